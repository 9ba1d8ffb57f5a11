"""The choice of the member that answers a request to a service. Pure (docs/decisions/0035-services.md).

Of two members drawn at random, the one with less to do is likely to be chosen: the power of two choices. A member's
cost is the time that its answers take, times the requests of this node that it works on. The choice between the two is
drawn, by the squares of their costs: equal members share evenly, whatever small differences their measured times have,
and a member that is ten times slower gets a hundredth of what the other one gets.

One slow answer says little about a member; the first one may have waited for a link. So it is tried again, with one
request at a time, when others were chosen in its place often enough. A time that nothing measures any more fades, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dep2p.types import PeerId, Rng

Failure = Literal["absent", "unreachable", "busy", "silent", "lost"]
"""A try without an answer: no handler; no connection; it takes no more now; no answer in time; the connection ended."""

AVOID_S: Final[dict[Failure, float]] = {"absent": 10.0, "unreachable": 5.0, "busy": 0.5, "silent": 5.0, "lost": 1.0}
"""Seconds for which a member that failed is chosen only when the others have failed, too; doubled with each failure."""
AVOID_MAX_S: Final = 300.0
STANDINGS_MAX: Final = 8_192
"""Members, each for each service, of which something is remembered."""
_FADE_S: Final = 10.0
"""Seconds after which a measured time counts half, and the weight of an older measurement."""
_SAMPLE_WEIGHT: Final = 0.3
_ERROR_WEIGHT: Final = 0.1
_ERROR_COST: Final = 10.0
"""The cost of a member whose answers are all errors, as a multiple: errors are quick, and must not draw requests."""
_DRAWS_MAX: Final = 8
PASSED_OVER_MAX: Final = 200
"""Times that a member is drawn and not chosen, after which it is tried again as if its time were that of the others:
however slow it is, it gets no more than one request in so many for that."""
_COST_MIN: Final = 1e-6


@dataclass(slots=True)
class _Standing:
    in_flight: int = 0
    time_s: float | None = None
    """The time that answers take, averaged; None: nothing is known."""
    measured_at: float = 0.0
    passed_over: int = 0
    """Choices between it and another member that it has lost since its last answer."""
    is_tried_again: bool = False
    """The next answer counts in place of what was measured before."""
    errors: float = 0.0
    """The share of answers that are errors, averaged."""
    failures: int = 0
    """Tries in a row without an answer."""
    avoid_until: float = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether it was passed over so often that it is tried again; one request at a time does that."""
        return self.passed_over >= PASSED_OVER_MAX and not self.in_flight


@dataclass(frozen=True, slots=True)
class MemberStanding:
    """The experience of this node with a member as the provider of one service."""

    in_flight: int
    time_s: float | None
    failures: int
    avoided_s: float
    """Seconds for which it is still avoided; 0.0: it is not."""


class MemberChoice:
    """Chooses members for the requests of one node in one realm, and remembers how they did."""

    def __init__(self, rng: Rng, *, standings_max: int = STANDINGS_MAX) -> None:
        self._rng = rng
        self._standings_max = standings_max
        self._standings: dict[tuple[str, PeerId], _Standing] = {}

    def __len__(self) -> int:
        return len(self._standings)

    def choose(self, service: str, candidates: Sequence[PeerId], now: float) -> PeerId:
        """Choose one of the members that offer a service. Raises ``IndexError`` when there is none."""
        first, second = self._two(service, candidates, now)
        if second is None:
            return first
        cost, other_cost = self._cost(service, first, second, now), self._cost(service, second, first, now)
        chance = other_cost**2 / (cost**2 + other_cost**2)
        chosen, other = (first, second) if self._rng.random() < chance else (second, first)
        self._passed_over(service, chosen, other)
        return chosen

    def _passed_over(self, service: str, chosen: PeerId, other: PeerId) -> None:
        standing = self._standings.get((service, other))
        if standing is not None:
            standing.passed_over += 1
        standing = self._standings.get((service, chosen))
        if standing is not None and standing.is_due:
            standing.passed_over, standing.is_tried_again = 0, True

    def _two(self, service: str, candidates: Sequence[PeerId], now: float) -> tuple[PeerId, PeerId | None]:
        count = len(candidates)
        if count == 1:
            return candidates[0], None
        first: PeerId | None = None
        for _ in range(_DRAWS_MAX):
            drawn = candidates[int(self._rng.random() * count)]
            if drawn == first or self._avoid_until(service, drawn) > now:
                continue
            if first is not None:
                return first, drawn
            first = drawn
        good = [peer for peer in candidates if self._avoid_until(service, peer) <= now]
        if not good:
            return min(candidates, key=lambda peer: self._avoid_until(service, peer)), None
        first = good.pop(int(self._rng.random() * len(good)))
        return first, good[int(self._rng.random() * len(good))] if good else None

    def _avoid_until(self, service: str, peer: PeerId) -> float:
        standing = self._standings.get((service, peer))
        return float("-inf") if standing is None else standing.avoid_until

    def _cost(self, service: str, peer: PeerId, other: PeerId, now: float) -> float:
        standing = self._standings.get((service, peer))
        time_s = self._time_s(standing, now)
        if time_s is None:  # nothing is known of it: it is as good as the other one until it shows
            time_s = self._time_s(self._standings.get((service, other)), now) or 1.0
        elif standing is not None and standing.is_due:
            time_s = min(time_s, self._time_s(self._standings.get((service, other)), now) or time_s)
        if standing is None:
            return max(time_s, _COST_MIN)
        return max(time_s, _COST_MIN) * (1 + standing.in_flight) * (1 + _ERROR_COST * standing.errors)

    def _time_s(self, standing: _Standing | None, now: float) -> float | None:
        if standing is None or standing.time_s is None:
            return None
        return float(standing.time_s * 0.5 ** ((now - standing.measured_at) / _FADE_S))

    def began(self, service: str, peer: PeerId) -> None:
        """A request goes to the member; `answered`, `failed` or `given_up` ends it."""
        self._standing(service, peer).in_flight += 1

    def answered(self, service: str, peer: PeerId, took_s: float, now: float, *, is_error: bool = False) -> None:
        """The member answered; ``is_error``: its handler failed, which says nothing about its speed."""
        standing = self._end(service, peer)
        standing.failures = 0
        standing.avoid_until = float("-inf")
        standing.errors += _ERROR_WEIGHT * (is_error - standing.errors)
        if is_error:
            return
        before = None if standing.is_tried_again else self._time_s(standing, now)
        standing.passed_over, standing.is_tried_again = 0, False
        standing.time_s = took_s if before is None else before + _SAMPLE_WEIGHT * (took_s - before)
        standing.measured_at = now

    def failed(self, service: str, peer: PeerId, failure: Failure, now: float, *, avoid_s: float = 0.0) -> None:
        """The member gave no answer. ``avoid_s``: the time that it asked for."""
        standing = self._end(service, peer)
        standing.failures = min(standing.failures + 1, 16)
        wait_s = min(AVOID_MAX_S, AVOID_S[failure] * 2.0 ** (standing.failures - 1))
        standing.avoid_until = max(standing.avoid_until, now + max(wait_s, min(avoid_s, AVOID_MAX_S)))

    def given_up(self, service: str, peer: PeerId) -> None:
        """The caller waits no more: that says nothing about the member."""
        self._end(service, peer)

    def standing(self, service: str, peer: PeerId, now: float) -> MemberStanding | None:
        """Return the experience with a member; None without any."""
        found = self._standings.get((service, peer))
        if found is None:
            return None
        avoided_s = max(0.0, found.avoid_until - now)
        return MemberStanding(found.in_flight, self._time_s(found, now), found.failures, avoided_s)

    def _standing(self, service: str, peer: PeerId) -> _Standing:
        key = service, peer
        standing = self._standings.pop(key, None)
        if standing is None:
            if len(self._standings) >= self._standings_max:
                self._forget_one()
            standing = _Standing()
        self._standings[key] = standing  # the newest is the last
        return standing

    def _end(self, service: str, peer: PeerId) -> _Standing:
        standing = self._standing(service, peer)
        standing.in_flight = max(0, standing.in_flight - 1)
        return standing

    def _forget_one(self) -> None:
        for key, standing in self._standings.items():
            if not standing.in_flight:
                del self._standings[key]
                return
        del self._standings[next(iter(self._standings))]
