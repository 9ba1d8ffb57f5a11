"""Consumers of queues that control clients drive: deliveries as NDJSON, results by calls of their own."""

import math
import secrets
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import trio
from starlette.types import Receive, Scope, Send

from dep2p.control_api.encoding import encode_headers, encode_line, encode_payload
from dep2p.daemon.api.resources.subscriptions import LineQueue, Subscriptions, cancel_on_disconnect
from dep2p.daemon.problems import Problem, problem_of, problem_response
from dep2p.errors import Dep2pError, LockLostError, NotInFlightError, StreamClosedError
from dep2p.protocols.queues.wire import QueueCode, Result, Settled
from dep2p.queues.api.queues import Queues
from dep2p.queues.consumer import Consumer
from dep2p.queues.types import Delivery, decode_attributes, message_id

_BATCH_ITEMS: Final = 256


@dataclass(frozen=True, slots=True)
class Consuming:
    """What a control client asked for."""

    place: Queues
    queue: str
    channel: str
    max_in_flight: int
    from_start: bool
    bytes_max: int
    count: int
    """After so many nothing more is taken; 0: no end."""
    filter_text: str = ""
    exclusive: bool = False


class ConsumerTable:
    """The consumers of control clients, by the id that a client gets in its first line."""

    def __init__(self, subscriptions: Subscriptions, counts: Counter[str]) -> None:
        self._subscriptions = subscriptions
        self._counts = counts
        self._consumers: dict[str, Consumer] = {}

    def __len__(self) -> int:
        return len(self._consumers)

    def find(self, consumer_id: str) -> Consumer:
        """Raises :class:`Problem` D5208."""
        consumer = self._consumers.get(consumer_id)
        if consumer is None:
            raise Problem("D5208", f"no consumer {consumer_id[:40]!r} is connected: what it held was given back")
        return consumer

    async def settle(self, consumer_id: str, results: Sequence[Result], *, durable: bool) -> dict[str, Any]:
        """Apply results; those of messages that are not held are told, not raised."""
        consumer = self.find(consumer_id)
        try:
            settled = await consumer.confirm(results) if durable else Settled(0, consumer.settle(results), [])
        except StreamClosedError:  # the keeper was lost: it gives to others what it did not hear of
            settled = Settled(0, [(each.partition, each.seq, 0) for each in results], [])
        self._counts["queue_results"] += len(results)
        self._counts["queue_results_refused"] += len(settled.refused)
        refused: dict[str, Any] = {}
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
        return {"refused": refused, "timeouts_s": timeouts}

    def lines(self, consuming: Consuming) -> "ConsumerLines":
        """The answer of a consumer."""
        return ConsumerLines(self, self._subscriptions, self._counts, consuming)

    def add(self, consumer: Consumer) -> str:
        """Keep it under a new id."""
        consumer_id = secrets.token_hex(8)
        self._consumers[consumer_id] = consumer
        return consumer_id

    def remove(self, consumer_id: str) -> None:
        """Its connection is over."""
        del self._consumers[consumer_id]


class ConsumerLines:
    """Deliveries as NDJSON. When the client or its connection dies, what it held goes to others at once."""

    def __init__(
        self, table: ConsumerTable, subscriptions: Subscriptions, counts: Counter[str], consuming: Consuming
    ) -> None:
        self._table = table
        self._subscriptions = subscriptions
        self._counts = counts
        self._consuming = consuming
        self._started = False
        self._last = b""

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
            consumer = await wanted.place.open_consumer(
                wanted.queue,
                wanted.channel,
                max_in_flight=wanted.max_in_flight,
                from_start=wanted.from_start,
                bytes_max=wanted.bytes_max,
                filter_text=wanted.filter_text,
                exclusive=wanted.exclusive,
            )
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
        first = encode_line({"consumer": consumer_id, "queue": consumer.queue, "channel": consumer.channel})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on_disconnect, receive, nursery.cancel_scope)
            nursery.start_soon(self._end, ending, nursery.cancel_scope)
            left = self._consuming.count or sys.maxsize
            try:
                while True:
                    taken = await consumer.receive(min(_BATCH_ITEMS, left))
                    left -= len(taken)
                    lines = [_line(each) for each in taken]
                    self._counts["queue_deliveries"] += len(lines)
                    await send({"type": "http.response.body", "body": b"".join(lines), "more_body": True})
                    if not left:
                        consumer.set_ready(0)
                        await trio.sleep_forever()
            except Dep2pError as error:
                self._last = encode_line({"error": problem_of(error)})
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": self._last, "more_body": False})

    async def _end(self, ending: LineQueue, scope: trio.CancelScope) -> None:
        self._last = await ending.take()
        scope.cancel()


def _line(delivery: Delivery) -> bytes:
    fields: dict[str, object] = {
        "id": message_id(delivery.partition, delivery.seq),
        "attempts": delivery.attempts,
        "published_s": delivery.published_us / 1e6,
        "timeout_s": max(0.0, round(delivery.deadline_s - trio.current_time(), 3)),
        **encode_payload(delivery.body),
    }
    if delivery.attributes:
        attributes = decode_attributes(delivery.attributes)
        if attributes.key:
            fields["key"] = attributes.key
        if attributes.tags:
            fields["tags"] = list(attributes.tags)
        if attributes.priority:
            fields["priority"] = attributes.priority
        if attributes.headers:
            fields["headers"] = encode_headers(attributes.headers)
    if not math.isfinite(float(str(fields["timeout_s"]))):
        fields["timeout_s"] = 1e9  # a queue without timeouts
    return encode_line(fields)
