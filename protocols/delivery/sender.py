"""What one sender has for one receiver: numbers, tries, ages and ends of its messages. Pure.

Numbers count per receiver from 1 and are contiguous, so that what the receiver has to remember is a floor and a few
ranges. Sent again is what was unsettled when a link ended, what was not heard of for the ack timeout, and what the
receiver has passed over: something that was sent behind it is settled.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.protocols.delivery.states import State
from dep2p.protocols.delivery.wire import NUMBER_MAX, WINDOW_MAX, Ack, Hello

SETTLED_STEP: Final = 1_024
"""HELLO is said again when so much more is settled than the receiver was told."""

RETRIES_USED_UP: Final = "no acknowledgement: all tries are used up"
TOO_OLD: Final = "it was not acknowledged within the age allowed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPolicy:
    """The seed's constants. Times in seconds."""

    ack_timeout_s: float = 5.0
    """Without a word from a connected receiver for so long, what it has not acknowledged is sent again."""
    retries_max: int = 3
    """Further tries after the first one. A try counts when a connected receiver said nothing for the ack timeout; what
    is sent again because a link ended counts as the same try."""
    age_max_s: float = 300.0
    """From acceptance on, connected or not."""


class Outgoing(msgspec.Struct, eq=False):
    """A message on its way to one receiver. A Struct: it is made in a third of the time."""

    head: bytes
    """Encoded headers, in front of the body in the payload."""
    flags: int
    body: bytes
    created_s: float
    """When it was accepted, on the clock of `now`; before the node's start for one of an earlier run."""
    is_restored: bool = False
    """It was accepted by an earlier run of this node."""
    number: int = 0
    tries: int = 0
    sent_s: float = 0.0
    state: State = State.CREATED
    reason: str = ""

    is_whole: ClassVar[bool] = True
    """Every try carries the body as it is."""

    def body_of_try(self) -> bytes:
        """What this try carries; the subclass for topics sends its message only when asking was not enough."""
        return self.body


_CREATED: Final = State.CREATED
_SENDING: Final = State.SENDING
_RETRYING: Final = State.RETRYING
_ACKNOWLEDGED: Final = State.ACKNOWLEDGED


class SenderLane:
    """All messages for one receiver. ``on_state(message)`` is called after each change of a message's state.

    Except that those of one ACK are given to ``on_acknowledged`` together, where there is one.
    """

    def __init__(
        self,
        epoch: bytes,
        policy: DeliveryPolicy,
        on_state: Callable[[Outgoing], None],
        *,
        next_number: int = 1,
        on_acknowledged: Callable[[list[Outgoing]], None] | None = None,
    ) -> None:
        self.epoch = epoch
        self.next_number = next_number
        self.unsettled: dict[int, Outgoing] = {}
        """By number, in rising order."""
        self.tells_all = True
        """Whether `on_state` is called for SENDING and DELIVERED too: nobody looks, it costs a third of a message."""
        self._reserved: dict[int, None] = {}
        self._leaving: dict[int, None] = {}
        self.free_until = 0
        """Numbers below it can be given; for others `is_full` has to look."""
        self._policy = policy
        self._on_state = on_state
        self._on_acknowledged = on_acknowledged or self._each
        self.unsent: deque[Outgoing] = deque()
        """What `take` gives next; among them some that have ended."""
        self._highest_sent = next_number - 1  # an earlier run may have sent all that it numbered
        self._linked = False
        self._told_settled = -1
        self._heard_s = 0.0
        self._received = 0
        self._answered_s = float("-inf")  # when the latest was sent that the receiver has settled
        self._passed: dict[int, int] = {}  # number -> how often it was sent again because it was passed over

    # The app's side

    @property
    def settled(self) -> int:
        """Everything up to this number is done with. What is reserved is not: it may be on its way to the disk."""
        first = next(iter(self.unsettled), self.next_number)
        return min(first, next(iter(self._reserved), first), *self._leaving) - 1

    @property
    def is_full(self) -> bool:
        """The next number would be too far from the lowest unsettled one, or there is none left in this epoch."""
        if self.next_number >= self.free_until:
            self.free_until = min(NUMBER_MAX, self.settled + WINDOW_MAX) + 1
        return self.next_number >= self.free_until

    @property
    def is_settled(self) -> bool:
        """Every number that was given is done with."""
        return not self.unsettled and not self._reserved and not self._leaving

    def renew(self, epoch: bytes) -> None:
        """Begin to count anew, when all is settled and the numbers have run out."""
        if not self.is_settled:
            raise LocalProtocolError("a new epoch while messages of the old one are unsettled")
        self.epoch = epoch
        self.next_number = 1
        self._highest_sent = self.free_until = 0
        self._told_settled = -1

    def reserve(self) -> int:
        """The next number, for a message that is added when it is on disk. It may stay unused: gaps are allowed."""
        number = self.next_number
        self.next_number = number + 1
        self._reserved[number] = None
        return number

    def leave(self, number: int) -> None:
        """A message has failed or expired, but comes back after a crash until its removal is on disk: see `left`.

        The receiver would take a settled number for handled.
        """
        self._leaving[number] = None

    def left(self, number: int) -> None:
        """The removal is on disk."""
        self._leaving.pop(number, None)

    def release(self, number: int) -> None:
        """A reserved number stays unused."""
        del self._reserved[number]

    def add(self, message: Outgoing) -> None:
        """Take a message with the number reserved for it; in the order of reserving."""
        del self._reserved[message.number]
        self.unsettled[message.number] = message
        self.unsent.append(message)

    def add_now(self, message: Outgoing) -> None:
        """Take a message that need not go to a disk first."""
        number = message.number = self.next_number
        self.next_number = number + 1
        self.unsettled[number] = message
        self.unsent.append(message)

    def restore(self, messages: Iterable[Outgoing]) -> None:
        """Messages of an earlier run with their numbers, in rising order, before anything is added."""
        for message in messages:
            self.unsettled[message.number] = message
            self.unsent.append(message)

    def drop(self, number: int, reason: str) -> bool:
        """Give a message up by request; False when it is settled already."""
        message = self.unsettled.get(number)
        if message is None:
            return False
        self._end(message, State.FAILED, reason)
        return True

    # The link's side

    def link_up(self, now: float) -> None:
        """A new link: everything unsettled goes out again, in order, behind a HELLO."""
        self._linked = True
        self._heard_s = now
        self._received = 0
        self.unsent = deque(self.unsettled.values())
        self._told_settled = -1

    def link_down(self) -> None:
        """The link ended: what was sent on it is sent again on the next one."""
        if not self._linked:
            return
        self._linked = False
        self.unsent = deque(self.unsettled.values())
        for message in self.unsettled.values():
            if message.state in (State.SENDING, State.DELIVERED):
                self._set(message, State.RETRYING)

    @property
    def has_unsent(self) -> bool:
        """`take` would give something."""
        return bool(self.unsent) or self._hello_due

    @property
    def _hello_due(self) -> bool:
        return self._told_settled < 0 or self.settled - self._told_settled >= SETTLED_STEP

    def take(self, now: float, bytes_max: int) -> tuple[Hello | None, list[Outgoing]]:
        """What is to be written now: a HELLO when it is due, then messages of about ``bytes_max`` together."""
        hello: Hello | None = None
        if self._hello_due:
            self._told_settled = self.settled
            hello = Hello(self.epoch, self._told_settled)
        taken: list[Outgoing] = []
        size = 0
        unsent, tells_all = self.unsent, self.tells_all
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
            if tells_all:
                self._on_state(message)
            taken.append(message)
        if taken and taken[-1].number > self._highest_sent:  # what is sent again is in front
            self._highest_sent = taken[-1].number
        return hello, taken

    def on_ack(self, ack: Ack, now: float) -> None:
        """What the receiver says. Numbers that are settled are passed over (a duplicate, an old one).

        Raises :class:`ProtocolError` for a number that was never sent.
        """
        highest = ack.received
        for _low, high in ack.handled:
            highest = max(highest, high)
        for number, _reason in ack.rejected:
            highest = max(highest, number)
        if highest > self._highest_sent:
            raise ProtocolError(f"ACK of number {highest}: the last one sent is {self._highest_sent}")
        self._heard_s = now
        unsettled = self.unsettled
        acknowledged: list[Outgoing] = []
        for low, high in ack.handled:
            if high - low > len(unsettled):
                numbers: Iterable[int] = [number for number in unsettled if low <= number <= high]
            else:
                numbers = range(low, high + 1)
            message: Outgoing | None = None
            for number in numbers:
                message = unsettled.pop(number, None)
                if message is not None:
                    message.state = _ACKNOWLEDGED
                    acknowledged.append(message)
            if message is not None and message.sent_s > self._answered_s:
                self._answered_s = message.sent_s
        if acknowledged:
            self._on_acknowledged(acknowledged)
        for number, reason in ack.rejected:
            message = unsettled.get(number)
            if message is not None:
                self._answered_s = max(self._answered_s, message.sent_s)
                self._end(message, State.FAILED, f"rejected: {reason}")
        if ack.received > self._received:
            self._received = ack.received
            for number, message in unsettled.items():
                if number > ack.received:
                    break
                if message.state is State.SENDING:
                    message.state = State.DELIVERED
                    if self.tells_all:
                        self._on_state(message)

    # Time

    def next_deadline(self) -> float | None:
        """When `on_deadline` has something to do."""
        for first in self.unsettled.values():  # noqa: B007  accepted in the order of their numbers: it is the oldest
            break
        else:
            return None
        oldest = first.created_s + self._policy.age_max_s
        if self._linked:
            for message in self.unsettled.values():
                if message.state is State.SENDING or message.state is State.DELIVERED:
                    oldest = min(oldest, self._timeout_of(message))
                    if message.sent_s >= self._answered_s:
                        break  # what was passed over is in front, and has a time of its own each
                elif message.state is State.CREATED:
                    break
        return oldest

    def on_deadline(self, now: float) -> None:
        """End what is too old; queue again what was not heard of. See `has_unsent` afterwards."""
        policy = self._policy
        aged: list[Outgoing] = []
        late: list[Outgoing] = []
        for message in self.unsettled.values():
            if now >= message.created_s + policy.age_max_s:
                aged.append(message)
            elif (
                self._linked
                and (message.state is State.SENDING or message.state is State.DELIVERED)
                and now >= self._timeout_of(message)
            ):
                late.append(message)
        for message in aged:
            self._end(message, State.EXPIRED, TOO_OLD)
        again: list[Outgoing] = []
        if self._passed:
            self._passed = {number: times for number, times in self._passed.items() if number in self.unsettled}
        for message in late:
            passed = self._passed.get(message.number, 0)
            is_passed_over = message.sent_s < self._answered_s
            if is_passed_over:
                self._passed[message.number] = passed + 1
            if not is_passed_over and message.tries - passed > policy.retries_max:
                self._end(message, State.FAILED, RETRIES_USED_UP)
            else:
                message.tries += 1
                self._set(message, State.RETRYING)
                again.append(message)
        if again:
            self.unsent.extendleft(reversed(again))
            self._told_settled = -1

    def _timeout_of(self, message: Outgoing) -> float:
        if message.sent_s < self._answered_s:
            # Messages are handled in the order of the link, so a word about others says nothing of this one. It was
            # left, or waits for its app: asked after again and again, ever more seldom.
            return message.sent_s + self._policy.ack_timeout_s * 2.0 ** self._passed.get(message.number, 0)
        return max(self._heard_s, message.sent_s) + self._policy.ack_timeout_s

    def _each(self, messages: list[Outgoing]) -> None:
        for message in messages:
            self._on_state(message)

    def _set(self, message: Outgoing, state: State) -> None:
        message.state = state
        self._on_state(message)

    def _end(self, message: Outgoing, state: State, reason: str) -> None:
        del self.unsettled[message.number]
        message.reason = reason
        self._set(message, state)
