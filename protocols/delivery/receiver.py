"""The handled messages of one sender, so that a message sent again is not handled again. Pure.

Exact and bounded: a floor and the numbers above it, within the window; no time runs out. `dump` and `restore` carry it
over a restart of the receiver.
"""

from collections.abc import Iterable
from typing import Final, Literal

from dep2p.errors import ProtocolError
from dep2p.protocols.delivery.wire import WINDOW_MAX, Hello, as_ranges

Verdict = Literal["handle", "working", "handled", "rejected"]

_REASONS_MAX: Final = 4_096
REASON_UNKNOWN: Final = "rejected; the reason is no longer known"


class ReceiveWindow:
    """Numbers of one sender's epoch."""

    def __init__(
        self,
        epoch: bytes,
        *,
        floor: int = 0,
        done: Iterable[tuple[int, int]] = (),
        rejected: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.epoch = epoch
        self.floor: int = floor
        """Everything up to this number is settled."""
        self._done: dict[int, None] = {}
        for low, high in done:
            self._done.update(dict.fromkeys(range(low, high + 1)))
        self._working: dict[int, None] = {}
        self._waiting: dict[int, None] = {}
        self._rejected: dict[int, str] = {}
        for low, high in rejected:
            self._rejected.update(dict.fromkeys(range(low, high + 1), REASON_UNKNOWN))
        self.repeated: int = 0
        """Messages that had come before."""

    def on_hello(self, hello: Hello) -> None:
        """Take a HELLO: the sender has settled everything up to a number. Raises :class:`ProtocolError` for another
        epoch."""
        if hello.epoch != self.epoch:
            raise ProtocolError("HELLO of another epoch than the link's first one")
        if hello.settled > self.floor:
            if hello.settled - self.floor <= len(self._done) + len(self._rejected):
                for number in range(self.floor + 1, hello.settled + 1):
                    self._done.pop(number, None)
                    self._rejected.pop(number, None)
            else:
                self._done = {number: None for number in self._done if number > hello.settled}
                self._rejected = {number: why for number, why in self._rejected.items() if number > hello.settled}
            self.floor = hello.settled
            if self._waiting:
                self._waiting = {number: None for number in self._waiting if number > self.floor}
        self._raise_floor()

    def begin_next(self, number: int) -> bool:
        """Do as `begin` for a message that has just the next number, the usual case. Returns False for others."""
        if number != self.floor + 1 or self._working or self._rejected or self._waiting or self._done:
            return False
        self._working[number] = None
        return True

    def begin(self, number: int) -> Verdict:
        """Take a message. The verdict: ``handle`` it, or it is at work, was handled, or was rejected before.

        Raises :class:`ProtocolError` for a number outside the window.
        """
        if self.begin_next(number):
            return "handle"
        floor = self.floor
        if number > floor + WINDOW_MAX:
            raise ProtocolError(f"message {number} is more than {WINDOW_MAX} above the settled {self.floor}")
        if number <= self.floor or number in self._done:
            self.repeated += 1
            return "handled"
        if number in self._working:
            self.repeated += 1
            return "working"
        if number in self._rejected:
            self.repeated += 1
            return "rejected"
        self._waiting.pop(number, None)
        self._working[number] = None
        return "handle"

    def finish(self, number: int) -> None:
        """Note that the handler took a message."""
        self._working.pop(number, None)
        if self._waiting:
            self._waiting.pop(number, None)
        if number == self.floor + 1 and not self._done:  # nearly always
            self.floor = number
        elif number > self.floor:
            self._done[number] = None
            self._raise_floor()

    def reject(self, number: int, reason: str) -> None:
        """Note that a message is rejected."""
        self._working.pop(number, None)
        if number <= self.floor:  # the sender has settled it meanwhile
            return
        # Never as done: it would count as acknowledged at the sender. Only the text is bounded below the window.
        self._rejected[number] = reason if len(self._rejected) < _REASONS_MAX else REASON_UNKNOWN

    def abandon(self, number: int) -> None:
        """Note that a handler was stopped before it ended: sent again, the message is handled again."""
        self._working.pop(number, None)

    def wait(self, number: int) -> None:
        """Note that a message is here and that another part handles it: `finish` follows. Sent again, it is checked
        again."""
        self._working.pop(number, None)
        self._waiting[number] = None

    @property
    def has_working(self) -> bool:
        """Whether a message is with its handler, or waits for it."""
        return bool(self._working) or bool(self._waiting)

    def reason(self, number: int) -> str:
        """Return the reason of a rejection."""
        return self._rejected.get(number, "")

    def _raise_floor(self) -> None:
        done = self._done
        floor = self.floor
        while floor + 1 in done:
            floor += 1
            del done[floor]
        self.floor = floor

    def dump(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the floor, and the ranges above it that handlers took; `dump_rejected` has the rest."""
        return self.floor, as_ranges(self._done)

    def dump_rejected(self) -> list[tuple[int, int]]:
        """Return the ranges that were rejected; their reasons end with the run."""
        return as_ranges(self._rejected)
