"""A limit on the failed handshakes of a peer (docs/spec/realm.md §3.5). Pure."""

from collections import deque
from typing import Final

from dep2p.types import PeerId

_WINDOW_S: Final = 60.0
_PEERS_MAX: Final = 4_096


def address_key(remote_addr: str) -> str:
    """Return the part of a multiaddr that one attacker cannot vary at will: the IPv4 address, or the IPv6 /64 prefix.

    Whatever has no IP in front (memory transports, names) counts as a whole. A relayed address is the relay's. Good for
    shares, and no reason to refuse a peer: honest peers are behind the same address.
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
    """Counts failures per peer in a sliding minute, for at most 4,096 peers (the least recent is forgotten).

    By the identity that the transport authenticated, and by nothing that a peer shares with others: a peer cannot
    fail in another one's name.

        limit = FailureLimit(10)
        if limit.retry_after_s(peer, now) == 0.0 and not prove(peer):
            limit.note(peer, now)
    """

    __slots__ = ("_failures", "_per_min")

    def __init__(self, per_min: int) -> None:
        """``per_min``: failures per peer and minute from which on it is refused; 0 means no limit."""
        self._per_min = per_min
        self._failures: dict[PeerId, deque[float]] = {}

    def __len__(self) -> int:
        """Peers remembered."""
        return len(self._failures)

    def retry_after_s(self, peer: PeerId, now: float) -> float:
        """Seconds until the peer may try again; 0.0 when it may now."""
        times = self._failures.get(peer)
        if times is None or len(times) < self._per_min:
            return 0.0
        return max(0.0, times[0] + _WINDOW_S - now)

    def note(self, peer: PeerId, now: float) -> None:
        """Remember one failure."""
        if self._per_min == 0:
            return
        times = self._failures.pop(peer, None)
        if times is None:
            times = deque[float](maxlen=self._per_min)
            if len(self._failures) >= _PEERS_MAX:
                del self._failures[next(iter(self._failures))]
        times.append(now)
        self._failures[peer] = times
