"""Events of durable queues, made where they are kept. The core calls these only while a trace is on."""

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import trio

from dep2p.protocols.queues.consumer import Held
from dep2p.protocols.queues.cursor import ChannelPlaces
from dep2p.protocols.queues.message import Message
from dep2p.protocols.queues.ordering.key_queues import key_of
from dep2p.protocols.queues.queue import Queue, Run
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId

_ID: Final = struct.Struct(">QQ")
_KEEPER_BYTES: Final = 6


def queue_message_id(keeper: PeerId, partition: int, seq: int) -> bytes:
    """The id that a queue's message has in traces: 22 bytes, unique over all keepers."""
    return _keeper(keeper) + _ID.pack(partition, seq)


@lru_cache(maxsize=64)
def _keeper(keeper: PeerId) -> bytes:
    return hashlib.blake2b(keeper.encode(), digest_size=_KEEPER_BYTES).digest()


@lru_cache(maxsize=8_192)
def _key_hash(attributes: bytes) -> str | None:
    """Of the order key: that two messages have the same one can be seen, what it is cannot."""
    key = key_of(attributes)
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if key else None


class TracedQueues:
    """The `dep2p.protocols.queues.trace_hooks.QueueTrace` of a node."""

    def __init__(self, log: TraceLog) -> None:
        self._log = log
        self._prefix = _keeper(log.node)

    def published(self, queue: Queue, runs: Sequence[Run]) -> None:
        log, t = self._log, self._log.t_us()
        for partition, first, items in runs:
            rows = queue.logs[partition].rows if partition in queue.logs else {}
            for seq in range(first, first + items):
                msg = self._prefix + _ID.pack(partition, seq)
                if log.is_sampled(msg):
                    message = rows.get(seq)
                    key, size = (None, None) if message is None else (_key(message), len(message.body))
                    log.put(
                        schema.Queue(
                            *(V, log.node, 0, t, queue.namespace, queue.name, "published", msg),
                            partition=partition,
                            position=seq,
                            key=key,
                            size=size,
                        )
                    )

    def handed_out(self, channel: ChannelPlaces, partition: int, message: Message, to: str, attempts: int) -> None:
        waited_us = max(0, self._log.t_us() - message.published_us)
        self._put(channel, "handed_out", partition, message, attempts, waited_us, consumer=to)

    def settled(self, channel: ChannelPlaces, state: str, partition: int, held: Held, reason: str = "") -> None:
        took_us = round((trio.current_time() - held.first) * 1e6)
        self._put(channel, state, partition, held.message, held.attempts, took_us, reason=reason)

    def ended(self, channel: ChannelPlaces, state: str, partition: int, message: Message, reason: str = "") -> None:
        self._put(channel, state, partition, message, None, None, reason=reason)

    def _put(
        self,
        channel: ChannelPlaces,
        state: str,
        partition: int,
        message: Message,
        attempt: int | None,
        duration_us: int | None,
        *,
        consumer: str | None = None,
        reason: str = "",
    ) -> None:
        log, queue = self._log, channel.queue
        msg = self._prefix + _ID.pack(partition, message.seq)
        if log.is_sampled(msg):
            log.put(
                schema.Queue(
                    *(V, log.node, 0, log.t_us(), queue.namespace, queue.name, state, msg, channel.name, consumer),
                    *(partition, message.seq, attempt, _key(message), None, reason or None, duration_us),
                )
            )


def _key(message: Message) -> str | None:
    return _key_hash(message.attributes) if message.attributes else None
