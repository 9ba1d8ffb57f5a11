"""Reliable delivery, sessions, queues, requests and scores. Formulas: docs/reference/traces.md."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from dep2p.spark_analytics.ingest.silver import code
from dep2p.spark_analytics.metrics import session_pushes


def bucketed(value: Column) -> Column:
    """The value rounded down to 8 significant bits, as in `dep2p.spark_analytics.metrics.delivery_trees.bucket_of`."""
    positive = F.greatest(value, F.lit(0))
    bits = F.floor(F.log2(F.greatest(positive, F.lit(1)))) - 7
    unit = F.floor(F.pow(F.lit(2.0), F.greatest(bits, F.lit(0))))
    return positive - positive % unit


def _first(state: str) -> Column:
    return F.min(F.when(F.col("state") == state, F.col("t")))


def _has(state: str) -> Column:
    return F.max(F.when(F.col("state") == state, 1).otherwise(0))


def sent(app: DataFrame) -> DataFrame:
    """(node_id, peer_id, msg_id): what became of each reliable message at its sender."""
    rows = app.where((F.col("k") == code("delivery")) & ~F.col("state").isin("received", "repeated"))
    return rows.groupBy("node_id", "peer_id", "msg_id").agg(
        _first("created").alias("created_t"),
        _first("sending").alias("sending_t"),
        _first("acknowledged").alias("acknowledged_t"),
        F.coalesce(F.max("attempt"), F.lit(0)).alias("attempts"),
        *(_has(state).alias(state) for state in ("failed", "expired", "dropped")),
    )


def delivery(messages: DataFrame) -> DataFrame:
    """(node_id, peer_id): messages, acknowledged, lost by reason, under way, and retries; of `sent`."""
    done = F.col("acknowledged_t").isNotNull()
    lost = (F.col("failed") + F.col("expired") + F.col("dropped")) > 0
    return messages.groupBy("node_id", "peer_id").agg(
        F.count(F.lit(1)).alias("messages"),
        F.count_if(done).alias("acknowledged"),
        F.count_if(lost & ~done).alias("lost"),
        *(F.sum(F.when(~done, F.col(name)).otherwise(0)).alias(name) for name in ("failed", "expired", "dropped")),
        F.count_if(~lost & ~done).alias("under_way"),
        F.sum(F.greatest(F.col("attempts") - 1, F.lit(0))).alias("retries"),
        F.count_if(F.col("attempts") > 1).alias("retried"),
    )


def ack_latency(messages: DataFrame) -> DataFrame:
    """(latency_us, messages): from the first state of a message to its acknowledgement, in buckets; of `sent`."""
    latency = F.col("acknowledged_t") - F.coalesce("created_t", "sending_t")
    acknowledged = messages.where(latency.isNotNull())
    return acknowledged.groupBy(bucketed(latency).alias("latency_us")).agg(F.count(F.lit(1)).alias("messages"))


def arrival(app: DataFrame) -> DataFrame:
    """(node_id, peer_id): received, repeated and reordered at the receiver.

    Reordered: received with a lower ``position`` than one received before from the same peer.
    """
    rows = app.where((F.col("k") == code("delivery")) & F.col("state").isin("received", "repeated"))
    before = (
        Window.partitionBy("node_id", "peer_id", "state").orderBy("t", "seq").rowsBetween(Window.unboundedPreceding, -1)
    )
    marked = rows.withColumn("highest", F.max("position").over(before))
    received = F.col("state") == "received"
    return marked.groupBy("node_id", "peer_id").agg(
        F.count_if(received).alias("received"),
        F.count_if(~received).alias("repeated"),
        F.count_if(received & (F.col("position") < F.col("highest"))).alias("reordered"),
    )


_CHANNEL = ["namespace", "queue", "channel"]


def handled(app: DataFrame) -> DataFrame:
    """(namespace, queue, channel, msg_id): when it was published, first and last handed out, and its end.

    A hand-out that was given back untried is none. ``waited_us`` is what the first one itself says: the publish may
    not be in the trace.
    """
    rows = app.where(F.col("k") == code("queue"))
    published = (
        rows.where(F.col("state") == "published")
        .groupBy("namespace", "queue", "msg_id")
        .agg(F.min("t").alias("published_t"))
    )
    per_channel = (
        rows.where(F.col("channel").isNotNull())
        .groupBy(*_CHANNEL, "msg_id")
        .agg(
            _first("handed_out").alias("first_t"),
            F.max(F.when(F.col("state") == "handed_out", F.col("t"))).alias("last_t"),
            F.max(F.when(F.col("state") == "finished", F.col("t"))).alias("finished_t"),
            F.min(F.when((F.col("state") == "handed_out") & (F.col("attempt") == 1), F.col("duration_us"))).alias(
                "waited_us"
            ),
            F.sum(F.when(F.col("state") == "handed_out", 1).when(F.col("state") == "released", -1).otherwise(0)).alias(
                "hand_outs"
            ),
            F.sum(F.when(F.col("state") == "timed_out", 1).otherwise(0)).alias("timeouts"),
            F.sum(F.when(F.col("state") == "requeued", 1).otherwise(0)).alias("requeues"),
            *(_has(state).alias(state) for state in ("dead", "expired", "rejected")),
        )
    )
    return per_channel.join(published, ["namespace", "queue", "msg_id"], "left")


def queues(messages: DataFrame) -> DataFrame:
    """(namespace, queue, channel): messages, finished, redelivered, dead letters, timeouts, requeues; of `handled`."""
    return messages.groupBy(*_CHANNEL).agg(
        F.count(F.lit(1)).alias("messages"),
        F.count("finished_t").alias("finished"),
        F.count_if(F.col("hand_outs") > 1).alias("redelivered"),
        *(F.sum(name).alias(name) for name in ("hand_outs", "timeouts", "requeues", "dead", "expired", "rejected")),
    )


def queue_times(messages: DataFrame) -> DataFrame:
    """(namespace, queue, channel, what, time_us, messages): waits before the first hand-out, service times; buckets.

    Service time: from the last hand-out to the finish.
    """
    wait = messages.select(
        *_CHANNEL,
        F.lit("wait").alias("what"),
        F.coalesce(F.col("first_t") - F.col("published_t"), "waited_us").alias("us"),
    )
    service = messages.select(
        *_CHANNEL, F.lit("service").alias("what"), (F.col("finished_t") - F.col("last_t")).alias("us")
    )
    rows = wait.unionByName(service).where(F.col("us").isNotNull())
    return rows.groupBy(*_CHANNEL, "what", bucketed(F.col("us")).alias("time_us")).agg(
        F.count(F.lit(1)).alias("messages")
    )


def order_violations(app: DataFrame) -> DataFrame:
    """(namespace, queue, channel, violations): first hand-outs of a key after a later message of the same key."""
    first = Window.partitionBy(*_CHANNEL, "msg_id").orderBy("t", "seq")
    before = (
        Window.partitionBy(*_CHANNEL, "partition", "key").orderBy("t", "seq").rowsBetween(Window.unboundedPreceding, -1)
    )
    rows = (
        app.where((F.col("k") == code("queue")) & (F.col("state") == "handed_out") & F.col("key").isNotNull())
        .withColumn("nth", F.row_number().over(first))
        .where(F.col("nth") == 1)
        .withColumn("highest", F.max("position").over(before))
    )
    wrong = F.col("position") < F.col("highest")
    return rows.groupBy(*_CHANNEL).agg(F.count_if(wrong).alias("violations"), F.countDistinct("key").alias("keys"))


def requests(app: DataFrame) -> DataFrame:
    """(name, side, outcome, duration_us, requests): requests by what they were and how they ended, in buckets."""
    rows = app.where(F.col("k") == code("request"))
    return rows.groupBy("name", "side", "outcome", bucketed(F.col("duration_us")).alias("duration_us")).agg(
        F.count(F.lit(1)).alias("requests")
    )


def slow_answers(app: DataFrame) -> DataFrame:
    """(peer_id, asked, failed, mean_us): how a peer answers, by the records of the peers that asked it."""
    rows = app.where((F.col("k") == code("request")) & (F.col("side") == "out"))
    failed = F.col("outcome") != "ok"
    return rows.groupBy("peer_id").agg(
        F.count(F.lit(1)).alias("asked"), F.count_if(failed).alias("failed"), F.avg("duration_us").alias("mean_us")
    )


def streams(app: DataFrame) -> DataFrame:
    """(name, side, state, streams, bytes_in, bytes_out, mean_us): streams that were opened, and how others ended."""
    rows = app.where(F.col("k") == code("stream"))
    return rows.groupBy("name", "side", "state").agg(
        F.count(F.lit(1)).alias("streams"),
        *(F.sum(F.coalesce(name, F.lit(0))).alias(name) for name in ("bytes_in", "bytes_out")),
        F.avg("duration_us").alias("mean_us"),
    )


def push_latency(app: DataFrame) -> DataFrame:
    """(from_id, to_id, latency_us, pushes): from a push's first sending to its receipt, in buckets, by one clock.

    Partial sums: rows with the same keys are to be added.
    """
    is_client = F.col("side") == "out"
    rows = app.where((F.col("k") == code("session")) & F.col("session").isNotNull() & F.col("peer_id").isNotNull())
    is_numbered = F.col("state").isin("sent", "received")
    return (
        rows.where(F.col("epoch").isNotNull() | is_numbered)
        .select(
            F.xxhash64("session").alias("session_id"),
            F.when(is_client, F.col("peer_id")).otherwise(F.col("node_id")).alias("server_id"),
            F.when(is_client, F.col("node_id")).otherwise(F.col("peer_id")).alias("client_id"),
            is_client.alias("received"),
            *("t", "seq", "epoch", "position"),
            F.when(is_numbered, F.col("count")).alias("count"),
        )
        .repartition("session_id")
        .mapInArrow(session_pushes.matcher(), session_pushes.DDL)
    )


def session_changes(app: DataFrame) -> DataFrame:
    """(session, node_id, peer_id, side, state): how often, and how many items were skipped or sent again."""
    rows = app.where(F.col("k") == code("session"))
    return rows.groupBy("session", "node_id", "peer_id", "side", "state").agg(
        F.count(F.lit(1)).alias("times"), F.sum(F.coalesce("count", F.lit(0))).alias("items")
    )


def scores(node: DataFrame) -> DataFrame:
    """(node_id, peer, score, t): every reading of every snapshot."""
    rows = node.where(F.col("k") == code("scores"))
    return rows.select("node_id", "t", F.explode("scores").alias("s")).select("node_id", "t", "s.peer", "s.score")


def score_spread(readings: DataFrame, bucket_us: int) -> DataFrame:
    """(bucket, readings, lowest, p10, p50, p90, highest, negative): scores over time; of `scores`."""
    bucket = F.floor(F.col("t") / bucket_us).alias("bucket")
    quantiles = F.percentile("score", [0.1, 0.5, 0.9])
    return (
        readings.groupBy(bucket)
        .agg(
            F.count(F.lit(1)).alias("readings"),
            F.min("score").alias("lowest"),
            quantiles.alias("q"),
            F.max("score").alias("highest"),
            F.count_if(F.col("score") < 0).alias("negative"),
        )
        .select(
            *("bucket", "readings", "lowest", F.col("q")[0].alias("p10"), F.col("q")[1].alias("p50")),
            *(F.col("q")[2].alias("p90"), "highest", "negative"),
        )
    )


def scores_of_peers(readings: DataFrame) -> DataFrame:
    """(peer, raters, mean, lowest): each peer, as all others score it; of `scores`."""
    return readings.groupBy("peer").agg(
        F.countDistinct("node_id").alias("raters"),
        F.avg("score").alias("mean"),
        F.min("score").alias("lowest"),
    )
