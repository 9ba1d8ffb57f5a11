"""How messages spread: the first-delivery trees, copies, recovery. Formulas: docs/reference/traces.md."""

from typing import Any

import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from dep2p.spark_analytics import walk
from dep2p.spark_analytics.load import code


def subscriptions(mesh: DataFrame, runs: DataFrame, messages: DataFrame) -> DataFrame:
    """(topic_id, node_id, begin, end): who was subscribed from when to when.

    ``runs`` has (node_id, run, first_t, last_t). A subscription ends with a leave or with the run. A node without a
    join, in a filtered trace, counts as subscribed for its whole run to the topics that it delivered.
    """
    changes = mesh.where(F.col("k").isin(_number("join"), _number("leave")))
    following = Window.partitionBy("node_id", "run", "topic_id").orderBy("t", "seq")
    joined = (
        changes.select("node_id", "run", "topic_id", "t", "k", F.lead("t").over(following).alias("next_t"))
        .where(F.col("k") == code("join"))
        .join(F.broadcast(runs), ["node_id", "run"])
        .select("topic_id", "node_id", F.col("t").alias("begin"), F.coalesce("next_t", "last_t").alias("end"))
    )
    unjoined = (
        messages.where(F.col("k") == code("deliver"))
        .groupBy("node_id", "topic_id")
        .agg(F.count(F.lit(1)).alias("delivered"))
        .join(joined.select("node_id", "topic_id").distinct(), ["node_id", "topic_id"], "left_anti")
        .join(F.broadcast(runs), "node_id")
        .select("topic_id", "node_id", F.col("first_t").alias("begin"), F.col("last_t").alias("end"))
    )
    return joined.unionByName(unjoined)


def _number(kind: str) -> int:
    from dep2p.spark_analytics.load import KIND_CODES

    return KIND_CODES[kind]


def walked(messages: DataFrame, intervals: walk.Intervals, *, settle_us: int, bucket_us: int) -> DataFrame:
    """The rows of `dep2p.spark_analytics.walk`: one shuffle by message, then numpy."""
    rows = messages.where(F.col("k").isin(walk.PUBLISH, walk.DELIVER)).select(
        "msg_id", "node_id", "peer_id", "topic_id", "t", F.col("k").cast("int").alias("k")
    )
    return rows.repartition("msg_id").mapInArrow(walk.walker(intervals, settle_us, bucket_us), walk.DDL)


def of_walk(rows: pd.DataFrame, what: int) -> pd.DataFrame:
    """One of the tables in what `walked` gave, with its names; partial sums of partitions are put together."""
    names = walk.FIELDS[what]
    table = rows.loc[rows["what"] == what, [f"c{n}" for n in range(len(names))]].astype("int64")
    table.columns = pd.Index(names)
    keys = {
        walk.MESSAGE: [],
        walk.LINK: ["from_id", "to_id"],
        walk.NODE: ["node_id", "bucket"],
        walk.HOPS: ["topic_id", "hops"],
        walk.LATENCY: ["topic_id", "publisher_id", "latency_us"],
    }[what]
    if not keys:
        return table.reset_index(drop=True)
    combine = {"delay_min": "min", "delay_max": "max"}
    sums = {name: combine.get(name, "sum") for name in names if name not in keys}
    return table.groupby(keys, sort=False).agg(sums).reset_index()


def copies(messages: DataFrame) -> DataFrame:
    """(node_id, peer_id, topic_id): publishes, firsts, duplicates, rejects and bytes. One pass over all messages.

    ``peer_id`` is null for a node's own messages.
    """
    kind = F.col("k")
    size = F.coalesce("size", F.lit(0))
    return messages.groupBy("node_id", "peer_id", "topic_id").agg(
        _count(kind == code("publish")).alias("publishes"),
        _count(kind == code("deliver")).alias("firsts"),
        _count(kind == code("duplicate")).alias("duplicates"),
        _count(kind == code("reject")).alias("rejects"),
        F.sum(F.when(kind == code("duplicate"), size).otherwise(0)).alias("duplicate_bytes"),
        F.sum(F.when(kind == code("deliver"), size).otherwise(0)).alias("first_bytes"),
    )


def _count(condition: Any) -> Any:
    return F.sum(F.when(condition, 1).otherwise(0))


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
    """(told, answered, late_copies): pairs (peer, message) told IDONTWANT; those of which a copy still came after."""
    told = asked(rpcs, "idontwant")
    copies_of = messages.where(F.col("k") == code("duplicate")).select("node_id", "peer_id", "msg_id", "t")
    joined = told.join(copies_of, ["node_id", "peer_id", "msg_id"], "left").withColumn(
        "late", F.when(F.col("t") >= F.col("asked_t"), 1).otherwise(0)
    )
    pairs = joined.groupBy("node_id", "peer_id", "msg_id").agg(F.sum("late").alias("late"))
    return pairs.agg(
        F.count(F.lit(1)).alias("told"),
        F.coalesce(_count(F.col("late") > 0), F.lit(0)).alias("answered"),
        F.coalesce(F.sum("late"), F.lit(0)).alias("late_copies"),
    )
