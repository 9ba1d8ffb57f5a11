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
from dep2p.protocols.queues import wire
from dep2p.protocols.queues.ordering.key_queues import key_of
from dep2p.protocols.queues.wire import PUBLISHER_BYTES, Point, WireMessage
from dep2p.queues.remote.broker_directory import Way
from dep2p.queues.remote.link import Answer, QueueLink
from dep2p.types import Rng

_BATCHES_IN_FLIGHT: Final = 8
_BATCH_ITEMS: Final = 1_024
_BATCH_BYTES: Final = 262_144
"""About so much goes into one PUBLISH."""
_PENDING_BYTES_MAX: Final = 8_388_608
_RETRY_FIRST_S: Final = 0.05
_RETRY_MAX_S: Final = 5.0
_RETRY_OF_SET_S: Final = 1.0
"""Of nodes that take over from each other."""
_FATAL: Final = (NotMemberError, ProtocolNotSupportedError)


class _Part:
    """What one call publishes."""

    __slots__ = ("bytes", "messages", "start")

    def __init__(self, messages: Sequence[WireMessage], size: int) -> None:
        self.messages = messages
        self.bytes = size
        self.start = 0
        """Its place in the batch, given when that is sent."""


class _Batch:
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
        """Given when it is sent first, so that numbers arrive rising; a refused one, of which nothing was taken, gets
        another."""
        self.has_keys = False
        """Some of its messages have an order: another such batch of the queue waits until this one is answered, since
        this one may be refused and come later."""
        self.parts: list[_Part] = []
        self.items = 0
        self.bytes = 0
        self.done = trio.Event()
        self.points: list[Point] = []
        self.error: Dep2pError | None = None
        self.deadline_s = 0.0
        self.refusal: Dep2pError | None = None
        """Why it was held back."""


class PeerPublisher:
    """All that this node publishes to the queues of one member."""

    def __init__(self, way: Way, limits: Limits, counters: Counter[str], rng: Rng) -> None:
        self.way = way
        self._limits = limits
        self._counters = counters
        self._publisher = rng.randbytes(PUBLISHER_BYTES)
        self._next_number = 1
        self._waiting: deque[_Batch] = deque()
        self._open: dict[str, _Batch] = {}
        """By queue: the last batch of ``_waiting``, which may still grow."""
        self._in_flight: dict[_Batch, QueueLink] = {}
        self._bytes = 0
        self._room = trio.lowlevel.ParkingLot()
        self._wake = trio.Event()
        self._paused_until_s = 0.0
        self._has_worked = False

    @property
    def is_idle(self) -> bool:
        """Nothing waits."""
        return not self._waiting and not self._in_flight

    async def publish(self, queue: str, messages: Sequence[WireMessage], timeout_s: float) -> list[Point]:
        """Returns the ids when the messages are durable there. See `RemoteQueues.publish`."""
        size = sum(len(attributes) + len(body) for attributes, body in messages)
        for _, body in messages:
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
        batch: _Batch | None = None
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
            # It is not under way: then nothing of it was taken.
            refusal = OverloadedError("too much waits to be published") if batch is None else batch.refusal
            if batch is not None:
                self._withdraw(batch, part)
            if refusal is not None:
                raise refusal.with_traceback(None)
        raise RequestTimeoutError(
            f"no answer to a publish within {timeout_s:g} s: whether {self.way.peer} has the message is not known"
        )

    def _withdraw(self, batch: _Batch, part: _Part) -> None:
        batch.parts.remove(part)
        batch.items -= len(part.messages)
        batch.bytes -= part.bytes
        self._bytes -= part.bytes
        if not batch.parts:
            self._drop(batch, OverloadedError("withdrawn"))

    def _add(self, queue: str, part: _Part, deadline_s: float) -> _Batch:
        batch = self._open.get(queue)
        count = len(part.messages)
        if batch is None or batch.items + count > _BATCH_ITEMS or batch.bytes + part.bytes > _BATCH_BYTES:
            batch = self._open[queue] = _Batch(queue)
            self._waiting.append(batch)
        batch.parts.append(part)
        batch.has_keys = batch.has_keys or any(key_of(attributes) for attributes, _body in part.messages)
        batch.items += count
        batch.bytes += part.bytes
        batch.deadline_s = max(batch.deadline_s, deadline_s)
        self._bytes += part.bytes
        self._wake.set()
        return batch

    async def run(self) -> None:
        """Send what waits, until cancelled."""
        retry_s = _RETRY_FIRST_S
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
                link = await self.way.get(now + self._limits.dial_timeout_s)
                await link.out.room(self._waiting[0].bytes if self._waiting else 0)
                batch = self._next()
                if batch is not None:  # else it was withdrawn meanwhile
                    self._send(link, batch)
                retry_s = _RETRY_FIRST_S
            except _FATAL as error:
                if (
                    not self._has_worked and not self.way.is_set
                ):  # else the node has just started, and may not know its members yet
                    self._fail_all(error)
                self._expire(error)
                await trio.sleep(retry_s)
            except Dep2pError as error:
                if self.way.is_here:
                    self._fail_all(error)
                self._expire(error)
                await trio.sleep(retry_s)
                retry_s = min(retry_s * 2, _RETRY_OF_SET_S if self.way.is_set else _RETRY_MAX_S)

    def _next(self) -> _Batch | None:
        """The first that may be sent."""
        ordered = {batch.queue: None for batch in self._in_flight if batch.has_keys}
        for batch in self._waiting:
            if not batch.has_keys:
                return batch
            if batch.queue not in ordered:
                return batch
        return None

    def _send(self, link: QueueLink, batch: _Batch) -> None:
        if not batch.first_number:
            batch.first_number = self._next_number
            self._next_number += batch.items
        messages: list[WireMessage] = []
        for part in batch.parts:
            part.start = len(messages)
            messages.extend(part.messages)
        frame = wire.encode_publish(link.new_id(), batch.queue, self._publisher, batch.first_number, messages)
        req_id = int.from_bytes(frame[4:8], "big")
        link.put(frame)
        self._has_worked = True
        self._waiting.remove(batch)
        if self._open.get(batch.queue) is batch:
            del self._open[batch.queue]
        self._in_flight[batch] = link
        link.expect(req_id, lambda answer: self._answered(batch, answer))

    def _answered(self, batch: _Batch, answer: Answer) -> None:
        link = self._in_flight.pop(batch)
        error = answer.error
        if isinstance(error, NotOwnerError):
            self.way.refused(link, error)
            self._paused_until_s = trio.current_time() + self.way.pause_s
        is_unknown = isinstance(error, StoreUnknownError | NotOwnerError) and trio.current_time() < batch.deadline_s
        if isinstance(error, StreamClosedError) or is_unknown:
            # The link is over, or the keeper's store is away or another's: it goes again, in the old order, with the
            # old numbers.
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
                self.way.keepers.worked(link.peer)
                if len(batch.points) != batch.items:
                    raise ProtocolError(f"{len(batch.points)} ids for {batch.items} messages")
                self._end(batch, None)
            except ProtocolError as broken:
                self._end(batch, broken)
        self._wake.set()

    def _end(self, batch: _Batch, error: Dep2pError | None) -> None:
        batch.error = error
        self._bytes -= batch.bytes
        batch.done.set()
        self._room.unpark_all()

    def _expire(self, error: Dep2pError) -> None:
        now = trio.current_time()
        for batch in [each for each in self._waiting if each.deadline_s <= now]:
            self._drop(batch, error)

    def _fail_all(self, error: Dep2pError) -> None:
        for batch in list(self._waiting):
            was_sent = batch.first_number != 0
            unknown = StoreUnknownError(f"whether {self.way.peer} has taken this is not known: {error}")
            self._drop(batch, unknown if was_sent else error)

    def _drop(self, batch: _Batch, error: Dep2pError) -> None:
        self._waiting.remove(batch)
        if self._open.get(batch.queue) is batch:
            del self._open[batch.queue]
        self._end(batch, error)
