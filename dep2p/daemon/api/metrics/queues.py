"""Metrics of durable queues. Queues that were not used since the start are not loaded, and are only counted."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dep2p.daemon.api.context import Control

_QUEUES_MAX: Final = 1_000
"""Queues with metrics of their own; further ones are summed up under the name "…"."""
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


def _ownership(control: Control) -> Iterator[Metric]:
    """Yield the metrics of a failover group: whether this node is the broker of the queues, and the term."""
    status = control.node.queues.ownership.status()
    here = GaugeMetricFamily(
        "dep2p_queues_owner", "1 while this node is the broker of the queues of its store, 0: it is on standby."
    )
    here.add_metric([], 1.0 if status["role"] == "owner" else 0.0)
    yield here
    for name, text in (
        ("term", "The term of the broker of the queues; it rises with each failover."),
        ("silent_s", "For how long that node had not renewed, when it was looked at last."),
    ):
        gauge = GaugeMetricFamily(f"dep2p_queues_owner_{name.replace('_s', '_seconds')}", text)
        gauge.add_metric([], float(status.get(name, 0)))
        yield gauge
    turns = CounterMetricFamily("dep2p_queues_turns", "Its turns as the owner, and how they ended.", labels=["event"])
    for name in ("terms", "failovers", "terms_lost", "owner_checks_failed"):
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
    "taken_by_other_broker",
    "left_key_queue",
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
    "results_resent",
    "dead_lettered",
    "dead_letters_resent",
    "lost",
    "expired",
    "released_waiting",
    "partitions_lost",
    "deliveries_not_taken",
    "results_dropped_late",
    "shards_lost",
)
"""Events that are there before the first one is counted; there may be others."""


def queue_metrics(control: Control) -> Iterator[Metric]:
    """Yield the families of one scrape."""
    yield from _ownership(control)
    yield from _flows(control)
    yield from _distributed(control)
    engine = control.node.queues.ownership.engine_if_here
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
    for queue in list(engine.registry.queues.values()):
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
        ("bytes_on_disk", "Bytes of the store on disk."),
    ):
        gauge = GaugeMetricFamily(f"dep2p_queues_{name}" if name != "queues" else "dep2p_queues", text)
        gauge.add_metric([], float(statistics[name]))
        yield gauge
    healthy = GaugeMetricFamily("dep2p_queues_store_ok", "1 while the store works.")
    healthy.add_metric([], 0.0 if statistics["problem"] else 1.0)
    yield healthy
    events = CounterMetricFamily("dep2p_queues_store", "Counts of the store and its group commit.", labels=["event"])
    for name in ("commits", "fsyncs", "rows_written"):
        events.add_metric([name], float(statistics[name]))
    for name, count in sorted(engine.commits.counters.items()):
        if name != "commits":
            events.add_metric([name], count)
    yield events


def _flows(control: Control) -> Iterator[Metric]:
    """Yield the metrics of this node's producers and consumers, wherever their queues are."""
    flows = control.node.queues.ownership.flows
    for kind, known in (("producer", _PRODUCER_EVENTS), ("consumer", _CONSUMER_EVENTS)):
        events = CounterMetricFamily(
            f"dep2p_queue_{kind}_events", f"Events of the {kind}s of this node.", labels=["event"]
        )
        for name, count in sorted({**dict.fromkeys(known, 0), **flows.counts(kind)}.items()):
            events.add_metric([name], count)
        yield events
        values = GaugeMetricFamily(
            f"dep2p_queue_{kind}_values", f"Values of the {kind}s at this moment.", labels=["name"]
        )
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


def _distributed(control: Control) -> Iterator[Metric]:
    """Yield the metrics of distributed queues: those that this node controls, and messages that wait for nodes that are
    away."""
    family = GaugeMetricFamily("dep2p_queue_distributed", "Queues on several members.", labels=["realm", "name"])
    for realm in control.node.realms():
        for name, value in control.node.queues.distributed_values(realm.name).items():
            family.add_metric([realm.name, name], value)
    yield family
