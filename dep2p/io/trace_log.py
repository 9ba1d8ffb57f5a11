"""Events on their way from a node's parts to its trace: made in the node's own thread, so every step here is cheap.

The parts ask `is_on` and call the method of their kind. Encoding, numbering and writing happen in a worker thread
(:mod:`dep2p.io.trace_files`).
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final, cast

import trio

from dep2p.gossipsub.rpc import Rpc
from dep2p.gossipsub.trace import DeliverMessage, DropRpc, DuplicateMessage, PublishMessage, RecvRpc, SendRpc, Trace
from dep2p.gossipsub.trace_events import RpcParts, rpc_parts, trace_events
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.traces.schema import Event, MessageRef, OneMessage
from dep2p.types import PeerId

WAKE_AT: Final = 2_048
"""So many events wake the writer before its time: four frames, and a hop to a thread for two thousand events."""
_IDS_PER_ITEM: Final = 16
"""An RPC with many ids takes the room of one event for each sixteen of them."""
_RPCS: Final = (RecvRpc, SendRpc, DropRpc)


class TraceLog:
    """A bounded buffer of events. Full, it takes no more and counts, until the writer has taken what it holds."""

    __slots__ = (
        "_events",
        "_items_max",
        "_last_now",
        "_last_t_us",
        "_mark",
        "_offset_s",
        "_wall",
        "_weight",
        "dropped",
        "is_on",
        "node",
        "rpcs",
        "wake",
    )

    def __init__(self, node: PeerId, items_max: int, *, wall: Callable[[], float] = time.time) -> None:
        """``wall``: seconds since the Unix epoch."""
        self.is_on = False
        """Somebody writes what comes; else nothing must be given."""
        self.rpcs = False
        self.dropped: Counter[str] = Counter()
        """Events that were not taken, by reason; all since the node began."""
        self.wake: Callable[[], None] = lambda: None
        """Called when there is enough to be written."""
        self.node = node
        self._items_max = items_max
        self._wall = wall
        self._events: list[Event] = []
        self._mark = 0
        self._weight = 0
        self._offset_s = 0.0
        self._last_now = float("-inf")
        self._last_t_us = 0

    def __len__(self) -> int:
        return len(self._events)

    # The writer's side

    def start(self, *, rpcs: bool) -> None:
        """Take events from now on."""
        self._events = []
        self.rpcs = rpcs
        self._reset_mark()
        self.set_clock()
        self.is_on = True

    def stop(self) -> None:
        """Take none any more; what is there can still be taken out."""
        self.is_on = False

    def set_clock(self) -> None:
        """Follow the wall clock: it may have been set since."""
        self._offset_s = self._wall() - trio.current_time()
        self._last_now = float("-inf")

    def take(self) -> list[Event]:
        """All that is there, oldest first."""
        events, self._events = self._events, []
        self._reset_mark()
        return events

    def _reset_mark(self) -> None:
        self._weight = 0
        self._mark = min(WAKE_AT, self._items_max)

    def t_us(self, now: float | None = None) -> int:
        """µs since the Unix epoch at a time of trio's clock, or now."""
        return int(((trio.current_time() if now is None else now) + self._offset_s) * 1e6)

    # The parts' side

    def put(self, event: Event) -> None:
        """Take an event; its ``seq`` is given when it is written."""
        events = self._events
        if not self.is_on or (len(events) >= self._mark and not self._has_room()):
            return
        events.append(event)

    def put_last(self, event: Event) -> None:
        """Take the last event of a run, however full it is: without it the node counts as killed."""
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

    def pubsub(self, trace: Trace, now: float) -> None:
        """An effect of a router, performed at ``now``."""
        if now != self._last_now:
            self._last_now = now
            self._last_t_us = int((now + self._offset_s) * 1e6)
        t = self._last_t_us
        event: Event
        if isinstance(trace, DeliverMessage):
            message = trace.message
            sender = trace.received_from
            event = schema.Deliver(V, self.node, 0, t, message.id, message.topic, sender, len(message.data))
        elif isinstance(trace, DuplicateMessage):
            message = trace.message
            sender = trace.received_from
            event = schema.Duplicate(V, self.node, 0, t, message.id, message.topic, sender, len(message.data))
        elif isinstance(trace, PublishMessage):
            message = trace.message
            event = schema.Publish(V, self.node, 0, t, message.id, message.topic, len(message.data))
        elif isinstance(trace, _RPCS):
            self._rpc(trace, t)
            return
        else:
            for event in trace_events(trace, self.node, 0, t):
                self.put(event)
            return
        events = self._events
        if len(events) < self._mark or self._has_room():
            events.append(event)

    def _rpc(self, trace: RecvRpc | SendRpc | DropRpc, t: int) -> None:
        rpc = trace.rpc
        if _has_messages_only(rpc):
            messages = rpc.messages
            if len(messages) == 1:
                (message,) = messages
                size = len(message.data)
                refs = cast("list[MessageRef]", OneMessage(MessageRef(message.id, message.topic, size)))
            else:
                refs = [MessageRef(message.id, message.topic, len(message.data)) for message in messages]
                size = sum([len(message.data) for message in messages])
                self._weigh(len(refs))
            self._put_rpc(trace, t, (size, 0, None, refs, None, None, None, None, None, None))
            return
        self._weigh(len(rpc.messages) + len(rpc.iwant) + len(rpc.idontwant) + len(rpc.graft) + len(rpc.prune))
        self._put_rpc(trace, t, rpc_parts(rpc))

    def _put_rpc(self, trace: RecvRpc | SendRpc | DropRpc, t: int, parts: RpcParts) -> None:
        node = self.node
        if isinstance(trace, RecvRpc):
            self.put(schema.RecvRpc(V, node, 0, t, trace.received_from, *parts))
        elif isinstance(trace, SendRpc):
            for peer in trace.send_to:
                self.put(schema.SendRpc(V, node, 0, t, peer, *parts))
        else:
            self.put(schema.DropRpc(V, node, 0, t, trace.send_to, *parts))


def _has_messages_only(rpc: Rpc) -> bool:
    return bool(rpc.messages) and not (
        rpc.ihave or rpc.idontwant or rpc.iwant or rpc.graft or rpc.prune or rpc.subscriptions
    )
