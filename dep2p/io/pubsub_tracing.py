"""Where the trace events of one router go: a buffer inside the process, the node's trace, both or neither."""

from collections.abc import Sequence

import trio

from dep2p.gossipsub.router import Router
from dep2p.gossipsub.rpc import Message
from dep2p.gossipsub.trace import DeliverMessage, Trace, TraceBuffer
from dep2p.io.pubsub_links import NeighbourStats
from dep2p.io.trace_log import TraceLog
from dep2p.traces.schema import Depth
from dep2p.types import PeerId


class RouterTrace:
    """Of one pub/sub network."""

    def __init__(self, router: Router, buffer: TraceBuffer | None) -> None:
        self._router = router
        self._buffer = buffer
        self._log: TraceLog | None = None

    def to(self, log: TraceLog | None) -> None:
        """Give the router's events to a node's trace, which begins with how things are now; None ends that."""
        self._log = log
        keeps = self._buffer is not None
        state = self._router.trace(on=keeps or log is not None, rpcs=keeps or (log is not None and log.rpcs))
        if log is not None:
            now = trio.current_time()
            for event in state:
                log.pubsub(event, now)

    def put(self, event: Trace, now: float) -> None:
        """An effect of the router, performed at ``now``."""
        if self._log is not None:
            self._log.pubsub(event, now)
        if self._buffer is not None:
            self._buffer.put(event, now)

    def delivered_directly(self, message_id: bytes, topic: str, data: bytes, sender: PeerId, now: float) -> None:
        """A message that came past the router: without this, it would count as lost."""
        if self._log is not None:
            self._log.pubsub(DeliverMessage(Message(message_id, b"", b"", topic, data), sender), now)


def depths_of(neighbours: Sequence[NeighbourStats]) -> list[Depth]:
    """What waits for each neighbour, where anything does, for snapshots."""
    return [Depth(f"peer:{one.peer}", one.queued_items, one.queued_bytes) for one in neighbours if one.queued_items]
