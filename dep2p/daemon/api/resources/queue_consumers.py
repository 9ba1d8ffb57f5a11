"""Consumers of queues that control clients drive: deliveries as NDJSON, results by calls of their own."""

import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from starlette.types import Receive, Scope, Send

from dep2p.control_api.encoding import encode_headers, encode_line
from dep2p.control_api.queues import ConsumerLoss, ConsumerOpened, DeliveredMessage, SettledMessages
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry, cancel_on_disconnect
from dep2p.daemon.problems import Problem, problem_of, problem_response
from dep2p.errors import Dep2pError, LockLostError, NotInFlightError, StreamClosedError
from dep2p.protocols.queues.attributes import readable_attributes
from dep2p.protocols.queues.names import message_id
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.protocols.queues.wire.frames import DeliveryResult, QueueCode, Settled
from dep2p.queues.api.queues import Queues
from dep2p.queues.consumer import Consumer
from dep2p.queues.types import MessageDelivery, SubscribeOptions

_BATCH_ITEMS: Final = 256
_LOSS: Final = b'{"loss"'
"""The beginning of the line of a loss."""
_WITHOUT_TIMEOUT_S: Final = 1e9
"""Seconds for which a message of a queue without timeouts belongs to its consumer: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Consuming:
    """The consumer that a control client asks for."""

    queues: Queues
    queue: str
    channel: str
    options: SubscribeOptions
    count: int
    """Messages that the consumer takes in all; 0: no end."""
    gives_losses: bool = False
    """Whether the client learns by lines of their own (`ConsumerLoss`) what it has lost."""


class ConsumerTable:
    """The consumers of control clients, by the id that a client gets in its first line."""

    def __init__(self, subscriptions: SubscriptionRegistry, counts: Counter[str]) -> None:
        self._subscriptions = subscriptions
        self._counts = counts
        self._consumers: dict[str, Consumer] = {}

    def __len__(self) -> int:
        return len(self._consumers)

    def find(self, consumer_id: str) -> Consumer:
        """Return a consumer. Raises :class:`Problem` D5208."""
        consumer = self._consumers.get(consumer_id)
        if consumer is None:
            raise Problem("D5208", f"no consumer {consumer_id[:40]!r} is connected: what it held was given back")
        return consumer

    async def settle(self, consumer_id: str, results: Sequence[DeliveryResult], *, durable: bool) -> SettledMessages:
        """Apply results. Those of messages that are not held are reported, not raised."""
        consumer = self.find(consumer_id)
        try:
            settled = await consumer.confirm(results) if durable else Settled(0, consumer.settle(results), [])
        except StreamClosedError:  # the broker was lost: it gives messages without a result to others
            settled = Settled(0, [(each.partition, each.seq, 0) for each in results], [])
        self._counts["queue_results"] += len(results)
        self._counts["queue_results_refused"] += len(settled.refused)
        refused: dict[str, dict[str, object]] = {}
        for partition, seq, code in settled.refused:
            text = message_id(partition, seq)
            kind = LockLostError if code == QueueCode.LOCK_LOST else NotInFlightError
            refused[text] = problem_of(
                kind(
                    f"the message {text} is not held here any more: its time was over, it was settled, or the "
                    "connection to its node was lost"
                )
            )
        timeouts = {message_id(partition, seq): left_ms / 1000 for partition, seq, left_ms in settled.touched}
        return SettledMessages(refused=refused, timeouts_s=timeouts)

    def lines(self, consuming: Consuming) -> "ConsumerLines":
        """Return the answer of a consumer."""
        return ConsumerLines(self, self._subscriptions, self._counts, consuming)

    def add(self, consumer: Consumer) -> str:
        """Keep a consumer under a new id."""
        consumer_id = secrets.token_hex(8)
        self._consumers[consumer_id] = consumer
        return consumer_id

    def remove(self, consumer_id: str) -> None:
        """Remove a consumer whose connection is over."""
        del self._consumers[consumer_id]


class ConsumerLines:
    """Deliveries as NDJSON. When the client or its connection dies, its messages go to others at once."""

    def __init__(
        self, table: ConsumerTable, subscriptions: SubscriptionRegistry, counts: Counter[str], consuming: Consuming
    ) -> None:
        self._table = table
        self._subscriptions = subscriptions
        self._counts = counts
        self._consuming = consuming
        self._started = False
        self._last = b""
        self._out: list[bytes] = []
        """Lines that are not sent so far: those of one receive, and losses."""
        self._has_lines = trio.Event()
        self._is_out = trio.Event()
        """Set when the lines that are in `_out` now are out."""
        self._sending: trio.Event | None = None
        """The same for those that are on their way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(receive, send)
        except Exception as error:
            if self._started:
                raise
            await problem_response(error)(scope, receive, send)

    async def _serve(self, receive: Receive, send: Send) -> None:
        wanted = self._consuming
        ending = self._subscriptions.open("queues")
        try:
            consumer = await wanted.queues.open_consumer(wanted.queue, wanted.channel, wanted.options)
            async with consumer:
                consumer_id = self._table.add(consumer)
                try:
                    await self._send_all(consumer, consumer_id, ending, receive, send)
                finally:
                    self._table.remove(consumer_id)
        finally:
            self._subscriptions.forget(ending)

    async def _send_all(
        self, consumer: Consumer, consumer_id: str, ending: LineQueue, receive: Receive, send: Send
    ) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opened = ConsumerOpened(consumer=consumer_id, queue=consumer.queue, channel=consumer.channel)
        first = encode_line(reply_fields(opened))
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on_disconnect, receive, nursery.cancel_scope)
            nursery.start_soon(self._end, ending, nursery.cancel_scope)
            nursery.start_soon(self._write_all, send)
            if self._consuming.gives_losses:
                consumer.on_lost = lambda: self._report_loss(ConsumerLoss(loss="connection"))
                consumer.on_revoke = lambda each: self._report_loss(ConsumerLoss(loss="revoked", partition=each))
            left = self._consuming.count or sys.maxsize
            try:
                while True:
                    taken = await consumer.receive(min(_BATCH_ITEMS, left))
                    left -= len(taken)
                    lines = [_line(each) for each in taken]
                    self._counts["queue_deliveries"] += len(lines)
                    self._out += lines
                    self._has_lines.set()
                    await self._is_out.wait()
                    if not left:
                        consumer.set_ready(0)
                        await trio.sleep_forever()
            except Dep2pError as error:
                self._last = encode_line({"error": problem_of(error)})
                await self._all_out()
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": self._last, "more_body": False})

    def _report_loss(self, loss: ConsumerLoss) -> None:
        """Send a loss behind the lines before it, unless the same one waits already behind all messages."""
        line = encode_line(reply_fields(loss))
        for waiting in reversed(self._out):
            if waiting == line:
                return
            if not waiting.startswith(_LOSS):
                break
        self._out.append(line)
        self._has_lines.set()

    async def _write_all(self, send: Send) -> None:
        """Send lines in their order. The next messages are received when all lines are out."""
        while True:
            await self._has_lines.wait()
            out, self._out = self._out, []
            self._sending, self._is_out = self._is_out, trio.Event()
            self._has_lines = trio.Event()
            await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
            self._sending.set()
            self._sending = None

    async def _all_out(self) -> None:
        """Wait until no line waits or is on its way: cancelled in the middle, a line would be cut."""
        if self._sending is not None:
            await self._sending.wait()
        if self._out:
            await self._is_out.wait()

    async def _end(self, ending: LineQueue, scope: trio.CancelScope) -> None:
        self._last = await ending.take()
        scope.cancel()


def _line(delivery: MessageDelivery) -> bytes:
    attributes = readable_attributes(delivery.attributes)
    left_s = max(0.0, round(delivery.deadline_s - trio.current_time(), 3))
    message = DeliveredMessage(
        id=message_id(delivery.partition, delivery.seq),
        attempts=delivery.attempts,
        published_s=delivery.published_us / 1e6,
        timeout_s=min(left_s, _WITHOUT_TIMEOUT_S),
        body=delivery.body,
        encoding="base64",
        key=attributes.key,
        tags=attributes.tags,
        priority=attributes.priority,
        headers=encode_headers(attributes.headers),
    )
    return encode_line(reply_fields(message))
