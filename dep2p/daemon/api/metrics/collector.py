"""Prometheus metrics, made from the node's counters at each scrape: nothing is counted twice, or without a reader.

docs/reference/metrics.md documents each family; a test compares.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import dep2p
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.metrics.nsq import nsq_metrics
from dep2p.daemon.api.metrics.queues import queue_metrics

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_PARTS: Final = (
    "host",
    "realm",
    "messaging",
    "public_pubsub",
    "pubsub",
    "delivery",
    "sessions",
    "queues",
    "clocks",
    "trace",
    "quota",
)
_VALUES: Final = (
    "host_connections",
    "host_connections_unproven",
    "host_inbound_pending",
    "host_loop_delay_max_ms",
    "host_memory_bytes",
    "host_memory_bytes_circuits",
    "host_memory_bytes_largest_address_block",
    "host_memory_bytes_largest_peer",
    "host_memory_bytes_unproven",
    "host_memory_bytes_windows",
    "host_peers_known",
    "host_relay_circuits_held",
    "host_relay_circuits_held_members",
    "host_relay_reservations_held",
    "host_relay_reservations_held_members",
    "host_relay_reserved_held",
    "host_streams_unproven",
)
"""Counts of the node that can also fall."""


def render(control: Control) -> bytes:
    """Return the text of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_NodeCollector(control))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _NodeCollector(Collector):
    def __init__(self, control: Control) -> None:
        self._control = control

    def collect(self) -> Iterable[Metric]:
        yield from self._process()
        yield from self._network()
        yield from self._realms()
        yield from self._topics()
        yield from queue_metrics(self._control)
        yield from nsq_metrics(self._control)
        yield from self._counted()
        yield from self._api()

    def _process(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("dep2p_build_info", "Always 1; the label has the version.", labels=["version"])
        info.add_metric([dep2p.__version__], 1)
        yield info
        uptime = self._control.node.stats().get("uptime_s", 0.0)
        yield _gauge("dep2p_uptime_seconds", "Since the node started.", float(str(uptime)))
        running = self._control.lifecycle.state == "running"
        yield _gauge("dep2p_ready", "1 while the daemon takes work, 0 while it drains.", float(running))

    def _network(self) -> Iterator[Metric]:
        connections = self._control.node.host.connections()
        family = GaugeMetricFamily("dep2p_connections", "Open connections to peers.", labels=["direction"])
        for direction in ("inbound", "outbound"):
            family.add_metric([direction], sum(1 for each in connections if each.direction == direction))
        yield family
        yield _gauge("dep2p_peers", "Connected peers.", len(dict.fromkeys(each.peer for each in connections)))

    def _realms(self) -> Iterator[Metric]:
        realms = self._control.node.realms()
        yield _gauge("dep2p_realms", "Joined realms.", len(realms))
        family = GaugeMetricFamily("dep2p_realm_members", "Members known, by state.", labels=["realm", "state"])
        for realm in realms:
            family.add_metric([realm.name, "up"], realm.members_up)
            family.add_metric([realm.name, "other"], realm.members_known - realm.members_up)
        yield family

    def _topics(self) -> Iterator[Metric]:
        topics = self._control.node.topics()
        yield _gauge("dep2p_topics", "Joined topics.", len(topics))
        families = {
            "peers": "Neighbours that are subscribed.",
            "mesh": "Neighbours with which every message of the topic is exchanged.",
            "subscriptions": "Open subscriptions on this node.",
            "buffered_items": "Messages that wait for their readers.",
        }
        for name, help_text in families.items():
            family = GaugeMetricFamily(f"dep2p_topic_{name}", help_text, labels=["realm", "topic"])
            for topic in topics:
                family.add_metric([topic.realm or "", topic.topic], getattr(topic, name))
            yield family

    def _counted(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "dep2p_node_events",
            "Counts of the node: messages, bytes, drops and refusals, each with its reason.",
            labels=["part", "event"],
        )
        values = GaugeMetricFamily("dep2p_node_values", "Values of the node at this moment.", labels=["part", "name"])
        for name, count in sorted(self._control.node.counters().items()):
            part = next((part for part in _PARTS if name.startswith(f"{part}_")), "node")
            (values if name in _VALUES else family).add_metric([part, name.removeprefix(f"{part}_")], count)
        yield family
        yield values

    def _api(self) -> Iterator[Metric]:
        control = self._control
        requests = CounterMetricFamily(
            "dep2p_control_requests", "Answers of the control API.", labels=["method", "route", "status"]
        )
        for (method, route, status), count in sorted(control.requests.items()):
            requests.add_metric([method, route, str(status)], count)
        yield requests
        counted = CounterMetricFamily(
            "dep2p_control_events", "Drops and refusals of the control API, and events reported.", labels=["event"]
        )
        for event, count in sorted(control.counts.items()):
            counted.add_metric([event], count)
        yield counted
        yield _gauge("dep2p_control_connections", "Open control connections.", control.connections())
        refused = CounterMetricFamily("dep2p_control_refused", "Control connections refused: too many were open.")
        refused.add_metric([], control.refused())
        yield refused
        yield _gauge("dep2p_control_streams", "Streams that control clients drive.", len(control.streams))
        yield _gauge("dep2p_control_in_flight", "Control calls and streams at work.", control.lifecycle.in_flight)
        yield _gauge(
            "dep2p_control_notifies_unconfirmed",
            "Reliable messages that programs have in hand.",
            control.notifies.unconfirmed_count,
        )
        yield _gauge("dep2p_control_replies_pending", "Requests that wait for a client.", control.replies.pending_count)
        subscriptions = GaugeMetricFamily("dep2p_control_subscriptions", "Open subscriptions.", labels=["kind"])
        open_now = control.subscriptions.by_kind()
        for kind in ("events", "notifies", "replies", "streams", "topics", "deliveries", "sessions", "queues"):
            subscriptions.add_metric([kind], open_now.get(kind, 0))
        yield subscriptions
        dropped = CounterMetricFamily("dep2p_log_lines_dropped", "Log lines lost: full disk, or too many at once.")
        dropped.add_metric([], control.log_lines_dropped())
        yield dropped


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text)
    family.add_metric([], value)
    return family
