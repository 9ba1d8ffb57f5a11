"""The sender's state for one receiver: numbers, tries, ages and ends of its messages. Pure.

Numbers count per receiver from 1 and are contiguous, so that what the receiver has to remember is a floor and a few
ranges. The sender repeats messages that were unsettled when a link ended, that the receiver did not mention for the ack
timeout, and that the receiver has passed over: a message behind them is settled.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, TypeVar

import msgspec

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.protocols.delivery.states import DeliveryState
from dep2p.protocols.delivery.wire import NUMBER_MAX, WINDOW_MAX, Ack, Hello

SETTLED_STEP: Final = 1_024
"""Newly settled numbers after which HELLO is sent again."""

RETRIES_USED_UP: Final = "no acknowledgement: all tries are used up"
TOO_OLD: Final = "it was not acknowledged within the age allowed"
NOT_TAKEN: Final = "the receiver had it, and no program there took it within the age allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPolicy:
    """The times of retries and of giving up (docs/spec/delivery.md). Times in seconds."""

    ack_timeout_s: float = 5.0
    """Seconds of silence of a connected receiver, after which unacknowledged messages are sent again. A receiver is not
    silent while bytes of messages flow to it."""
    retries_max: int = 3
    """Further tries after the first one. A try counts when a connected receiver was silent for the ack timeout. A
    message that is sent again because a link ended is in the same try."""
    age_max_s: float = 300.0
    """Seconds from acceptance until a message expires, connected or not."""


class Outgoing(msgspec.Struct, eq=False):
    """A message on its way to one receiver. A Struct: it is made in a third of the time."""

    head: bytes
    """Encoded headers, in front of the body in the payload."""
    flags: int
    body: bytes
    created_s: float
    """The time of acceptance, on the clock of `now`; before the node's start for a message of an earlier run."""
    is_restored: bool = False
    """Whether an earlier run of this node accepted it."""
    ttl_s: float = 0.0
    """Seconds from acceptance until it expires; 0: those of the policy."""
    number: int = 0
    tries: int = 0
    sent_s: float = 0.0
    state: DeliveryState = DeliveryState.CREATED
    reason: str = ""
    was_refused: bool = False
    """Whether the receiver has said that it does not take it."""

    is_whole: ClassVar[bool] = True
    """Every try carries the body as it is."""

    @property
    def may_have_been_taken(self) -> bool:
        """Whether it failed or expired, and the receiver's handler may have taken it all the same: it was sent, and no
        word came back. A program that sends it again may cause its effect twice."""
        is_lost = self.state is _FAILED or self.state is _EXPIRED
        return is_lost and not self.was_refused and (self.tries > 0 or self.is_restored)

    def body_of_try(self) -> bytes:
        """Return the body for this try. The subclass for topics sends the message itself only when asking was not
        enough."""
        return self.body


_NEVER: Final = float("inf")
_CREATED: Final = DeliveryState.CREATED
_SENDING: Final = DeliveryState.SENDING
_DELIVERED: Final = DeliveryState.DELIVERED
_RETRYING: Final = DeliveryState.RETRYING
_ACKNOWLEDGED: Final = DeliveryState.ACKNOWLEDGED
_FAILED: Final = DeliveryState.FAILED
_EXPIRED: Final = DeliveryState.EXPIRED


M = TypeVar("M", bound=Outgoing)
"""The type of a window's messages: `Outgoing`, or a subclass of the window's user."""


class SendWindow(Generic[M]):
    """All messages for one receiver. ``on_state(message)`` is called after each change of a message's state.

    Except that those of one ACK are given to ``on_acknowledged`` together, where there is one.
    """

    def __init__(
        self,
        epoch: bytes,
        policy: DeliveryPolicy,
        on_state: Callable[[M], None],
        *,
        next_number: int = 1,
        on_acknowledged: Callable[[list[M]], None] | None = None,
    ) -> None:
        self.epoch: bytes = epoch
        self.next_number: int = next_number
        self.unsettled: dict[int, M] = {}
        """Unsettled messages by number, in rising order."""
        self.reports_all = True
        """Whether `on_state` is called for SENDING and DELIVERED too: a third of the cost of a message."""
        self._reserved: dict[int, None] = {}
        self._leaving: dict[int, None] = {}
        self.free_until: int = 0
        """The number below which numbers can be given; for others `is_full` has to check."""
        self._policy = policy
        self._age_max_s = policy.age_max_s
        self._on_state = on_state
        self._on_acknowledged = on_acknowledged or self._each
        self.unsent: deque[M] = deque()
        """Messages that `take` returns next. Some of them may have ended."""
        self._highest_sent = next_number - 1  # an earlier run may have sent all that it numbered
        self._linked = False
        self._reported_settled = -1
        self._heard_s = 0.0
        self._received = 0
        self._answered_s = float("-inf")  # when the latest was sent that the receiver has settled
        self.expiry_s: float = _NEVER
        """Never later than the first message expires; earlier after its end, and then a check finds nothing."""
        self._noted_from_s: float = _NEVER
        """A message with the usual age that was accepted earlier than this expires before `expiry_s`."""
        self._passed: dict[int, int] = {}  # number -> how often it was sent again because it was passed over

    # The app's side

    @property
    def settled(self) -> int:
        """Everything up to this number is settled. Reserved numbers are not: their messages may be on their way to the
        disk."""
        first = next(iter(self.unsettled), self.next_number)
        return min(first, next(iter(self._reserved), first), *self._leaving) - 1

    @property
    def is_full(self) -> bool:
        """Whether the next number would be too far from the lowest unsettled one, or this epoch has none left."""
        if self.next_number >= self.free_until:
            self.free_until = min(NUMBER_MAX, self.settled + WINDOW_MAX) + 1
        return self.next_number >= self.free_until

    @property
    def is_settled(self) -> bool:
        """Whether every given number is settled."""
        return not self.unsettled and not self._reserved and not self._leaving

    def renew(self, epoch: bytes) -> None:
        """Begin a new numbering, when all is settled and the numbers have run out."""
        if not self.is_settled:
            raise LocalProtocolError("a new epoch while messages of the old one are unsettled")
        self.epoch = epoch
        self.next_number = 1
        self._highest_sent = self.free_until = 0
        self._reported_settled = -1

    def reserve(self) -> int:
        """Reserve the next number, for a message that is added when it is on disk. It may stay unused: gaps are
        allowed."""
        number = self.next_number
        self.next_number = number + 1
        self._reserved[number] = None
        return number

    def leave(self, number: int) -> None:
        """Leave a message that has failed or expired. A crash brings it back until its removal is on disk: see `left`.

        Until then it is unsettled, since the receiver takes a settled number for handled.
        """
        self._leaving[number] = None

    def left(self, number: int) -> None:
        """Note that the removal is on disk."""
        self._leaving.pop(number, None)

    def release(self, number: int) -> None:
        """Release a reserved number, which stays unused."""
        del self._reserved[number]

    def add(self, message: M) -> None:
        """Take a message with the number reserved for it; in the order of reserving."""
        del self._reserved[message.number]
        self.unsettled[message.number] = message
        self.unsent.append(message)
        self._note_expiry(message)

    def add_now(self, message: M) -> None:
        """Take a message that need not go to a disk first."""
        number = message.number = self.next_number
        self.next_number = number + 1
        self.unsettled[number] = message
        self.unsent.append(message)
        if message.created_s < self._noted_from_s or message.ttl_s:
            self._note_expiry(message)

    def restore(self, messages: Iterable[M]) -> None:
        """Restore messages of an earlier run with their numbers, in rising order, before anything is added."""
        for message in messages:
            self.unsettled[message.number] = message
            self.unsent.append(message)
            self._note_expiry(message)

    def _note_expiry(self, message: M) -> None:
        expires_s = message.created_s + (message.ttl_s or self._age_max_s)
        if expires_s < self.expiry_s:
            self._set_expiry(expires_s)

    def _set_expiry(self, expiry_s: float) -> None:
        self.expiry_s = expiry_s
        self._noted_from_s = expiry_s - self._age_max_s

    def drop(self, number: int, reason: str, *, is_refused: bool = False) -> bool:
        """Give a message up by request; False when it is settled already. ``is_refused``: the receiver does not take
        it."""
        message = self.unsettled.get(number)
        if message is None:
            return False
        message.was_refused = is_refused
        self._end(message, DeliveryState.FAILED, reason)
        return True

    # For the link

    def link_up(self, now: float) -> None:
        """Begin a link: everything unsettled goes out again, in order, behind a HELLO."""
        self._linked = True
        self._heard_s = now
        self._received = 0
        self.unsent = deque(self.unsettled.values())
        self._reported_settled = -1

    def link_down(self) -> None:
        """End a link: its unsettled messages are sent again on the next one."""
        if not self._linked:
            return
        self._linked = False
        self.unsent = deque(self.unsettled.values())
        for message in self.unsettled.values():
            if message.state in (DeliveryState.SENDING, DeliveryState.DELIVERED):
                self._set(message, DeliveryState.RETRYING)

    @property
    def has_unsent(self) -> bool:
        """Whether `take` would return frames."""
        return bool(self.unsent) or self._hello_due

    @property
    def _hello_due(self) -> bool:
        return self._reported_settled < 0 or self.settled - self._reported_settled >= SETTLED_STEP

    def take(self, now: float, bytes_max: int) -> tuple[Hello | None, list[M]]:
        """Return the next frames to write: a HELLO when it is due, then messages of about ``bytes_max`` together."""
        hello: Hello | None = None
        if self._hello_due:
            self._reported_settled = self.settled
            hello = Hello(self.epoch, self._reported_settled)
        taken: list[M] = []
        size = 0
        unsent, reports_all = self.unsent, self.reports_all
        while unsent and size < bytes_max:
            message = unsent.popleft()
            state = message.state
            if state is _CREATED:
                message.tries = 1
            elif state is not _RETRYING:  # it has ended
                continue
            message.sent_s = now
            size += len(message.head) + len(message.body)
            message.state = _SENDING
            if reports_all:
                self._on_state(message)
            taken.append(message)
        if taken and taken[-1].number > self._highest_sent:  # what is sent again is in front
            self._highest_sent = taken[-1].number
        return hello, taken

    def on_ack(self, ack: Ack, now: float) -> None:
        """Take an acknowledgement. Numbers that are settled are ignored (a duplicate, an old one).

        Raises :class:`ProtocolError` for a number that was never sent.
        """
        handled, rejected = ack.handled, ack.rejected
        highest = max((ack.received, *(high for _low, high in handled), *(number for number, _reason in rejected)))
        if highest > self._highest_sent:
            raise ProtocolError(f"ACK of number {highest}: the last one sent is {self._highest_sent}")
        self._heard_s = now
        acknowledged = self._settle_handled(ack)
        if acknowledged:
            self._on_acknowledged(acknowledged)
        for number, reason in rejected:
            message = self.unsettled.get(number)
            if message is not None:
                self._answered_s = max(self._answered_s, message.sent_s)
                message.was_refused = True
                self._end(message, DeliveryState.FAILED, f"rejected: {reason}")
        if ack.received > self._received:
            self._received = ack.received
            self._mark_delivered(ack.received)

    def _settle_handled(self, ack: Ack) -> list[M]:
        """Return the messages that this ACK is the first to call handled."""
        unsettled = self.unsettled
        acknowledged: list[M] = []
        for low, high in ack.handled:
            if high - low > len(unsettled):
                numbers: Iterable[int] = [number for number in unsettled if low <= number <= high]
            else:
                numbers = range(low, high + 1)
            message: M | None = None
            for number in numbers:
                message = unsettled.pop(number, None)
                if message is not None:
                    message.state = _ACKNOWLEDGED
                    acknowledged.append(message)
            if message is not None and message.sent_s > self._answered_s:
                self._answered_s = message.sent_s
        return acknowledged

    def _mark_delivered(self, received: int) -> None:
        for number, message in self.unsettled.items():
            if number > received:
                break
            if message.state is _SENDING:
                message.state = _DELIVERED
                if self.reports_all:
                    self._on_state(message)

    # Time

    def note_flow(self, now: float) -> None:
        """Note that what was written before still flows: the receiver is not silent, it has not got everything yet."""
        self._heard_s = now

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` has work to do."""
        if not self.unsettled:
            self._set_expiry(_NEVER)
            return None
        oldest = self.expiry_s
        if self._linked:
            for message in self.unsettled.values():
                if message.state is DeliveryState.SENDING or message.state is DeliveryState.DELIVERED:
                    oldest = min(oldest, self._timeout_of(message))
                    if message.sent_s >= self._answered_s:
                        break  # passed-over messages are in front, each with a time of its own
                elif message.state is DeliveryState.CREATED:
                    break
        return oldest

    def on_deadline(self, now: float) -> None:
        """End messages that are too old; queue again those without an answer. Check `has_unsent` afterwards."""
        if now >= self.expiry_s:
            self._end_aged(now)
        late: list[M] = []
        if self._linked:
            late = [
                message
                for message in self.unsettled.values()
                if (message.state is _SENDING or message.state is _DELIVERED) and now >= self._timeout_of(message)
            ]
        again: list[M] = []
        if self._passed:
            self._passed = {number: times for number, times in self._passed.items() if number in self.unsettled}
        for message in late:
            passed = self._passed.get(message.number, 0)
            is_passed_over = message.sent_s < self._answered_s
            if is_passed_over:
                self._passed[message.number] = passed + 1
            if not is_passed_over and message.tries - passed > self._policy.retries_max:
                self._end(message, DeliveryState.FAILED, RETRIES_USED_UP)
            else:
                message.tries += 1
                self._set(message, DeliveryState.RETRYING)
                again.append(message)
        if again:
            self.unsent.extendleft(reversed(again))
            self._reported_settled = -1

    def _end_aged(self, now: float) -> None:
        expiry_s = _NEVER
        aged: list[M] = []
        for message in self.unsettled.values():
            expires_s = message.created_s + (message.ttl_s or self._age_max_s)
            if now >= expires_s:
                aged.append(message)
            elif expires_s < expiry_s:
                expiry_s = expires_s
        self._set_expiry(expiry_s)
        for message in aged:
            was_there = message.state is _DELIVERED
            self._end(message, DeliveryState.EXPIRED, NOT_TAKEN if was_there else TOO_OLD)

    def _timeout_of(self, message: M) -> float:
        if message.sent_s < self._answered_s:
            # Messages are handled in the order of the link, so a word about others says nothing of this one. It was
            # left, or waits for its app: asked after again and again, ever more seldom.
            return message.sent_s + self._policy.ack_timeout_s * 2.0 ** self._passed.get(message.number, 0)
        return max(self._heard_s, message.sent_s) + self._policy.ack_timeout_s

    def _each(self, messages: list[M]) -> None:
        for message in messages:
            self._on_state(message)

    def _set(self, message: M, state: DeliveryState) -> None:
        message.state = state
        self._on_state(message)

    def _end(self, message: M, state: DeliveryState, reason: str) -> None:
        del self.unsettled[message.number]
        message.reason = reason
        self._set(message, state)
