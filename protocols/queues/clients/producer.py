"""The producer: where each message goes, and what happens when that fails. Pure.

RocketMQ's flow: the route is fetched once and kept; a message goes to the next candidate in turn, and after a failure
to the one after it, at most ``attempts_max`` times. A transactional message has one attempt. A broker that says 'flow
control' gets nothing for as long as it says.

Messages with an order key stand in a queue per key, of which one batch is on its way at a time. In strict order that is
one message, since a batch whose outcome is not known would repeat more than its current message; one that failed stays
at the head of its key queue and goes to the same broker again, after the back-off, forever (until its sender withdraws
it). In best-effort order it may go to another broker, and after ``attempts_max`` tries it leaves the key queue, which
goes on without it; both are counted.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from itertools import count
from typing import Final, Literal, NamedTuple

from dep2p.errors import (
    ChannelNotFoundError,
    MessageTooLargeError,
    OverloadedError,
    ProtocolError,
    QueueAccessError,
    QueueFullError,
    QueueNotFoundError,
)
from dep2p.protocols.queues.clients.destinations import Candidate, Kind, RouteCache
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.timing.backoff import Backoff

Order = Literal["strict", "best_effort"]

BATCH_ITEMS: Final = 64
BATCH_BYTES: Final = 262_144
"""Bytes of one key's queue that go together."""
FLOW_CONTROL_MIN_S: Final = 0.01
"""The wait for a broker that says 'flow control' and no time."""
UNSETTLED_MAX: Final = 128
"""Strict messages with a key that may have been taken, or that are on their way. Each has a publisher of its own, and a
queue remembers 1,024 publishers: of one that it has forgotten, it takes a message again."""


class PendingMessage:
    """A message on its way. ``item`` is the shell's own object."""

    __slots__ = ("in_flight", "is_over", "is_withdrawn", "item", "key", "kind", "queue", "size", "tries")

    def __init__(self, key: str, kind: Kind, size: int, item: object) -> None:
        self.key: str = key
        self.kind: Kind = kind
        self.size: int = size
        self.item: object = item
        self.tries: int = 0
        self.queue: SendQueue | None = None
        self.in_flight: bool = False
        self.is_withdrawn: bool = False
        self.is_over: bool = False


class SendQueue:
    """The messages of one order key that wait to be sent, or one message without a key."""

    __slots__ = ("in_flight", "is_queued", "is_single", "key", "not_before", "sends")

    def __init__(self, key: str) -> None:
        self.key: str = key
        self.sends: deque[PendingMessage] = deque()
        self.in_flight: bool = False
        self.not_before: float = 0.0
        self.is_queued: bool = False
        self.is_single: bool = False
        """Whether its messages go one by one: a batch was refused, and only the bad message shall fail."""


class SendFailure(Enum):
    """The reason why a batch was not taken."""

    RETRY = auto()
    """Unreachable, no answer, a failing store: another try may work. It may be unknown whether the batch was taken."""
    FLOW_CONTROL = auto()
    """Too much waits at the broker."""
    STALE_ROUTE = auto()
    """The broker does not have this partition any more."""
    REFUSED = auto()
    """Another try would meet the same: too large, not allowed, no such queue."""


_REFUSED: Final = (
    ChannelNotFoundError,
    MessageTooLargeError,
    ProtocolError,
    QueueAccessError,
    QueueNotFoundError,
    ValueError,
)
"""Errors that another try would meet again."""


def send_failure_of(error: Exception) -> SendFailure:
    """Return the kind of failure that an error of a publish means."""
    if isinstance(error, OverloadedError | QueueFullError):
        return SendFailure.FLOW_CONTROL
    return SendFailure.REFUSED if isinstance(error, _REFUSED) else SendFailure.RETRY


class FetchRoute(NamedTuple):
    """Ask for the route table, then call `ProducerCore.route` or `ProducerCore.route_failed`."""


class Dispatch(NamedTuple):
    """Send these together, all or none, in this order, then call `ProducerCore.sent` or `ProducerCore.failed`."""

    queue: SendQueue
    sends: list[PendingMessage]
    candidate: int


class MessageTaken(NamedTuple):
    """The message is durable. ``where`` is the shell's value."""

    send: PendingMessage
    where: str


class GivenUp(NamedTuple):
    """The message failed for good."""

    send: PendingMessage
    error: Exception


ProducerEffect = FetchRoute | Dispatch | MessageTaken | GivenUp


class KindRefusedError(Exception):
    """The broker does not take messages of this kind."""


class ProducerCore:
    """Events in, effects out; ``now`` is monotonic seconds.

    ``attempts_max``: tries of a message that is not in a strict key queue. ``in_flight_max``: batches on their way at
    once. ``items_max``, ``bytes_max``: of what has not been taken yet.
    """

    def __init__(
        self,
        order: Order,
        *,
        attempts_max: int,
        backoff: Backoff,
        in_flight_max: int = 64,
        items_max: int = 10_000,
        bytes_max: int = 67_108_864,
    ) -> None:
        if attempts_max < 1 or in_flight_max < 1 or items_max < 1 or bytes_max < 1:
            raise ValueError("attempts_max, in_flight_max, items_max and bytes_max are at least 1")
        self.order = order
        self.is_strict: bool = order == "strict"
        self.attempts_max = attempts_max
        self.backoff = backoff
        self.items_max = items_max
        self.bytes_max = bytes_max
        self.routes: RouteCache = RouteCache()
        self.counts: Counter[str] = Counter()
        self.items: int = 0
        self.bytes: int = 0
        self._batch_items = 1 if self.is_strict else BATCH_ITEMS
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._open: dict[PendingMessage, None] = {}
        self._queues: dict[str, SendQueue] = {}
        self._ready: deque[SendQueue] = deque()
        self._unsettled: dict[PendingMessage, None] = {}
        """Strict messages with a key that may have been taken although a try failed."""
        self._fresh = 0
        """Others of them that are on their way."""
        self._held: deque[SendQueue] = deque()
        """Key queues whose head waits until fewer are unsettled."""
        self._routeless: deque[SendQueue] = deque()
        """Key queues that wait for the first route table."""
        self._timers: list[tuple[float, int, SendQueue]] = []
        self._number = count()
        self._is_fetching = False
        self._fetch_failures = 0
        self._fetch_at: float | None = None

    @property
    def has_room(self) -> bool:
        """Whether it takes another message."""
        return self.items < self.items_max and self.bytes < self.bytes_max

    @property
    def keys(self) -> int:
        """The number of order keys that have messages here."""
        return len(self._queues)

    @property
    def waiting_key_queues(self) -> int:
        """The number of keys whose head has failed and waits for its next try."""
        return sum(
            bool(queue.sends and queue.sends[0].tries and not queue.in_flight) for queue in self._queues.values()
        )

    @property
    def unsettled(self) -> int:
        """The number of strict messages with a key that may have been taken although a try failed."""
        return len(self._unsettled)

    def open_sends(self) -> list[PendingMessage]:
        """Return the messages that no broker has taken and that are not given up or withdrawn, in the order of
        submitting."""
        return list(self._open)

    def next_deadline(self) -> float | None:
        """Return when `on_time` has work to do."""
        timers = self._timers
        while timers and timers[0][2].not_before != timers[0][0]:
            heapq.heappop(timers)
        first = timers[0][0] if timers else None
        if self._fetch_at is not None:
            return self._fetch_at if first is None else min(first, self._fetch_at)
        return first

    # Messages

    def submit(self, send: PendingMessage, now: float) -> list[ProducerEffect]:
        """Take a message. The caller looks at `has_room` before."""
        queue = self._queues.get(send.key) if send.key else None
        if queue is None:
            queue = SendQueue(send.key)
            if send.key:
                self._queues[send.key] = queue
        send.queue = queue
        queue.sends.append(send)
        self._open[send] = None
        self.items += 1
        self.bytes += send.size
        self.counts["submitted"] += 1
        self._offer(queue, now)
        return self._go_on(now)

    def withdraw(self, send: PendingMessage, now: float) -> list[ProducerEffect]:
        """Withdraw a message whose sender waits no more: it is not tried again. A try that is under way may still
        succeed."""
        if send.is_over:
            return []
        send.is_withdrawn = True
        self._open.pop(send, None)
        self.counts["withdrawn"] += 1
        if not send.in_flight:
            queue = _queue_of(send)
            was_head = queue.sends[0] is send
            self._remove(send)
            if was_head:
                queue.not_before = 0.0  # the next one has not failed
            self._offer(queue, now)
        return self._go_on(now)

    def sent(self, dispatch: Dispatch, where: Iterable[str], now: float) -> list[ProducerEffect]:
        """Take the success of a dispatch: the messages are durable. ``where``: one for each message."""
        effects: list[ProducerEffect] = []
        queue = self._landed(dispatch)
        candidate = self.routes.candidates.get(dispatch.candidate)
        if candidate is not None:
            candidate.failures, candidate.avoided_until = 0, 0.0
        for send, point in zip(dispatch.sends, where, strict=True):
            self._remove(send)
            self.counts["taken"] += 1
            effects.append(MessageTaken(send, point))
        self._offer(queue, now)
        return self._go_on(now, effects)

    def failed(
        self,
        dispatch: Dispatch,
        failure: SendFailure,
        now: float,
        *,
        error: Exception,
        retry_after_s: float = 0.0,
        may_be_taken: bool = False,
    ) -> list[ProducerEffect]:
        """Take the failure of a dispatch: it was not taken, or that is not known. ``retry_after_s``: the broker's wait
        (flow control). ``may_be_taken``: the next try of a strict message says that it is the same one, and its queue
        has to remember that: no more than `UNSETTLED_MAX` are unsettled at once, and further keys wait."""
        effects: list[ProducerEffect] = []
        queue = self._landed(dispatch)
        if may_be_taken and self._has_number(dispatch.sends[0]):
            self._unsettled[dispatch.sends[0]] = None
        candidate = self.routes.candidates.get(dispatch.candidate)
        self.counts[f"failed_{failure.name.lower()}"] += 1
        if failure is SendFailure.FLOW_CONTROL and candidate is not None:
            candidate.paused_until = max(candidate.paused_until, now + max(retry_after_s, FLOW_CONTROL_MIN_S))
        elif failure is SendFailure.RETRY and candidate is not None:
            candidate.failures += 1
            candidate.avoided_until = now + self.backoff.after(candidate.failures)
        elif failure is SendFailure.STALE_ROUTE:
            self._fetch(now, effects)
        if failure is SendFailure.REFUSED and len(dispatch.sends) > 1:
            queue.is_single = True
        else:
            self._count_try(dispatch, queue, failure, error, now, effects)
        for send in dispatch.sends:
            if send.is_withdrawn and not send.is_over:
                self._remove(send)
        self._offer(queue, now)
        return self._go_on(now, effects)

    def _count_try(
        self,
        dispatch: Dispatch,
        queue: SendQueue,
        failure: SendFailure,
        error: Exception,
        now: float,
        effects: list[ProducerEffect],
    ) -> None:
        stays = self.is_strict and bool(queue.key)
        for send in dispatch.sends:
            send.tries += 1
            has_one = send.kind is Kind.TRANSACTIONAL
            if failure is SendFailure.REFUSED or has_one or (not stays and send.tries >= self.attempts_max):
                if queue.key and not send.is_withdrawn:
                    self.counts["left_key_queue"] += 1
                self._give_up(send, error, effects)
        if not queue.sends or failure is SendFailure.REFUSED:
            return
        tries = queue.sends[0].tries
        # Try again at once while there is an untried broker, as RocketMQ does; then after a wait. A broker that says
        # 'flow control' decides the wait itself.
        if failure is SendFailure.FLOW_CONTROL:
            return
        if stays or failure is SendFailure.STALE_ROUTE or tries >= len(self.routes.candidates):
            self._wait(queue, now + self.backoff.after(tries))

    def _give_up(self, send: PendingMessage, error: Exception, effects: list[ProducerEffect]) -> None:
        self._remove(send)
        if not send.is_withdrawn:
            self.counts["given_up"] += 1
            effects.append(GivenUp(send, error))

    def _has_number(self, send: PendingMessage) -> bool:
        """Whether a try of the message has a number, by which the queue recognizes it when it comes again."""
        return self.is_strict and bool(send.key) and send.kind is not Kind.TRANSACTIONAL

    def _is_fresh(self, send: PendingMessage) -> bool:
        """Whether a try of it takes a publisher that no message has."""
        return self._has_number(send) and send not in self._unsettled

    def _landed(self, dispatch: Dispatch) -> SendQueue:
        self._in_flight -= 1
        self._fresh -= self._is_fresh(dispatch.sends[0])
        dispatch.queue.in_flight = False
        for send in dispatch.sends:
            send.in_flight = False
        return dispatch.queue

    def _remove(self, send: PendingMessage) -> None:
        queue = _queue_of(send)
        queue.sends.remove(send)
        self._open.pop(send, None)
        self._unsettled.pop(send, None)
        send.is_over = True
        self.items -= 1
        self.bytes -= send.size
        if not queue.sends and not queue.in_flight and self._queues.get(queue.key) is queue:
            del self._queues[queue.key]

    # Routes

    def route(
        self, table: RouteTable, now: float, accepts: Mapping[int, Iterable[Kind]] | None = None
    ) -> list[ProducerEffect]:
        """Take a route table: one that was asked for, or that a broker sent."""
        self._is_fetching = False
        self._fetch_at = None
        self._fetch_failures = 0
        if self.routes.take(table, accepts):
            self.counts["routes_taken"] += 1
        self._release_routeless(now)
        return self._go_on(now)

    def route_failed(self, error: Exception, now: float) -> list[ProducerEffect]:
        """Take a failed fetch of the route table: messages that cannot wait fail; strict key queues wait."""
        effects: list[ProducerEffect] = []
        self._is_fetching = False
        self._fetch_failures += 1
        if not self.routes.version:
            for queue in list(self._routeless):
                for send in list(queue.sends):
                    if not (self.is_strict and queue.key and send.kind is not Kind.TRANSACTIONAL):
                        self._give_up(send, error, effects)
            self._routeless = deque(queue for queue in self._routeless if queue.sends)
        if self._routeless or self.routes.version:
            self._fetch_at = now + self.backoff.after(self._fetch_failures)
        return self._go_on(now, effects)

    def _fetch(self, now: float, effects: list[ProducerEffect]) -> None:
        if not self._is_fetching and (self._fetch_at is None or self._fetch_at <= now):
            self._is_fetching = True
            self._fetch_at = None
            effects.append(FetchRoute())

    def _release_routeless(self, now: float) -> None:
        waiting, self._routeless = self._routeless, deque()
        for queue in waiting:
            queue.is_queued = False
            self._offer(queue, now)

    # Going on

    def on_time(self, now: float) -> list[ProducerEffect]:
        """Run the timers that are due."""
        effects: list[ProducerEffect] = []
        if self._fetch_at is not None and self._fetch_at <= now:
            self._fetch(now, effects)
        timers = self._timers
        while timers and timers[0][0] <= now:
            at, _number, queue = heapq.heappop(timers)
            if queue.not_before == at:
                self._offer(queue, now)
        return self._go_on(now, effects)

    def _wait(self, queue: SendQueue, until: float) -> None:
        queue.not_before = until
        heapq.heappush(self._timers, (until, next(self._number), queue))

    def _offer(self, queue: SendQueue, now: float) -> None:
        if queue.sends and not queue.in_flight and not queue.is_queued and queue.not_before <= now:
            queue.is_queued = True
            self._ready.append(queue)

    def _go_on(self, now: float, effects: list[ProducerEffect] | None = None) -> list[ProducerEffect]:
        effects = [] if effects is None else effects
        while self._in_flight < self._in_flight_max:
            queue = self._next_queue()
            if queue is None:
                break
            queue.is_queued = False
            if not queue.sends or queue.in_flight or queue.not_before > now:
                continue
            if not self.routes.version:
                queue.is_queued = True
                self._routeless.append(queue)
                self._fetch(now, effects)
                continue
            self._dispatch(queue, now, effects)
        return effects

    def _next_queue(self) -> SendQueue | None:
        """Return the next key queue that may send. One with a fresh strict message goes behind those that are held."""
        ready, held = self._ready, self._held
        has_room = len(self._unsettled) + self._fresh < UNSETTLED_MAX
        while ready:
            queue = ready.popleft()
            if not queue.sends or not self._is_fresh(queue.sends[0]):
                return queue
            held.append(queue)
            if has_room:
                break
        return held.popleft() if held and has_room else None

    def _dispatch(self, queue: SendQueue, now: float, effects: list[ProducerEffect]) -> None:
        head = queue.sends[0]
        candidate = self._choose(head, now)
        if candidate.paused_until > now:
            self.counts["held_back"] += 1
            self._wait(queue, candidate.paused_until)
            return
        if head.kind not in candidate.accepts:
            error = KindRefusedError(f"place {candidate.id} takes no {head.kind.name.lower()} messages")
            self._give_up(head, error, effects)
            self._offer(queue, now)
            return
        sends = self._batch(queue, head)
        queue.in_flight = True
        self._in_flight += 1
        self._fresh += self._is_fresh(head)
        for send in sends:
            send.in_flight = True
        effects.append(Dispatch(queue, sends, candidate.id))

    def _batch(self, queue: SendQueue, head: PendingMessage) -> list[PendingMessage]:
        if queue.is_single or head.kind is not Kind.ORDERED:
            queue.is_single = queue.is_single and len(queue.sends) > 1
            return [head]
        sends: list[PendingMessage] = []
        size = 0
        for send in queue.sends:
            # A message that has failed goes with others of its batch, or alone: each message keeps its own tries.
            if sends and (
                len(sends) >= self._batch_items
                or size + send.size > BATCH_BYTES
                or send.kind is not head.kind
                or send.tries != head.tries
            ):
                break
            sends.append(send)
            size += send.size
        return sends

    def _choose(self, send: PendingMessage, now: float) -> Candidate:
        """Choose the candidate of the next try; a paused one only when all usable ones are."""
        first = self.routes.candidate_of(send.key) if send.key else None
        if first is not None and self.is_strict:
            return first
        rotation = self.routes.rotation(now, first)
        free = [each for each in rotation if each.paused_until <= now]
        chosen = free[0] if free else min(rotation, key=lambda each: each.paused_until)
        if first is not None and chosen is not first:
            self.counts["moved"] += 1
        return chosen


def _queue_of(send: PendingMessage) -> SendQueue:
    assert send.queue is not None
    return send.queue
