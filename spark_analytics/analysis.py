"""Silver → tables of numbers: runs the metrics, corrects clocks on the way, and collects what is small."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dep2p.spark_analytics import app, clocks, mesh, propagation, traffic, walk
from dep2p.spark_analytics.load import Silver, corrected, names_of, read_silver

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
    say("reading the time line")
    first_t, last_t, parts = _spans(silver)
    found.first_t, found.last_t = first_t, last_t
    found.bucket_us = step_us(last_t - first_t, options.points)
    fine_us = min(5_000_000, step_us(last_t - first_t, 720)) if last_t - first_t < 86_400_000_000 else 60_000_000
    activity = traffic.activity(silver.events, fine_us).toPandas()
    excluded = duplicate_sources(activity)
    if excluded:
        sources = _sources(silver, excluded)
        found.duplicate_sources = sorted(sources.values())
        silver = read_silver(spark, place, excluded_sources=excluded)
        activity = activity[~activity["source_id"].isin(excluded)]
    runs = runs_of(activity)
    clock.lap("time line")

    say("reading meshes and clocks")
    readings = traffic.clock_readings(silver.node).toPandas()
    naming = [getattr(silver, part) for part in ("mesh", "node", "app") if part in parts] or [silver.messages]
    known = names_of(naming).toPandas().sort_values(["id", "name"])
    clashing = known[known["id"].duplicated(keep=False)].groupby("id")["name"].apply(list)
    found.key_clashes = [(texts[0], texts[1]) for texts in clashing]
    names = dict(known.itertuples(index=False, name=None))
    offsets: dict[int, int] = {}
    if options.correct_clocks and len(readings):
        edges = [clocks.Edge(*row) for row in readings.itertuples(index=False, name=None)]
        offsets = clocks.offsets(edges, floor_us=clocks.READING_FLOOR_US)
        found.clocks_from = "readings" if offsets else ""
    clock.lap("clocks and names")

    say("walking the trees of the messages")
    tables = _walk(spark, silver, runs, offsets, found)
    if options.correct_clocks and not len(readings):
        delays = tables["links"][["from_id", "to_id", "delay_min"]].itertuples(index=False, name=None)
        offsets = clocks.offsets(clocks.edges_of_delays(delays), floor_us=clocks.TRAFFIC_FLOOR_US)
        if offsets:
            say(f"{len(offsets)} clocks are off: walking again, corrected")
            found.clocks_from = "delays"
            tables = _walk(spark, silver, runs, offsets, found)
    clock.lap("trees")

    say("counting copies, RPCs, meshes, deliveries and queues")
    queries = _queries(spark, silver, runs, offsets, tables["subscriptions"], found)
    tables |= _collected(queries, [*parts, "bad"], options.parallel)
    tables |= _mesh_tables(tables.pop("mesh_samples"))
    tables["runs"], tables["activity"] = runs, activity
    clock.lap("counts")

    say("naming")
    for ids in _missing(tables, names):
        names |= dict(_named(silver, ids).itertuples(index=False, name=None))
    found.offsets = {names.get(node, str(node)): ahead for node, ahead in offsets.items()}
    found.tables = {name: _with_names(table, names) for name, table in tables.items()}
    found.tables["tree"] = _tree(silver, found, options.message, offsets, names)
    clock.lap("names and tree")
    return found


class _Clock:
    def __init__(self, laps: dict[str, float]) -> None:
        self._laps = laps
        self._at = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = round(now - self._at, 3)
        self._at = now


def _spans(silver: Silver) -> tuple[int, int, list[str]]:
    """The first and the last time, and which parts have events."""
    rows = silver.events.groupBy("part").agg(F.min("t").alias("first"), F.max("t").alias("last")).collect()
    if not rows:
        raise NothingToAnalyse
    return min(row["first"] for row in rows), max(row["last"] for row in rows), [row["part"] for row in rows]


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


def _walk(
    spark: SparkSession, silver: Silver, runs: pd.DataFrame, offsets: dict[int, int], found: Analysis
) -> dict[str, pd.DataFrame]:
    messages = corrected(silver.messages, offsets)
    subscribed = propagation.subscriptions(
        corrected(silver.mesh, offsets), _runs_frame(spark, runs, offsets), messages
    ).toPandas()
    subscribed = subscribed.sort_values("topic_id", kind="stable")
    intervals = tuple(subscribed[name].to_numpy(dtype=np.int64) for name in ("topic_id", "node_id", "begin", "end"))
    walked = propagation.walked(messages, intervals, settle_us=found.settle_us, bucket_us=found.bucket_us).toPandas()
    names = {
        "spread": walk.MESSAGE,
        "links": walk.LINK,
        "node_coverage": walk.NODE,
        "hops": walk.HOPS,
        "latency": walk.LATENCY,
    }
    tables = {name: propagation.of_walk(walked, what) for name, what in names.items()}
    tables["subscriptions"] = subscribed
    return tables


def _queries(
    spark: SparkSession,
    silver: Silver,
    runs: pd.DataFrame,
    offsets: dict[int, int],
    subscribed: pd.DataFrame,
    found: Analysis,
) -> dict[str, tuple[str, DataFrame]]:
    """What to count, each with the part that it needs."""
    run_times = _runs_frame(spark, runs, offsets)
    changes = corrected(silver.mesh, offsets)
    sessions = mesh.mesh_sessions(changes, run_times).cache()
    due = spark.createDataFrame(subscribed, "topic_id BIGINT, node_id BIGINT, begin BIGINT, end BIGINT")
    traced = np.unique(runs["node_id"].to_numpy(dtype=np.int64))
    sent = app.sent(silver.app)
    handled = app.handled(silver.app)
    readings = app.scores(silver.node)
    queries = {
        "messages": {
            "copies": propagation.copies(silver.messages),
            "rejects": traffic.rejects(silver.messages),
        },
        "rpcs": {
            "rpcs": traffic.rpc_totals(silver.rpcs),
            "recovered": propagation.recovered(silver.messages, silver.rpcs),
            "idontwant": propagation.after_idontwant(silver.messages, silver.rpcs),
            "drops": traffic.drops(silver.rpcs, found.bucket_us),
        },
        "mesh": {
            "mesh_sessions": sessions.select("node_id", "topic_id", "peer_id", "begin", "end", "open"),
            "mesh_samples": mesh.sampled(sessions, due, traced, found.bucket_us),
            "churn": mesh.churn(changes),
        },
        "app": {
            "delivery": app.delivery(sent),
            "ack_latency": app.ack_latency(sent),
            "arrival": app.arrival(silver.app),
            "queues": app.queues(handled),
            "queue_times": app.queue_times(handled),
            "order_violations": app.order_violations(silver.app),
            "requests": app.requests(silver.app),
            "answers": app.slow_answers(silver.app),
            "session_changes": app.session_changes(silver.app),
        },
        "node": {
            "lost_events": traffic.lost_events(silver.node),
            "score_spread": app.score_spread(readings, found.bucket_us),
            "peer_scores": app.scores_of_peers(readings),
        },
        "bad": {"strangers": traffic.strangers(silver.bad)},
    }
    return {name: (part, frame) for part, frames in queries.items() for name, frame in frames.items()}


def _mesh_tables(samples: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Degree, symmetry and islands from the samples: only what there was at that time."""
    due, linked = samples[samples["nodes"] > 0], samples[samples["meshed"] > 0]
    degree = due[["topic_id", "bucket", "nodes", "lowest"]].assign(mean=due["degree_sum"] / due["nodes"])
    degree = degree.assign(highest=due["highest"], without=due["without"])
    islands = linked[["topic_id", "bucket", "meshed", "islands", "largest"]].rename(columns={"meshed": "nodes"})
    return {"degree": degree, "symmetry": linked[["topic_id", "bucket", "links", "one_way"]], "islands": islands}


def _collected(
    queries: dict[str, tuple[str, DataFrame]], parts: Sequence[str], parallel: int
) -> dict[str, pd.DataFrame]:
    with ThreadPoolExecutor(parallel) as threads:
        futures = {name: threads.submit(frame.toPandas) for name, (part, frame) in queries.items() if part in parts}
        empty = {name: pd.DataFrame(columns=frame.columns) for name, (part, frame) in queries.items()}
        return empty | {name: future.result() for name, future in futures.items()}


# Names ----------------------------------------------------------------------------------------------------------------


def _missing(tables: dict[str, pd.DataFrame], names: dict[int, str]) -> list[list[int]]:
    ids: dict[int, None] = {}
    for table in tables.values():
        for column in _ID_COLUMNS:
            if column in table:
                for value in table[column].dropna().unique():
                    if value and int(value) not in names:
                        ids[int(value)] = None
    return [list(ids)] if ids else []


def _named(silver: Silver, ids: list[int]) -> pd.DataFrame:
    known = names_of([silver.messages, silver.rpcs])
    if len(ids) <= 10_000:
        known = known.where(F.col("id").isin(*ids))
    return known.toPandas()


def _with_names(table: pd.DataFrame, names: dict[int, str]) -> pd.DataFrame:
    columns = {}
    for column in table.columns:
        if column in _ID_COLUMNS:
            columns[_ID_COLUMNS[column]] = table[column].map(names)
        elif column != "source_id":
            columns[column] = table[column]
    return pd.DataFrame(columns)


# The tree of one message ----------------------------------------------------------------------------------------------


def _tree(
    silver: Silver, found: Analysis, wanted: str | None, offsets: dict[int, int], names: dict[int, str]
) -> pd.DataFrame:
    """(node, parent, hops, latency_us) of one message, the publisher first."""
    spread = found.tables["spread"]
    if wanted is not None:
        key = int(silver.events.sparkSession.range(1).select(F.xxhash64(F.lit(wanted)).alias("k")).collect()[0]["k"])
    else:
        known = spread[(spread["published"] == 1) & (spread["delivered"] > 0)]
        if not len(known):
            return pd.DataFrame(columns=["msg", "node", "parent", "hops", "latency_us"])
        key = int(known.sort_values(["last_us", "msg_id"], ascending=[False, True]).iloc[0]["msg_id"])
    rows = (
        corrected(silver.messages.where(F.col("msg_id") == key), offsets)
        .where(F.col("k").isin(walk.PUBLISH, walk.DELIVER))
        .select("k", "node_id", "peer_id", "t", "msg")
        .orderBy("t")
        .collect()
    )
    return tree_of([(row["k"], row["node_id"], row["peer_id"], row["t"], row["msg"]) for row in rows], names)


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
