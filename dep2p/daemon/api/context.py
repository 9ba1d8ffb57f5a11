"""The parts behind the control API, put together for one node."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from dep2p.config.loader import Config
from dep2p.daemon.api.resources.feeds import EventFeed, NotifyFeed
from dep2p.daemon.api.resources.queue_consumers import ConsumerTable
from dep2p.daemon.api.resources.receipts import ReceiptTable
from dep2p.daemon.api.resources.replies import PendingReplies
from dep2p.daemon.api.resources.sessions import SessionRegistry
from dep2p.daemon.api.resources.streams import StreamTable
from dep2p.daemon.api.resources.subscriptions import SubscriptionRegistry
from dep2p.daemon.api.resources.topics import TopicTable
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.lifecycle import Lifecycle
from dep2p.daemon.node_interface import NodeInterface
from dep2p.daemon.nsq.server import NsqServer
from dep2p.daemon.realm_files import RealmFiles


@dataclass(slots=True, eq=False)
class Control:
    """The parts of the daemon that the routes use."""

    node: NodeInterface
    config: Config
    bounds: ControlBounds
    lifecycle: Lifecycle
    realm_files: RealmFiles
    subscriptions: SubscriptionRegistry
    events: EventFeed
    notifies: NotifyFeed
    replies: PendingReplies
    streams: StreamTable
    topics: TopicTable
    receipts: ReceiptTable
    queue_consumers: ConsumerTable
    sessions: SessionRegistry
    nursery: trio.Nursery
    """The nursery for work that outlives the call which began it."""
    counts: Counter[str]
    """Drops and refusals of the control API, by reason."""
    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter[tuple[str, str, int]])
    """Answers, by method, route and status."""
    started_unix_s: float = field(default_factory=time.time)
    connections: Callable[[], int] = lambda: 0
    """Open control connections."""
    refused: Callable[[], int] = lambda: 0
    """Control connections refused because too many were open."""
    log_lines_dropped: Callable[[], int] = lambda: 0
    nsq: NsqServer | None = None
    """The NSQ server; None unless [nsq] is on."""
    problems: list[str] = field(default_factory=list[str])
    """Problems of a daemon that runs nevertheless, human-readable: the status shows them."""


@asynccontextmanager
async def open_control(
    node: NodeInterface, config: Config, *, bounds: ControlBounds | None = None
) -> AsyncGenerator[Control, None]:
    """Build the parts for a running node; their tasks end with the block."""
    bounds = bounds or ControlBounds.for_limits(config.limits)
    counts: Counter[str] = Counter()
    lifecycle = Lifecycle(node.drain, config.limits.drain_timeout_s)
    subscriptions = SubscriptionRegistry(bounds, counts)
    events = EventFeed(node, subscriptions, counts)
    error: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            streams = StreamTable(node, subscriptions, lifecycle, bounds, counts, nursery)
            nursery.start_soon(streams.reap)
            topics = TopicTable(node, subscriptions, bounds, counts)
            nursery.start_soon(topics.reap)
            sessions = SessionRegistry(node, subscriptions, bounds)
            nursery.start_soon(sessions.reap)
            control = Control(
                node,
                config,
                bounds,
                lifecycle,
                RealmFiles(config.realms_dir),
                subscriptions,
                events,
                NotifyFeed(node, subscriptions, bounds),
                PendingReplies(node, subscriptions, bounds),
                streams,
                topics,
                ReceiptTable(),
                ConsumerTable(subscriptions, counts),
                sessions,
                nursery,
                counts,
            )
            try:
                yield control
            except Exception as raised:
                error = raised
            nursery.cancel_scope.cancel()
    finally:
        events.close()
    if error is not None:
        raise error
