"""nsqd's statistics, from the present queues and connections. The fields have the names of nsqd's stats.go."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from dep2p.daemon.nsq.connection import NsqConnection
from dep2p.daemon.nsq.context import NsqContext
from dep2p.errors import Dep2pError
from dep2p.protocols.nsq.identify import VERSION
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.broker.engine import QueueEngine

TOPICS_MAX: Final = 10_000


class NsqLatency(Struct, frozen=True):
    """The latency of messages; not measured here."""

    count: int = 0
    percentiles: None = None


class NsqTopicPublishes(Struct, frozen=True, kw_only=True):
    """The number of messages that a client has published to a topic."""

    topic: str
    count: int


class NsqClientStats(Struct, frozen=True, kw_only=True):
    """A connection."""

    client_id: str
    hostname: str
    version: str = "V2"
    remote_address: str
    state: int
    ready_count: int
    in_flight_count: int
    message_count: int
    finish_count: int
    requeue_count: int
    connect_ts: int
    sample_rate: int
    deflate: bool = False
    snappy: bool = False
    user_agent: str
    topology_zone: str = ""
    topology_region: str = ""
    pub_counts: list[NsqTopicPublishes] | UnsetType = UNSET
    tls: bool = False
    tls_cipher_suite: str = ""
    tls_version: str = ""
    tls_negotiated_protocol: str = ""
    tls_negotiated_protocol_is_mutual: bool = False


class NsqChannelStats(Struct, frozen=True, kw_only=True):
    """A channel."""

    channel_name: str
    depth: int
    backend_depth: int
    in_flight_count: int
    deferred_count: int
    message_count: int
    requeue_count: int
    timeout_count: int
    client_count: int
    clients: list[NsqClientStats] | None
    paused: bool
    e2e_processing_latency: NsqLatency = NsqLatency()


class NsqTopicStats(Struct, frozen=True, kw_only=True):
    """A topic."""

    topic_name: str
    channels: list[NsqChannelStats]
    depth: int
    backend_depth: int
    message_count: int
    message_bytes: int
    paused: bool
    e2e_processing_latency: NsqLatency = NsqLatency()


class NsqStats(Struct, frozen=True, kw_only=True):
    """The JSON of /stats."""

    version: str
    health: str
    start_time: int
    topics: list[NsqTopicStats]
    producers: list[NsqClientStats] | None


async def stats_of(server: NsqContext, topic: str, channel: str, *, include_clients: bool) -> NsqStats:
    """Return the JSON of /stats. It loads a topic that is not in memory, to count it."""
    namespace, engine = server.namespace(), server.engine
    names = [name for name in engine.queue_names(namespace) if not topic or name == topic]
    topics: list[NsqTopicStats] = []
    for name in names[:TOPICS_MAX]:
        try:
            queue = await engine.loaded(namespace, name)
        except Dep2pError:
            continue  # the topic was deleted meanwhile
        if channel and channel not in queue.channels:
            continue
        chosen = [each for _, each in sorted(queue.channels.items()) if not channel or each.name == channel]
        connections = server.connections if include_clients else ()
        topics.append(_topic(queue, chosen, list(connections), include_clients=include_clients))
    producers = [
        _client(connection, topic)
        for connection in (server.connections if include_clients else ())
        if connection.consumer is None and connection.session.has_published
    ]
    return NsqStats(
        version=VERSION,
        health=health_of(engine),
        start_time=int(server.started_unix_s),
        topics=topics,
        producers=producers or None,
    )


def health_of(engine: QueueEngine) -> str:
    """Return the text of /ping."""
    problem = engine.statistics()["problem"]
    return f"NOK - {problem}" if problem else "OK"


def _topic(
    queue: Queue,
    channels: Iterable[Channel],
    connections: list[NsqConnection],
    *,
    include_clients: bool,
) -> NsqTopicStats:
    waiting = 0 if queue.channels else queue.items
    return NsqTopicStats(
        topic_name=queue.name,
        channels=[_channel(each, connections, include_clients=include_clients) for each in channels],
        depth=waiting,
        backend_depth=0 if queue.is_ephemeral else waiting,
        message_count=queue.counts["published"],
        message_bytes=queue.size_bytes,
        paused=queue.is_paused,
    )


_ENDS: Final = (
    "finished",
    "dead",
    "dropped_attempts_used_up",
    "expired",
    "emptied",
    "dropped_overflow",
    "filtered",
)
"""The ways in which a message leaves a channel for good."""


def _channel(channel: Channel, connections: list[NsqConnection], *, include_clients: bool) -> NsqChannelStats:
    counts, deferred = channel.counts, channel.deferred
    depth = max(0, channel.depth - deferred)
    is_memory = channel.queue.is_ephemeral or channel.name.endswith("#ephemeral")
    clients = [
        _client(connection, channel.queue.name)
        for connection in connections
        if connection.consumer is not None and connection.consumer.core.id in channel.consumers
    ]
    return NsqChannelStats(
        channel_name=channel.name,
        depth=depth,
        backend_depth=0 if is_memory else depth,
        in_flight_count=channel.in_flight,
        deferred_count=deferred,
        message_count=channel.depth + channel.in_flight + sum([counts[end] for end in _ENDS]),
        requeue_count=counts["requeued"],
        timeout_count=counts["timed_out"],
        client_count=len(channel.consumers),
        clients=clients if include_clients else None,
        paused=channel.is_paused,
    )


def _client(connection: NsqConnection, topic: str) -> NsqClientStats:
    session, counts, consumer = connection.session, connection.counts, connection.consumer
    settings = session.settings
    published = [
        NsqTopicPublishes(topic=name.removeprefix("topic "), count=count)
        for name, count in sorted(counts.items())
        if name.startswith("topic ") and (not topic or name == f"topic {topic}")
    ]
    return NsqClientStats(
        client_id=settings.client_id or connection.remote,
        hostname=settings.hostname,
        remote_address=connection.remote,
        state=int(session.state),
        ready_count=session.ready,
        in_flight_count=0 if consumer is None else len(consumer.core.held),
        message_count=counts["delivered"],
        finish_count=counts["finished"],
        requeue_count=counts["requeued"],
        connect_ts=connection.connected_s,
        sample_rate=settings.sample_rate,
        user_agent=settings.user_agent,
        pub_counts=published or UNSET,
    )


def as_text(stats: NsqStats, now_unix_s: float) -> str:
    """Return the human-readable form of nsqd."""
    started = datetime.fromtimestamp(stats.start_time).astimezone()
    lines = [
        f"nsqd v{stats.version}",
        f"start_time {started.isoformat()}",
        f"uptime {timedelta(seconds=max(0, int(now_unix_s - stats.start_time)))}",
        "",
        f"Health: {stats.health}",
        "",
        "Topics:" if stats.topics else "Topics: None",
    ]
    for topic in stats.topics:
        lines.append(
            f"{'*P' if topic.paused else '  '} [{topic.topic_name:<15}] depth: {topic.depth:<5} "
            f"be-depth: {topic.backend_depth:<5} msgs: {topic.message_count:<8} e2e%:"
        )
        for channel in topic.channels:
            lines.append(
                f"   {'*P' if channel.paused else '  '} [{channel.channel_name:<25}] "
                f"depth: {channel.depth:<5} be-depth: {channel.backend_depth:<5} "
                f"inflt: {channel.in_flight_count:<4} def: {channel.deferred_count:<4} "
                f"re-q: {channel.requeue_count:<5} timeout: {channel.timeout_count:<5} "
                f"msgs: {channel.message_count:<8} e2e%:"
            )
            for client in channel.clients or ():
                lines.append(
                    f"        [V2 {client.client_id:<21}] state: {client.state} inflt: "
                    f"{client.in_flight_count:<4} rdy: {client.ready_count:<4} fin: {client.finish_count:<8} "
                    f"re-q: {client.requeue_count:<8} msgs: {client.message_count:<8}"
                )
        lines.append("")
    producers = stats.producers or []
    lines.append("Producers:" if producers else "Producers: None")
    for client in producers:
        counts = [] if client.pub_counts is UNSET else client.pub_counts
        listed = ", ".join(f"{each.topic}: {each.count}" for each in counts)
        lines.append(f"   [V2 {client.client_id:<21}] msgs: {listed}")
    return "\n".join(lines) + "\n"
