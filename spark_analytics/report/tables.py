"""The tables of numbers on the page of a report."""

from collections.abc import Sequence
from typing import Final

from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.figures import Figures
from dep2p.spark_analytics.report.svg import escape

_ROWS: Final = 30
_NODES: Final = 15


def all_tables(found: Analysis, figures: Figures) -> list[str]:
    """The HTML of each table that has rows, and of those that are always shown."""
    made = (
        _topics(figures),
        _meshes(figures),
        _rpcs(figures),
        _queues(figures),
        _sessions(figures),
        _pushes(figures),
        _streams(figures),
        _poorest_nodes(found),
    )
    return [text for text in made if text]


def share_text(value: float | None) -> str:
    """``99.987%`` near the whole, ``12.3%`` elsewhere."""
    return "–" if value is None else f"{value:.3%}" if value > 0.99 and value < 1 else f"{value:.1%}"


def ms_text(value: float | None) -> str:
    """``1,234 ms``, or two digits below 10 ms."""
    return "–" if value is None else f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"


def _topics(figures: Figures) -> str:
    estimated = (
        {each["topic"]: each["count"] for each in figures["estimated"]["topics"]} if figures["estimated"] else {}
    )
    rows = [
        (
            topic["topic"],
            f"{topic['messages']:,}" + (f" (≈ {estimated[topic['topic']]:,})" if estimated else ""),
            f"{topic['deliveries']:,}",
            f"{topic['local_deliveries']:,}",
            share_text(topic["reliability"]),
            *(ms_text((topic["latency_ms"] or {}).get(name)) for name in ("p50", "p90", "p99", "max")),
            _number(topic["hops_mean"]),
            _number(topic["duplicates_per_delivery"]),
            _number(topic["rmr"]),
            share_text(topic["iwant_recovered"]),
        )
        for topic in figures["topics"][:_ROWS]
    ]
    counts = ("messages", "deliveries", "to own programs", "delivered")
    latency = ("p50", "p90", "p99", "max")
    heads = ("topic", *counts, *latency, "hops", "dup/deliv.", "RMR", "by IWANT")
    return _table("Topics", heads, rows)


def _meshes(figures: Figures) -> str:
    rows = [
        (
            topic["topic"],
            _number(topic["degree_mean"]),
            topic["degree_lowest"],
            topic["degree_highest"],
            share_text(topic["one_way"]),
            _number(topic["changes_per_node_minute"]),
            topic["islands_most"],
        )
        for topic in figures["mesh"][:_ROWS]
    ]
    return _table("Meshes", ("topic", "degree", "lowest", "highest", "one-way", "changes/node/min", "parts"), rows)


def _rpcs(figures: Figures) -> str:
    if not figures["rpcs"]:
        return ""
    rows = [(name.replace("_", " "), _number(value)) for name, value in figures["rpcs"].items()]
    return _table("RPCs", ("what", "value"), rows)


def _queues(figures: Figures) -> str:
    if not figures["queues"]:
        return ""
    rows = [
        (
            *(queue["queue"], queue["channel"], queue["messages"], queue["finished"]),
            share_text(queue["redelivered_share"]),
            *(queue["dead"], queue["order_violations"]),
            ms_text((queue["wait_ms"] or {}).get("p50")),
            ms_text((queue["service_ms"] or {}).get("p50")),
        )
        for queue in figures["queues"][:_ROWS]
    ]
    counts = ("messages", "finished", "redelivered", "dead", "order violations")
    return _table("Queues", ("queue", "channel", *counts, "wait p50", "service p50"), rows)


def _sessions(figures: Figures) -> str:
    if not figures["sessions"]:
        return ""
    rows = [(state, f"{each['times']:,}", f"{each['items']:,}") for state, each in figures["sessions"].items()]
    return _table("Sessions", ("what", "times", "pushes"), rows)


def _pushes(figures: Figures) -> str:
    taken = figures["pushes"]["latency_ms"]
    if not taken:
        return ""
    row = (f"{taken['n']:,}", *(ms_text(taken[name]) for name in ("p50", "p90", "p99")))
    return _table("Pushes, from sending to receipt", ("pushes", "p50", "p90", "p99"), [row])


def _streams(figures: Figures) -> str:
    if not figures["streams"]:
        return ""
    rows = [
        (
            *(each["name"], each["side"], each["state"], f"{each['streams']:,}"),
            *(f"{each['bytes_in']:,}", f"{each['bytes_out']:,}", ms_text(each["mean_us"] / 1000)),
        )
        for each in figures["streams"][:_ROWS]
    ]
    return _table("Streams", ("name", "side", "state", "streams", "bytes in", "bytes out", "mean time"), rows)


def _poorest_nodes(found: Analysis) -> str:
    nodes = found.tables["node_coverage"].groupby("node")[["eligible", "reached", "late_sum"]].sum()
    nodes = nodes[nodes["eligible"] > 0]
    order = (nodes["reached"] / nodes["eligible"]).sort_values(kind="stable").index[:_NODES]
    rows = [
        (
            node,
            f"{int(nodes.eligible[node]):,}",
            share_text(nodes.reached[node] / nodes.eligible[node]),
            f"{nodes.late_sum[node] / max(1, nodes.reached[node]) / 1000:+.1f} ms",
        )
        for node in order
    ]
    return _table("Nodes that miss most", ("node", "due", "got", "later than the median by"), rows)


def _number(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _table(name: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th{' class=n' if n else ''}>{escape(heading)}" for n, heading in enumerate(headings))
    lines = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=n' if n else ''}>{escape(value if value is not None else '–')}" for n, value in enumerate(row)
        )
        for row in rows
    )
    return f"<h3>{escape(name)}</h3><div class=wide><table><tr>{head}</tr>{lines}</table></div><br>"
