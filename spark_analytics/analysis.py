"""Silver → tables of numbers: runs the metrics, corrects clocks on the way, and collects what is small."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dep2p.spark_analytics import app, clocks, mesh, propagation, traffic, walk
from dep2p.spark_analytics.load import KIND_CODES, Silver, corrected, names_of, read_silver

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
    """What was found. ``tables``: pandas tables by name, with names for ids (docs/reference/traces.md)."""

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
    """There are no events."""


def step_us(span_us: int, points: int) -> int:
    """A step of time for about ``points`` of them: a round number of seconds, one at least."""
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
    """All metrics of the silver tables in ``place``. Raises `NothingToAnalyse`, and what Spark raises."""
    found = Analysis(settle_us=round(options.settle_s * 1e6))
    clock = _Clock(found.seconds)
    silver = read_silver(spark, place)
    say("counting events, copies and RPCs")
    found.first_t, found.last_t = _span(silver)
    found.bucket_us = step_us(found.last_t - found.first_t, options.points)
    counts = _counts(silver, found, options.parallel)
    excluded = duplicate_sources(counts["activity"])
    if excluded:
        found.duplicate_sources = sorted(_sources(silver, excluded).values())
        silver = read_silver(spark, place, excluded_sources=excluded)
        counts = _counts(silver, found, options.parallel)
    activity = counts.pop("activity")
    kinds = _kinds(activity)
    runs = runs_of(activity)
    clock.lap("counts")

    say("reading names and clocks")
    known = names_of(_naming(silver))
    clashing = known[known["id"].duplicated(keep=False)].groupby("id")["name"].apply(list)
    found.key_clashes = [(texts[0], texts[1]) for texts in clashing]
    names = dict(zip(known["id"].tolist(), known["name"], strict=True))
    offsets: dict[int, int] = {}
    read_clocks = options.correct_clocks and "clock" in kinds
    if read_clocks:
        readings = traffic.clock_readings(silver.node).toPandas()
        edges = [clocks.Edge(*row) for row in readings.itertuples(index=False, name=None)]
        offsets = clocks.offsets(edges, floor_us=clocks.READING_FLOOR_US)
        found.clocks_from = "readings" if offsets else ""
    clock.lap("clocks and names")

    say("walking the trees of the messages")
    pass_ = _Pass(spark, silver, runs, counts["copies"], kinds, found, options)
    tables = pass_.tables(offsets)
    if options.correct_clocks and not read_clocks:
        delays = tables["links"][["from_id", "to_id", "delay_min"]].itertuples(index=False, name=None)
        offsets = clocks.offsets(clocks.edges_of_delays(delays), floor_us=clocks.TRAFFIC_FLOOR_US)
        if offsets:
            say(f"{len(offsets)} clocks are off: walking again, corrected")
            found.clocks_from = "delays"
            tables = pass_.tables(offsets)
    clock.lap("trees and meshes")

    say("counting deliveries, queues and the rest")
    tables |= counts
    tables |= _collected(_queries(silver, kinds, counts["rpcs"], found), options.parallel)
    if len(counts["rpcs"]) and not len(tables["idontwant"]):
        tables["idontwant"] = pd.DataFrame({"told": [0], "answered": [0], "late_copies": [0]})
    tables |= _mesh_tables(tables.pop("mesh_samples"))
    tables["runs"], tables["activity"] = runs, activity
    clock.lap("rest")

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


class _Clock:
    def __init__(self, laps: dict[str, float]) -> None:
        self._laps = laps
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = round(now - self._at, 3)
        self._at = now


def _span(silver: Silver) -> tuple[int, int]:
    """The first and the last time."""
    row = silver.events.agg(F.min("t").alias("first"), F.max("t").alias("last")).collect()[0]
    if row["first"] is None:
        raise NothingToAnalyse
    return row["first"], row["last"]


def _counts(silver: Silver, found: Analysis, parallel: int) -> dict[str, pd.DataFrame]:
    """What is counted over most events, whatever their times."""
    span_us = found.last_t - found.first_t
    fine_us = min(5_000_000, step_us(span_us, 720)) if span_us < 86_400_000_000 else 60_000_000
    queries = {
        "activity": (True, traffic.activity(silver.events, fine_us)),
        "copies": ("messages" in silver.filled, propagation.copies(silver.messages)),
        "rpcs": ("rpcs" in silver.filled, traffic.rpc_totals(silver.rpcs)),
    }
    return _collected(queries, parallel)


def _kinds(activity: pd.DataFrame) -> frozenset[str]:
    """The kinds of events that there are."""
    bits = int(np.bitwise_or.reduce(activity["kinds"].to_numpy(dtype=np.int64))) if len(activity) else 0
    return frozenset(name for name, number in KIND_CODES.items() if bits >> number & 1)


def _naming(silver: Silver) -> DataFrame:
    """Events that name most nodes, peers and topics, and are few; all where there are none such."""
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


def _runs_frame(spark: SparkSession, runs: pd.DataFrame, offsets: dict[int, int]) -> DataFrame:
    rows = _corrected(runs, offsets)[["node_id", "run", "first_t", "last_t"]]
    return spark.createDataFrame(rows, "node_id BIGINT, run BIGINT, first_t BIGINT, last_t BIGINT")


@dataclass(frozen=True, slots=True)
class _Pass:
    """What depends on the times of several nodes: done anew when their clocks turn out to be off."""

    spark: SparkSession
    silver: Silver
    runs: pd.DataFrame
    copies: pd.DataFrame
    kinds: frozenset[str]
    found: Analysis
    options: AnalysisOptions

    def tables(self, offsets: dict[int, int]) -> dict[str, pd.DataFrame]:
        """Trees, subscriptions and meshes by clocks that are corrected by ``offsets``."""
        run_times = _runs_frame(self.spark, self.runs, offsets)
        changes = corrected(self.silver.mesh, offsets)
        joined = propagation.subscriptions(changes, run_times)
        subscribed = _collected({"": ("join" in self.kinds, joined)}, 1)[""]
        silent = propagation.unjoined(self.copies, subscribed, _corrected(self.runs, offsets))
        subscribed = pd.concat([part for part in (subscribed, silent) if len(part)] or [subscribed], ignore_index=True)
        subscribed = subscribed.sort_values("topic_id", kind="stable", ignore_index=True)
        with ThreadPoolExecutor(2) as threads:
            meshes = threads.submit(self._meshes, changes, run_times, subscribed)
            return self._trees(offsets, subscribed) | meshes.result() | {"subscriptions": subscribed}

    def _trees(self, offsets: dict[int, int], subscribed: pd.DataFrame) -> dict[str, pd.DataFrame]:
        wanted = None
        if self.options.message is not None:
            wanted = int(self.spark.range(1).select(F.xxhash64(F.lit(self.options.message))).collect()[0][0])
        walked = propagation.walked(
            corrected(self.silver.messages, offsets),
            tuple(subscribed[name].to_numpy(dtype=np.int64) for name in ("topic_id", "node_id", "begin", "end")),
            settle_us=self.found.settle_us,
            bucket_us=self.found.bucket_us,
            deliveries=int(self.copies["firsts"].sum()),
            wanted=wanted,
        ).toArrow()
        names = {
            "spread": walk.MESSAGE,
            "links": walk.LINK,
            "node_coverage": walk.NODE,
            "hops": walk.HOPS,
            "latency": walk.LATENCY,
            "drawn": walk.TREE,
        }
        tables = {name: propagation.of_walk(walked, what) for name, what in names.items()}
        tables["drawn"]["text"] = walked.filter(pc.equal(walked["what"], walk.TREE))["text"].to_pandas()
        return tables

    def _meshes(self, changes: DataFrame, run_times: DataFrame, subscribed: pd.DataFrame) -> dict[str, pd.DataFrame]:
        grafted = "graft" in self.kinds
        sessions = mesh.mesh_sessions(changes, run_times).persist()
        due = self.spark.createDataFrame(subscribed, "topic_id BIGINT, node_id BIGINT, begin BIGINT, end BIGINT")
        traced = np.unique(self.runs["node_id"].to_numpy(dtype=np.int64))
        links = sessions.select("node_id", "topic_id", "peer_id", "begin", "end", "open")
        samples = mesh.sampled(sessions, due, traced, self.found.bucket_us)
        queries = {
            "mesh_sessions": (grafted, links),
            "mesh_samples": (len(subscribed) > 0, samples),
            "churn": (grafted or "prune" in self.kinds, mesh.churn(changes)),
        }
        try:
            return _collected(queries, 1)
        finally:
            sessions.unpersist()


def _queries(
    silver: Silver, kinds: frozenset[str], rpcs: pd.DataFrame, found: Analysis
) -> dict[str, tuple[bool, DataFrame]]:
    """What else to count, each with whether there is any."""
    sent = app.sent(silver.app)
    handled = app.handled(silver.app)
    readings = app.scores(silver.node)
    delivered, queued, asked = "delivery" in kinds, "queue" in kinds, "request" in kinds
    scored = "scores" in kinds
    return {
        "rejects": ("reject" in kinds, traffic.rejects(silver.messages)),
        "recovered": (rpcs["iwant"].sum() > 0, propagation.recovered(silver.messages, silver.rpcs)),
        "idontwant": (rpcs["idontwant"].sum() > 0, propagation.after_idontwant(silver.messages, silver.rpcs)),
        "drops": ("drop_rpc" in kinds, traffic.drops(silver.rpcs, found.bucket_us)),
        "delivery": (delivered, app.delivery(sent)),
        "ack_latency": (delivered, app.ack_latency(sent)),
        "arrival": (delivered, app.arrival(silver.app)),
        "queues": (queued, app.queues(handled)),
        "queue_times": (queued, app.queue_times(handled)),
        "order_violations": (queued, app.order_violations(silver.app)),
        "requests": (asked, app.requests(silver.app)),
        "answers": (asked, app.slow_answers(silver.app)),
        "session_changes": ("session" in kinds, app.session_changes(silver.app)),
        "lost_events": ("dropped" in kinds, traffic.lost_events(silver.node)),
        "score_spread": (scored, app.score_spread(readings, found.bucket_us)),
        "peer_scores": (scored, app.scores_of_peers(readings)),
        "strangers": ("bad" in silver.filled, traffic.strangers(silver.bad)),
    }


def _mesh_tables(samples: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Degree, symmetry and islands from the samples: only what there was at that time."""
    due, linked = samples[samples["nodes"] > 0], samples[samples["meshed"] > 0]
    degree = due[["topic_id", "bucket", "nodes", "lowest"]].assign(mean=due["degree_sum"] / due["nodes"])
    degree = degree.assign(highest=due["highest"], without=due["without"])
    islands = linked[["topic_id", "bucket", "meshed", "islands", "largest"]].rename(columns={"meshed": "nodes"})
    return {"degree": degree, "symmetry": linked[["topic_id", "bucket", "links", "one_way"]], "islands": islands}


def _collected(queries: dict[str, tuple[bool, DataFrame]], parallel: int) -> dict[str, pd.DataFrame]:
    """Tables of those that have something to find, so many Spark jobs at once; empty tables for the others."""
    with ThreadPoolExecutor(parallel) as threads:
        futures = {name: threads.submit(_table, frame) for name, (worth, frame) in queries.items() if worth}
        empty = {name: _empty(frame) for name, (worth, frame) in queries.items() if not worth}
        return empty | {name: future.result() for name, future in futures.items()}


def _table(frame: DataFrame) -> pd.DataFrame:
    """The rows; an id that is null is 0, since pandas would make floats of a column with nulls, which hold no id."""
    found = frame.toArrow()
    for place, name in enumerate(found.column_names):
        if name in _ID_COLUMNS and found[name].null_count:
            found = found.set_column(place, name, pc.fill_null(found[name], 0))
    return found.to_pandas()


def _empty(frame: DataFrame) -> pd.DataFrame:
    numbers = {"bigint": "int64", "int": "int32", "double": "float64", "boolean": "bool"}
    return pd.DataFrame({name: pd.Series(dtype=numbers.get(kind, "object")) for name, kind in frame.dtypes})


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
    """Names of ids that the few events do not name: from all the others."""
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


def _rows_of_tree(drawn: pd.DataFrame, spread: pd.DataFrame, wanted: bool) -> list[tuple[Any, ...]]:
    """(k, node, peer, t, msg) of the message that was asked for, or of the slowest of all."""
    if not wanted:
        known = spread[(spread["published"] == 1) & (spread["delivered"] > 0)]
        if not len(known):
            return []
        slowest = known.sort_values(["last_us", "msg_id"], ascending=[False, True]).iloc[0]["msg_id"]
        drawn = drawn[drawn["msg_id"] == slowest]
    rows = drawn[["k", "node_id", "peer_id", "t", "text"]].itertuples(index=False, name=None)
    return [(k, node, peer or None, t, text) for k, node, peer, t, text in rows]


def tree_of(rows: Sequence[tuple[Any, ...]], names: dict[int, str]) -> pd.DataFrame:
    """The first-delivery tree from (k, node, peer, t, msg) in the order of time."""
    text = next((row[4] for row in rows if row[4]), "")
    root = next((row[1] for row in rows if row[0] == walk.PUBLISH), None)
    start = next((row[3] for row in rows if row[1] == root), rows[0][3] if rows else 0)
    hops: dict[int, int] = {} if root is None else {root: 0}
    found: list[tuple[Any, ...]] = [] if root is None else [(text, names.get(root, str(root)), None, 0, 0)]
    seen: dict[int, None] = {} if root is None else {root: None}
    for k, node, peer, t, _ in rows:
        if k != walk.DELIVER or node in seen:
            continue
        seen[node] = None
        hops[node] = hops[peer] + 1 if hops.get(peer, -1) >= 0 else -1
        found.append((text, names.get(node, str(node)), names.get(peer, str(peer)), hops[node], t - start))
    return pd.DataFrame(found, columns=["msg", "node", "parent", "hops", "latency_us"])
