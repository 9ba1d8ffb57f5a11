"""Metrics of NSQ clients; none while [nsq] lets none in."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dep2p.daemon.control import Control


def nsq_metrics(control: Control) -> Iterator[Metric]:
    """The families of one scrape."""
    connections = GaugeMetricFamily("dep2p_nsq_connections", "Open connections of NSQ clients.")
    consumers = GaugeMetricFamily("dep2p_nsq_consumers", "Those that have subscribed.")
    events = CounterMetricFamily(
        "dep2p_nsq_events", "What NSQ clients did, and what was dropped or refused, by reason.", labels=["event"]
    )
    server = control.nsq
    connections.add_metric([], 0 if server is None else len(server.connections))
    consumers.add_metric([], 0 if server is None else server.consumer_count)
    for event, count in sorted(server.counts.items()) if server is not None else ():
        events.add_metric([event], count)
    yield connections
    yield consumers
    yield events
