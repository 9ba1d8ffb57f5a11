"""A rate for each member. Pure."""

from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId

MEMBERS_MAX = 4_096
"""Members whose rate is remembered; the one that came first is forgotten first, and begins anew."""


class MemberRates:
    """One token bucket for each member that comes.

    >>> rates = MemberRates(20.0, burst=200)
    >>> rates.wait_s(PeerId("alice"), 1, now=0.0)
    0.0
    """

    __slots__ = ("_buckets", "_burst", "_rate_per_s")

    def __init__(self, rate_per_s: float, burst: float) -> None:
        """Tokens a second, and at once; a rate of 0 sets no limit."""
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._buckets: dict[PeerId, TokenBucket] = {}

    def wait_s(self, member: PeerId, tokens: int, now: float) -> float:
        """0.0: the tokens were taken; else the seconds until the member may come again, and nothing was taken.

        More tokens than there are become a debt that later calls wait for, so that a large batch is possible.
        """
        if not self._rate_per_s:
            return 0.0
        bucket = self._buckets.get(member)
        if bucket is None:
            if len(self._buckets) >= MEMBERS_MAX:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[member] = TokenBucket(self._rate_per_s, self._burst)
        wait_s = bucket.wait_s(now)
        if not wait_s:
            bucket.spend(tokens)
        return wait_s
