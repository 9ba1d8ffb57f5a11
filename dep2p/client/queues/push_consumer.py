"""The client's push consumer: calls a handler for each message of a channel, in normal or FIFO mode, and settles for
it.

The shell of `dep2p.protocols.queues.clients.push_consumer`, which decides, as it does for a node's push consumer. Its
connection is a feed: over a restart of the daemon it is opened again, and messages that were held come again.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, Never
from urllib.parse import quote

import anyio
import anyio.abc
import anyio.lowlevel
from msgspec import convert

from dep2p.arguments import check_handler
from dep2p.client.models import FeedInterrupted
from dep2p.client.queues.calls import BrokerCalls, channel_path, is_malformed, queue_path
from dep2p.client.queues.consumer import ClientQueueMessage
from dep2p.client.reconnection.feeds import Feed, FeedCall, opened_feed
from dep2p.control_api.errors import DaemonUnreachableError, FeedEndedError, unexpected_answer
from dep2p.control_api.queues import (
    DELAY_MAX_S,
    ConsumerLoss,
    ConsumerOpened,
    DeliveredMessage,
    Do,
    MessageResult,
    SettledMessages,
    SettleMessages,
)
from dep2p.errors import Dep2pError
from dep2p.gossipsub.topic_types import Lagged
from dep2p.outside_text import one_line
from dep2p.protocols.queues.admin import QueueInfo
from dep2p.protocols.queues.clients.process_queue import Phase, ProcessQueueEntry
from dep2p.protocols.queues.clients.push_consumer import (
    SETTLE_RETRY_S,
    Arrived,
    CancelHandler,
    Effect,
    HandlerFailure,
    Outcome,
    PushCore,
    ResultOutcome,
    SendResult,
    StartHandler,
    failure_of,
)
from dep2p.protocols.queues.clients.settings import ConsumerSettings
from dep2p.protocols.queues.names import parse_message_id
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.protocols.queues.wire.frames import Settle

_logger: logging.Logger = logging.getLogger("dep2p.client")

_RESULTS_MAX: Final = 512
"""Results in one call."""
_LAST_RESULTS_S: Final = 10.0
"""Seconds that the end of the block waits for the last results to arrive."""
_DO: Final[dict[Settle, Do]] = {
    Settle.FINISH: "finish",
    Settle.REQUEUE: "requeue",
    Settle.TOUCH: "touch",
    Settle.RELEASE: "release",
    Settle.REJECT: "reject",
}

PushHandler = Callable[["ClientPushedMessage"], Awaitable[None]]


class _SettledByConsumer:
    """Stands where a message's results go: the consumer reports them, not the handler."""

    async def settle(self, result: MessageResult, *, durable: bool = False) -> Never:
        del result, durable
        await anyio.lowlevel.checkpoint()
        raise RuntimeError(
            "the consumer settles this message: return when it is done; raise RejectMessage, RetryMessage or any other "
            "exception when it is not"
        )


class ClientPushedMessage(ClientQueueMessage):
    """The message that a handler gets. The consumer settles it: return when it is done, raise when it did not work.

    Raise RejectMessage for one that can never work, and RetryMessage to say when it shall be tried again.
    """

    def __init__(self, opened: ConsumerOpened, message: DeliveredMessage, entry: ProcessQueueEntry) -> None:
        super().__init__(_SettledByConsumer(), opened, message)
        self._entry = entry
        self.move_deadline(entry.deadline)

    @property
    def attempts(self) -> int:
        """The number of this try, from 1."""
        return self._entry.attempts

    @property
    def is_redelivered(self) -> bool:
        """Whether an earlier try failed: it may have been worked on."""
        return self._entry.attempts > 1

    @property
    def expired(self) -> bool:
        """Whether its time is over, or it was lost with its connection: another consumer gets it. Stop working on
        it."""
        return self._entry.phase is Phase.GONE or super().expired

    async def touch(self) -> float:
        """Not needed: the message is renewed while the handler runs. Returns its ``deadline_s``."""
        await anyio.lowlevel.checkpoint()
        return self.deadline_s


class _Item:
    """A delivery, with its handler's message and scope; the core carries it."""

    __slots__ = ("delivered", "message", "scope")

    def __init__(self, delivered: DeliveredMessage) -> None:
        self.delivered = delivered
        self.message: ClientPushedMessage | None = None
        self.scope: anyio.CancelScope | None = None


def _item(entry: ProcessQueueEntry) -> _Item:
    """The delivery of an entry of the core."""
    assert isinstance(entry.item, _Item)
    return entry.item


class _Report(NamedTuple):
    """A result, or a touch, on its way to the daemon."""

    entry: ProcessQueueEntry
    result: MessageResult
    is_confirmed: bool
    """Whether the core waits for its outcome."""

    @property
    def is_touch(self) -> bool:
        return self.result.do == "touch"

    @property
    def is_void(self) -> bool:
        """Whether it is about a message that was lost meanwhile."""
        return (self.is_confirmed or self.is_touch) and self.entry.phase is Phase.GONE


class _Bell:
    """Wakes one waiting task."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        """Wait until it has been rung since the last wait."""
        await self._event.wait()
        self._event = anyio.Event()


class ClientPushConsumer:
    """Made by ``queue.consumer(…)``; runs as long as its ``async with`` block.

    When the daemon goes away, it waits for it and goes on. Handlers of messages that were held then are cancelled: the
    messages are delivered again, to any consumer.
    """

    def __init__(
        self, calls: BrokerCalls, queue: str, channel: str, handler: PushHandler, settings: ConsumerSettings
    ) -> None:
        check_handler(handler)
        self.queue = queue
        self.channel = channel
        self.settings = settings
        self.error: Dep2pError | None = None
        """Why it ended before its block: the queue was deleted, or another error that no retry mends."""
        self.counts: Counter[str] = Counter()
        """``cancelled_at_the_end``: handlers that did not finish in time when the block ended. ``results_lost``:
        results that were not sent before the connection to the daemon was lost. ``results_malformed``: results that
        the daemon refuses each time, dropped: their messages are delivered again when their time is over."""
        self._calls = calls
        self._handler = handler
        self._core: PushCore | None = None
        self._opened: ConsumerOpened | None = None
        """The connection; None while the daemon is away."""
        self._arrivals: list[Arrived] = []
        """Deliveries that came together, until all of them are read."""
        self._reports: deque[_Report] = deque()
        self._results_max = _RESULTS_MAX
        """Results of the next call; fewer after a refused one, until the malformed result is found."""
        self._is_sending = False
        self._takes_no_more = False
        """Whether the daemon has to learn that it delivers nothing more."""
        self._has_reports = _Bell()
        self._quiet = _Bell()
        self._timer = _Bell()
        self._timer_at: float = -math.inf
        self._group: anyio.abc.TaskGroup | None = None

    @property
    def running(self) -> int:
        """The number of handlers that run."""
        return 0 if self._core is None else self._core.running

    @property
    def cached(self) -> int:
        """The number of messages that it holds."""
        return 0 if self._core is None else self._core.items

    @property
    def is_over(self) -> bool:
        """Whether it handles nothing more."""
        return self._group is None

    def statistics(self) -> dict[str, float]:
        """Counts since it began (`PushCore.counts`), and what is here now."""
        core = self._core
        if core is None:
            return {}
        now = {"running": core.running, "cached": core.items, "cached_bytes": core.bytes, "settling": core.settling}
        return {**core.counts, **self.counts, **now}

    # Life

    @asynccontextmanager
    async def working(self) -> AsyncGenerator["ClientPushConsumer", None]:
        """Consume while the block runs. When it is left, handlers that run may finish (`drain_timeout_s`) and what was
        not begun goes back at once; when the block is cancelled, so are they."""
        failed: Exception | None = None
        self._core = core = await self._new_core()
        async with opened_feed(self._calls.transport, self._feed_call()) as feed:
            try:
                async with anyio.create_task_group() as group:
                    self._group = group
                    group.start_soon(self._receive_all, core, feed)
                    group.start_soon(self._keep_time, core)
                    group.start_soon(self._send_all, core)
                    try:
                        yield self
                    except Exception as error:  # raised as it is, not in the task group's
                        failed = error
                    await self._drain(core)
                    group.cancel_scope.cancel()
            finally:
                self._group = None
        if failed is not None:
            raise failed
        if self.error is not None:
            raise self.error

    async def _new_core(self) -> PushCore:
        settings = self.settings
        # The queue's settings come first: nothing is delivered before the limits are known.
        info = await self._calls.ask(QueueInfo, "GET", queue_path(self.queue))
        attempts_max = settings.max_attempts
        return PushCore(
            settings.mode,
            concurrency=settings.concurrency,
            items_max=settings.items_max,
            bytes_max=settings.cache_bytes,
            attempts_max=info.options.max_attempts if attempts_max is None else attempts_max,
            backoff=settings.retry,
        )

    def _feed_call(self) -> FeedCall:
        settings = self.settings
        params = {
            "max_in_flight": str(settings.items_max),
            "bytes_max": str(settings.cache_bytes),
            "losses": "1",
            "from_start": str(int(settings.from_start)),
            "exclusive": str(int(settings.mode == "fifo")),
        }
        params |= {"filter": settings.filter} if settings.filter else {}
        return FeedCall(
            "POST",
            f"{channel_path(self.queue, self.channel)}/consume",
            f"messages of queue {self.queue!r}, channel {self.channel!r}",
            loses=False,
            params=self._calls.params | params,
        )

    async def _drain(self, core: PushCore) -> None:
        self._takes_no_more = True  # otherwise released messages come again at once
        self._do(core, core.stop(anyio.current_time()))
        self._has_reports.ring()
        with anyio.move_on_after(self.settings.drain_timeout_s):
            while not core.is_idle:
                await self._quiet.wait()
        if not core.is_idle:
            self.counts["cancelled_at_the_end"] += core.running
            _logger.warning(
                "the consumer of %r, channel %r, ends with %d handlers that did not finish within %g s: they are "
                "cancelled, and their messages go to others",
                self.queue,
                self.channel,
                core.running,
                self.settings.drain_timeout_s,
            )
        with anyio.move_on_after(_LAST_RESULTS_S):
            while self._opened is not None and (self._is_sending or self._reports):
                await self._quiet.wait()

    def _fail(self, error: Dep2pError) -> None:
        self.error = self.error or error
        if self._group is not None:
            self._group.cancel_scope.cancel()

    # Effects

    def _do(self, core: PushCore, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, StartHandler):
                assert self._group is not None
                self._group.start_soon(self._work, core, effect.entry)
            elif isinstance(effect, SendResult):
                self._report(_report(effect))
            elif isinstance(effect, CancelHandler):
                scope = _item(effect.entry).scope
                if scope is not None:
                    scope.cancel()
            else:
                for entry in effect.entries:
                    self._report(_touch(entry))
        if core.is_idle:
            self._quiet.ring()
        at = core.next_deadline()
        if at is not None and at < self._timer_at:
            self._timer.ring()

    def _report(self, report: _Report) -> None:
        if self._opened is not None:
            self._reports.append(report)
            self._has_reports.ring()
        elif not report.is_touch:
            self.counts["results_lost"] += 1

    # Messages

    async def _receive_all(self, core: PushCore, feed: Feed) -> None:
        # It reads on while the cache is full: lines about lost messages must not wait behind handlers. No more than
        # the settings' `items_max` are here all the same, since the daemon gives no more without their results.
        try:
            while True:
                line = await feed.next_line()
                if isinstance(line, FeedInterrupted):
                    self._arrivals.clear()  # of the lost connection: they come again
                    self._lose_connection(core)
                elif not isinstance(line, Lagged):
                    try:
                        self._take(core, line)
                    except ValueError as error:  # of another version
                        raise FeedEndedError(feed.name, unexpected_answer(str(error))) from error
                if not feed.has_line:
                    self._take_arrivals(core)
        except Dep2pError as error:
            self._lose_connection(core)
            if not core.is_stopping:
                self._fail(error)

    def _take(self, core: PushCore, line: dict[str, object]) -> None:
        now = anyio.current_time()
        if "consumer" in line or "loss" in line:
            self._take_arrivals(core)
        if "consumer" in line:
            self._opened = convert(line, ConsumerOpened)
            self._takes_no_more = core.is_stopping
            self._has_reports.ring()
        elif "loss" in line:
            loss = convert(line, ConsumerLoss)
            if loss.partition is not None:
                self._revoke(core, loss.partition, now)
            else:
                self._void_reports()
                self._do(core, core.lost_all(now))
        else:
            delivered = convert(line, DeliveredMessage)
            arrived = _arrived(delivered, core.is_fifo, now)
            if core.is_stopping:
                entry = ProcessQueueEntry(arrived.partition, arrived.seq, 0, arrived.attempts, now, now, None)
                self._report(_Report(entry, MessageResult(id=delivered.id, do="release"), False))
            else:
                self._arrivals.append(arrived)

    def _take_arrivals(self, core: PushCore) -> None:
        """Give deliveries that came together to the core together. It begins the first message of a key, which need not
        be the first delivery: a best-effort queue gives a message whose time was over behind the next one."""
        arrivals, self._arrivals = self._arrivals, []
        if arrivals:
            self._do(core, core.arrived(arrivals, anyio.current_time()))

    def _revoke(self, core: PushCore, partition: int, now: float) -> None:
        """Act on a partition that is another consumer's soon, or already. The answer to a touch says whether a message
        that is in a handler is still held."""
        self._do(core, core.stop_partition(partition, now))
        queue = core.queues.get(partition)
        if queue is not None:
            for entry in queue.entries.values():
                if entry.phase is Phase.RUNNING:
                    self._report(_touch(entry))

    def _lose_connection(self, core: PushCore) -> None:
        self._opened = None
        self._void_reports()
        self._do(core, core.lost_all(anyio.current_time()))
        self._quiet.ring()

    def _void_reports(self) -> None:
        """Forget results of messages that are not held any more: a later delivery must not get them."""
        self.counts["results_lost"] += sum(not each.is_touch for each in self._reports)
        self._reports.clear()

    async def _keep_time(self, core: PushCore) -> None:
        while True:
            at = core.next_deadline()
            self._timer_at = math.inf if at is None else at
            with anyio.CancelScope(deadline=self._timer_at):
                await self._timer.wait()
            self._do(core, core.on_time(anyio.current_time()))

    # Handlers

    async def _work(self, core: PushCore, entry: ProcessQueueEntry) -> None:
        outcome, reason, delay_s, _was_meant = await self._handle(entry)
        self._do(core, core.handled(entry, outcome, anyio.current_time(), reason=reason, delay_s=delay_s))

    async def _handle(self, entry: ProcessQueueEntry) -> HandlerFailure:
        """Run the handler; "failure" has its success, too."""
        item = _item(entry)
        if entry.phase is Phase.GONE or self._opened is None:  # lost before its handler began
            return HandlerFailure(Outcome.CANCELLED, "", None, True)
        try:
            message = item.message = ClientPushedMessage(self._opened, item.delivered, entry)
            with message.scope() as item.scope:
                try:
                    await self._handler(message)
                    return HandlerFailure(Outcome.DONE, "", None, True)
                except anyio.get_cancelled_exc_class():
                    if anyio.current_effective_deadline() == -math.inf:
                        raise
                    # In asyncio, a handler that awaits a cancelled task gets that task's cancellation.
                    raise RuntimeError("a task that the handler waited for was cancelled") from None
        except Exception as error:
            failure = failure_of(error)
            if not failure.was_meant:
                _logger.warning(
                    "the handler of message %s of %r, channel %r, failed at try %d",
                    one_line(item.delivered.id),
                    self.queue,
                    self.channel,
                    entry.attempts,
                    exc_info=True,
                )
            return failure
        finally:
            item.scope = None
        return HandlerFailure(Outcome.CANCELLED, "", None, True)

    # Results

    async def _send_all(self, core: PushCore) -> None:
        """Send results in their order, those that come meanwhile in the next call."""
        while True:
            while self._opened is None or not (self._reports or self._takes_no_more):
                await self._has_reports.wait()
            opened = self._opened
            taken = [self._reports.popleft() for _ in range(min(len(self._reports), self._results_max))]
            reports = [each for each in taken if not each.is_void]
            self._is_sending = True
            try:
                await self._send(core, opened, reports)
            finally:
                self._is_sending = False
                self._quiet.ring()

    async def _send(self, core: PushCore, opened: ConsumerOpened, reports: list[_Report]) -> None:
        if not (reports or self._takes_no_more):
            return
        given = SettleMessages(
            results=tuple(each.result for each in reports),
            durable=any(each.is_confirmed for each in reports),
            max_in_flight=0 if self._takes_no_more else None,
        )
        path = f"/v1/queue-consumers/{quote(opened.consumer, safe='')}/results"
        try:
            answer = await self._calls.transport.call("POST", path, reply_fields(given))
            settled = convert(answer, SettledMessages)
        except (Dep2pError, ValueError) as error:
            if reports and is_malformed(error):
                self._refused(core, opened, reports, error)
            else:
                await self._not_sent(core, opened, reports, error)
            return
        self._takes_no_more = False
        self._results_max = min(2 * self._results_max, _RESULTS_MAX)
        now = anyio.current_time()
        for report in reports:
            is_refused = report.result.id in settled.refused
            if report.is_touch:
                self._renewed(core, report.entry, settled.timeouts_s.get(report.result.id), now)
            elif report.is_confirmed:
                outcome = ResultOutcome.NOT_HELD if is_refused else ResultOutcome.CONFIRMED
                self._do(core, core.result_sent(report.entry, outcome, now))
            else:
                self.counts["results_refused"] += is_refused

    async def _not_sent(
        self, core: PushCore, opened: ConsumerOpened, reports: list[_Report], error: Dep2pError | ValueError
    ) -> None:
        """Send results again while their connection lasts: without them, the daemon waits for their messages' time."""
        if not isinstance(error, DaemonUnreachableError):
            _logger.warning("results of %r, channel %r, wait: %s", self.queue, self.channel, one_line(str(error)))
        now = anyio.current_time()
        for report in reports:
            if report.is_confirmed:
                self._do(core, core.result_sent(report.entry, ResultOutcome.FAILED, now))
        await anyio.sleep(SETTLE_RETRY_S)
        again = [each for each in reports if not each.is_confirmed and not each.is_touch]
        if self._opened is opened:
            self._reports.extendleft(reversed(again))
        else:
            self.counts["results_lost"] += len(again)

    def _refused(
        self, core: PushCore, opened: ConsumerOpened, reports: list[_Report], error: Dep2pError | ValueError
    ) -> None:
        """Find the malformed result of a refused call, half by half, and drop it: the others are not its business."""
        if len(reports) > 1:
            if self._opened is opened:
                self._results_max = len(reports) // 2
                self._reports.extendleft(reversed(reports))
            else:
                self.counts["results_lost"] += sum(not each.is_touch for each in reports)
            return
        (report,) = reports
        self.counts["results_malformed"] += 1
        _logger.warning(
            "a result (%s) of message %s of %r, channel %r, is dropped, and the message is delivered again when its "
            "time is over: the daemon refuses it: %s",
            report.result.do,
            one_line(report.result.id),
            self.queue,
            self.channel,
            one_line(str(error)),
        )
        if report.is_confirmed:
            self._do(core, core.result_sent(report.entry, ResultOutcome.NOT_HELD, anyio.current_time()))

    def _renewed(self, core: PushCore, entry: ProcessQueueEntry, left_s: float | None, now: float) -> None:
        if left_s is None:
            self._do(core, core.lost(entry, now))
            return
        self._do(core, core.renewed(entry, now + left_s, now))
        message = _item(entry).message
        if message is not None and entry.phase is not Phase.GONE:
            message.move_deadline(entry.deadline)


def _arrived(delivered: DeliveredMessage, needs_key: bool, now: float) -> Arrived:
    partition, seq = parse_message_id(delivered.id)
    key = delivered.key if needs_key else ""
    deadline = now + delivered.timeout_s
    return Arrived(partition, seq, key, len(delivered.body), delivered.attempts, deadline, _Item(delivered))


def _report(send: SendResult) -> _Report:
    entry = send.entry
    delay_s = min(max(0.0, entry.delay_s), DELAY_MAX_S)
    result = MessageResult(id=_item(entry).delivered.id, do=_DO[send.fate], delay_s=delay_s, reason=entry.reason)
    return _Report(entry, result, send.confirmed)


def _touch(entry: ProcessQueueEntry) -> _Report:
    return _Report(entry, MessageResult(id=_item(entry).delivered.id, do="touch"), False)
