"""The rate of one neighbour's subscriptions, grafts and prunes: what is over it is held back, and a flood is noticed.

A neighbour over its rate loses nothing: the node reads nothing of it until its debt is paid. So a flood costs this node
no more than the rate, and the flooder, which cannot send, little more. Dropping would cost the decoding of all that is
dropped, and a reset a new connection of the same flooder.
"""

from dataclasses import dataclass
from typing import Final

CONTROL_ITEMS_PER_S: Final = 256.0
"""Subscriptions, grafts and prunes taken from one neighbour in a second, averaged: all its topics, each second."""
CONTROL_ITEMS_BURST: Final = 1_024
"""Such items that may come at once: a neighbour joins or leaves all its topics, and announces them on a new stream."""
CONTROL_DEBT_MAX: Final = 1_024
"""Items that one RPC may bring above the rate, four seconds of it; more are dropped."""
CONTROL_HOLD_S: Final = 0.25
"""A neighbour in debt is held back until it may send as much as this time allows, not for each item anew."""
CONTROL_FLOOD_S: Final = 10.0
"""A neighbour that sends at its rate for so long, without half of a burst left in between, floods: an honest one has
announced all its topics many times by then."""


@dataclass(frozen=True, slots=True)
class ControlTaken:
    """The fate of one RPC's items."""

    taken: int
    hold_s: float
    """Seconds for which to read nothing of the neighbour; 0 within its rate."""
    is_flood: bool


class NeighbourControlRate:
    """A token bucket with a bounded debt."""

    __slots__ = ("_filled_at", "_pressing_since", "_tokens")

    def __init__(self) -> None:
        self._tokens = float(CONTROL_ITEMS_BURST)
        self._filled_at: float | None = None
        self._pressing_since: float | None = None
        """Since when it has been in debt, or close to it."""

    def take(self, items: int, now: float) -> ControlTaken | None:
        """Take the items of one RPC. None: all of them are within the rate."""
        filled_at = self._filled_at
        if filled_at is not None:
            filled = self._tokens + max(0.0, now - filled_at) * CONTROL_ITEMS_PER_S
            self._tokens = min(float(CONTROL_ITEMS_BURST), filled)
        self._filled_at = now
        if self._pressing_since is not None and self._tokens >= CONTROL_ITEMS_BURST / 2:
            self._pressing_since = None
        taken = min(items, max(0, int(self._tokens + CONTROL_DEBT_MAX)))
        self._tokens -= taken
        if taken == items and self._tokens >= 0.0:
            return None
        if self._pressing_since is None:
            self._pressing_since = now
        is_flood = now - self._pressing_since >= CONTROL_FLOOD_S
        if is_flood:
            self._pressing_since = now
        return ControlTaken(taken, CONTROL_HOLD_S + max(0.0, -self._tokens) / CONTROL_ITEMS_PER_S, is_flood)
