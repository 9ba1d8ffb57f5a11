"""The ways of one router's trace events: a buffer inside the process, the node's trace, both or neither."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from dep2p.gossipsub.effects import Deliver, Effect, Send
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import RpcMessage
from dep2p.gossipsub.tracing.libp2p_events import TRACE_TYPES, DeliverMessage, TraceBuffer
from dep2p.pubsub.peer_links import NeighbourStats
from dep2p.traces.schema import Depth
from dep2p.tracing.event_log import PENDING_MAX, LocalDelivery, TraceLog
from dep2p.types import PeerId

_AT_ONCE: Final = 2


class RouterTrace:
    """The trace of one pub/sub network's router.

    The code that performs an effect of one of `kinds` adds it to `pending`, and then the time. At `pending_max` entries
    it calls `flush`.
    """

    def __init__(self, router: Router, buffer: TraceBuffer | None) -> None:
        self._router = router
        self._buffer = buffer
        self._log: TraceLog | None = None
        self.kinds: Mapping[type, int] = TRACE_TYPES if buffer is not None else {}
        self.pending: list[Effect | LocalDelivery | float] = []
        self.pending_max: int = _AT_ONCE
        self.flush: Callable[[], None] = self._flush

    def to(self, log: TraceLog | None) -> None:
        """Give the router's events to a node's trace, which begins with the present state; None ends that."""
        self._log = log
        keeps = self._buffer is not None
        rpcs = log is not None and log.rpcs
        state = self._router.trace(on=keeps or log is not None, rpcs=keeps or rpcs, implied=keeps)
        self.pending, self.pending_max, self.flush = [], _AT_ONCE, self._flush
        self.kinds = TRACE_TYPES if keeps else {}
        if log is not None:
            if not keeps:
                self.pending, self.pending_max, self.flush = log.pending, PENDING_MAX, log.flush
                self.kinds = {**TRACE_TYPES, Deliver: 0, **({Send: 0} if rpcs else {})}
            now = trio.current_time()
            for event in state:
                log.pubsub(event, now)

    def _flush(self) -> None:
        """Give the pending events to both."""
        (event, now) = self.pending
        self.pending.clear()
        if self._log is not None:
            self._log.pubsub(event, now)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        if self._buffer is not None:
            self._buffer.put(event, now)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    def delivered_locally(self, message: RpcMessage, readers: int, now: float) -> None:
        """Record that subscriptions of this node's other programs got a message of this node."""
        if self._log is not None:
            self._log.pubsub(LocalDelivery(message, readers), now)

    def delivered_directly(self, message_id: bytes, topic: str, data: bytes, sender: PeerId, now: float) -> None:
        """Record a message that came past the router: otherwise it would count as lost."""
        if self._log is not None:
            self._log.pubsub(DeliverMessage(RpcMessage(message_id, b"", b"", topic, data), sender), now)


def depths_of(neighbours: Sequence[NeighbourStats]) -> list[Depth]:
    """Return the depth of each neighbour's queue that is not empty, for snapshots."""
    return [Depth(f"peer:{one.peer}", one.queued_items, one.queued_bytes) for one in neighbours if one.queued_items]
