"""The reservations of a relay: the right of a peer to be dialled through it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from dep2p.protocols.relay.bounds import AskRates, RelayAsker, ReservationBounds
from dep2p.token_bucket import TokenBucket
from dep2p.types import PeerId

RefusedReservation = Literal["reservations_rate", "reservations_max"]
"""Why a relay refuses a reservation, as its counters name it."""


@dataclass(slots=True, eq=False)
class Reservation:
    """A reservation. ``last_used_s``: when a circuit of its holder was opened or ended last; None when there was
    none."""

    holder: RelayAsker
    since_s: float
    expires_s: float
    renewals: TokenBucket
    last_used_s: float | None = None
    circuits: int = 0
    """Open circuits to the holder, and those that it has dialled: both end when its connection is closed."""

    @property
    def loss(self) -> tuple[bool, bool, float]:
        """Sorts reservations by the harm that their loss does: unused ones first, the oldest of them first."""
        since_s = self.since_s if self.last_used_s is None else self.last_used_s
        return self.circuits > 0, self.last_used_s is not None, since_s

    def circuit_opened(self, now_s: float) -> None:
        """Note that a circuit to the holder, or from it, was opened."""
        self.circuits += 1
        self.last_used_s = now_s

    def circuit_ended(self, now_s: float) -> None:
        """Note that it has ended."""
        self.circuits -= 1
        self.last_used_s = now_s


@dataclass(frozen=True, slots=True)
class ReservationGranted:
    """The peer has its reservation. ``replaced``: the holder of one that gave way."""

    replaced: PeerId | None = None


@dataclass(slots=True)
class Reservations:
    """The reservations of one relay.

    Strangers never take a place of a member. Strangers of one address block share its places; where all places are
    taken, the block that holds most gives way to one that holds less. A reservation through which a circuit runs gives
    way to members only. ``is_member`` answers for a holder, who may prove its membership after it has reserved.

    Example::

        reservations = Reservations(ReservationBounds(), is_member=lambda peer: False)
        asker = RelayAsker(peer, "192.0.2.0/24", is_member=False)
        reservations.ask(asker, now_s=0.0)  # ReservationGranted(replaced=None)
    """

    bounds: ReservationBounds
    is_member: Callable[[PeerId], bool]
    _held: dict[PeerId, Reservation] = field(default_factory=dict[PeerId, Reservation])
    """By the holder, the oldest first."""
    _rates: AskRates = field(init=False)

    def __post_init__(self) -> None:
        self._rates = AskRates(self.bounds.asks_per_s, self.bounds.asks_burst)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._held

    @property
    def holders(self) -> list[PeerId]:
        """The peers that hold one, in the order in which they got it."""
        return list(self._held)

    @property
    def members(self) -> int:
        """How many members hold one."""
        return sum(map(self.is_member, self._held))

    def find(self, peer: PeerId, now_s: float) -> Reservation | None:
        """Return the valid reservation of a peer."""
        found = self._held.get(peer)
        return found if found is not None and found.expires_s > now_s else None

    def ask(self, asker: RelayAsker, now_s: float) -> ReservationGranted | RefusedReservation:
        """Grant a reservation, or renew it; or say why not. A refused renewal leaves the reservation as it was."""
        known = self.find(asker.peer, now_s)
        if known is not None:
            if known.renewals.take(now_s):
                return "reservations_rate"
            known.holder, known.expires_s = asker, now_s + self.bounds.lasts_s
            return ReservationGranted()
        if not self._rates.may_ask(asker, now_s):
            return "reservations_rate"
        self._expire(now_s)
        replaced: Reservation | None = None
        members, unproven = self._split()
        if not self._has_place(asker, members, unproven):
            if asker.is_member:
                replaced = self._replaceable_by_member(asker, members, unproven)
            else:
                replaced = self._replaceable(asker, unproven, now_s)
            if replaced is None:
                return "reservations_max"
            del self._held[replaced.holder.peer]
        self._held[asker.peer] = Reservation(
            asker,
            now_s,
            now_s + self.bounds.lasts_s,
            TokenBucket(self.bounds.renewals_per_s, self.bounds.renewals_burst),
        )
        return ReservationGranted(None if replaced is None else replaced.holder.peer)

    def release(self, peer: PeerId) -> None:
        """End the reservation of a peer, if it has one."""
        self._held.pop(peer, None)

    def _expire(self, now_s: float) -> None:
        for reservation in [each for each in self._held.values() if each.expires_s <= now_s]:
            del self._held[reservation.holder.peer]

    def _split(self) -> tuple[list[Reservation], list[Reservation]]:
        members: list[Reservation] = []
        unproven: list[Reservation] = []
        for peer, each in self._held.items():
            (members if self.is_member(peer) else unproven).append(each)
        return members, unproven

    def _has_place(self, asker: RelayAsker, members: list[Reservation], unproven: list[Reservation]) -> bool:
        bounds = self.bounds
        if len(self._held) >= bounds.total_max:
            return False
        if asker.is_member:
            return _in_block(members, asker.block) < bounds.members_per_block_max
        return len(unproven) < bounds.unproven_max and _in_block(unproven, asker.block) < bounds.per_block_max

    def _replaceable_by_member(
        self, asker: RelayAsker, members: list[Reservation], unproven: list[Reservation]
    ) -> Reservation | None:
        if _in_block(members, asker.block) >= self.bounds.members_per_block_max:
            return None
        held = Counter(each.holder.block for each in unproven)
        return min(unproven, key=lambda each: (-held[each.holder.block], each.loss), default=None)

    def _replaceable(self, asker: RelayAsker, unproven: list[Reservation], now_s: float) -> Reservation | None:
        held = Counter(each.holder.block for each in unproven)
        own = held[asker.block]
        latest_s = now_s - self.bounds.unused_s
        found = [each for each in unproven if each.last_used_s is None and each.since_s <= latest_s]
        if own >= self.bounds.per_block_max:
            return min((each for each in found if each.holder.block == asker.block), key=_loss, default=None)
        # A block that holds less gets a place of one that holds more, also a place that was used before.
        larger = [each for each in unproven if held[each.holder.block] > own + 1 and not each.circuits]
        if larger:
            return min(larger, key=lambda each: (-held[each.holder.block], each.loss))
        return min(
            (each for each in found if each.holder.block == asker.block or held[each.holder.block] > own),
            key=_loss,
            default=None,
        )


def _loss(reservation: Reservation) -> tuple[bool, bool, float]:
    return reservation.loss


def _in_block(reservations: Iterable[Reservation], block: str) -> int:
    return sum(each.holder.block == block for each in reservations)
