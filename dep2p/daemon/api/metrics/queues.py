"""Metrics of durable queues. Queues that nobody has used since the start are not loaded, and are only counted."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dep2p.daemon.api.context import Control

_QUEUES_MAX: Final = 1_000
"""More are summed up under the name "…"."""
_GAUGES: Final = {
    "messages": "Messages in the log.",
    "bytes": "Bytes of their bodies.",
    "in_flight": "Messages in the hands of consumers, over all channels.",
    "deferred": "Messages that wait for their time, over all channels.",
    "consumers": "Connected consumers.",
}
_COUNTS: Final = {
    "published": "Messages that were taken.",
    "delivered": "Messages handed to consumers, over all channels.",
    "finished": "Messages finished.",
    "requeued": "Messages that a consumer gave back for another try.",
    "timed_out": "Messages that were not settled in time.",
    "dead": "Messages that became dead letters.",
}


def _keeping(control: Control) -> Iterator[Metric]:
    """Of several nodes on a store: which one keeps the queues."""
    status = control.node.queues.keeping.status()
    here = GaugeMetricFamily("dep2p_queues_owner", "1 while this node keeps the queues of its store, 0: it stands by.")
    here.add_metric([], 1.0 if status["role"] == "owner" else 0.0)
    yield here
    for name, text in (
        ("term", "Of the node that keeps the queues; it rises with each takeover."),
        ("silent_s", "For how long that node had not renewed, when it was looked at last."),
    ):
        gauge = GaugeMetricFamily(f"dep2p_queues_owner_{name.replace('_s', '_seconds')}", text)
        gauge.add_metric([], float(status.get(name, 0)))
        yield gauge
    turns = CounterMetricFamily("dep2p_queues_turns", "Its turns as the owner, and how they ended.", labels=["event"])
    for name in ("terms", "takeovers", "terms_lost", "looks_failed"):
        turns.add_metric([name], float(status.get(name, 0)))
    yield turns


_PRODUCER_EVENTS: Final = (
    "submitted",
    "taken",
    "failed_retry",
    "failed_flow_control",
    "failed_refused",
    "held_back",
    "moved",
    "taken_elsewhere",
    "left_their_line",
    "given_up",
    "withdrawn",
    "failed_at_the_end",
)
_CONSUMER_EVENTS: Final = (
    "arrived",
    "done",
    "failed",
    "rejected",
    "cancelled",
    "confirmed",
    "results_told_again",
    "dead_lettered",
    "dead_letters_told_again",
    "lost",
    "expired",
    "released_waiting",
    "partitions_lost",
    "deliveries_not_taken",
    "results_dropped_late",
    "shares_lost",
)
"""They are there before the first one is counted; there may be others."""


def queue_metrics(control: Control) -> Iterator[Metric]:
    """The families of one scrape."""
    yield from _keeping(control)
    yield from _flows(control)
    yield from _placed(control)
    engine = control.node.queues.keeping.engine_if_here
    if engine is None:
        return
    names = {str(realm.realm_id): realm.name for realm in control.node.realms()}
    gauges = {
        name: GaugeMetricFamily(f"dep2p_queue_{name}", text, labels=["realm", "queue"])
        for name, text in _GAUGES.items()
    }
    counters = {
        name: CounterMetricFamily(f"dep2p_queue_{name}", text, labels=["realm", "queue"])
        for name, text in _COUNTS.items()
    }
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for queue in list(engine.book.queues.values()):
        if not queue.is_loaded:
            continue
        channels = list(queue.channels.values())
        values: dict[str, float] = {
            "messages": queue.items,
            "bytes": queue.size_bytes,
            "in_flight": sum(channel.in_flight for channel in channels),
            "deferred": sum(channel.deferred for channel in channels),
            "consumers": sum(len(channel.consumers) for channel in channels),
            "published": queue.counts["published"],
        }
        for name in _COUNTS:
            values.setdefault(name, sum(channel.counts[name] for channel in channels))
        label = (names.get(queue.namespace, queue.namespace), queue.name if len(sums) < _QUEUES_MAX else "…")
        total = sums.setdefault(label, {})
        for name, value in values.items():
            total[name] = total.get(name, 0) + value
    for label, values in sums.items():
        for name, family in gauges.items():
            family.add_metric(list(label), values[name])
        for name, counter in counters.items():
            counter.add_metric(list(label), values[name])
    yield from gauges.values()
    yield from counters.values()
    statistics = engine.statistics()
    for name, text in (
        ("queues", "Queues that this node keeps."),
        ("pending_items", "Messages that wait to become durable."),
        ("pending_bytes", "Their bytes."),
        ("cached_bytes", "Messages kept in memory, so that live traffic reads no disk."),
        ("bytes_on_disk", "What the store takes."),
    ):
        gauge = GaugeMetricFamily(f"dep2p_queues_{name}" if name != "queues" else "dep2p_queues", text)
        gauge.add_metric([], float(statistics[name]))
        yield gauge
    healthy = GaugeMetricFamily("dep2p_queues_store_ok", "1 while the store works.")
    healthy.add_metric([], 0.0 if statistics["problem"] else 1.0)
    yield healthy
    events = CounterMetricFamily("dep2p_queues_store", "What the store and its group commit counted.", labels=["event"])
    for name in ("commits", "fsyncs", "rows_written"):
        events.add_metric([name], float(statistics[name]))
    for name, count in sorted(engine.commits.counters.items()):
        if name != "commits":
            events.add_metric([name], count)
    yield events


def _flows(control: Control) -> Iterator[Metric]:
    """Of producers and consumers of this node, wherever their queues are."""
    flows = control.node.queues.keeping.flows
    for kind, known in (("producer", _PRODUCER_EVENTS), ("consumer", _CONSUMER_EVENTS)):
        events = CounterMetricFamily(f"dep2p_queue_{kind}_events", f"What {kind}s of this node did.", labels=["event"])
        for name, count in sorted({**dict.fromkeys(known, 0), **flows.counts(kind)}.items()):
            events.add_metric([name], count)
        yield events
        values = GaugeMetricFamily(f"dep2p_queue_{kind}_values", f"What {kind}s have at this moment.", labels=["name"])
        for name, value in sorted({"at_work": 0.0, **flows.values(kind)}.items()):
            values.add_metric([name], value)
        yield values
    family = HistogramMetricFamily(
        "dep2p_queue_handover_seconds",
        "Handing partitions of exclusive channels over, and taking them.",
        labels=["step"],
    )
    found = flows.handovers()
    for step, durations in (("give", found.given), ("take", found.taken)):
        up_to = list(accumulate(durations.counts))
        bounds = [*map(str, durations.BOUNDS_S), "+Inf"]
        family.add_metric([step], list(zip(bounds, up_to, strict=True)), durations.sum_s)
    yield family


def _placed(control: Control) -> Iterator[Metric]:
    """Of queues on several members: those that this node is the home of, and what waits for nodes that are away."""
    family = GaugeMetricFamily("dep2p_queue_placed", "Queues on several members.", labels=["realm", "name"])
    for realm in control.node.realms():
        for name, value in control.node.queues.placed_values(realm.name).items():
            family.add_metric([realm.name, name], value)
    yield family
