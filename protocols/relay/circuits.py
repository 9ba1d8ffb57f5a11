"""The circuits of a relay: connections that it carries from one peer to another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dep2p.protocols.relay.bounds import AskRates, CircuitBounds, RelayAsker
from dep2p.types import PeerId

RefusedCircuit = Literal["circuits_rate", "circuits_max"]
"""Why a relay refuses a circuit, as its counters name it."""
EndedCircuit = Literal["pair", "block"]
"""Why a circuit gives way: its two ends have another one; its address block holds most."""


@dataclass(slots=True, eq=False)
class Circuit:
    """A circuit, counted from before it is made, so that many asked for at once keep to the bounds, too."""

    source: RelayAsker
    target: PeerId
    is_open: bool = False
    carried_bytes: int = 0
    """Bytes carried in both directions together."""


@dataclass(slots=True)
class Circuits:
    """The circuits of one relay, the oldest first.

    A stranger's circuit never ends one that a member has dialled, nor takes a place that is kept for members. Where
    strangers have taken all of theirs, the address block that holds most gives way to one that holds less, with the
    circuit that carried least. A member that finds no free place takes that of a stranger.
    """

    bounds: CircuitBounds
    _held: dict[Circuit, None] = field(default_factory=dict[Circuit, None])
    _rates: AskRates = field(init=False)

    def __post_init__(self) -> None:
        self._rates = AskRates(self.bounds.asks_per_s, self.bounds.asks_burst)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def members(self) -> int:
        """How many of them members have dialled."""
        return sum(each.source.is_member for each in self._held)

    def open_from(self, source: PeerId) -> int:
        """Count the open circuits that a peer has dialled."""
        return sum(each.is_open and each.source.peer == source for each in self._held)

    def sources(self, block: str) -> int:
        """Count the strangers of an address block that have dialled circuits that are open."""
        found = [each.source for each in self._held if each.is_open and not each.source.is_member]
        return len(dict.fromkeys(each.peer for each in found if each.block == block))

    def may_ask(self, asker: RelayAsker, now_s: float) -> bool:
        """Whether a peer may ask for a circuit now; counts it."""
        return self._rates.may_ask(asker, now_s)

    def add(self, wanted: Circuit) -> list[tuple[Circuit, EndedCircuit]] | RefusedCircuit:
        """Take a place. Return the circuits that end for it, which are removed; or the reason of the refusal."""
        ends: list[tuple[Circuit, EndedCircuit]] = []
        pair = [each for each in self._held if each.source.peer == wanted.source.peer and each.target == wanted.target]
        if len(pair) >= self.bounds.per_pair_max:
            # A peer that dials again has lost its last circuit, or holds circuits to keep others out.
            oldest = next((each for each in pair if each.is_open), None)
            if oldest is None:
                return "circuits_max"
            ends.append((oldest, "pair"))
        left = [each for each in self._held if all(each is not ended for ended, _ in ends)]
        if sum(each.source.peer == wanted.source.peer for each in left) >= self.bounds.per_source_max:
            return "circuits_max"
        to_target = [each for each in left if each.target == wanted.target]
        for held, total_max, unproven_max in (
            (to_target, self.bounds.per_target_max, self.bounds.unproven_per_target_max),
            (left, self.bounds.total_max, self.bounds.unproven_max),
        ):
            unproven = [each for each in held if not each.source.is_member]
            if len(held) < total_max and (wanted.source.is_member or len(unproven) < unproven_max):
                continue
            ended = _gives_way(unproven, wanted)
            if ended is None:
                return "circuits_max"
            ends.append((ended, "block"))
            left.remove(ended)
        for ended, _ in ends:
            self.remove(ended)
        self._held[wanted] = None
        return ends

    def remove(self, circuit: Circuit) -> None:
        """Note that a circuit has ended. Idempotent."""
        self._held.pop(circuit, None)


def _gives_way(unproven: Sequence[Circuit], wanted: Circuit) -> Circuit | None:
    held = Counter(each.source.block for each in unproven)
    least = 0 if wanted.source.is_member else held[wanted.source.block] + 1
    return min(
        (each for each in unproven if each.is_open and held[each.source.block] >= max(least, 1)),
        key=lambda each: (-held[each.source.block], each.carried_bytes),
        default=None,
    )
