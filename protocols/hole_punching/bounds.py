"""Bounds of the dials that peers can make a node do by hole punching. Pure."""

from collections import OrderedDict
from typing import Final, Literal

from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId

RefusedPunch = Literal["busy", "rate", "rate_unproven", "total"]
"""Why a peer's punch is refused, as counters name it."""

AT_ONCE_MAX: Final = 16
"""Punches under way."""
PER_PEER_BURST: Final = 8.0
PER_PEER_PER_S: Final = 0.1
"""Two rounds, each of a reversal and three punches, then one try in ten seconds."""
UNPROVEN_BURST: Final = 16.0
UNPROVEN_PER_S: Final = 0.5
"""The same of all peers together that are no members: names cost nothing, and each punch dials up to six addresses."""
_PEERS_MAX: Final = 1_024


class PunchBounds:
    """Admits punches: one of a peer at a time, few at once, and each peer seldom.

    ``now_s`` may start anywhere.
    """

    def __init__(self) -> None:
        self._under_way: dict[PeerId, None] = {}
        self._buckets: OrderedDict[PeerId, TokenBucket] = OrderedDict()
        self._unproven = TokenBucket(UNPROVEN_PER_S, UNPROVEN_BURST)

    def begin(self, peer: PeerId, *, is_member: bool, now_s: float) -> RefusedPunch | None:
        """Take a place, and return None; or the reason why there is none. `end` gives it back."""
        if peer in self._under_way:
            return "busy"
        if len(self._under_way) >= AT_ONCE_MAX:
            return "total"
        bucket = self._bucket(peer)
        if not _has_token(bucket, now_s):
            return "rate"
        if not is_member:
            if not _has_token(self._unproven, now_s):
                return "rate_unproven"
            self._unproven.spend()
        bucket.spend()
        self._under_way[peer] = None
        return None

    def end(self, peer: PeerId) -> None:
        """Give the place of a peer back. Idempotent."""
        self._under_way.pop(peer, None)

    def _bucket(self, peer: PeerId) -> TokenBucket:
        bucket = self._buckets.get(peer)
        if bucket is None:
            if len(self._buckets) >= _PEERS_MAX:
                self._buckets.popitem(last=False)
            bucket = self._buckets[peer] = TokenBucket(PER_PEER_PER_S, PER_PEER_BURST)
        self._buckets.move_to_end(peer)
        return bucket


def _has_token(bucket: TokenBucket, now_s: float) -> bool:
    return not bucket.wait_s(now_s)
