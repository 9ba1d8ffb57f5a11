"""How many failed handshakes an address may cause (docs/spec/realm.md §3.5)."""

from collections import deque
from typing import Final

_WINDOW_S: Final = 60.0
_ADDRESSES_MAX: Final = 4_096


def address_key(remote_addr: str) -> str:
    """The part of a multiaddr that one attacker cannot vary at will: the IPv4 address, or the IPv6 /64 prefix.

    Whatever has no IP in front (memory transports, names) counts as a whole. A relayed address is the relay's.
    """
    parts = remote_addr.split("/")
    if len(parts) >= 3 and parts[0] == "" and parts[1] == "ip4":
        return parts[2]
    if len(parts) >= 3 and parts[0] == "" and parts[1] == "ip6":
        return _prefix_64(parts[2])
    return remote_addr


def _prefix_64(text: str) -> str:
    head, double_colon, tail = text.partition("::")
    groups = head.split(":") if head else []
    if double_colon:
        last = tail.split(":") if tail else []
        groups += ["0"] * max(0, 8 - len(groups) - len(last)) + last
    return ":".join(group.lower().lstrip("0") or "0" for group in groups[:4]) + "::/64"


class FailureLimit:
    """Counts failures per address in a sliding minute, for at most 4,096 addresses (the least recent is forgotten)."""

    __slots__ = ("_failures", "_per_min")

    def __init__(self, per_min: int) -> None:
        """``per_min``: failures per address and minute from which on it is refused; 0 means no limit."""
        self._per_min = per_min
        self._failures: dict[str, deque[float]] = {}

    def __len__(self) -> int:
        """Addresses remembered."""
        return len(self._failures)

    def retry_after_s(self, key: str, now: float) -> float:
        """Seconds until the address may try again; 0.0 when it may now."""
        times = self._failures.get(key)
        if times is None or len(times) < self._per_min:
            return 0.0
        return max(0.0, times[0] + _WINDOW_S - now)

    def note(self, key: str, now: float) -> None:
        """Remember one failure."""
        if self._per_min == 0:
            return
        times = self._failures.pop(key, None)
        if times is None:
            times = deque[float](maxlen=self._per_min)
            if len(self._failures) >= _ADDRESSES_MAX:
                del self._failures[next(iter(self._failures))]
        times.append(now)
        self._failures[key] = times
