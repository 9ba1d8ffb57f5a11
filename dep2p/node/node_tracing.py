"""The trace of a node: what its snapshots are made of."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from dep2p.delivery.service import Delivery
from dep2p.host.interface import Host
from dep2p.limits import Limits
from dep2p.messaging.service import Messaging
from dep2p.node.services import RealmServices
from dep2p.node.tracer import Tracer, TraceSources
from dep2p.pubsub.service import PubSub
from dep2p.queues.broker.ownership import Keeping
from dep2p.traces.schema import Depth
from dep2p.types import PeerId


class Traced(Protocol):
    """What a trace needs of a node."""

    @property
    def peer_id(self) -> PeerId: ...
    @property
    def host(self) -> Host: ...
    def all_pubsubs(self) -> Sequence[PubSub]: ...
    def all_apps(self) -> Sequence[tuple[Messaging, Delivery | None]]: ...
    def all_services(self) -> Sequence[RealmServices]: ...


def make_tracer(node: Traced, keeping: Keeping, limits: Limits) -> Tracer:
    """One for a node, which need not be in any realm yet."""
    sources = TraceSources(
        pubsubs=node.all_pubsubs,
        apps=node.all_apps,
        parts=lambda: [keeping, *(services.sessions for services in node.all_services())],
        clocks=lambda: [services.clocks for services in node.all_services()],
        depths=lambda: _depths(node, keeping),
        connection_rtts=lambda: [
            (connection.peer, connection.rtt_s)
            for connection in node.host.connections()
            if connection.rtt_s is not None
        ],
    )
    return Tracer(node.peer_id, limits.trace_items_max, sources)


def _depths(node: Traced, keeping: Keeping) -> Iterator[Depth]:
    """What waits for acknowledgements, and in the queues that have been used since the start."""
    for services in node.all_services():
        outbox = services.delivery.stats()
        if outbox.waiting_items:
            yield Depth(f"outbox:{services.delivery.realm_id}", outbox.waiting_items, outbox.waiting_bytes)
    engine = keeping.engine_if_here
    for queue in [] if engine is None else list(engine.book.queues.values()):
        if queue.is_loaded and queue.items:
            yield Depth(f"queue:{queue.namespace}/{queue.name}", queue.items, queue.size_bytes)
