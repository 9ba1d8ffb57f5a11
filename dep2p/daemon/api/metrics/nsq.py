"""Metrics of NSQ clients."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dep2p.daemon.api.context import Control

_ALWAYS: Final = ("published", "delivered", "finished", "requeued", "touched")
_VALUES: Final = (
    "memory_bytes",
    "memory_bytes_largest_connection",
    "publishes_pending",
    "publishes_pending_largest_connection",
)


def nsq_metrics(control: Control) -> Iterator[Metric]:
    """Yield the families of one scrape."""
    connections = GaugeMetricFamily("dep2p_nsq_connections", "Open connections of NSQ clients.")
    consumers = GaugeMetricFamily("dep2p_nsq_consumers", "Those that have subscribed.")
    events = CounterMetricFamily(
        "dep2p_nsq_events", "What NSQ clients did, and what was dropped or refused, by reason.", labels=["event"]
    )
    values = GaugeMetricFamily("dep2p_nsq_values", "What NSQ clients hold at this moment.", labels=["name"])
    server = control.nsq
    connections.add_metric([], 0 if server is None else len(server.connections))
    consumers.add_metric([], 0 if server is None else server.consumer_count)
    counts = dict.fromkeys(_ALWAYS, 0) | (dict(server.counts) if server is not None else {})
    for event, count in sorted(counts.items()):
        events.add_metric([event], count)
    held = dict.fromkeys(_VALUES, 0) if server is None else server.values()
    for name, value in held.items():
        values.add_metric([name], value)
    yield connections
    yield consumers
    yield events
    yield values
