"""[queues]: the store of durable queues, and defaults for queues whose maker sets none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from dep2p.errors import ConfigError
from dep2p.types import parse_peer_id


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesConfig:
    """[queues]: durable queues, for local programs and for members of realms."""

    store: str = "auto"
    """The store: "auto" is SQLite in <data_dir>/queues.sqlite, "memory" forgets everything at the end; else a path, or
    postgresql://… or redis://…, whose drivers come with dep2p[postgres] and dep2p[redis]."""
    sync: Literal["always", "interval", "never"] = "always"
    """When a publish is acknowledged: "always" when it is on the disk; "interval" and "never" sooner, so that a power
    failure, but not a crash of the daemon, may lose the last messages ("interval" syncs at most once a second, with a
    later commit: what precedes a pause waits for the system)."""
    standby: bool = False
    """Whether this node shares the store, which must be in PostgreSQL, with other nodes that set this, too. One of them
    is the broker of the queues. When it is gone, or silent for 15 s, another one takes over
    (docs/howto/failover.md)."""
    msg_timeout_s: float = 60.0
    """Seconds after which a message that its consumer has not settled or touched goes to another one (NSQ: 60 s)."""
    max_attempts: int = 5
    """Deliveries of a message before it becomes a dead letter; 0 sets no limit."""
    items_max: int = 10_000_000
    """Messages that one queue may hold; then publishers wait."""
    bytes_max: int = 17_179_869_184
    """The same in bytes of bodies."""
    create: str = "members"
    """The peers that may make queues of a realm on this node: "members", "owner" (programs of this machine alone), or
    peer ids with commas between them."""
    publish: str = "members"
    """The peers that may publish to a queue of a realm when its maker says nothing else; written as for create."""
    consume: str = "members"
    """The peers that may consume from it."""
    administer: str = "members"
    """The peers that may pause, empty or delete it, and replay its dead letters."""


def check_store(value: object, where: str) -> None:
    """Raises :class:`ConfigError` for a store that no backend knows."""
    text = str(value)
    scheme, separator, _ = text.partition("://")
    if not text or (separator and scheme not in ("postgresql", "postgres", "redis", "rediss")):
        raise ConfigError(
            f'{where}: "{text[:80]}" is no store. Write "auto", "memory", the path of a file, or an address that '
            "starts with postgresql:// or redis://."
        )


def check_standby(chosen: QueuesConfig, origins: Mapping[str, str]) -> None:
    """Raises :class:`ConfigError` when nodes shall take turns with a store that they cannot share."""
    if chosen.standby and not chosen.store.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            f"{origins['queues.standby']}: [queues] standby: nodes that stand by for each other share a store in "
            'PostgreSQL. Set store = "postgresql://USER:PASSWORD@HOST/NAME" in [queues], the same on each of them, or '
            "standby = false."
        )


def check_who(value: object, where: str) -> None:
    """Raises :class:`ConfigError` for a value that names no peers."""
    text = str(value)
    try:
        if text not in ("members", "owner"):
            for peer in text.split(","):
                parse_peer_id(peer.strip())
    except ValueError as error:
        raise ConfigError(f'{where}: write "members", "owner", or peer ids with commas between them: {error}') from None


def check_timeout(value: object, where: str) -> None:
    """Raises :class:`ConfigError` unless the value is a time that a message can have."""
    if not 0.1 <= float(str(value)) <= 86_400.0:
        raise ConfigError(f"{where}: {value} is out of range: 0.1 to 86400 seconds. The default is 60.0.")


def check_count(value: object, where: str) -> None:
    """Raises :class:`ConfigError` for a negative number."""
    if int(str(value)) < 0:
        raise ConfigError(f"{where}: {value} is out of range: it must be 0 or more.")


def check_size(value: object, where: str) -> None:
    """Raises :class:`ConfigError` for a bound of 0."""
    if int(str(value)) < 1:
        raise ConfigError(f"{where}: {value} is out of range: it must be greater than 0.")


QUEUE_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "queues.store": check_store,
    "queues.msg_timeout_s": check_timeout,
    "queues.max_attempts": check_count,
    "queues.items_max": check_size,
    "queues.bytes_max": check_size,
    **{f"queues.{name}": check_who for name in ("create", "publish", "consume", "administer")},
}
