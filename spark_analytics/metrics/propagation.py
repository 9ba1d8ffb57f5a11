"""How messages spread: the first-delivery trees, copies, recovery. Formulas: docs/reference/traces.md."""

from typing import Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dep2p.spark_analytics.ingest.silver import code
from dep2p.spark_analytics.metrics import delivery_trees
from dep2p.spark_analytics.metrics.traffic import grouped, only

_DELIVERIES_PER_PART: Final = 2_000_000
"""A worker holds those of one part at once, in about 0.5 GB."""
_PARTS_BY_DEFAULT: Final = 2
"""With no more parts than this, Spark says how many."""


def unjoined(copies: pd.DataFrame, joined: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The same for nodes without a join, in a filtered trace: they count as subscribed for their whole runs to the
    topics that they delivered. ``copies`` and ``joined`` are the tables of those names.
    """
    if not len(copies):
        return joined.iloc[:0]
    delivered = copies.loc[copies["firsts"] > 0, ["topic_id", "node_id"]].drop_duplicates()
    joined_pairs = joined[["topic_id", "node_id"]].drop_duplicates()
    silent = delivered.merge(joined_pairs, "left", on=["topic_id", "node_id"], indicator=True)
    silent = silent[silent["_merge"] == "left_only"].drop(columns="_merge")
    spans = runs[["node_id", "first_t", "last_t"]].rename(columns={"first_t": "begin", "last_t": "end"})
    return silent.merge(spans, on="node_id")


def walked(
    messages: DataFrame,
    intervals: delivery_trees.Intervals,
    *,
    settle_us: int,
    bucket_us: int,
    deliveries: int = 0,
    wanted: int | None = None,
) -> DataFrame:
    """The rows of `dep2p.spark_analytics.metrics.delivery_trees`: one shuffle by message, then numpy.

    ``deliveries``: how many there are about, so that no worker gets more than it can hold. ``wanted``: the message
    whose tree is given; None for the slowest of each worker's.
    """
    rows = messages.where(F.col("k").isin(delivery_trees.PUBLISH, delivery_trees.DELIVER)).select(
        "msg_id", "node_id", "peer_id", "topic_id", "t", F.col("k").cast("int").alias("k"), "msg"
    )
    parts = -(-deliveries // _DELIVERIES_PER_PART)
    by_message = rows.repartition(parts, "msg_id") if parts > _PARTS_BY_DEFAULT else rows.repartition("msg_id")
    return by_message.mapInArrow(delivery_trees.walker(intervals, settle_us, bucket_us, wanted), delivery_trees.DDL)


def of_walk(rows: pa.Table, what: int) -> pd.DataFrame:
    """One of the tables in what `walked` gave, with its names; partial sums of partitions are put together."""
    names = delivery_trees.FIELDS[what]
    mine = rows.filter(pc.equal(rows["what"], what)).select([f"c{n}" for n in range(len(names))])
    table = mine.rename_columns(list(names)).to_pandas()
    keys = {
        delivery_trees.MESSAGE: [],
        delivery_trees.TREE: [],
        delivery_trees.LINK: ["from_id", "to_id"],
        delivery_trees.NODE: ["node_id", "bucket"],
        delivery_trees.HOPS: ["topic_id", "hops"],
        delivery_trees.LATENCY: ["topic_id", "publisher_id", "latency_us"],
    }[what]
    if not keys:
        return table
    combine = {"delay_min": "min", "delay_max": "max"}
    sums = {name: combine.get(name, "sum") for name in names if name not in keys}
    return table.groupby(keys, sort=False).agg(sums).reset_index()


def copies_by_kind(messages: DataFrame) -> DataFrame:
    """(node_id, peer_id, topic_id, k): how many messages and bytes. One pass over all messages."""
    return messages.groupBy("node_id", "peer_id", "topic_id", "k").agg(
        F.count(F.lit(1)).alias("n"), F.sum(F.coalesce("size", F.lit(0))).alias("bytes")
    )


def copies(by_kind: pa.Table) -> pd.DataFrame:
    """(node_id, peer_id, topic_id): publishes, firsts, duplicates, rejects and bytes; of `copies_by_kind`.

    ``peer_id`` is 0 for a node's own messages. ``local``: those that its other programs got.
    """
    wanted = {
        **{"publishes": ("publish", "n"), "firsts": ("deliver", "n"), "duplicates": ("duplicate", "n")},
        **{"local": ("deliver_local", "n"), "rejects": ("reject", "n")},
        **{"duplicate_bytes": ("duplicate", "bytes"), "first_bytes": ("deliver", "bytes")},
    }
    for name, (kind, column) in wanted.items():
        by_kind = by_kind.append_column(name, only(by_kind, kind, column))
    return grouped(by_kind, ["node_id", "peer_id", "topic_id"], [(name, "sum") for name in wanted])


def asked(rpcs: DataFrame, column: str) -> DataFrame:
    """(node_id, peer_id, msg_id, asked_t): what a node sent to a peer in IWANT or IDONTWANT, the first time."""
    sent = rpcs.where((F.col("k") == code("send_rpc")) & F.col(column).isNotNull())
    flat = sent.select("node_id", "peer_id", "t", F.explode(column).alias("msg_id"))
    return flat.groupBy("node_id", "peer_id", "msg_id").agg(F.min("t").alias("asked_t"))


def recovered(messages: DataFrame, rpcs: DataFrame) -> DataFrame:
    """(topic_id, recovered): first deliveries from a peer that had been sent an IWANT for the message before."""
    firsts = messages.where((F.col("k") == code("deliver")) & F.col("peer_id").isNotNull())
    pairs = firsts.join(asked(rpcs, "iwant"), ["node_id", "peer_id", "msg_id"]).where(F.col("asked_t") <= F.col("t"))
    return pairs.groupBy("topic_id").agg(F.count(F.lit(1)).alias("recovered"))


def after_idontwant(messages: DataFrame, rpcs: DataFrame) -> DataFrame:
    """(sent, answered, late_copies): pairs (peer, message) in IDONTWANT; those of which a copy still came after."""
    sent = asked(rpcs, "idontwant")
    copies_of = messages.where(F.col("k") == code("duplicate")).select("node_id", "peer_id", "msg_id", "t")
    joined = sent.join(copies_of, ["node_id", "peer_id", "msg_id"], "left").withColumn(
        "late", F.when(F.col("t") >= F.col("asked_t"), 1).otherwise(0)
    )
    pairs = joined.groupBy("node_id", "peer_id", "msg_id").agg(F.sum("late").alias("late"))
    return pairs.agg(
        F.count(F.lit(1)).alias("sent"),
        F.count_if(F.col("late") > 0).alias("answered"),
        F.coalesce(F.sum("late"), F.lit(0)).alias("late_copies"),
    )
