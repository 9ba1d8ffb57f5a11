"""Silver → tables of numbers: runs the metrics, corrects clocks on the way, and collects what is small."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dep2p.spark_analytics.ingest.silver import KIND_CODES, Silver, corrected, names_of, read_silver
from dep2p.spark_analytics.metrics import apps, clocks, delivery_trees, mesh, propagation, traffic
from dep2p.spark_analytics.metrics.queries import Query, empty, first_queries, later_queries

_ID_COLUMNS: Final = {
    "node_id": "node",
    "peer_id": "peer",
    "topic_id": "topic",
    "publisher_id": "publisher",
    "from_id": "sender",
    "to_id": "receiver",
}


@dataclass(frozen=True, slots=True)
class AnalysisOptions:
    """``settle_s``: a node is due a message when it is subscribed from the publish to so long after it.

    ``points``: about how many steps of time plots have. ``message``: the base64 id of the one whose tree is drawn;
    None takes the slowest. ``parallel``: Spark jobs at once.
    """

    settle_s: float = 3.0
    points: int = 120
    message: str | None = None
    parallel: int = 3
    correct_clocks: bool = True


@dataclass(slots=True)
class Analysis:
    """The result of an analysis. ``tables``: pandas tables by name, with names for ids (docs/reference/traces.md)."""

    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    first_t: int = 0
    last_t: int = 0
    bucket_us: int = 1_000_000
    settle_us: int = 3_000_000
    offsets: dict[str, int] = field(default_factory=dict)
    clocks_from: str = ""
    duplicate_sources: list[str] = field(default_factory=list)
    key_clashes: list[tuple[str, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class NothingToAnalyse(Exception):
    """The trace has no events."""


def step_us(span_us: int, points: int) -> int:
    """Return a step of time for about ``points`` steps: a round number of seconds, at least one."""
    wanted = span_us / 1e6 / max(1, points)
    for seconds in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400):
        if seconds >= wanted:
            return seconds * 1_000_000
    return math.ceil(wanted / 86400) * 86_400_000_000


def analyse(
    spark: SparkSession,
    place: str | Sequence[str],
    options: AnalysisOptions = AnalysisOptions(),
    say: Callable[[str], None] = lambda text: None,
) -> Analysis:
    """Compute all metrics of the silver tables in ``place``. Raises `NothingToAnalyse`, and what Spark raises."""
    found = Analysis(settle_us=round(options.settle_s * 1e6))
    clock = _Clock(found.seconds)
    say("counting events, copies and RPCs")
    silver, first = _read_first(spark, place, options, found)
    found.bucket_us = step_us(found.last_t - found.first_t, options.points)
    names = _unique_names(first.names, found)
    clock.lap("counts")

    say("walking the trees of the messages, counting deliveries, queues and the rest")
    pass_ = _Pass(spark, silver, runs_of(first.activity), first, found, options)
    tables, offsets = _all_tables(pass_, say)
    clock.lap("trees, meshes and the rest")

    say("naming")
    drawn = tables.pop("drawn")
    missing = _missing(tables, names)
    if missing:
        more = _named(silver, missing)
        names |= dict(zip(more["id"].tolist(), more["name"], strict=True))
    found.offsets = {names.get(node, str(node)): ahead for node, ahead in offsets.items()}
    found.tables = {name: _with_names(table, names) for name, table in tables.items()}
    found.tables["tree"] = tree_of(_rows_of_tree(drawn, found.tables["spread"], options.message is not None), names)
    clock.lap("names")
    return found


def _read_first(
    spark: SparkSession, place: str | Sequence[str], options: AnalysisOptions, found: Analysis
) -> tuple[Silver, "_First"]:
    """The silver tables without copies of files, and what is counted over them first."""
    silver = read_silver(spark, place)
    first = _First.of(silver, found, options)
    excluded = duplicate_sources(first.activity)
    if excluded:
        found.duplicate_sources = sorted(_sources(silver, excluded).values())
        silver = read_silver(spark, place, excluded_sources=excluded)
        first = _First.of(silver, found, options)
    return silver, first


def _unique_names(known: pd.DataFrame, found: Analysis) -> dict[int, str]:
    """Return the name of each id; two names of one id are noted in ``found``."""
    clashing = known[known["id"].duplicated(keep=False)].groupby("id")["name"].apply(list)
    found.key_clashes = [(texts[0], texts[1]) for texts in clashing]
    return dict(zip(known["id"].tolist(), known["name"], strict=True))


def _all_tables(pass_: "_Pass", say: Callable[[str], None]) -> tuple[dict[str, pd.DataFrame], dict[int, int]]:
    """All tables with ids, and by node the µs that its clock is ahead."""
    first, found, options = pass_.first, pass_.found, pass_.options
    has_readings = options.correct_clocks and "clock" in first.kinds
    offsets: dict[int, int] = {}
    if has_readings:
        edges = [clocks.Edge(*row) for row in first.readings.itertuples(index=False, name=None)]
        offsets = clocks.offsets(edges, floor_us=clocks.READING_FLOOR_US)
        found.clocks_from = "readings" if offsets else ""
    with ThreadPoolExecutor(1) as threads:
        # Beside the trees, whose workers leave Spark's planner idle.
        later = later_queries(pass_.silver, first.kinds, first.rpcs, found.bucket_us)
        rest = threads.submit(_collected, later, options.parallel)
        tables = pass_.trees(offsets)
        if options.correct_clocks and not has_readings:
            delays = tables["links"][["from_id", "to_id", "delay_min"]].itertuples(index=False, name=None)
            offsets = clocks.offsets(clocks.edges_of_delays(delays), floor_us=clocks.TRAFFIC_FLOOR_US)
            if offsets:
                say(f"{len(offsets)} clocks are off: walking again, corrected")
                found.clocks_from = "delays"
                tables = pass_.trees(offsets)
        tables |= pass_.meshes(offsets)
        tables |= pass_.pushes(offsets)
        tables |= rest.result()
    tables |= {"copies": first.copies, "rpcs": first.rpcs, "runs": pass_.runs, "activity": first.activity}
    if len(first.rpcs) and not len(tables["idontwant"]):
        tables["idontwant"] = pd.DataFrame({"sent": [0], "answered": [0], "late_copies": [0]})
    return tables, offsets


class _Clock:
    def __init__(self, laps: dict[str, float]) -> None:
        self._laps = laps
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = round(now - self._at, 3)
        self._at = now


def _span(silver: Silver) -> tuple[int, int]:
    """Return the first and the last time."""
    row = silver.events.agg(F.min("t").alias("first"), F.max("t").alias("last")).collect()[0]
    if row["first"] is None:
        raise NothingToAnalyse
    return row["first"], row["last"]


@dataclass(frozen=True, slots=True)
class _First:
    """Tables that do not depend on clocks: all others build upon them."""

    activity: pd.DataFrame
    kinds: frozenset[str]
    copies: pd.DataFrame
    rpcs: pd.DataFrame
    changes: pd.DataFrame
    readings: pd.DataFrame
    names: pd.DataFrame

    @staticmethod
    def of(silver: Silver, found: Analysis, options: AnalysisOptions) -> "_First":
        """Read it, and the span of time. Raises `NothingToAnalyse`."""
        with ThreadPoolExecutor(options.parallel + 1) as threads:
            span = threads.submit(_span, silver)
            counted = threads.submit(_collected, first_queries(silver), options.parallel)
            names = threads.submit(lambda: names_of(_naming(silver)))
            found.first_t, found.last_t = span.result()
            by_kind = _arrow(traffic.activity_by_kind(silver.events, _fine_us(found.last_t - found.first_t)))
            tables = counted.result()
            return _First(
                traffic.activity(by_kind),
                frozenset(
                    name for name, number in KIND_CODES.items() if number in set(by_kind["k"].unique().to_pylist())
                ),
                propagation.copies(pa.Table.from_pandas(tables["copies_by_kind"], preserve_index=False)),
                tables["rpcs"],
                tables["changes"],
                tables["readings"],
                names.result(),
            )


def _fine_us(span_us: int) -> int:
    """Return the step of time in which the activity of nodes is counted."""
    return min(5_000_000, step_us(span_us, 720)) if span_us < 86_400_000_000 else 60_000_000


def _naming(silver: Silver) -> DataFrame:
    """Return the events that name most nodes, peers and topics, and are few; all events where there are none such."""
    few = [part for part in ("mesh", "node", "app") if part in silver.filled]
    return silver.events.where(F.col("part").isin(*few)) if few else silver.events


def _sources(silver: Silver, ids: Sequence[int]) -> dict[int, str]:
    rows = silver.events.where(F.col("source_id").isin(*ids)).select("source_id", "source").distinct().collect()
    return {row["source_id"]: row["source"] for row in rows}


def duplicate_sources(activity: pd.DataFrame) -> list[int]:
    """Files whose events are in another file, too: of each such group all but the fullest."""
    files = (
        activity.groupby(["node_id", "run", "source_id"])
        .agg(first=("first_seq", "min"), last=("last_seq", "max"), events=("events", "sum"))
        .reset_index()
        .sort_values(["node_id", "run", "events", "source_id"], ascending=[True, True, False, True])
    )
    excluded: list[int] = []
    for _, group in files.groupby(["node_id", "run"], sort=False):
        if len(group) == 1:
            continue
        kept: list[tuple[int, int]] = []
        for source, first, last in group[["source_id", "first", "last"]].itertuples(index=False, name=None):
            # The files of a run follow one another: one that begins within another is a copy, whole or cut.
            if any(low <= first <= high or low <= last <= high for low, high in kept):
                excluded.append(int(source))
            else:
                kept.append((first, last))
    return excluded


def runs_of(activity: pd.DataFrame) -> pd.DataFrame:
    """(node_id, run): times, events, gaps in ``seq``, and whether it started and stopped in order."""
    runs = activity.groupby(["node_id", "run"]).agg(
        first_t=("first_t", "min"),
        last_t=("last_t", "max"),
        first_seq=("first_seq", "min"),
        last_seq=("last_seq", "max"),
        events=("events", "sum"),
        started=("node_start", "sum"),
        stopped=("node_stop", "sum"),
        version=("version", "max"),
        oldest_version=("oldest_version", "min"),
    )
    runs["missing"] = runs["last_seq"] + 1 - runs["events"]
    return runs.reset_index()


def _corrected(runs: pd.DataFrame, offsets: dict[int, int]) -> pd.DataFrame:
    ahead = runs["node_id"].map(offsets).fillna(0).astype("int64")
    return runs.assign(first_t=runs["first_t"] - ahead, last_t=runs["last_t"] - ahead)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Tables that depend on the times of several nodes: made again when their clocks turn out to be off."""

    spark: SparkSession
    silver: Silver
    runs: pd.DataFrame
    first: _First
    found: Analysis
    options: AnalysisOptions

    def _subscribed(self, offsets: dict[int, int]) -> pd.DataFrame:
        runs, changes = _corrected(self.runs, offsets), mesh.corrected(self.first.changes, offsets)
        joined = mesh.subscriptions(changes, runs)
        silent = propagation.unjoined(self.first.copies, joined, runs)
        both = pd.concat([part for part in (joined, silent) if len(part)] or [joined], ignore_index=True)
        return both.sort_values("topic_id", kind="stable", ignore_index=True)

    def trees(self, offsets: dict[int, int]) -> dict[str, pd.DataFrame]:
        """Compute the trees, by clocks that are corrected by ``offsets``."""
        subscribed = self._subscribed(offsets)
        wanted = None
        if self.options.message is not None:
            wanted = int(self.spark.range(1).select(F.xxhash64(F.lit(self.options.message))).collect()[0][0])
        walked = propagation.walked(
            corrected(self.silver.messages, offsets),
            tuple(subscribed[name].to_numpy(dtype=np.int64) for name in ("topic_id", "node_id", "begin", "end")),
            settle_us=self.found.settle_us,
            bucket_us=self.found.bucket_us,
            deliveries=int(self.first.copies["firsts"].sum()),
            wanted=wanted,
        ).toArrow()
        names = {
            "spread": delivery_trees.MESSAGE,
            "links": delivery_trees.LINK,
            "node_coverage": delivery_trees.NODE,
            "hops": delivery_trees.HOPS,
            "latency": delivery_trees.LATENCY,
            "drawn": delivery_trees.TREE,
        }
        tables = {name: propagation.of_walk(walked, what) for name, what in names.items()}
        tables["drawn"]["text"] = walked.filter(pc.equal(walked["what"], delivery_trees.TREE))["text"].to_pandas()
        return tables

    def meshes(self, offsets: dict[int, int]) -> dict[str, pd.DataFrame]:
        """Compute subscriptions and meshes, by clocks that are corrected by ``offsets``."""
        subscribed = self._subscribed(offsets)
        changes = mesh.corrected(self.first.changes, offsets)
        sessions = mesh.mesh_sessions(changes, _corrected(self.runs, offsets))
        traced = np.unique(self.runs["node_id"].to_numpy(dtype=np.int64))
        samples = mesh.sampled(self.spark, sessions, subscribed, traced, self.found.bucket_us)
        tables = {"subscriptions": subscribed, "mesh_sessions": sessions, "churn": mesh.churn(changes)}
        return tables | _mesh_tables(samples)

    def pushes(self, offsets: dict[int, int]) -> dict[str, pd.DataFrame]:
        """How long pushes of sessions took, by clocks that are corrected by ``offsets``."""
        if "session" not in self.first.kinds:
            return {"push_latency": empty("push_latency")}
        found = _arrow(apps.push_latency(corrected(self.silver.app, offsets))).to_pandas()
        keys = ["from_id", "to_id", "latency_us"]
        return {"push_latency": found.groupby(keys, as_index=False)["pushes"].sum()}


def _mesh_tables(samples: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Degree, symmetry and islands from the samples: only what there was at that time."""
    due, linked = samples[samples["nodes"] > 0], samples[samples["meshed"] > 0]
    degree = due[["topic_id", "bucket", "nodes", "lowest"]].assign(mean=due["degree_sum"] / due["nodes"])
    degree = degree.assign(highest=due["highest"], without=due["without"])
    islands = linked[["topic_id", "bucket", "meshed", "islands", "largest"]].rename(columns={"meshed": "nodes"})
    return {"degree": degree, "symmetry": linked[["topic_id", "bucket", "links", "one_way"]], "islands": islands}


def _collected(queries: dict[str, Query], parallel: int) -> dict[str, pd.DataFrame]:
    """Tables of those that have something to find, so many Spark jobs at once; empty tables for the others."""
    with ThreadPoolExecutor(parallel) as threads:
        futures = {name: threads.submit(_table, query) for name, query in queries.items() if query.worth}
        blank = {name: empty(name) for name, query in queries.items() if not query.worth}
        return blank | {name: future.result() for name, future in futures.items()}


def _table(query: Query) -> pd.DataFrame:
    return _arrow(query.frame()).to_pandas()


def _arrow(frame: DataFrame) -> pa.Table:
    """The rows; an id that is null is 0, since pandas would make floats of a column with nulls, which hold no id."""
    found = frame.toArrow()
    for place, name in enumerate(found.column_names):
        if name in _ID_COLUMNS and found[name].null_count:
            found = found.set_column(place, name, pc.fill_null(found[name], 0))
    return found


# Names ----------------------------------------------------------------------------------------------------------------


def _missing(tables: dict[str, pd.DataFrame], names: dict[int, str]) -> list[int]:
    ids: dict[int, None] = {}
    for table in tables.values():
        for column in _ID_COLUMNS:
            if column in table:
                for value in table[column].dropna().unique():
                    if value and int(value) not in names:
                        ids[int(value)] = None
    return list(ids)


def _named(silver: Silver, ids: list[int]) -> pd.DataFrame:
    """Return the names of ids that the few events do not name, from all the others."""
    events = silver.events
    if len(ids) <= 10_000:
        events = events.where(F.col("node_id").isin(*ids) | F.col("peer_id").isin(*ids) | F.col("topic_id").isin(*ids))
    return names_of(events)


def _with_names(table: pd.DataFrame, names: dict[int, str]) -> pd.DataFrame:
    columns = {}
    for column in table.columns:
        if column in _ID_COLUMNS:
            columns[_ID_COLUMNS[column]] = table[column].map(names)
        elif column != "source_id":
            columns[column] = table[column]
    return pd.DataFrame(columns)


# The tree of one message ----------------------------------------------------------------------------------------------


_TreeRow = tuple[int, int, int | None, int, str | None]
"""(k, node, peer, t, msg): ``peer`` is None for the node itself."""


def _rows_of_tree(drawn: pd.DataFrame, spread: pd.DataFrame, wanted: bool) -> list[_TreeRow]:
    """(k, node, peer, t, msg) of the message that was asked for, or of the slowest of all."""
    if not wanted:
        known = spread[(spread["published"] == 1) & (spread["delivered"] > 0)]
        if not len(known):
            return []
        slowest = known.sort_values(["last_us", "msg_id"], ascending=[False, True]).iloc[0]["msg_id"]
        drawn = drawn[drawn["msg_id"] == slowest]
    rows = drawn[["k", "node_id", "peer_id", "t", "text"]].itertuples(index=False, name=None)
    return [(k, node, peer or None, t, text) for k, node, peer, t, text in rows]


def tree_of(rows: Sequence[_TreeRow], names: dict[int, str]) -> pd.DataFrame:
    """Return the first-delivery tree of (k, node, peer, t, msg) rows in the order of time."""
    text = next((row[4] for row in rows if row[4]), "")
    root = next((row[1] for row in rows if row[0] == delivery_trees.PUBLISH), None)
    start = next((row[3] for row in rows if row[1] == root), rows[0][3] if rows else 0)
    hops: dict[int, int] = {} if root is None else {root: 0}
    found: list[tuple[str, str, str | None, int, int]] = (
        [] if root is None else [(text, names.get(root, str(root)), None, 0, 0)]
    )
    seen: dict[int, None] = {} if root is None else {root: None}
    for k, node, peer, t, _ in rows:
        if k != delivery_trees.DELIVER or node in seen:
            continue
        seen[node] = None
        above = -1 if peer is None else hops.get(peer, -1)
        hops[node] = above + 1 if above >= 0 else -1
        parent = None if peer is None else names.get(peer, str(peer))
        found.append((text, names.get(node, str(node)), parent, hops[node], t - start))
    return pd.DataFrame(found, columns=["msg", "node", "parent", "hops", "latency_us"])
