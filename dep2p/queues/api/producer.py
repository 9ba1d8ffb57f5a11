"""The producer: sends to a queue, or to queues of one name on several nodes, with retries and key queues.

The shell of `dep2p.protocols.queues.clients.producer`, which decides; docs/howto/consumers.md shows how to use it.
"""

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Unpack

import trio

from dep2p.arguments import checks_arguments
from dep2p.errors import (
    Dep2pError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.protocols.queues.admin import DescribeQueue, QueueInfo
from dep2p.protocols.queues.attributes import encode_options
from dep2p.protocols.queues.clients.destinations import ALL_KINDS, Kind
from dep2p.protocols.queues.clients.producer import (
    Dispatch,
    FetchRoute,
    GivenUp,
    KindRefusedError,
    MessageTaken,
    PendingMessage,
    ProducerCore,
    ProducerEffect,
    SendFailure,
    SendQueue,
    send_failure_of,
)
from dep2p.protocols.queues.clients.settings import ProducerSettings
from dep2p.protocols.queues.names import message_id, ranges
from dep2p.protocols.queues.options import MessageOptions
from dep2p.protocols.queues.ordering.route_table import Route, RouteTable
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.api.broker import QueueBroker

logger: logging.Logger = logging.getLogger("dep2p.io")

_RETRY_AFTER_S: Final = 0.05
"""The wait for a busy broker that did not say how long: a broker's own wait (docs/spec/queue.md)."""
_FOR_EVER_S: Final = 1e9
"""The time of a strict message's attempt. The link below sends it again with the same numbers, so that none is taken
twice."""


class PendingSend:
    """A message on its way. Made by `Producer.send`."""

    __slots__ = ("_done", "_error", "_id", "is_off_partition", "message", "send")

    def __init__(self, message: WireMessage, send: PendingMessage) -> None:
        self.message: WireMessage = message
        self.send: PendingMessage = send
        """The core's record of the message."""
        self._done = trio.Event()
        self._id = ""
        self._error: Exception | None = None
        self.is_off_partition: bool = False
        """Whether another partition than its key's has taken it, since that one's node was away."""

    @property
    def is_over(self) -> bool:
        """Whether it was taken, or failed."""
        return self._done.is_set()

    @property
    def tries(self) -> int:
        """The number of tries that have failed."""
        return self.send.tries

    async def wait(self) -> str:
        """Wait until the message is durable; return its id. Raises the error when it failed."""
        await self._done.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._id

    def taken(self, text: str) -> None:
        """Take the success: the message is durable."""
        self._id = text
        self._done.set()

    def failed(self, error: Exception) -> None:
        """Take the failure: the message is not tried again."""
        self._error = error
        self._done.set()


def _sending(send: PendingMessage) -> PendingSend:
    """The handle of a message that the core has."""
    assert isinstance(send.item, PendingSend)
    return send.item


@checks_arguments
class Producer:
    """Made by ``queue.producer(…)``; works as long as its ``async with`` block."""

    def __init__(self, brokers: Sequence[QueueBroker], queue: str, settings: ProducerSettings) -> None:
        self.queue = queue
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._brokers = brokers
        self._core = ProducerCore(
            settings.order,
            attempts_max=settings.max_attempts,
            backoff=settings.retry,
            items_max=settings.items_max,
            bytes_max=settings.bytes_max,
        )
        self._version = 0
        self._nursery: trio.Nursery | None = None
        self._room = trio.lowlevel.ParkingLot()
        self._empty = trio.lowlevel.ParkingLot()
        self._timer = trio.CancelScope()
        self._timer_at: float | None = None
        self._began: dict[SendQueue, float] = {}
        self._last_error: Exception | None = None

    def statistics(self) -> dict[str, float]:
        """Counts since it began (`ProducerCore.counts`), and what waits now: messages, keys of which the first one has
        failed, and for how long the oldest try has been under way."""
        return {**self.flow_counts(), **self.flow_values()}

    flow_kind = "producer"
    handovers = None

    @property
    def is_over(self) -> bool:
        """Whether it sends nothing more."""
        return self._nursery is None

    def flow_counts(self) -> dict[str, int]:
        """Return its counts since it began."""
        return {**self._core.counts, **self.counts}

    def flow_values(self) -> dict[str, float]:
        """Return the gauges of this moment: messages and bytes that wait, keys, the age of the oldest try."""
        core = self._core
        now = trio.current_time()
        return {
            "waiting": core.items,
            "waiting_bytes": core.bytes,
            "keys": core.keys,
            "keys_waiting": core.waiting_key_queues,
            "oldest_try_s": now - min(self._began.values(), default=now),
        }

    # Sending

    async def publish(
        self,
        body: bytes,
        *,
        transactional: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[MessageOptions],
    ) -> str:
        """Send a message, and wait until it is durable; returns its id.

        After ``timeout_s`` (None: no limit), or when this call is cancelled, it is not tried again; whether a try
        that is under way succeeds is not known then, and RequestTimeoutError says so. Otherwise as :meth:`send`.
        """
        sending: PendingSend | None = None
        try:
            with trio.fail_after(1e12 if timeout_s is None else timeout_s):
                sending = await self.send(body, transactional=transactional, **options)
                return await sending.wait()
        except trio.TooSlowError:
            why = f" (the last failure: {self._last_error})" if self._last_error is not None else ""
            raise RequestTimeoutError(f"the message was not taken within {timeout_s:g} s{why}") from None
        finally:
            if sending is not None and not sending.is_over:
                self.withdraw(sending)

    async def send(
        self,
        body: bytes,
        *,
        transactional: bool = False,
        **options: Unpack[MessageOptions],
    ) -> PendingSend:
        """Put a message in line; returns when there is room for it, not when it is taken: `PendingSend.wait`.

        ``options`` are those of :class:`MessageOptions`. Messages with the same ``key`` go in the order of these calls.
        One that is ``transactional`` has a single try: its sender decides what comes after a failure.

        Raises MessageTooLargeError from `PendingSend.wait`, ``ValueError`` here (a delay together with a key in strict
        order).
        """
        key, delay_s = options.get("key", ""), options.get("delay_s", 0.0)
        if delay_s and key and self.settings.order == "strict":
            raise ValueError("a message with an order key has no delay in strict order: those behind it would wait")
        attributes = encode_options(**options)
        await trio.lowlevel.checkpoint()
        while not self._core.has_room and self._nursery is not None:
            await self._room.park()
        if self._nursery is None:
            raise StreamClosedError("the producer is closed")
        kind = Kind.NORMAL
        if transactional:
            kind = Kind.TRANSACTIONAL
        elif key:
            kind = Kind.DELAYED if delay_s else Kind.ORDERED
        send = PendingMessage(key, kind, len(body) + len(attributes), None)
        sending = PendingSend(WireMessage(attributes, body), send)
        send.item = sending
        self._do(self._core.submit(send, trio.current_time()))
        return sending

    def withdraw(self, sending: PendingSend) -> None:
        """Try it no more. A try that is under way may still succeed."""
        if not sending.is_over:
            self._do(self._core.withdraw(sending.send, trio.current_time()))
            sending.failed(StreamClosedError("it was withdrawn: whether it was taken is not known"))

    # Life

    @asynccontextmanager
    async def working(self) -> AsyncGenerator["Producer", None]:
        """Send while the block runs. When it is left, what was sent may be taken (`close_timeout_s`)."""
        failed: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                flows = self._brokers[0].flows
                if flows is not None:
                    flows.add(self)
                nursery.start_soon(self._keep_time)
                try:
                    yield self
                except Exception as error:  # raised as it is, not in the nursery's group
                    failed = error
                with trio.move_on_after(self.settings.close_timeout_s):
                    while self._core.items:
                        await self._empty.park()
                nursery.cancel_scope.cancel()
        finally:
            self._nursery = None
            self._room.unpark_all()
            self._fail_rest()
        if failed is not None:
            raise failed

    def _fail_rest(self) -> None:
        left = self._core.open_sends()
        if left:
            self.counts["failed_at_the_end"] += len(left)
            logger.warning("the producer of %r ends with %d messages that were not taken", self.queue, len(left))
        for send in left:
            _sending(send).failed(
                StreamClosedError("the producer was closed: whether the message was taken is not known")
            )

    # Effects

    def _do(self, effects: Iterable[ProducerEffect]) -> None:
        nursery = self._nursery
        for effect in effects:
            if isinstance(effect, Dispatch):
                if nursery is not None:
                    self._began[effect.queue] = trio.current_time()
                    nursery.start_soon(self._dispatch, effect)
            elif isinstance(effect, FetchRoute):
                if nursery is not None:
                    nursery.start_soon(self._fetch_route)
            elif isinstance(effect, MessageTaken):
                _sending(effect.send).taken(effect.where)
            else:
                self._give_up(effect)
        core = self._core
        if core.has_room:
            self._room.unpark_all()
        if not core.items:
            self._empty.unpark_all()
        at = core.next_deadline()
        if at is not None and (self._timer_at is None or at < self._timer_at):
            self._timer.cancel()

    def _give_up(self, effect: GivenUp) -> None:
        error = effect.error
        if isinstance(error, KindRefusedError):
            error = ValueError(f"the queue {self.queue!r} takes no message with both a key and a delay: it is strict")
        _sending(effect.send).failed(error)

    # Tasks

    async def _keep_time(self) -> None:
        while True:
            with trio.CancelScope() as self._timer:
                self._timer_at = self._core.next_deadline()
                await trio.sleep_until(float("inf") if self._timer_at is None else self._timer_at)
            self._do(self._core.on_time(trio.current_time()))

    async def _fetch_route(self) -> None:
        """Ask each broker whether it has the queue, and what it takes."""
        answers: dict[int, QueueInfo] = {}
        errors: list[Dep2pError] = []

        async def ask(index: int, broker: QueueBroker) -> None:
            try:
                answers[index] = await broker.ask(DescribeQueue(queue=self.queue))
            except Dep2pError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for index, broker in enumerate(self._brokers):
                nursery.start_soon(ask, index, broker)
        now = trio.current_time()
        if not answers:
            self._last_error = errors[0]
            self._do(self._core.route_failed(errors[0], now))
            return
        # A key's place does not depend on which nodes can be reached now: its key queue waits for its own.
        self._version += 1
        shares = ranges(len(self._brokers))
        table = RouteTable(self._version, [Route(each.start, each.stop, at) for at, each in enumerate(shares)])
        accepts: dict[int, frozenset[Kind]] = {}
        for index, answer in answers.items():
            accepts[index] = ALL_KINDS - {Kind.DELAYED} if answer.options.order == "strict" else ALL_KINDS
        self._do(self._core.route(table, now, accepts))

    async def _dispatch(self, dispatch: Dispatch) -> None:
        core = self._core
        broker = self._brokers[dispatch.candidate]
        messages = [_sending(send).message for send in dispatch.sends]
        stays = core.is_strict and bool(dispatch.queue.key) and dispatch.sends[0].kind is not Kind.TRANSACTIONAL
        error: Exception | None = None
        failure = SendFailure.RETRY
        points: list[tuple[int, int]] = []
        try:
            points = await broker.publish_batch(
                self.queue, messages, _FOR_EVER_S if stays else self.settings.send_timeout_s
            )
        except (Dep2pError, ValueError) as raised:
            error, failure = raised, send_failure_of(raised)
        finally:
            del self._began[dispatch.queue]
        now = trio.current_time()
        if error is None:
            ids = [message_id(*point) for point in points]
            for send, each in zip(dispatch.sends, ids, strict=True):
                if send.key and broker.is_off_partition(self.queue, send.key, each):
                    _sending(send).is_off_partition = True
                    self.counts["taken_by_other_broker"] += 1
            self._do(core.sent(dispatch, ids, now))
        else:
            self._last_error = error
            self._do(core.failed(dispatch, failure, now, error=error, retry_after_s=_RETRY_AFTER_S))
