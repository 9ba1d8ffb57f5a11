"""Bounds of a relay, and the peer that asks it."""

from dataclasses import dataclass

from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId

_BUCKETS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class RelayAsker:
    """A peer that asks a relay for something.

    ``block``: its address block, by which strangers share. ``is_member``: it has proved its membership of a realm of
    the relay.
    """

    peer: PeerId
    block: str
    is_member: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationBounds:
    """Bounds of the reservations of one relay.

    Of ``total_max`` reservations, strangers hold ``unproven_max`` at most, and ``per_block_max`` in one address block;
    the places above ``unproven_max`` are kept for members. Members of one block hold ``members_per_block_max`` at
    most, so that one member with many identities does not take all. ``unused_s``: seconds for which a new reservation
    keeps its place against other peers of its own block, so that its holder has time to be dialled.
    """

    total_max: int = 256
    unproven_max: int = 192
    per_block_max: int = 64
    members_per_block_max: int = 128
    unused_s: float = 10.0
    lasts_s: float = 3_600.0
    asks_per_s: float = 8.0
    """Asks a second of the strangers of one address block together, and of each member."""
    asks_burst: int = 128
    renewals_per_s: float = 0.1
    """Renewals a second of one reservation: they have a rate of their own, which no other peer can use up."""
    renewals_burst: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitBounds:
    """Bounds of the circuits of one relay.

    As with reservations, the places above ``unproven_max``, and above ``unproven_per_target_max`` to one peer, are
    kept for circuits that members dial. ``per_source_max``: circuits that one peer has dialled. ``per_pair_max``:
    circuits from one peer to another; a further one ends the oldest of them.
    """

    total_max: int = 256
    unproven_max: int = 192
    per_source_max: int = 16
    per_target_max: int = 64
    unproven_per_target_max: int = 48
    per_pair_max: int = 2
    asks_per_s: float = 8.0
    """Asks a second of the strangers of one address block together, and of each member."""
    asks_burst: int = 128


class AskRates:
    """Rates at which peers ask: one for the strangers of an address block together, one for each member."""

    __slots__ = ("_buckets", "_burst", "_per_s")

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: dict[tuple[bool, str], TokenBucket] = {}

    def may_ask(self, asker: RelayAsker, now_s: float) -> bool:
        """Take a token; False when there is none."""
        key = (asker.is_member, asker.peer if asker.is_member else asker.block)
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= _BUCKETS_MAX:  # the one that came first begins anew with a full bucket
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[key] = TokenBucket(self._per_s, self._burst)
        return not bucket.take(now_s)
