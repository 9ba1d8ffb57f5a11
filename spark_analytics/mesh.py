"""Meshes over time: sessions of mesh links, degree, symmetry, churn, islands."""

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from dep2p.spark_analytics import mesh_samples
from dep2p.spark_analytics.load import KIND_CODES, code


def mesh_sessions(mesh: DataFrame, runs: DataFrame) -> DataFrame:
    """(node_id, run, topic_id, peer_id, begin, end, open): from each GRAFT to the PRUNE, or the peer's going.

    A GRAFT while in the mesh changes nothing. The end of a run ends what is open then; ``open`` says so.
    """
    link = ["node_id", "run", "topic_id", "peer_id"]
    changes = mesh.where(F.col("k").isin(KIND_CODES["graft"], KIND_CODES["prune"])).select(
        *link, "t", "seq", (F.col("k") == code("graft")).alias("up")
    )
    gone = (
        mesh.where(F.col("k") == code("remove_peer"))
        .select("node_id", "run", "peer_id", "t", "seq")
        .join(changes.where("up").select(*link).distinct(), ["node_id", "run", "peer_id"])
        .select(*link, "t", "seq", F.lit(False).alias("up"))
    )
    by_time = Window.partitionBy(*link).orderBy("t", "seq")
    edges = (
        changes.unionByName(gone)
        .withColumn("was", F.coalesce(F.lag("up").over(by_time), F.lit(False)))
        .where(F.col("up") != F.col("was"))
        .withColumn("next_t", F.lead("t").over(by_time))
    )
    return (
        edges.where("up")
        .join(F.broadcast(runs.select("node_id", "run", "last_t")), ["node_id", "run"])
        .select(
            *link,
            F.col("t").alias("begin"),
            F.coalesce("next_t", "last_t").alias("end"),
            F.col("next_t").isNull().alias("open"),
        )
    )


def churn(mesh: DataFrame) -> DataFrame:
    """(node_id, topic_id, grafts, prunes) over the whole trace."""
    return (
        mesh.where(F.col("k").isin(KIND_CODES["graft"], KIND_CODES["prune"]))
        .groupBy("node_id", "topic_id")
        .agg(
            F.sum(F.when(F.col("k") == code("graft"), 1).otherwise(0)).alias("grafts"),
            F.sum(F.when(F.col("k") == code("prune"), 1).otherwise(0)).alias("prunes"),
        )
    )


def sampled(sessions: DataFrame, subscriptions: DataFrame, traced: Any, bucket_us: int) -> DataFrame:
    """(topic_id, bucket, …) of `dep2p.spark_analytics.mesh_samples`: the meshes at the end of each bucket of time.

    ``traced``: sorted array of the ids of the nodes in the trace. One shuffle by topic, then numpy.
    """
    links = sessions.select("topic_id", "node_id", "peer_id", "begin", "end")
    due = subscriptions.select("topic_id", "node_id", F.lit(None).cast("bigint").alias("peer_id"), "begin", "end")
    rows = links.unionByName(due).repartition("topic_id")
    return rows.mapInArrow(mesh_samples.sampler(traced, bucket_us), mesh_samples.DDL)
