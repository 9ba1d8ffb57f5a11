"""The client's producer: sends to a queue, or to queues of one name on several nodes, with retries and key queues.

The shell of `dep2p.protocols.queues.clients.producer`, which decides, as it does for a node's producer. While the
daemon is away, messages wait here.
"""

import logging
import math
import random
import secrets
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeVar, Unpack

import anyio
import anyio.abc
import anyio.lowlevel
from msgspec import convert
from msgspec.json import encode

from dep2p.arguments import checks_arguments
from dep2p.client.queues.calls import MALFORMED_CODES, BrokerCalls, queue_path
from dep2p.control_api.encoding import encode_headers, fields_of
from dep2p.control_api.errors import ControlError, DaemonUnreachableError
from dep2p.control_api.queues import (
    BatchMessage,
    FindDestinations,
    NewQueueBatch,
    PublishedBatch,
    QueueDestinations,
)
from dep2p.errors import (
    Dep2pError,
    PartitionMovedError,
    PeerNotFoundError,
    QueueIsDistributedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.protocols.queues.admin import QueueInfo
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
from dep2p.protocols.queues.names import ranges
from dep2p.protocols.queues.options import MessageOptions
from dep2p.protocols.queues.ordering.route_table import Route, RouteTable
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.protocols.queues.wire.frames import PUBLISHER_BYTES
from dep2p.protocols.timing.backoff import Backoff
from dep2p.types import Headers

_logger: logging.Logger = logging.getLogger("dep2p.client")

T = TypeVar("T")

_ANSWER_S: Final = 10.0
"""Seconds that the daemon's answer may take beyond the time that it has for a try."""
_STRICT_TRY_S: Final = 30.0
"""Seconds of one try of a strict message. The next try has the same number, so that it is not taken twice."""
_RETRY_AFTER_S: Final = 0.25
"""The wait for a queue that is full, or a node that is busy."""
_REACH: Final = Backoff(0.05, 1.0)
"""Delays between two looks for a daemon that is away."""


class ClientPendingSend:
    """A message on its way. Made by `ClientProducer.send`."""

    def __init__(self, message: BatchMessage, send: PendingMessage) -> None:
        self.message: BatchMessage = message
        self.send: PendingMessage = send
        """The core's record of the message."""
        self._done = anyio.Event()
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


def _sending(send: PendingMessage) -> ClientPendingSend:
    """The handle of a message that the core has."""
    assert isinstance(send.item, ClientPendingSend)
    return send.item


class _Number(NamedTuple):
    """The number of a strict message's try, by which the queue recognizes it when it comes again."""

    publisher: str
    number: int
    destination: str
    """The only node that the number is good for; "" for a queue on one node."""
    is_unknown: bool = False
    """Whether a try under this number may have been taken."""


class _Numbers:
    """Numbers of strict messages. A message keeps its number while the outcome of a try is unknown.

    A publisher has one message on its way, since the numbers of a publisher must rise at the queue.
    """

    def __init__(self) -> None:
        self._free: list[tuple[str, int]] = []
        self._kept: dict[PendingMessage, _Number] = {}

    def of(self, send: PendingMessage) -> _Number:
        """Return the number of the message's next try."""
        kept = self._kept.pop(send, None)
        if kept is not None:
            return kept
        publisher, number = self._free.pop() if self._free else (secrets.token_hex(PUBLISHER_BYTES), 1)
        return _Number(publisher, number, "")

    def keep(self, send: PendingMessage, number: _Number) -> None:
        """Keep the number of a try whose outcome is unknown."""
        self._kept[send] = number

    def is_kept(self, send: PendingMessage) -> bool:
        """Whether the message may have been taken."""
        return send in self._kept

    def release(self, number: _Number) -> None:
        """Let the publisher have another message."""
        self._free.append((number.publisher, number.number + 1))

    def forget_over(self) -> None:
        """Release the numbers of messages that were withdrawn."""
        for send in [send for send in self._kept if send.is_over]:
            self.release(self._kept.pop(send))


@checks_arguments
class ClientProducer:
    """Made by ``queue.producer(…)``; works as long as its ``async with`` block.

    While the daemon is away, strict messages wait for it, and others for ``send_timeout_s`` at each try.
    """

    def __init__(self, brokers: Sequence[BrokerCalls], queue: str, settings: ProducerSettings) -> None:
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
        self._numbers = _Numbers()
        self._distributed: dict[int, bool] = {}
        """Brokers whose queue is on several nodes, by index, and whether the known destinations are old."""
        self._group: anyio.abc.TaskGroup | None = None
        self._room = anyio.Event()
        self._empty = anyio.Event()
        self._timer = anyio.Event()
        self._timer_at = -math.inf
        self._began: dict[SendQueue, float] = {}
        self._last_error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether it sends nothing more."""
        return self._group is None

    def statistics(self) -> dict[str, float]:
        """Counts since it began (`ProducerCore.counts`), and what waits now: messages, keys of which the first one has
        failed, strict messages that may have been taken although a try failed (at 128 of them, ``unsettled``, no
        further key begins), and for how long the oldest try has been under way."""
        core = self._core
        now = anyio.current_time()
        return {
            **core.counts,
            **self.counts,
            "waiting": core.items,
            "waiting_bytes": core.bytes,
            "keys": core.keys,
            "keys_waiting": core.waiting_key_queues,
            "unsettled": core.unsettled,
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
        sending: ClientPendingSend | None = None
        try:
            with anyio.move_on_after(timeout_s):
                sending = await self.send(body, transactional=transactional, **options)
                return await sending.wait()
            why = f" (the last failure: {self._last_error})" if self._last_error is not None else ""
            raise RequestTimeoutError(f"the message was not taken within {timeout_s:g} s{why}")
        finally:
            if sending is not None and not sending.is_over:
                self.withdraw(sending)

    async def send(
        self,
        body: bytes,
        *,
        transactional: bool = False,
        **options: Unpack[MessageOptions],
    ) -> ClientPendingSend:
        """Put a message in line; returns when there is room for it, not when it is taken: `ClientPendingSend.wait`.

        ``options`` are those of :class:`MessageOptions`. Messages with the same ``key`` go in the order of these calls.
        One that is ``transactional`` has a single try: its sender decides what comes after a failure.

        Raises MessageTooLargeError from `ClientPendingSend.wait`, ``ValueError`` here (a delay together with a key in
        strict order).
        """
        key, delay_s = options.get("key", ""), options.get("delay_s", 0.0)
        if delay_s and key and self.settings.order == "strict":
            raise ValueError("a message with an order key has no delay in strict order: those behind it would wait")
        message = _message(body, **options)
        await anyio.lowlevel.checkpoint()
        while not self._core.has_room and self._group is not None:
            await self._room.wait()
        if self._group is None:
            raise StreamClosedError("the producer is closed")
        kind = Kind.NORMAL
        if transactional:
            kind = Kind.TRANSACTIONAL
        elif key:
            kind = Kind.DELAYED if delay_s else Kind.ORDERED
        send = PendingMessage(key, kind, len(encode(message)), None)
        sending = ClientPendingSend(message, send)
        send.item = sending
        self._do(self._core.submit(send, anyio.current_time()))
        return sending

    def withdraw(self, sending: ClientPendingSend) -> None:
        """Try it no more. A try that is under way may still succeed."""
        if not sending.is_over:
            self._do(self._core.withdraw(sending.send, anyio.current_time()))
            self._numbers.forget_over()
            sending.failed(StreamClosedError("it was withdrawn: whether it was taken is not known"))

    # Life

    @asynccontextmanager
    async def working(self) -> AsyncGenerator["ClientProducer", None]:
        """Send while the block runs. When it is left, what was sent may be taken (`close_timeout_s`)."""
        failed: Exception | None = None
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                group.start_soon(self._keep_time)
                try:
                    yield self
                except Exception as error:  # raised as it is, not in the task group's
                    failed = error
                with anyio.move_on_after(self.settings.close_timeout_s):
                    while self._core.items:
                        await self._empty.wait()
                group.cancel_scope.cancel()
        finally:
            self._group = None
            self._room.set()
            self._fail_rest()
        if failed is not None:
            raise failed

    def _fail_rest(self) -> None:
        left = self._core.open_sends()
        if left:
            self.counts["failed_at_the_end"] += len(left)
            _logger.warning("the producer of %r ends with %d messages that were not taken", self.queue, len(left))
        for send in left:
            _sending(send).failed(
                StreamClosedError("the producer was closed: whether the message was taken is not known")
            )

    # Effects

    def _do(self, effects: Iterable[ProducerEffect]) -> None:
        group = self._group
        for effect in effects:
            if isinstance(effect, Dispatch):
                if group is not None:
                    self._began[effect.queue] = anyio.current_time()
                    group.start_soon(self._dispatch, effect)
            elif isinstance(effect, FetchRoute):
                if group is not None:
                    group.start_soon(self._fetch_route)
            elif isinstance(effect, MessageTaken):
                _sending(effect.send).taken(effect.where)
            else:
                self._give_up(effect)
        core = self._core
        if core.has_room:
            self._room.set()
            self._room = anyio.Event()
        if not core.items:
            self._empty.set()
            self._empty = anyio.Event()
        at = core.next_deadline()
        if at is not None and at < self._timer_at:
            self._timer.set()

    def _give_up(self, effect: GivenUp) -> None:
        error = effect.error
        if isinstance(error, KindRefusedError):
            error = ValueError(f"the queue {self.queue!r} takes no message with both a key and a delay: it is strict")
        _sending(effect.send).failed(error)

    # Tasks

    async def _keep_time(self) -> None:
        while True:
            self._timer = anyio.Event()
            at = self._core.next_deadline()
            self._timer_at = math.inf if at is None else at
            with anyio.CancelScope(deadline=self._timer_at):
                await self._timer.wait()
            self._do(self._core.on_time(anyio.current_time()))

    async def _reached(self, broker: BrokerCalls, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make a call. While the daemon is away, make it again for ``send_timeout_s``, if it certainly was not carried
        out."""
        watch = broker.transport.watch
        until_s = anyio.current_time() + self.settings.send_timeout_s
        tries = 0
        while True:
            try:
                return await attempt()
            except DaemonUnreachableError as error:
                tries += 1
                pause_s = _REACH.jittered(tries, random)
                if error.was_sent or not watch.was_reached or anyio.current_time() + pause_s > until_s:
                    raise
                watch.lost(str(error))
            await watch.pause(pause_s)

    async def _fetch_route(self) -> None:
        """Ask each broker whether it has the queue, and what it takes."""
        answers: dict[int, QueueInfo] = {}
        errors: list[Dep2pError] = []

        async def ask(index: int, broker: BrokerCalls) -> None:
            try:
                answers[index] = await self._reached(
                    broker, lambda: broker.ask(QueueInfo, "GET", queue_path(self.queue))
                )
            except Dep2pError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for index, broker in enumerate(self._brokers):
                group.start_soon(ask, index, broker)
        now = anyio.current_time()
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
        stays = core.is_strict and bool(dispatch.queue.key) and dispatch.sends[0].kind is not Kind.TRANSACTIONAL
        published: PublishedBatch | None = None
        error: Exception | None = None
        try:
            if stays:
                published = await self._send_numbered(dispatch.candidate, dispatch.sends[0])
            else:
                published = await self._send(self._brokers[dispatch.candidate], dispatch.sends)
        except (Dep2pError, ValueError) as raised:
            error = self._last_error = raised
        finally:
            del self._began[dispatch.queue]  # the next dispatch of the key queue begins behind this
        now = anyio.current_time()
        if published is not None:
            off = frozenset(published.off_partition)
            for send, each in zip(dispatch.sends, published.ids, strict=True):
                if each in off:
                    _sending(send).is_off_partition = True
                    self.counts["taken_by_other_broker"] += 1
            self._do(core.sent(dispatch, published.ids, now))
        elif error is not None:
            failure = _failure_of(error)
            may_be_taken = self._numbers.is_kept(dispatch.sends[0])
            self._do(
                core.failed(
                    dispatch, failure, now, error=error, retry_after_s=_RETRY_AFTER_S, may_be_taken=may_be_taken
                )
            )
        self._numbers.forget_over()

    async def _send(self, broker: BrokerCalls, sends: Sequence[PendingMessage]) -> PublishedBatch:
        timeout_s = self.settings.send_timeout_s
        batch = NewQueueBatch(messages=tuple(_sending(send).message for send in sends), timeout_s=timeout_s)
        return await self._reached(broker, lambda: self._post(broker, batch, timeout_s + _ANSWER_S))

    async def _send_numbered(self, index: int, send: PendingMessage) -> PublishedBatch:
        """Send a strict message: under the number of a try before, if its outcome is unknown."""
        for is_last in (False, True):
            number = self._numbers.of(send)
            try:
                if index in self._distributed and not number.destination:
                    number = number._replace(destination=await self._destination(index, send.key))
                published = await self._post_numbered(index, send, number)
            except (PartitionMovedError, QueueIsDistributedError) as error:
                # Nothing was taken: another node's number is right. Numbers are known to the node that took them.
                self._numbers.release(number)
                is_stale = isinstance(error, PartitionMovedError)
                self._distributed[index] = is_stale or self._distributed.get(index, False)
                if is_last:
                    raise
                continue
            except (Dep2pError, ValueError) as error:
                if number.is_unknown or _may_be_taken(error):
                    self._numbers.keep(send, number._replace(is_unknown=True))
                else:
                    self._numbers.release(number)
                raise
            self._numbers.release(number)
            return published
        raise AssertionError("the second round returns or raises")

    async def _post_numbered(self, index: int, send: PendingMessage, number: _Number) -> PublishedBatch:
        broker = self._brokers[index]
        batch = NewQueueBatch(
            messages=(_sending(send).message,),
            publisher=number.publisher,
            number=number.number,
            destination=number.destination,
        )
        return await self._reached(broker, lambda: self._post(broker, batch, _STRICT_TRY_S))

    async def _destination(self, index: int, key: str) -> str:
        """Return the destination of a key's messages at a queue on several nodes."""
        broker = self._brokers[index]
        wanted = FindDestinations(keys=(key,), is_stale=self._distributed[index])
        path = f"{queue_path(self.queue)}/destinations"
        found = await self._reached(broker, lambda: broker.ask(QueueDestinations, "POST", path, reply_fields(wanted)))
        self._distributed[index] = False
        return found.destinations[0] if found.destinations else ""

    async def _post(self, broker: BrokerCalls, batch: NewQueueBatch, timeout_s: float) -> PublishedBatch:
        path = f"{queue_path(self.queue)}/publishes"
        published = await broker.ask(PublishedBatch, "POST", path, reply_fields(batch), timeout_s=timeout_s)
        if len(published.ids) != len(batch.messages):
            raise ControlError({"code": "D3007", "status": 502, "detail": "a publish was answered with other ids"})
        return published


def _failure_of(error: Exception) -> SendFailure:
    """Return the failure that an error of a call means: a malformed call is refused as a malformed message is."""
    if isinstance(error, ControlError) and error.code in MALFORMED_CODES:
        return SendFailure.REFUSED
    return send_failure_of(error)


def _may_be_taken(error: Exception) -> bool:
    """Whether the message may have been taken although its try has failed."""
    if isinstance(error, DaemonUnreachableError):
        return error.was_sent
    if isinstance(error, PeerNotFoundError) or (isinstance(error, Dep2pError) and error.is_unsent):
        return False  # nothing was sent to the queue's node
    return _failure_of(error) is SendFailure.RETRY


def _message(
    body: bytes,
    *,
    key: str = "",
    tags: Sequence[str] = (),
    priority: int = 0,
    delay_s: float = 0.0,
    headers: Headers | None = None,
) -> BatchMessage:
    """Make a message. Raises ``ValueError`` for values out of their bounds."""
    message = BatchMessage(
        body=b64encode(body).decode("ascii"),
        key=key,
        tags=tuple(tags),
        priority=priority,
        delay_s=delay_s,
        headers=encode_headers(headers or {}),
    )
    return convert(fields_of(message), BatchMessage)
