"""The plots of the page, section by section: (name, what it shows, SVG)."""

from typing import Final

import numpy as np
import pandas as pd

from dep2p.spark_analytics.findings.model import short
from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.figures import Figures
from dep2p.spark_analytics.report import svg
from dep2p.spark_analytics.report.svg import Band, Series

_TOPICS: Final = 6
_CELLS: Final = 160
_GOOD: Final = ((178, 34, 34), (240, 196, 90), (34, 139, 84))
_HOT: Final = ((247, 247, 252), (98, 150, 220), (60, 60, 140), (190, 40, 90))


_SHOWN_FROM: Final = 0.001
"""The share at which curves begin: a single value near zero would stretch a logarithmic axis by decades."""


def _cdf(table: pd.DataFrame, value: str, count: str) -> list[tuple[float, float]]:
    grouped = table.groupby(value)[count].sum().sort_index()
    share = grouped.cumsum() / grouped.sum()
    points = [(float(x) / 1000, float(y)) for x, y in share.items()]
    points = [point for point in points if point[1] >= _SHOWN_FROM]
    if len(points) > 300:
        keep = np.unique(np.linspace(0, len(points) - 1, 300).astype(int))
        points = [points[n] for n in keep]
    return points


def _time(found: Analysis) -> svg.TimeAxis:
    return svg.TimeAxis(found.first_t / 1e6, found.last_t - found.first_t >= 7_200_000_000)


def _at(found: Analysis, bucket: float) -> float:
    return (bucket * found.bucket_us - found.first_t) / 1e6


def propagation(found: Analysis, figures: Figures) -> list[tuple[str, str, str]]:
    tables = found.tables
    top = [topic["topic"] for topic in figures["topics"][:_TOPICS]]
    latency = tables["latency"]
    lines = [Series(topic, _cdf(latency[latency["topic"] == topic], "latency_us", "deliveries")) for topic in top]
    text = _time(found)
    coverage = tables["node_coverage"]
    due = coverage.groupby("bucket")[["eligible", "reached"]].sum()
    due = due[due["eligible"] > 0]
    mean = [(_at(found, bucket), row.reached / row.eligible) for bucket, row in due.iterrows()]
    single = coverage[coverage["eligible"] > 0]
    shares = (single["reached"] / single["eligible"]).groupby(single["bucket"]).min()
    worst = [(_at(found, bucket), float(value)) for bucket, value in shares.items()]
    hops = tables["hops"]
    by_hops = hops[hops["hops"] > 0].groupby("hops")["deliveries"].sum()
    return [
        (
            "Latency",
            "share of first deliveries within a time after the publish, by topic",
            svg.plot(
                [line for line in lines if line.points],
                svg.Axes("ms", "share of deliveries", y_range=(0, 1), log_x=True),
            ),
        ),
        (
            "Delivered",
            "by the time of the publish: of all that should have got it",
            svg.plot(
                [Series("all", mean), Series("worst node", worst)],
                svg.Axes("UTC", "share delivered", x_text=text, y_range=(0, 1.02)),
            ),
        ),
        (
            "Who got what, when",
            "a row is a node, worst on top; red: messages that it should have had and did not",
            _coverage_map(found),
        ),
        (
            "Hops",
            "from the publisher, over the peers that were first",
            svg.bars([(str(n), float(count)) for n, count in by_hops.items()], x_label="hops", y_label="deliveries"),
        ),
        ("Tree of a message", _tree_words(tables["tree"]), _tree_plot(tables["tree"])),
        (
            "Delay between peers",
            "mean time from a peer's own receipt to the first delivery at the next, ms",
            _delay_map(tables["links"]),
        ),
        ("Duplicates", "further copies for each first delivery", _duplicates(found)),
        (
            "Who is first",
            "share of first deliveries among all copies that a peer sends",
            _first_rates(tables["copies"]),
        ),
    ]


def _coverage_map(found: Analysis) -> str:
    coverage = found.tables["node_coverage"]
    coverage = coverage[coverage["eligible"] > 0]
    if not len(coverage):
        return svg.nothing()
    share = (coverage["reached"] / coverage["eligible"]).rename("share")
    wide = pd.concat([coverage[["node", "bucket"]], share], axis=1).pivot(
        index="node", columns="bucket", values="share"
    )
    wide = wide.loc[wide.mean(axis=1).sort_values(kind="stable").index[:_CELLS]]
    full = wide.reindex(columns=range(int(wide.columns.min()), int(wide.columns.max()) + 1))
    if full.shape[1] > 400:
        full = wide
    cells = [[None if np.isnan(value) else float(value) for value in row] for row in full.to_numpy(dtype=float)]
    text = _time(found)
    ends = (text(_at(found, full.columns[0])), text(_at(found, full.columns[-1])))
    return svg.heat_map(cells, svg.Scale(0, 1, _GOOD), x_label="UTC", y_label="node", x_ends=ends)


def _delay_map(links: pd.DataFrame) -> str:
    if not len(links):
        return svg.nothing()
    busiest = links.groupby("receiver")["firsts"].sum().sort_values(ascending=False).index[:_CELLS]
    nodes = sorted(busiest)
    place = {node: n for n, node in enumerate(nodes)}
    cells: list[list[float | None]] = [[None] * len(nodes) for _ in nodes]
    for row in links.itertuples(index=False):
        if row.sender in place and row.receiver in place:
            cells[place[row.receiver]][place[row.sender]] = row.delay_sum / row.firsts / 1000
    values = sorted(value for line in cells for value in line if value is not None)
    if not values:
        return svg.nothing()
    high = values[min(len(values) - 1, int(len(values) * 0.98))]
    return svg.heat_map(cells, svg.Scale(0, max(high, 0.001), _HOT), x_label="from", y_label="to")


def _tree_words(tree: pd.DataFrame) -> str:
    if not len(tree):
        return "none was published in the trace"
    return f"message {tree['msg'].iloc[0]}: {len(tree) - 1} nodes; the slowest one unless another was asked for"


def _tree_plot(tree: pd.DataFrame) -> str:
    shown = tree.head(400)
    return svg.tree(
        [
            (row.node, row.parent if isinstance(row.parent, str) else None, int(row.hops), row.latency_us / 1000)
            for row in shown.itertuples(index=False)
        ]
    )


def _duplicates(found: Analysis) -> str:
    activity = found.tables["activity"]
    bucket = (activity["first_t"] // found.bucket_us).rename("step")
    sums = activity.groupby(bucket)[["deliver", "duplicate"]].sum()
    sums = sums[sums["deliver"] > 0]
    points = [(_at(found, step), row.duplicate / row.deliver) for step, row in sums.iterrows()]
    return svg.plot([Series("", points)], svg.Axes("UTC", "duplicates per delivery", x_text=_time(found)))


def _first_rates(copies: pd.DataFrame) -> str:
    sums = copies.dropna(subset=["peer"]).groupby("peer")[["firsts", "duplicates"]].sum()
    sums = sums[sums["firsts"] + sums["duplicates"] > 0]
    if not len(sums):
        return svg.nothing()
    rates = (sums["firsts"] / (sums["firsts"] + sums["duplicates"])).sort_values(ascending=False)
    step = max(1, len(rates) // 60)
    return svg.bars(
        [(short(peer), float(rate)) for peer, rate in rates.iloc[::step].items()],
        x_label="peers",
        y_label="share first",
    )


def meshes(found: Analysis) -> list[tuple[str, str, str]]:
    tables = found.tables
    degree = tables["degree"].sort_values("bucket")
    text = _time(found)
    top = degree.groupby("topic")["nodes"].max().sort_values(ascending=False).index[:_TOPICS]
    lines, bands = [], []
    for topic in top:
        rows = degree[degree["topic"] == topic]
        xs = [_at(found, bucket + 1) for bucket in rows["bucket"]]
        lines.append(Series(str(topic), list(zip(xs, map(float, rows["mean"]), strict=True))))
        bands.append(
            Band(str(topic), list(zip(xs, map(float, rows["lowest"]), map(float, rows["highest"]), strict=True)))
        )
    sides = tables["symmetry"].groupby("bucket")[["links", "one_way"]].sum().sort_index()
    one_way = [(_at(found, bucket + 1), row.one_way / row.links) for bucket, row in sides.iterrows() if row.links]
    lengths = (tables["mesh_sessions"]["end"] - tables["mesh_sessions"]["begin"]) / 1000
    session = pd.DataFrame({"ms": lengths.clip(lower=1).round(), "n": 1})
    scores = tables["score_spread"].sort_values("bucket")
    xs = [_at(found, bucket) for bucket in scores["bucket"]]
    score_lines = [Series(name, list(zip(xs, map(float, scores[name]), strict=True))) for name in ("p50", "p10", "p90")]
    return [
        (
            "Degree",
            "mesh peers of subscribed nodes over time: mean, lowest and highest",
            svg.plot(lines, svg.Axes("UTC", "mesh peers", x_text=text), bands=bands),
        ),
        (
            "One-way links",
            "mesh links that only one of two traced ends has",
            svg.plot([Series("", one_way)], svg.Axes("UTC", "share", x_text=text)),
        ),
        (
            "How long links last",
            "from GRAFT to PRUNE, open ones to the end of the trace",
            svg.plot(
                [Series("", _cdf(session, "ms", "n"))] if len(session) else [],
                svg.Axes("s", "share of mesh links", y_range=(0, 1), log_x=True),
            ),
        ),
        (
            "Scores",
            "that nodes give their peers, over time",
            svg.plot(score_lines if len(scores) else [], svg.Axes("UTC", "score", x_text=text, y_range=(None, None))),
        ),
    ]


def losses(found: Analysis) -> list[tuple[str, str, str]]:
    tables = found.tables
    text = _time(found)
    islands = tables["islands"].groupby("bucket")["islands"].max().sort_index()
    parts = [(_at(found, bucket + 1), float(count)) for bucket, count in islands.items()]
    coverage = tables["node_coverage"].groupby("bucket")[["eligible", "reached"]].sum().sort_index()
    missing = [(_at(found, bucket), float(row.eligible - row.reached)) for bucket, row in coverage.iterrows()]
    drops = tables["drops"].groupby("bucket")["drops"].sum().sort_index()
    dropped = [(_at(found, bucket), float(count)) for bucket, count in drops.items()]
    reasons = tables["rejects"].groupby("reason")["rejects"].sum().sort_values(ascending=False)
    runs = tables["runs"]
    marks = [
        (_at(found, row.last_t / found.bucket_us), f"{short(row.node)} ends")
        for row in runs[(runs["stopped"] == 0) & (runs["last_t"] < found.last_t - 5_000_000)]
        .head(8)
        .itertuples(index=False)
    ]
    return [
        (
            "Timeline of loss",
            "deliveries missing, by the time of the publish; RPCs dropped; nodes that ended without a word",
            svg.plot(
                [Series("deliveries missing", missing, steps=True), Series("RPCs dropped", dropped, steps=True)],
                svg.Axes("UTC", "count", x_text=text),
                marks=marks,
            ),
        ),
        (
            "Parts of the mesh",
            "1 is whole; more is a partition",
            svg.plot([Series("", parts, steps=True)], svg.Axes("UTC", "parts", x_text=text)),
        ),
        (
            "Rejected",
            "messages that were not taken, by reason",
            svg.bars(
                [(reason or "(no reason)", float(n)) for reason, n in reasons.head(12).items()],
                x_label="reason",
                y_label="messages",
            ),
        ),
    ]


def apps(found: Analysis) -> list[tuple[str, str, str]]:
    tables = found.tables
    cards: list[tuple[str, str, str]] = []
    if len(tables["ack_latency"]):
        cards.append(
            (
                "Acknowledged",
                "time from a reliable send to its acknowledgement",
                svg.plot(
                    [Series("", _cdf(tables["ack_latency"], "latency_us", "messages"))],
                    svg.Axes("ms", "share of messages", y_range=(0, 1), log_x=True),
                ),
            )
        )
    pushes = tables["push_latency"]
    if len(pushes):
        busiest = pushes.groupby("sender")["pushes"].sum().sort_values(ascending=False).index[:8]
        lines = [
            Series(short(server), _cdf(pushes[pushes["sender"] == server], "latency_us", "pushes"))
            for server in busiest
        ]
        cards.append(
            (
                "Pushes of sessions",
                "time from a push's first sending to its receipt, by server",
                svg.plot(lines, svg.Axes("ms", "share of pushes", y_range=(0, 1), log_x=True)),
            )
        )
    times = tables["queue_times"]
    if len(times):
        lines = [
            Series(f"{queue}/{channel} {what}", _cdf(rows, "time_us", "messages"))
            for (queue, channel, what), rows in list(times.groupby(["queue", "channel", "what"]))[:8]
        ]
        cards.append(
            (
                "Queues",
                "wait before the first hand-out, and service time",
                svg.plot(lines, svg.Axes("ms", "share of messages", y_range=(0, 1), log_x=True)),
            )
        )
    if len(tables["requests"]):
        ok = tables["requests"][tables["requests"]["outcome"] == "ok"]
        lines = [
            Series(str(name), _cdf(rows, "duration_us", "requests")) for name, rows in list(ok.groupby("name"))[:8]
        ]
        cards.append(
            (
                "Requests",
                "duration of those that were answered",
                svg.plot(lines, svg.Axes("ms", "share of requests", y_range=(0, 1), log_x=True)),
            )
        )
    return cards
