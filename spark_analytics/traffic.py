"""What nodes did over time, whether their traces are whole, and what RPCs cost."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dep2p.spark_analytics.load import code


def activity(events: DataFrame, bucket_us: int) -> DataFrame:
    """(node_id, run, source_id, bucket) with counts, and the first and last ``t`` and ``seq``: one pass over all.

    ``kinds`` has bit n set when there are events of the kind with the number n.
    """
    # By kind first: few sums for each of many events, then the many sums over few rows.
    place = ["node_id", "run", "source_id", F.floor(F.col("t") / bucket_us).alias("bucket")]
    by_kind = events.groupBy(*place, "k").agg(
        F.count(F.lit(1)).alias("n"),
        *(F.min("t").alias("first_t"), F.max("t").alias("last_t")),
        *(F.min("seq").alias("first_seq"), F.max("seq").alias("last_seq")),
        *(F.max("v").alias("version"), F.min("v").alias("oldest_version")),
    )
    kind = F.col("k")

    def count(name: str) -> Column:
        return F.sum(F.when(kind == code(name), F.col("n")).otherwise(0))

    return by_kind.groupBy("node_id", "run", "source_id", "bucket").agg(
        F.sum("n").alias("events"),
        F.bit_or(_bit(kind)).alias("kinds"),
        *(F.min("first_t").alias("first_t"), F.max("last_t").alias("last_t")),
        *(F.min("first_seq").alias("first_seq"), F.max("last_seq").alias("last_seq")),
        *(F.max("version").alias("version"), F.min("oldest_version").alias("oldest_version")),
        *(count(name).alias(name) for name in ("publish", "deliver", "duplicate", "reject", "drop_rpc")),
        *(count(name).alias(name) for name in ("node_start", "node_stop")),
    )


def _bit(kind: Column) -> Column:
    return F.pow(F.lit(2.0), kind.cast("double")).cast("bigint")


def rpc_totals(rpcs: DataFrame) -> DataFrame:
    """(node_id, peer_id, k): RPCs with their messages, ids and bytes. One pass."""

    def total(column: str) -> Column:
        return F.sum(F.coalesce(F.col(column).cast("bigint"), F.lit(0))).alias(column)

    return rpcs.groupBy("node_id", "peer_id", F.col("k").cast("int").alias("k")).agg(
        F.count(F.lit(1)).alias("rpcs"),
        *(total(name) for name in ("messages", "message_bytes", "control_bytes", "ihave", "grafts", "prunes")),
        F.sum(F.coalesce(F.size(F.coalesce("iwant", F.array())), F.lit(0))).cast("bigint").alias("iwant"),
        F.sum(F.coalesce(F.size(F.coalesce("idontwant", F.array())), F.lit(0))).cast("bigint").alias("idontwant"),
    )


def drops(rpcs: DataFrame, bucket_us: int) -> DataFrame:
    """(bucket, node_id, peer_id, reason): dropped RPCs over time."""
    bucket = F.floor(F.col("t") / bucket_us).alias("bucket")
    dropped = rpcs.where(F.col("k") == code("drop_rpc"))
    return dropped.groupBy(bucket, "node_id", "peer_id", F.coalesce("reason", F.lit("")).alias("reason")).agg(
        F.count(F.lit(1)).alias("drops"),
        F.sum(F.coalesce("messages", F.lit(0))).cast("bigint").alias("messages"),
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


def clock_readings(node: DataFrame) -> DataFrame:
    """(node_id, peer_id, ahead_us, error_us): the most exact reading of each pair."""
    readings = node.where(F.col("k") == code("clock")).groupBy("node_id", "peer_id")
    return readings.agg(
        F.min_by("offset_us", F.struct("error_us", "t")).alias("ahead_us"), F.min("error_us").alias("error_us")
    )


def strangers(bad: DataFrame) -> DataFrame:
    """(source, trouble, rows, example): lines that are no JSON, lack node or time, or are of a kind unknown here."""
    trouble = (
        F.when(F.col("_corrupt").isNotNull(), "no JSON")
        .when(F.col("node").isNull() | F.col("t").isNull(), "no event: node or t is missing")
        .otherwise(F.concat(F.lit("unknown kind "), F.coalesce("kind", F.lit("(none)"))))
    )
    return bad.groupBy("source", trouble.alias("trouble")).agg(
        F.count(F.lit(1)).alias("rows"), F.first(F.substring("_corrupt", 1, 200), ignorenulls=True).alias("example")
    )
