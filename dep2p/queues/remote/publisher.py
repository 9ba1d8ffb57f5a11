"""Publishing to another member's queues: batched, pipelined, sent again with the same numbers after a lost link."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

import trio

from dep2p.errors import (
    Dep2pError,
    MessageTooLargeError,
    NotMemberError,
    NotOwnerError,
    OverloadedError,
    ProtocolError,
    ProtocolNotSupportedError,
    QueueFullError,
    RequestTimeoutError,
    StoreUnknownError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.protocols.queues.ordering.key_queues import key_of
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.frames import PUBLISHER_BYTES, Point, WireMessage
from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.remote.broker_directory import BrokerRoute
from dep2p.queues.remote.link import LinkAnswer, QueueLink
from dep2p.types import Rng

_BATCHES_IN_FLIGHT: Final = 8
_BATCH_ITEMS: Final = 1_024
_BATCH_BYTES: Final = 262_144
"""About the bytes of one PUBLISH."""
_PENDING_BYTES_MAX: Final = 8_388_608
_BACKOFF: Final = Backoff(first_s=0.05, max_s=5.0)
_BACKOFF_OF_SET: Final = Backoff(first_s=0.05, max_s=1.0)
"""Between tries at a failover group."""
_FATAL: Final = (NotMemberError, ProtocolNotSupportedError)


class _Part:
    """The messages of one call. That call encodes them, so that a message that cannot be encoded fails there, and not a
    batch of others."""

    __slots__ = ("bytes", "encoded", "has_keys", "items", "start")

    def __init__(self, messages: Sequence[WireMessage], size: int) -> None:
        self.encoded = wire.encode_publish_items(messages)
        self.items = len(messages)
        self.has_keys = any([key_of(attributes) for attributes, _body in messages if attributes])
        self.bytes = size
        self.start = 0
        """The index of its first message in the batch, set when the batch is sent."""


class _PublishBatch:
    """Messages that go and are answered together."""

    __slots__ = (
        "bytes",
        "deadline_s",
        "done",
        "error",
        "first_number",
        "has_keys",
        "items",
        "parts",
        "points",
        "queue",
        "refusal",
    )

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self.first_number = 0
        """Set when the batch is first sent, so that numbers arrive rising. A refused batch, of which nothing was taken,
        gets another."""
        self.has_keys = False
        """Whether some of its messages have an order key. Another such batch of the queue waits until this one is
        answered, since this one may be refused and come later."""
        self.parts: list[_Part] = []
        self.items = 0
        self.bytes = 0
        self.done = trio.Event()
        self.points: list[Point] = []
        self.error: Dep2pError | None = None
        self.deadline_s = 0.0
        self.refusal: Dep2pError | None = None
        """The reason why it was held back."""


class PeerPublisher:
    """All that this node publishes to the queues of one member."""

    def __init__(self, broker_route: BrokerRoute, limits: Limits, counters: Counter[str], rng: Rng) -> None:
        self.broker_route = broker_route
        self._limits = limits
        self._counters = counters
        self._publisher = rng.randbytes(PUBLISHER_BYTES)
        self._next_number = 1
        self._waiting: deque[_PublishBatch] = deque()
        self._open: dict[str, _PublishBatch] = {}
        """By queue: the last batch of ``_waiting``, which may still grow."""
        self._in_flight: dict[_PublishBatch, QueueLink] = {}
        self._bytes = 0
        self._room = trio.lowlevel.ParkingLot()
        self._wake = trio.Event()
        self._paused_until_s = 0.0
        self._has_worked = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting and not self._in_flight

    async def publish(self, queue: str, messages: Sequence[WireMessage], timeout_s: float) -> list[Point]:
        """Publish messages; return the ids when they are durable there. See `RemoteQueues.publish`."""
        size = 0
        for attributes, body in messages:
            size += len(attributes) + len(body)
            if len(body) > self._limits.message_bytes_max:
                raise MessageTooLargeError(
                    f"a message of {len(body)} bytes: at most {self._limits.message_bytes_max} go into a queue"
                )
        if len(messages) > wire.BATCH_ITEMS_MAX or (size > 4 * _BATCH_BYTES and len(messages) > 1):
            raise MessageTooLargeError(
                f"{len(messages)} messages of {size} bytes at once: at most {wire.BATCH_ITEMS_MAX} messages and "
                f"{4 * _BATCH_BYTES} bytes are taken together"
            )
        deadline_s = trio.current_time() + timeout_s
        batch: _PublishBatch | None = None
        part = _Part(messages, size)
        with trio.move_on_at(deadline_s):
            while self._bytes >= _PENDING_BYTES_MAX:
                await self._room.park()
            batch = self._add(queue, part, deadline_s)
            await batch.done.wait()
            if batch.error is not None:
                raise batch.error.with_traceback(None)
            return batch.points[part.start : part.start + len(messages)]
        if batch is None or (batch in self._waiting and not batch.first_number):
            # The batch is not under way: so nothing of it was taken.
            refusal = OverloadedError("too much waits to be published") if batch is None else batch.refusal
            if batch is not None:
                self._withdraw(batch, part)
            if refusal is not None:
                raise refusal.with_traceback(None)
        raise RequestTimeoutError(
            f"no answer to a publish within {timeout_s:g} s: "
            f"whether {self.broker_route.peer} has the message is not known"
        )

    def _withdraw(self, batch: _PublishBatch, part: _Part) -> None:
        batch.parts.remove(part)
        batch.items -= part.items
        batch.bytes -= part.bytes
        self._bytes -= part.bytes
        if not batch.parts:
            self._drop(batch, OverloadedError("withdrawn"))

    def _add(self, queue: str, part: _Part, deadline_s: float) -> _PublishBatch:
        batch = self._open.get(queue)
        count = part.items
        if batch is None or batch.items + count > _BATCH_ITEMS or batch.bytes + part.bytes > _BATCH_BYTES:
            batch = self._open[queue] = _PublishBatch(queue)
            self._waiting.append(batch)
        batch.parts.append(part)
        batch.has_keys = batch.has_keys or part.has_keys
        batch.items += count
        batch.bytes += part.bytes
        batch.deadline_s = max(batch.deadline_s, deadline_s)
        self._bytes += part.bytes
        self._wake.set()
        return batch

    async def run(self) -> None:
        """Send waiting batches, until cancelled."""
        failures = 0
        while True:
            now = trio.current_time()
            if now < self._paused_until_s and self._waiting:
                await trio.sleep(self._paused_until_s - now)
                continue
            if self._next() is None or len(self._in_flight) >= _BATCHES_IN_FLIGHT:
                self._wake = trio.Event()
                await self._wake.wait()
                continue
            try:
                link = await self.broker_route.get(now + self._limits.dial_timeout_s)
                await link.out.wait_for_space(self._waiting[0].bytes if self._waiting else 0)
                batch = self._next()
                if batch is not None:  # otherwise it was withdrawn meanwhile
                    self._send(link, batch)
                failures = 0
            except _FATAL as error:
                if (
                    not self._has_worked and not self.broker_route.is_set
                ):  # otherwise the node has just started, and may not know its members yet
                    self._fail_all(error)
                self._expire(error)
                await trio.sleep(self._backoff.after(failures + 1))
            except Dep2pError as error:
                if self.broker_route.is_here:
                    self._fail_all(error)
                self._expire(error)
                failures += 1
                await trio.sleep(self._backoff.after(failures))

    @property
    def _backoff(self) -> Backoff:
        return _BACKOFF_OF_SET if self.broker_route.is_set else _BACKOFF

    def _next(self) -> _PublishBatch | None:
        """Return the first batch that may be sent."""
        ordered = {batch.queue: None for batch in self._in_flight if batch.has_keys}
        for batch in self._waiting:
            if not batch.has_keys:
                return batch
            if batch.queue not in ordered:
                return batch
        return None

    def _send(self, link: QueueLink, batch: _PublishBatch) -> None:
        if not batch.first_number:
            batch.first_number = self._next_number
            self._next_number += batch.items
        start = 0
        for part in batch.parts:
            part.start = start
            start += part.items
        encoded = [part.encoded for part in batch.parts]
        frame = wire.encode_publish_batch(
            link.new_id(),
            wire.PublishBatch(batch.queue, self._publisher, batch.first_number, start, encoded),
        )
        req_id = int.from_bytes(frame[4:8], "big")
        link.put(frame)
        self._has_worked = True
        self._waiting.remove(batch)
        if self._open.get(batch.queue) is batch:
            del self._open[batch.queue]
        self._in_flight[batch] = link
        link.expect(req_id, lambda answer: self._answered(batch, answer))

    def _answered(self, batch: _PublishBatch, answer: LinkAnswer) -> None:
        link = self._in_flight.pop(batch)
        error = answer.error
        if isinstance(error, NotOwnerError):
            self.broker_route.refused(link, error)
            self._paused_until_s = trio.current_time() + self.broker_route.pause_s
        is_unknown = isinstance(error, StoreUnknownError | NotOwnerError) and trio.current_time() < batch.deadline_s
        if isinstance(error, StreamClosedError) or is_unknown:
            # The link is over, or the broker has no store or does not own it: send the batch again, in the old order,
            # with the old numbers.
            self._counters["publishes_sent_again"] += batch.items
            index = 0
            while index < len(self._waiting) and 0 < self._waiting[index].first_number < batch.first_number:
                index += 1
            self._waiting.insert(index, batch)
        elif isinstance(error, QueueFullError | OverloadedError) and trio.current_time() < batch.deadline_s:
            self._counters["publishes_held_back"] += 1
            batch.first_number = 0
            batch.refusal = error
            self._paused_until_s = trio.current_time() + max(0.01, answer.retry_after_ms / 1000)
            index = 0
            while index < len(self._waiting) and self._waiting[index].first_number:
                index += 1
            self._waiting.insert(index, batch)
        elif error is not None:
            self._end(batch, error)
        else:
            try:
                if answer.type != wire.PUBLISHED:
                    raise ProtocolError(f"queue frame 0x{answer.type:02x} in answer to a PUBLISH")
                batch.points = wire.decode_published(answer.payload)
                self.broker_route.failover_group.worked(link.peer)
                if len(batch.points) != batch.items:
                    raise ProtocolError(f"{len(batch.points)} ids for {batch.items} messages")
                self._end(batch, None)
            except ProtocolError as broken:
                self._end(batch, broken)
        self._wake.set()

    def _end(self, batch: _PublishBatch, error: Dep2pError | None) -> None:
        batch.error = error
        self._bytes -= batch.bytes
        batch.done.set()
        self._room.unpark_all()

    def fail(self, error: Exception) -> None:
        """Give an error to every caller that waits: `run` has ended by a fault."""
        self._fail_all(StreamClosedError(f"publishing failed by an internal error: {error}"))
        for batch in list(self._in_flight):
            self._end(batch, StoreUnknownError("publishing failed by an internal error: it may have been taken"))
        self._in_flight.clear()

    def _expire(self, error: Dep2pError) -> None:
        now = trio.current_time()
        for batch in [each for each in self._waiting if each.deadline_s <= now]:
            self._drop(batch, error)

    def _fail_all(self, error: Dep2pError) -> None:
        for batch in list(self._waiting):
            was_sent = batch.first_number != 0
            unknown = StoreUnknownError(f"whether {self.broker_route.peer} has taken this is not known: {error}")
            self._drop(batch, unknown if was_sent else error)

    def _drop(self, batch: _PublishBatch, error: Dep2pError) -> None:
        self._waiting.remove(batch)
        if self._open.get(batch.queue) is batch:
            del self._open[batch.queue]
        self._end(batch, error)
