"""Events of durable queues, made where they are kept. The core calls these only while a trace is on."""

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import trio

from dep2p.protocols.queues.consumer import HeldMessage
from dep2p.protocols.queues.message import QueuedMessage
from dep2p.protocols.queues.ordering.key_queues import key_of
from dep2p.protocols.queues.records import Run
from dep2p.protocols.queues.trace_hooks import TracedChannel, TracedQueue
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId

_ID: Final = struct.Struct(">QQ")
_BROKER_BYTES: Final = 6


def queue_message_id(broker: PeerId, partition: int, seq: int) -> bytes:
    """Return the id of a queue's message in traces: 22 bytes, unique over all brokers."""
    return _broker(broker) + _ID.pack(partition, seq)


@lru_cache(maxsize=64)
def _broker(broker: PeerId) -> bytes:
    return hashlib.blake2b(broker.encode(), digest_size=_BROKER_BYTES).digest()


@lru_cache(maxsize=8_192)
def _key_hash(attributes: bytes) -> str | None:
    """Return a hash of the order key. Readers of a trace see which messages have the same key, and not the key."""
    key = key_of(attributes)
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if key else None


class TracedQueues:
    """The `dep2p.protocols.queues.trace_hooks.QueueTrace` of a node."""

    def __init__(self, log: TraceLog) -> None:
        self._log = log
        self._prefix = _broker(log.node)

    def published(self, queue: TracedQueue, runs: Sequence[Run]) -> None:
        log, t = self._log, self._log.t_us()
        for partition, first, items in runs:
            rows = queue.logs[partition].rows if partition in queue.logs else {}
            for seq in range(first, first + items):
                msg = self._prefix + _ID.pack(partition, seq)
                if log.is_sampled(msg):
                    message = rows.get(seq)
                    key, size = (None, None) if message is None else (_key(message), len(message.body))
                    log.put(
                        schema.QueueEvent(
                            *(V, log.node, 0, t, queue.namespace, queue.name, "published", msg),
                            partition=partition,
                            position=seq,
                            key=key,
                            size=size,
                        )
                    )

    def delivered(self, channel: TracedChannel, partition: int, message: QueuedMessage, to: str, attempts: int) -> None:
        waited_us = max(0, self._log.t_us() - message.published_us)
        self._put(channel, partition, message, _Change("handed_out", attempts, waited_us, consumer=to))

    def settled(self, channel: TracedChannel, state: str, partition: int, held: HeldMessage, reason: str = "") -> None:
        took_us = round((trio.current_time() - held.first) * 1e6)
        self._put(channel, partition, held.message, _Change(state, held.attempts, took_us, reason=reason))

    def ended(
        self, channel: TracedChannel, state: str, partition: int, message: QueuedMessage, reason: str = ""
    ) -> None:
        self._put(channel, partition, message, _Change(state, reason=reason))

    def _put(self, channel: TracedChannel, partition: int, message: QueuedMessage, change: "_Change") -> None:
        log, queue = self._log, channel.queue
        msg = self._prefix + _ID.pack(partition, message.seq)
        if log.is_sampled(msg):
            log.put(
                schema.QueueEvent(
                    *(V, log.node, 0, log.t_us(), queue.namespace, queue.name, change.state, msg, channel.name),
                    *(change.consumer, partition, message.seq, change.attempt, _key(message), None),
                    *(change.reason or None, change.duration_us),
                )
            )


class _Change(NamedTuple):
    """A message of a channel changed its state."""

    state: str
    attempt: int | None = None
    duration_us: int | None = None
    consumer: str | None = None
    reason: str = ""


def _key(message: QueuedMessage) -> str | None:
    return _key_hash(message.attributes) if message.attributes else None
