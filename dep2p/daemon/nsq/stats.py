"""nsqd's statistics, from the queues and connections that are there. Fields as nsqd's stats.go names them."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from dep2p.daemon.nsq.connection import NsqConnection
from dep2p.errors import Dep2pError
from dep2p.protocols.nsq.identify import VERSION
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.broker.engine import QueueEngine

if TYPE_CHECKING:
    from dep2p.daemon.nsq.server import NsqServer

TOPICS_MAX: Final = 10_000
_NO_LATENCY: Final = {"count": 0, "percentiles": None}


async def stats_of(server: "NsqServer", topic: str, channel: str, *, include_clients: bool) -> dict[str, Any]:
    """The JSON of /stats. A topic that is not in memory is loaded to be counted."""
    namespace, engine = server.namespace(), server.engine
    names = [name for name in engine.queue_names(namespace) if not topic or name == topic]
    topics: list[dict[str, Any]] = []
    for name in names[:TOPICS_MAX]:
        try:
            queue = await engine.loaded(namespace, name)
        except Dep2pError:
            continue  # deleted meanwhile
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
    return {
        "version": VERSION,
        "health": health_of(engine),
        "start_time": int(server.started_unix_s),
        "topics": topics,
        "producers": producers or None,
    }


def health_of(engine: QueueEngine) -> str:
    """What /ping says."""
    problem = engine.statistics()["problem"]
    return f"NOK - {problem}" if problem else "OK"


def _topic(
    queue: Queue,
    channels: Iterable[Channel],
    connections: list[NsqConnection],
    *,
    include_clients: bool,
) -> dict[str, Any]:
    waiting = 0 if queue.channels else queue.items
    return {
        "topic_name": queue.name,
        "channels": [_channel(each, connections, include_clients=include_clients) for each in channels],
        "depth": waiting,
        "backend_depth": 0 if queue.is_ephemeral else waiting,
        "message_count": queue.counts["published"],
        "message_bytes": queue.size_bytes,
        "paused": queue.is_paused,
        "e2e_processing_latency": _NO_LATENCY,
    }


def _channel(channel: Channel, connections: list[NsqConnection], *, include_clients: bool) -> dict[str, Any]:
    counts, deferred = channel.counts, channel.deferred
    depth = max(0, channel.depth - deferred)
    is_memory = channel.queue.is_ephemeral or channel.name.endswith("#ephemeral")
    clients = [
        _client(connection, channel.queue.name)
        for connection in connections
        if connection.consumer is not None and connection.consumer.core.id in channel.consumers
    ]
    return {
        "channel_name": channel.name,
        "depth": depth,
        "backend_depth": 0 if is_memory else depth,
        "in_flight_count": channel.in_flight,
        "deferred_count": deferred,
        "message_count": counts["delivered"] - counts["requeued"] - counts["timed_out"] + depth,
        "requeue_count": counts["requeued"],
        "timeout_count": counts["timed_out"],
        "client_count": len(channel.consumers),
        "clients": clients if include_clients else None,
        "paused": channel.is_paused,
        "e2e_processing_latency": _NO_LATENCY,
    }


def _client(connection: NsqConnection, topic: str) -> dict[str, Any]:
    session, counts, consumer = connection.session, connection.counts, connection.consumer
    settings = session.settings
    published = [
        {"topic": name.removeprefix("topic "), "count": count}
        for name, count in sorted(counts.items())
        if name.startswith("topic ") and (not topic or name == f"topic {topic}")
    ]
    return {
        "client_id": settings.client_id or connection.remote,
        "hostname": settings.hostname,
        "version": "V2",
        "remote_address": connection.remote,
        "state": int(session.state),
        "ready_count": session.ready,
        "in_flight_count": 0 if consumer is None else len(consumer.core.held),
        "message_count": counts["delivered"],
        "finish_count": counts["finished"],
        "requeue_count": counts["requeued"],
        "connect_ts": connection.connected_s,
        "sample_rate": settings.sample_rate,
        "deflate": False,
        "snappy": False,
        "user_agent": settings.user_agent,
        "topology_zone": "",
        "topology_region": "",
        **({"pub_counts": published} if published else {}),
        "tls": False,
        "tls_cipher_suite": "",
        "tls_version": "",
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": False,
    }


def as_text(stats: dict[str, Any], now_unix_s: float) -> str:
    """For people; the form of nsqd's."""
    started = datetime.fromtimestamp(stats["start_time"]).astimezone()
    lines = [
        f"nsqd v{stats['version']}",
        f"start_time {started.isoformat()}",
        f"uptime {timedelta(seconds=max(0, int(now_unix_s - stats['start_time'])))}",
        "",
        f"Health: {stats['health']}",
        "",
        "Topics:" if stats["topics"] else "Topics: None",
    ]
    for topic in stats["topics"]:
        lines.append(
            f"{'*P' if topic['paused'] else '  '} [{topic['topic_name']:<15}] depth: {topic['depth']:<5} "
            f"be-depth: {topic['backend_depth']:<5} msgs: {topic['message_count']:<8} e2e%:"
        )
        for channel in topic["channels"]:
            lines.append(
                f"   {'*P' if channel['paused'] else '  '} [{channel['channel_name']:<25}] "
                f"depth: {channel['depth']:<5} be-depth: {channel['backend_depth']:<5} "
                f"inflt: {channel['in_flight_count']:<4} def: {channel['deferred_count']:<4} "
                f"re-q: {channel['requeue_count']:<5} timeout: {channel['timeout_count']:<5} "
                f"msgs: {channel['message_count']:<8} e2e%:"
            )
            for client in channel["clients"] or ():
                lines.append(
                    f"        [V2 {client['client_id']:<21}] state: {client['state']} inflt: "
                    f"{client['in_flight_count']:<4} rdy: {client['ready_count']:<4} fin: {client['finish_count']:<8} "
                    f"re-q: {client['requeue_count']:<8} msgs: {client['message_count']:<8}"
                )
        lines.append("")
    producers: list[dict[str, Any]] = stats["producers"] or []
    lines.append("Producers:" if producers else "Producers: None")
    for client in producers:
        counts: list[dict[str, Any]] = client.get("pub_counts", [])
        told = ", ".join(f"{each['topic']}: {each['count']}" for each in counts)
        lines.append(f"   [V2 {client['client_id']:<21}] msgs: {told}")
    return "\n".join(lines) + "\n"
