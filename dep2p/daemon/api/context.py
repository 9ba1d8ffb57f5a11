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
from dep2p.daemon.api.resources.replies import ReplyDesk
from dep2p.daemon.api.resources.sessions import SessionDesk
from dep2p.daemon.api.resources.streams import StreamTable
from dep2p.daemon.api.resources.subscriptions import Subscriptions
from dep2p.daemon.api.resources.topics import TopicTable
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.lifecycle import Lifecycle
from dep2p.daemon.node_interface import NodeApi
from dep2p.daemon.nsq.server import NsqServer
from dep2p.daemon.realm_files import RealmFiles


@dataclass(slots=True, eq=False)
class Control:
    """What the routes work on."""

    node: NodeApi
    config: Config
    bounds: ControlBounds
    lifecycle: Lifecycle
    realm_files: RealmFiles
    subscriptions: Subscriptions
    events: EventFeed
    notifies: NotifyFeed
    replies: ReplyDesk
    streams: StreamTable
    topics: TopicTable
    queue_consumers: ConsumerTable
    sessions: SessionDesk
    nursery: trio.Nursery
    """For work that outlives the call which began it."""
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
    """NSQ clients, when [nsq] lets them in."""
    problems: list[str] = field(default_factory=list[str])
    """What is wrong although the daemon runs, for people: shown by the status."""


@asynccontextmanager
async def open_control(
    node: NodeApi, config: Config, *, bounds: ControlBounds | None = None
) -> AsyncGenerator[Control, None]:
    """The parts for a running node; their tasks end with the block."""
    bounds = bounds or ControlBounds.for_limits(config.limits)
    counts: Counter[str] = Counter()
    lifecycle = Lifecycle(node.drain, config.limits.drain_timeout_s)
    subscriptions = Subscriptions(bounds, counts)
    events = EventFeed(node, subscriptions, counts)
    error: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            streams = StreamTable(node, subscriptions, lifecycle, bounds, counts, nursery)
            nursery.start_soon(streams.reap)
            topics = TopicTable(node, subscriptions, bounds, counts)
            nursery.start_soon(topics.reap)
            sessions = SessionDesk(node, subscriptions, bounds)
            nursery.start_soon(sessions.reap)
            control = Control(
                node,
                config,
                bounds,
                lifecycle,
                RealmFiles(config.realms_dir),
                subscriptions,
                events,
                NotifyFeed(node, subscriptions),
                ReplyDesk(node, subscriptions, bounds),
                streams,
                topics,
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
