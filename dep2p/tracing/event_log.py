"""Events on their way from a node's parts to its trace: made in the node's own thread, so every step here is cheap.

The parts ask `is_on` and give their events to `put`. The effects of pub/sub's routers, some for each message, wait in
`pending` for a few dozens of their like: code that runs once a message is out of the caches each time, and costs
several times what the same code costs in a loop. Encoding, numbering and writing happen in a worker thread
(:mod:`dep2p.tracing.file_writer`).
"""

import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Final, cast

import msgspec
import trio

from dep2p.gossipsub.effects import Deliver, Effect, Send
from dep2p.gossipsub.rpc import IHave, Rpc, RpcMessage
from dep2p.gossipsub.tracing.libp2p_events import (
    DeliverMessage,
    DropRpc,
    DuplicateMessage,
    PublishMessage,
    RecvRpc,
    RejectedMessage,
    SendRpc,
    Trace,
)
from dep2p.gossipsub.tracing.schema_events import RpcParts, rpc_parts, trace_events
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.traces.schema import MessageRef, OneMessage, TraceEvent
from dep2p.types import PeerId

WAKE_AT: Final = 2_048
"""Events that wake the writer before its time: four frames, and one hop to a thread for two thousand events."""
PENDING_MAX: Final = 2 * 64
"""Effects and their times that wait to become events. They hold the messages themselves, as the router's cache does."""
_ALL: Final = 1 << 32
_NOTHING: Final = Rpc()
_IDS_PER_ITEM: Final = 16
"""Ids of an RPC that count as one event, for the room in the log."""


class LocalDelivery(msgspec.Struct, gc=False):
    """A publish of this node went to ``readers`` subscriptions of its other programs: past the router."""

    message: RpcMessage
    readers: int


class TraceLog:
    """A bounded buffer of events. A full one takes no more and counts them, until the writer has taken its events."""

    __slots__ = (
        "_events",
        "_items_max",
        "_mark",
        "_offset_s",
        "_sample_below",
        "_wall",
        "_weight",
        "dropped",
        "is_on",
        "node",
        "pending",
        "rpcs",
        "wake",
    )

    def __init__(self, node: PeerId, items_max: int, *, wall: Callable[[], float] = time.time) -> None:
        """``wall``: seconds since the Unix epoch."""
        self.is_on: bool = False
        """Whether a writer takes the events; add none while this is False."""
        self.rpcs: bool = False
        self.dropped: Counter[str] = Counter()
        """Events that were not taken, by reason, since the node began."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there are enough events to write."""
        self.node: PeerId = node
        self.pending: list[Effect | LocalDelivery | float] = []
        """Effects of routers and local deliveries, each followed by its time.

        A caller that adds to it calls `flush` at `PENDING_MAX`.
        """
        self._items_max = items_max
        self._wall = wall
        self._sample_below = _ALL
        self._events: list[TraceEvent] = []
        self._mark = 0
        self._weight = 0
        self._offset_s = 0.0

    def __len__(self) -> int:
        return len(self._events)

    # The writer's side

    def start(self, *, rpcs: bool, sample: float = 1.0) -> None:
        """Take events from now on. ``sample``: the share of messages whose events are taken."""
        self._sample_below = sample_below(sample)
        self._events = []
        self.pending.clear()
        self.rpcs = rpcs
        self._reset_mark()
        self.set_clock()
        self.is_on = True

    def stop(self) -> None:
        """Take no more events; those that are there can still be taken out."""
        self.flush()
        self.is_on = False

    def set_clock(self) -> None:
        """Read the wall clock again: it may have been set."""
        self.flush()
        self._offset_s = self._wall() - trio.current_time()

    def take(self) -> list[TraceEvent]:
        """Take out all events, oldest first."""
        self.flush()
        events, self._events = self._events, []
        self._reset_mark()
        return events

    def _reset_mark(self) -> None:
        self._weight = 0
        self._mark = min(WAKE_AT, self._items_max)

    def t_us(self, now: float | None = None) -> int:
        """Return µs since the Unix epoch for a time of trio's clock, or for now."""
        return int(((trio.current_time() if now is None else now) + self._offset_s) * 1e6)

    # The parts' side

    def is_sampled(self, message_id: bytes) -> bool:
        """Whether the events of a message are taken: every node decides the same."""
        return self._sample_below == _ALL or zlib.crc32(message_id) < self._sample_below

    def put(self, event: TraceEvent) -> None:
        """Take an event; its ``seq`` is given when it is written."""
        if self.pending:
            self.flush()
        self._put(event)

    def _put(self, event: TraceEvent) -> None:
        events = self._events
        if self.is_on and (len(events) < self._mark or self._has_room()):
            events.append(event)

    def put_last(self, event: TraceEvent) -> None:
        """Take the last event of a run, even when the buffer is full: without it the node counts as killed."""
        self.flush()
        self._events.append(event)

    def _has_room(self) -> bool:
        bound = self._items_max - self._weight
        if len(self._events) < bound:
            self._mark = bound
            self.wake()
            return True
        self.dropped["buffer full"] += 1
        return False

    def _weigh(self, ids: int) -> None:
        self._weight += ids // _IDS_PER_ITEM
        self._mark -= ids // _IDS_PER_ITEM

    def pubsub(self, effect: Effect | LocalDelivery, now: float) -> None:
        """Take an effect of a router, or a local delivery, performed at ``now``."""
        self.pending += (effect, now)
        if len(self.pending) >= PENDING_MAX:
            self.flush()

    def flush(self) -> None:
        """Make events of what is pending. A node's own message is in its trace once, as its `Publish`."""
        pending = self.pending
        if not pending:
            return
        waiting = iter(pending.copy())
        pending.clear()
        events, node, offset_s = self._events, self.node, self._offset_s
        below = self._sample_below
        last_now, t = float("-inf"), 0
        effect: Effect | LocalDelivery
        now: float
        event: TraceEvent
        for effect, now in zip(waiting, waiting, strict=True):  # type: ignore[assignment]  # pyright: ignore
            if now != last_now:
                last_now, t = now, int((now + offset_s) * 1e6)
            if isinstance(effect, Deliver):
                if effect.peer is None:
                    continue
                message = effect.message
                event = schema.DeliverEvent(V, node, 0, t, message.id, message.topic, effect.peer, len(message.data))
            elif isinstance(effect, DuplicateMessage):
                message = effect.message
                sender = effect.received_from
                event = schema.DuplicateEvent(V, node, 0, t, message.id, message.topic, sender, len(message.data))
            elif isinstance(effect, PublishMessage):
                message = effect.message
                event = schema.PublishEvent(V, node, 0, t, message.id, message.topic, len(message.data))
            elif isinstance(effect, LocalDelivery):
                message = effect.message
                size, readers = len(message.data), effect.readers
                event = schema.DeliverLocalEvent(V, node, 0, t, message.id, message.topic, readers, size)
            else:
                self._other(effect, t)
                continue
            if below != _ALL and zlib.crc32(message.id) >= below:
                continue
            if len(events) < self._mark or self._has_room():
                events.append(event)

    def _other(self, effect: Effect, t: int) -> None:
        node, put = self.node, self._put
        if self._sample_below != _ALL:
            sampled = self._sampled(effect)
            if sampled is None:
                return
            effect = sampled
        if isinstance(effect, Send):
            parts = self._parts(effect.rpc)
            for peer in effect.peers:
                put(schema.SendRpcEvent(V, node, 0, t, peer, *parts))
        elif isinstance(effect, RecvRpc):
            put(schema.RecvRpcEvent(V, node, 0, t, effect.received_from, *self._parts(effect.rpc)))
        elif isinstance(effect, SendRpc):
            parts = self._parts(effect.rpc)
            for peer in effect.send_to:
                put(schema.SendRpcEvent(V, node, 0, t, peer, *parts))
        elif isinstance(effect, DropRpc):
            put(schema.DropRpcEvent(V, node, 0, t, effect.send_to, *self._parts(effect.rpc)))
        elif not isinstance(effect, DeliverMessage) or effect.received_from is not None:
            for event in trace_events(cast("Trace", effect), node, 0, t):
                put(event)

    def _sampled(self, effect: Effect) -> Effect | None:
        """Return an effect without the messages whose events are not taken; None when none is left."""
        if isinstance(effect, RejectedMessage | DeliverMessage):
            return effect if self.is_sampled(effect.message.id) else None
        if not isinstance(effect, Send | SendRpc | RecvRpc | DropRpc):
            return effect
        rpc, taken = effect.rpc, self.is_sampled
        have = [IHave(each.topic, tuple(filter(taken, each.ids))) for each in rpc.ihave]
        left = Rpc(
            messages=tuple(message for message in rpc.messages if taken(message.id)),
            subscriptions=rpc.subscriptions,
            ihave=tuple(each for each in have if each.ids),
            iwant=tuple(filter(taken, rpc.iwant)),
            idontwant=tuple(filter(taken, rpc.idontwant)),
            graft=rpc.graft,
            prune=rpc.prune,
        )
        if left == _NOTHING:
            return None
        if isinstance(effect, Send):
            return Send(effect.peers, left, effect.lane)
        if isinstance(effect, SendRpc):
            return SendRpc(effect.send_to, left)
        return RecvRpc(effect.received_from, left) if isinstance(effect, RecvRpc) else DropRpc(effect.send_to, left)

    def _parts(self, rpc: Rpc) -> RpcParts:
        messages = rpc.messages
        if not _has_messages_only(rpc):
            self._weigh(len(messages) + len(rpc.iwant) + len(rpc.idontwant) + len(rpc.graft) + len(rpc.prune))
            return rpc_parts(rpc)
        if len(messages) == 1:
            (message,) = messages
            size = len(message.data)
            refs = cast("list[MessageRef]", OneMessage(MessageRef(message.id, message.topic, size)))
        else:
            refs = [MessageRef(message.id, message.topic, len(message.data)) for message in messages]
            size = sum([len(message.data) for message in messages])
            self._weigh(len(refs))
        return (size, 0, None, refs, None, None, None, None, None, None)


def sample_below(share: float) -> int:
    """Return the CRC-32 below which a message belongs to the traced share."""
    return min(_ALL, max(1, round(share * _ALL)))


def _has_messages_only(rpc: Rpc) -> bool:
    return bool(rpc.messages) and not (
        rpc.ihave or rpc.idontwant or rpc.iwant or rpc.graft or rpc.prune or rpc.subscriptions
    )
