"""[pubsub]: checks of the router's parameters against each other, in the words of the configuration's keys."""

from collections.abc import Mapping
from typing import Final, Protocol

from dep2p.errors import ConfigError

SEEN_S: Final = 120.0
"""Seconds for which a message is recognised; it must be announced and asked for within that time."""
_D_MAX: Final = 1_000
_HEARTBEAT_MIN_S: Final = 0.01


class RouterKeys(Protocol):
    """The keys of [pubsub] that become parameters of the router."""

    @property
    def d(self) -> int: ...
    @property
    def d_lo(self) -> int: ...
    @property
    def d_hi(self) -> int: ...
    @property
    def d_lazy(self) -> int: ...
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def fanout_ttl_s(self) -> float: ...
    @property
    def history_length(self) -> int: ...
    @property
    def history_gossip(self) -> int: ...


def check_router_keys(keys: RouterKeys, origins: Mapping[str, str]) -> None:
    """Raises :class:`ConfigError` that names the key, where it was set, and what must hold."""

    def refuse(names: tuple[str, ...], text: str) -> None:
        # The first of them that is set is the one to change.
        name = next((name for name in names if origins[f"pubsub.{name}"] != "default"), names[0])
        raise ConfigError(f"{origins[f'pubsub.{name}'].removeprefix('file ')}: [pubsub] {name}: {text}")

    if not 1 <= keys.d_lo <= keys.d:
        refuse(("d_lo", "d"), f"1 <= d_lo <= d must hold, not d_lo {keys.d_lo} and d {keys.d}.")
    if not keys.d <= keys.d_hi <= _D_MAX:
        refuse(("d_hi", "d"), f"d <= d_hi <= {_D_MAX} must hold, not d {keys.d} and d_hi {keys.d_hi}.")
    if not 0 <= keys.d_lazy <= _D_MAX:
        refuse(("d_lazy",), f"{keys.d_lazy} is out of range: it must be between 0 and {_D_MAX}. The default is 6.")
    if keys.heartbeat_s < _HEARTBEAT_MIN_S:
        refuse(
            ("heartbeat_s",), f"{keys.heartbeat_s:g} is too short: at least {_HEARTBEAT_MIN_S} s. The default is 1.0."
        )
    if keys.fanout_ttl_s <= 0:
        refuse(("fanout_ttl_s",), f"{keys.fanout_ttl_s:g} is out of range: it must be above 0. The default is 60.0.")
    if not 1 <= keys.history_gossip <= keys.history_length:
        refuse(
            ("history_gossip", "history_length"),
            f"1 <= history_gossip <= history_length must hold, not history_gossip {keys.history_gossip} and "
            f"history_length {keys.history_length}.",
        )
    if keys.history_length * keys.heartbeat_s > SEEN_S:
        refuse(
            ("history_length", "heartbeat_s"),
            f"{keys.history_length} heartbeats of {keys.heartbeat_s:g} s are more than the {SEEN_S:g} s for which a "
            "message is recognised: peers would send again what was seen. Lower one of the two.",
        )
