"""Meshes and subscriptions over time: from the changes that nodes recorded, in pandas; sampled in numpy.

Changes are few (one event in hundreds, a thousand in a trace of a million), so they are read once and worked on here;
what one time of the meshes costs grows with the topics, so many topics go to Spark's workers.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dep2p.spark_analytics.ingest.silver import KIND_CODES
from dep2p.spark_analytics.metrics import mesh_samples

_TOPICS_HERE: Final = 32
_ROWS_HERE: Final = 200_000
"""Topics and rows up to which the samples are made here: a Spark job is not worth it."""


def changes(mesh: DataFrame) -> DataFrame:
    """(k, node_id, run, topic_id, peer_id, t, seq): joins, leaves, GRAFTs, PRUNEs, and peers that went."""
    kinds = ("join", "leave", "graft", "prune", "remove_peer")
    found = mesh.where(F.col("k").isin(*(KIND_CODES[kind] for kind in kinds)))
    return found.select("k", "node_id", "run", "topic_id", "peer_id", "t", F.coalesce("seq", F.lit(0)).alias("seq"))


def corrected(found: pd.DataFrame, offsets: dict[int, int]) -> pd.DataFrame:
    """The changes by one common clock: the node's offset (µs that its clock is ahead) is taken off."""
    return found.assign(t=found["t"] - found["node_id"].map(offsets).fillna(0).astype("int64"))


def subscriptions(found: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """(topic_id, node_id, begin, end): from when to when each node was subscribed, by its own events.

    ``runs`` has (node_id, run, last_t). A subscription ends with a leave or with the run.
    """
    keys = ["node_id", "run", "topic_id"]
    rows = _in_order(_of_kinds(found, "join", "leave"), keys)
    rows = _with_ends(rows, keys, runs)
    return rows.loc[rows["k"] == KIND_CODES["join"], ["topic_id", "node_id", "begin", "end"]].reset_index(drop=True)


def mesh_sessions(found: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """(node_id, topic_id, peer_id, begin, end, open): from each GRAFT to the PRUNE, or the peer's going.

    A GRAFT while in the mesh changes nothing. The end of a run ends what is open then; ``open`` says so.
    """
    link = ["node_id", "run", "topic_id", "peer_id"]
    links = _of_kinds(found, "graft", "prune")
    links = links.assign(up=links["k"] == KIND_CODES["graft"])
    known = links.loc[links["up"], link].drop_duplicates()
    gone = _of_kinds(found, "remove_peer")[["node_id", "run", "peer_id", "t", "seq"]]
    gone = gone[gone["peer_id"] != 0].merge(known, on=["node_id", "run", "peer_id"]).assign(up=False)
    rows = _in_order(pd.concat([links, gone], ignore_index=True), link)
    up = rows["up"].to_numpy(dtype=bool)
    was = np.concatenate([[False], up[:-1]]) & _as_before(rows, link)
    rows = _with_ends(rows[up != was], link, runs)
    chosen = ["node_id", "topic_id", "peer_id", "begin", "end", "open"]
    return rows.loc[rows["up"].astype(bool), chosen].reset_index(drop=True)


def churn(found: pd.DataFrame) -> pd.DataFrame:
    """(node_id, topic_id, grafts, prunes) over the whole trace."""
    rows = _of_kinds(found, "graft", "prune")
    counted = rows[["node_id", "topic_id"]].assign(
        grafts=(rows["k"] == KIND_CODES["graft"]).astype("int64"),
        prunes=(rows["k"] == KIND_CODES["prune"]).astype("int64"),
    )
    return counted.groupby(["node_id", "topic_id"], as_index=False).sum()


def sampled(
    spark: SparkSession, sessions: pd.DataFrame, subscribed: pd.DataFrame, traced: np.ndarray, bucket_us: int
) -> pd.DataFrame:
    """(topic_id, bucket, …) of `dep2p.spark_analytics.metrics.mesh_samples`: the meshes at the end of each bucket.

    ``traced``: sorted array of the ids of the nodes in the trace.
    """
    columns = ["topic_id", "node_id", "peer_id", "begin", "end"]
    rows = pd.concat([sessions[columns], subscribed.assign(peer_id=0)[columns]], ignore_index=True)
    sample = mesh_samples.sampler(traced, bucket_us)
    if len(rows) <= _ROWS_HERE and rows["topic_id"].nunique() <= _TOPICS_HERE:
        found = list(sample(iter(pa.Table.from_pandas(rows, preserve_index=False).to_batches())))
        empty = pa.schema([(name, pa.int64()) for name in mesh_samples.NAMES])
        return pa.Table.from_batches(found, None if found else empty).to_pandas()
    given = spark.createDataFrame(rows, ", ".join(f"{name} BIGINT" for name in columns))
    return given.repartition("topic_id").mapInArrow(sample, mesh_samples.DDL).toArrow().to_pandas()


def _of_kinds(found: pd.DataFrame, *kinds: str) -> pd.DataFrame:
    return found[found["k"].isin([KIND_CODES[kind] for kind in kinds])]


def _in_order(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Sort by keys, then by time."""
    order = np.lexsort([rows[name].to_numpy(dtype=np.int64) for name in ("seq", "t", *reversed(keys))])
    return rows.iloc[order]


def _as_before(rows: pd.DataFrame, keys: Sequence[str]) -> np.ndarray:
    """Whether each row has the keys of the one before."""
    values = rows[list(keys)].to_numpy(dtype=np.int64)
    same = np.zeros(len(rows), dtype=bool)
    same[1:] = (values[1:] == values[:-1]).all(axis=1)
    return same


def _with_ends(rows: pd.DataFrame, keys: Sequence[str], runs: pd.DataFrame) -> pd.DataFrame:
    """``begin``: the time of each row; ``end``: that of the next with the same keys, else the end of the run."""
    follows = np.append(_as_before(rows, keys)[1:], False)[: len(rows)]
    t = rows["t"].to_numpy(dtype=np.int64)
    last_t = rows[["node_id", "run"]].merge(runs[["node_id", "run", "last_t"]], "left", on=["node_id", "run"])["last_t"]
    ends = np.where(follows, np.append(t[1:], 0)[: len(rows)], last_t.to_numpy(dtype=np.int64))
    return rows.assign(begin=t, end=ends, open=~follows)
