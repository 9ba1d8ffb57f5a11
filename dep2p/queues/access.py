"""Who may do what with which queue of a realm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast

from dep2p.errors import QueueAccessError
from dep2p.protocols.wire.cbor import decode_bounded
from dep2p.types import PeerId, RealmId, parse_peer_id

_PREFIX: Final = "access/"
_PEERS_MAX: Final = 1_000

Who = str | tuple[PeerId, ...]
"""``members``, ``owner`` (this node alone), or peers besides this node."""


class Right(Enum):
    """What an operation needs."""

    LOOK = "look"
    """Any member: names, counts, options."""
    CREATE = "create"
    PUBLISH = "publish"
    CONSUME = "consume"
    ADMINISTER = "administer"


@dataclass(frozen=True, slots=True)
class Access:
    """Of one queue."""

    publish: Who = "members"
    consume: Who = "members"
    administer: Who = "members"

    def as_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            name: who if isinstance(who, str) else list(who)
            for name, who in (("publish", self.publish), ("consume", self.consume), ("administer", self.administer))
        }


def parse_access(value: object, default: Access) -> Access:
    """From plain values; what is not given is as in ``default``. Raises ``ValueError``."""
    if not isinstance(value, dict):
        raise ValueError("access is no object")
    given = cast(dict[str, object], value)
    unknown = [name for name in given if name not in ("publish", "consume", "administer")]
    if unknown:
        raise ValueError(f"access has no {unknown[0][:40]!r}: publish, consume and administer are known")
    return Access(
        *(
            parse_who(given[name]) if name in given else getattr(default, name)
            for name in ("publish", "consume", "administer")
        )
    )


def parse_who(value: object) -> Who:
    """Raises ``ValueError``."""
    if isinstance(value, str):
        if value in ("members", "owner"):
            return value
        value = [part.strip() for part in value.split(",")]
    if isinstance(value, list | tuple):
        peers = cast(list[object], value)
        if 1 <= len(peers) <= _PEERS_MAX and all(isinstance(peer, str) for peer in peers):
            return tuple(parse_peer_id(cast(str, peer)) for peer in peers)
    raise ValueError('who may do it is "members", "owner" or a list of 1 to 1,000 peer ids')


class Rights:
    """The access of every queue of this node's realms. Kept in the store's definitions beside the queues."""

    def __init__(self, default: Access, create: Who) -> None:
        self.default = default
        self.create = create
        """Who may make queues here."""
        self._by_queue: dict[tuple[str, str], Access] = {}
        self.save: Callable[[str, object | None], None] = lambda _key, _value: None
        """Set by the engine: what changes is committed with the next batch."""

    def restore(self, definitions: Mapping[str, bytes]) -> None:
        """What was kept, instead of what is known. Raises ``ValueError``, ProtocolError for a damaged definition."""
        self._by_queue.clear()
        for key, raw in definitions.items():
            if key.startswith(_PREFIX):
                namespace, _, name = key[len(_PREFIX) :].partition("/")
                value = decode_bounded(raw, f"the definition {key}", depth_max=3, entries_max=_PEERS_MAX)
                try:
                    self._by_queue[namespace, name] = parse_access(value, self.default)
                except ValueError as error:
                    raise ValueError(f"the store's definition {key[:120]!r} is damaged ({error})") from None

    def of(self, namespace: str, name: str) -> Access:
        """That of a queue."""
        return self._by_queue.get((namespace, name), self.default)

    def set(self, namespace: str, name: str, access: Access) -> None:
        """Change that of a queue."""
        self._by_queue[namespace, name] = access
        self.save(f"{_PREFIX}{namespace}/{name}", access.as_dict())

    def forget(self, namespace: str, name: str) -> None:
        """The queue is gone."""
        if self._by_queue.pop((namespace, name), None) is not None:
            self.save(f"{_PREFIX}{namespace}/{name}", None)

    def require(self, realm_id: RealmId, name: str, peer: PeerId, right: Right) -> None:
        """Raises QueueAccessError unless the member may do that."""
        who = cast(Who, getattr(self.of(realm_id, name), right.value))
        if who != "members" and (isinstance(who, str) or peer not in who):
            raise QueueAccessError(f"the owner of the queue {name!r} does not let {peer} {right.value} there")

    def require_create(
        self, realm_id: RealmId, peer: PeerId, fields: Mapping[str, object], *, is_there: bool = False
    ) -> None:
        """Raises QueueAccessError unless the member may make queues here; and administer one that ``is_there``, if it
        gives it another access: to make it once more, as programs do at each start, changes nothing else."""
        if self.create != "members" and (isinstance(self.create, str) or peer not in self.create):
            raise QueueAccessError(f"this node does not let {peer} make queues: its owner makes them")
        if is_there and fields.get("access") is not None:
            self.require(realm_id, str(fields.get("queue")), peer, Right.ADMINISTER)
