"""Activity of nodes over time, gaps in their traces, and the cost of RPCs."""

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dep2p.spark_analytics.ingest.decode import UNREADABLE
from dep2p.spark_analytics.ingest.silver import KIND_CODES, code


def activity_by_kind(events: DataFrame, bucket_us: int) -> DataFrame:
    """(node_id, run, source_id, bucket, k) with counts, and the first and last ``t`` and ``seq``: one pass over all."""
    # With the kind as a key, each of many events costs seven sums and not fourteen; `activity` makes the others.
    place = ["node_id", "run", "source_id", F.floor(F.col("t") / bucket_us).alias("bucket"), "k"]
    return events.groupBy(*place).agg(
        F.count(F.lit(1)).alias("events"),
        *(F.min("t").alias("first_t"), F.max("t").alias("last_t")),
        *(F.min("seq").alias("first_seq"), F.max("seq").alias("last_seq")),
        *(F.max("v").alias("version"), F.min("v").alias("oldest_version")),
    )


def activity(by_kind: pa.Table) -> pd.DataFrame:
    """(node_id, run, source_id, bucket) with the same, and how many events of some kinds; of `activity_by_kind`."""
    counted = ("publish", "deliver", "duplicate", "reject", "drop_rpc", "node_start", "node_stop")
    for name in counted:
        by_kind = by_kind.append_column(name, only(by_kind, name, "events"))
    sums = [(name, "sum") for name in ("events", *counted)]
    least = [(name, "min") for name in ("first_t", "first_seq", "oldest_version")]
    most = [(name, "max") for name in ("last_t", "last_seq", "version")]
    return grouped(by_kind, ["node_id", "run", "source_id", "bucket"], [*sums, *least, *most])


def only(by_kind: pa.Table, kind: str, column: str) -> pa.Array:
    """The column for events of a kind, 0 for the others."""
    return pc.if_else(pc.equal(by_kind["k"], pa.scalar(KIND_CODES[kind], pa.int8())), by_kind[column], 0)


def grouped(table: pa.Table, keys: list[str], wanted: list[tuple[str, str]]) -> pd.DataFrame:
    """Rows by keys with (column, aggregate), under the names of the columns. A key that is null stays one group."""
    found = table.group_by(keys).aggregate(wanted)
    return (
        found.select([*keys, *(f"{name}_{how}" for name, how in wanted)])
        .rename_columns([*keys, *(name for name, _ in wanted)])
        .to_pandas()
    )


def rpc_totals(rpcs: DataFrame) -> DataFrame:
    """(node_id, peer_id, k): RPCs with their messages, ids and bytes. One pass."""

    def total(column: str) -> Column:
        return F.sum(F.coalesce(column, F.lit(0))).alias(column)

    return rpcs.groupBy("node_id", "peer_id", F.col("k").cast("int").alias("k")).agg(
        F.count(F.lit(1)).alias("rpcs"),
        *(total(name) for name in ("messages", "message_bytes", "control_bytes", "ihave", "grafts", "prunes")),
        F.sum(F.size(F.coalesce("iwant", F.array()))).alias("iwant"),
        F.sum(F.size(F.coalesce("idontwant", F.array()))).alias("idontwant"),
    )


def drops(rpcs: DataFrame, bucket_us: int) -> DataFrame:
    """(bucket, node_id, peer_id, reason): dropped RPCs over time."""
    bucket = F.floor(F.col("t") / bucket_us).alias("bucket")
    dropped = rpcs.where(F.col("k") == code("drop_rpc"))
    return dropped.groupBy(bucket, "node_id", "peer_id", F.coalesce("reason", F.lit("")).alias("reason")).agg(
        F.count(F.lit(1)).alias("drops"),
        F.sum(F.coalesce("messages", F.lit(0))).alias("messages"),
    )


def rejects(messages: DataFrame) -> DataFrame:
    """(node_id, peer_id, topic_id, reason): messages that were not taken."""
    return (
        messages.where(F.col("k") == code("reject"))
        .groupBy("node_id", "peer_id", "topic_id", F.coalesce("reason", F.lit("")).alias("reason"))
        .agg(F.count(F.lit(1)).alias("rejects"))
    )


def lost_events(node: DataFrame) -> DataFrame:
    """(node_id, reason, lost): events that nodes say they did not write."""
    return (
        node.where(F.col("k") == code("dropped"))
        .groupBy("node_id", F.coalesce("reason", F.lit("")).alias("reason"))
        .agg(F.sum("count").alias("lost"))
    )


def samples(node: DataFrame) -> DataFrame:
    """(share, nodes): what share of the messages nodes say that they traced."""
    starts = node.where(F.col("k") == code("node_start"))
    return starts.groupBy(F.coalesce("sample", F.lit(1.0)).alias("share")).agg(
        F.countDistinct("node_id").alias("nodes")
    )


def clock_readings(node: DataFrame) -> DataFrame:
    """(node_id, peer_id, ahead_us, error_us): the most exact reading of each pair."""
    readings = node.where(F.col("k") == code("clock")).groupBy("node_id", "peer_id")
    return readings.agg(
        F.min_by("offset_us", F.struct("error_us", "t")).alias("ahead_us"), F.min("error_us").alias("error_us")
    )


def rejected_lines(bad: DataFrame) -> DataFrame:
    """(source, error, rows, example): lines that are no JSON, lack node or time, or are of an unknown kind; files
    that workers could not read.
    """
    error = (
        F.when(F.col("_corrupt").isNotNull(), "no JSON")
        .when(F.col("node").isNull() & F.col("reason").startswith(UNREADABLE), F.col("reason"))
        .when(F.col("node").isNull() | F.col("t").isNull(), "no event: node or t is missing")
        .otherwise(F.concat(F.lit("unknown kind "), F.coalesce("kind", F.lit("(none)"))))
    )
    return bad.groupBy("source", error.alias("error")).agg(
        F.count(F.lit(1)).alias("rows"), F.first(F.substring("_corrupt", 1, 200), ignorenulls=True).alias("example")
    )
