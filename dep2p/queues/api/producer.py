"""The producer: sends to a queue, or to queues of one name on several nodes, with retries and lines of order keys.

The shell of `dep2p.protocols.queues.clients.producer`, which decides; docs/howto/consumers.md tells how to use it.
"""

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import trio

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    MessageTooLargeError,
    OverloadedError,
    ProtocolError,
    QueueAccessError,
    QueueFullError,
    QueueNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.protocols.queues.clients.backoff import Backoff
from dep2p.protocols.queues.clients.destinations import ALL_KINDS, Kind
from dep2p.protocols.queues.clients.producer import (
    Dispatch,
    Failure,
    FetchRoute,
    GivenUp,
    KindRefusedError,
    Order,
    ProducerCore,
    ProducerEffect,
    Send,
    SendLine,
    Taken,
)
from dep2p.protocols.queues.names import ranges
from dep2p.protocols.queues.ordering.route_table import Route, RouteTable
from dep2p.protocols.queues.wire import WireMessage
from dep2p.queues.types import Attributes, encode_attributes, message_id
from dep2p.types import Headers

if TYPE_CHECKING:
    from dep2p.queues.api.queues import Queues

logger = logging.getLogger("dep2p.io")

_REFUSED: Final = (
    ChannelNotFoundError,
    MessageTooLargeError,
    ProtocolError,
    QueueAccessError,
    QueueNotFoundError,
    ValueError,
)
"""Another try would meet the same."""
_FLOW_CONTROL: Final = (OverloadedError, QueueFullError)
_RETRY_AFTER_S: Final = 0.05
"""For a busy place that did not say how long: a keeper's own wait (docs/spec/queue.md)."""
_FOR_EVER_S: Final = 1e9
"""A strict message's attempt: the link below sends it again with the same numbers, so that none is taken twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """How a producer works. Times in seconds. Raises ``ValueError``."""

    order: Order = "best_effort"
    """``strict``: a message with an order key that fails stays at the head of its key's line and is sent again to the
    same place until it is taken. ``best_effort``: it may go to another place, and after ``max_attempts`` it fails and
    its line goes on."""
    max_attempts: int = 3
    """Tries of a message that is not in a strict line."""
    send_timeout_s: float = 10.0
    """Of one try of such a message."""
    retry: Backoff = field(default_factory=lambda: Backoff(0.05, 5.0))
    """Between tries at the same place."""
    items_max: int = 10_000
    """Messages that wait here at most; `Producer.send` waits for room then."""
    bytes_max: int = 67_108_864
    close_timeout_s: float = 10.0
    """When the producer is left, what was sent may be taken for so long; then it fails."""

    def __post_init__(self) -> None:
        if self.order not in ("strict", "best_effort"):
            raise ValueError(f"the order {self.order!r} is not known: strict and best_effort are")
        if not 1 <= self.max_attempts <= 1_000:
            raise ValueError(f"max_attempts is {self.max_attempts}: it is 1 to 1,000")
        if not self.send_timeout_s > 0:
            raise ValueError(f"send_timeout_s is {self.send_timeout_s}: it is more than 0")
        if not 1 <= self.items_max <= 1_000_000:
            raise ValueError(f"items_max is {self.items_max}: it is 1 to 1,000,000")
        if not 1 <= self.bytes_max <= 1 << 32:
            raise ValueError(f"bytes_max is {self.bytes_max}: it is 1 to 4 GiB")
        if not self.close_timeout_s >= 0:
            raise ValueError(f"close_timeout_s is {self.close_timeout_s}: it cannot be negative")


class Sending:
    """A message on its way. Made by `Producer.send`."""

    __slots__ = ("_done", "_error", "_id", "is_elsewhere", "message", "send")

    def __init__(self, message: WireMessage, send: Send) -> None:
        self.message = message
        self.send = send
        """The core's."""
        self._done = trio.Event()
        self._id = ""
        self._error: Exception | None = None
        self.is_elsewhere = False
        """It was taken by a partition to which its key does not belong: the node of that one was away."""

    @property
    def is_over(self) -> bool:
        """Taken, or failed."""
        return self._done.is_set()

    @property
    def tries(self) -> int:
        """Tries that have failed."""
        return self.send.tries

    async def wait(self) -> str:
        """Until it is durable; gives its id. Raises why it failed."""
        await self._done.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._id

    def taken(self, text: str) -> None:
        """It is durable."""
        self._id = text
        self._done.set()

    def failed(self, error: Exception) -> None:
        """It is not, and is not tried again."""
        self._error = error
        self._done.set()


class Producer:
    """Made by ``queue.producer(…)``; works as long as its ``async with`` block."""

    def __init__(self, places: Sequence["Queues"], queue: str, settings: ProducerSettings) -> None:
        self.queue = queue
        self.settings = settings
        self.counts: Counter[str] = Counter()
        self._places = places
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
        self._began: dict[SendLine, float] = {}
        self._last_error: Exception | None = None

    def statistics(self) -> dict[str, Any]:
        """Counts since it began (`ProducerCore.counts`), and what waits now: messages, keys of which the first one has
        failed, and for how long the oldest try has been under way."""
        return {**self.flow_counts(), **self.flow_values()}

    flow_kind = "producer"
    handovers = None

    @property
    def is_over(self) -> bool:
        """It sends nothing more."""
        return self._nursery is None

    def flow_counts(self) -> dict[str, int]:
        """Since it began."""
        return {**self._core.counts, **self.counts}

    def flow_values(self) -> dict[str, float]:
        """Of this moment."""
        core = self._core
        now = trio.current_time()
        return {
            "waiting": core.items,
            "waiting_bytes": core.bytes,
            "keys": core.keys,
            "keys_waiting": core.waiting_lines,
            "oldest_try_s": now - min(self._began.values(), default=now),
        }

    # Sending

    async def publish(
        self,
        body: bytes,
        *,
        order_key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        delay_s: float = 0.0,
        headers: Headers | None = None,
        transactional: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Send a message, and wait until it is durable; returns its id.

        After ``timeout`` seconds (None: for ever), or when this call is cancelled, it is not tried again; whether a try
        that is under way succeeds is not known then, and RequestTimeoutError says so. Otherwise as :meth:`send`.
        """
        sending: Sending | None = None
        try:
            with trio.fail_after(1e12 if timeout is None else timeout):
                sending = await self.send(
                    body,
                    order_key=order_key,
                    tags=tags,
                    priority=priority,
                    delay_s=delay_s,
                    headers=headers,
                    transactional=transactional,
                )
                return await sending.wait()
        except trio.TooSlowError:
            why = f" (the last failure: {self._last_error})" if self._last_error is not None else ""
            raise RequestTimeoutError(f"the message was not taken within {timeout:g} s{why}") from None
        finally:
            if sending is not None and not sending.is_over:
                self.withdraw(sending)

    async def send(
        self,
        body: bytes,
        *,
        order_key: str = "",
        tags: Sequence[str] = (),
        priority: int = 0,
        delay_s: float = 0.0,
        headers: Headers | None = None,
        transactional: bool = False,
    ) -> Sending:
        """Put a message in line; returns when there is room for it, not when it is taken: `Sending.wait`.

        Messages with the same ``order_key`` go in the order of these calls. One that is ``transactional`` has a single
        try: what comes after a failure is decided by its sender. Raises MessageTooLargeError from `Sending.wait`,
        ``ValueError`` here (a delay together with a key in strict order).
        """
        if delay_s and order_key and self.settings.order == "strict":
            raise ValueError("a message with an order key has no delay in strict order: those behind it would wait")
        attributes = encode_attributes(
            Attributes(order_key, tuple(tags), priority, dict(headers or {}), round(delay_s * 1000))
        )
        await trio.lowlevel.checkpoint()
        while not self._core.has_room and self._nursery is not None:
            await self._room.park()
        if self._nursery is None:
            raise StreamClosedError("the producer is closed")
        kind = Kind.NORMAL
        if transactional:
            kind = Kind.TRANSACTIONAL
        elif order_key:
            kind = Kind.DELAYED if delay_s else Kind.ORDERED
        send = Send(order_key, kind, len(body) + len(attributes), None)
        sending = Sending(WireMessage(attributes, body), send)
        send.item = sending
        self._do(self._core.submit(send, trio.current_time()))
        return sending

    def withdraw(self, sending: Sending) -> None:
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
                flows = self._places[0].flows
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
            cast(Sending, send.item).failed(
                StreamClosedError("the producer was closed: whether the message was taken is not known")
            )

    # Effects

    def _do(self, effects: Iterable[ProducerEffect]) -> None:
        nursery = self._nursery
        for effect in effects:
            if isinstance(effect, Dispatch):
                if nursery is not None:
                    self._began[effect.line] = trio.current_time()
                    nursery.start_soon(self._dispatch, effect)
            elif isinstance(effect, FetchRoute):
                if nursery is not None:
                    nursery.start_soon(self._fetch_route)
            elif isinstance(effect, Taken):
                cast(Sending, effect.send.item).taken(effect.where)
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
        cast(Sending, effect.send.item).failed(error)

    # Tasks

    async def _keep_time(self) -> None:
        while True:
            with trio.CancelScope() as self._timer:
                self._timer_at = self._core.next_deadline()
                await trio.sleep_until(float("inf") if self._timer_at is None else self._timer_at)
            self._do(self._core.on_time(trio.current_time()))

    async def _fetch_route(self) -> None:
        """Ask each place whether it has the queue, and what it takes."""
        answers: dict[int, dict[str, Any]] = {}
        errors: list[Dep2pError] = []

        async def ask(index: int, place: "Queues") -> None:
            try:
                answers[index] = await place.info(self.queue)
            except Dep2pError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for index, place in enumerate(self._places):
                nursery.start_soon(ask, index, place)
        now = trio.current_time()
        if not answers:
            self._last_error = errors[0]
            self._do(self._core.route_failed(errors[0], now))
            return
        # A key's place does not depend on which nodes can be reached now: its line waits for its own.
        self._version += 1
        shares = ranges(len(self._places))
        table = RouteTable(self._version, [Route(each.start, each.stop, at) for at, each in enumerate(shares)])
        accepts: dict[int, frozenset[Kind]] = {}
        for index, answer in answers.items():
            is_strict = cast(dict[str, object], answer["options"]).get("order") == "strict"
            accepts[index] = ALL_KINDS - {Kind.DELAYED} if is_strict else ALL_KINDS
        self._do(self._core.route(table, now, accepts))

    async def _dispatch(self, dispatch: Dispatch) -> None:
        core = self._core
        place = self._places[dispatch.candidate]
        messages = [cast(Sending, send.item).message for send in dispatch.sends]
        stays = core.is_strict and bool(dispatch.line.key) and dispatch.sends[0].kind is not Kind.TRANSACTIONAL
        error: Exception | None = None
        failure = Failure.RETRY
        points: list[tuple[int, int]] = []
        try:
            points = await place.publish_batch(
                self.queue, messages, _FOR_EVER_S if stays else self.settings.send_timeout_s
            )
        except _FLOW_CONTROL as raised:
            error, failure = raised, Failure.FLOW_CONTROL
        except _REFUSED as raised:
            error, failure = raised, Failure.REFUSED
        except Dep2pError as raised:
            error = raised
        finally:
            del self._began[dispatch.line]
        now = trio.current_time()
        if error is None:
            ids = [message_id(*point) for point in points]
            for send, each in zip(dispatch.sends, ids, strict=True):
                if send.key and place.is_elsewhere(self.queue, send.key, each):
                    cast(Sending, send.item).is_elsewhere = True
                    self.counts["taken_elsewhere"] += 1
            self._do(core.sent(dispatch, ids, now))
        else:
            self._last_error = error
            self._do(core.failed(dispatch, failure, now, error=error, retry_after_s=_RETRY_AFTER_S))
