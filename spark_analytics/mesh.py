"""Meshes over time: sessions of mesh links, degree, symmetry, churn, islands."""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

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


def sampled(sessions: DataFrame, bucket_us: int) -> DataFrame:
    """(topic_id, bucket, node_id, peer_id): links that are there at the end of each bucket of time."""
    return _at_ends(sessions, bucket_us, "topic_id", "node_id", "peer_id")


def _at_ends(spans: DataFrame, bucket_us: int, *names: str) -> DataFrame:
    # The end of bucket b is (b + 1) * bucket_us; a span covers it when begin <= it < end.
    begin, end = F.col("begin"), F.col("end")
    last = F.floor((end - 1) / bucket_us) - 1
    first = F.floor((begin - 1) / bucket_us)
    buckets = F.explode(F.sequence(first, last)).alias("bucket")
    return spans.where(last >= first).select(*names, buckets).distinct()


def degrees(samples: DataFrame, subscriptions: DataFrame, bucket_us: int) -> DataFrame:
    """(topic_id, bucket, nodes, lowest, mean, highest, without): how many mesh peers subscribed nodes have."""
    due = _at_ends(subscriptions, bucket_us, "topic_id", "node_id")
    counts = samples.groupBy("topic_id", "bucket", "node_id").agg(F.count(F.lit(1)).alias("degree"))
    joined = due.join(counts, ["topic_id", "bucket", "node_id"], "left").withColumn(
        "degree", F.coalesce("degree", F.lit(0))
    )
    return joined.groupBy("topic_id", "bucket").agg(
        F.count(F.lit(1)).alias("nodes"),
        F.min("degree").alias("lowest"),
        F.avg("degree").alias("mean"),
        F.max("degree").alias("highest"),
        F.sum(F.when(F.col("degree") == 0, 1).otherwise(0)).alias("without"),
    )


def symmetry(samples: DataFrame, nodes: DataFrame) -> DataFrame:
    """(topic_id, bucket, links, one_way): mesh links between traced nodes, and those that only one end has."""
    traced = samples.join(F.broadcast(nodes.select(F.col("node_id").alias("peer_id")).distinct()), "peer_id")
    one, other = F.least("node_id", "peer_id"), F.greatest("node_id", "peer_id")
    ends = traced.groupBy("topic_id", "bucket", one.alias("a"), other.alias("b")).agg(F.count(F.lit(1)).alias("ends"))
    return ends.groupBy("topic_id", "bucket").agg(
        F.sum("ends").alias("links"), F.sum(F.when(F.col("ends") == 1, 1).otherwise(0)).alias("one_way")
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


ISLANDS_DDL = "topic_id BIGINT, bucket BIGINT, nodes BIGINT, islands BIGINT, largest BIGINT"


def islands(samples: DataFrame) -> DataFrame:
    """(topic_id, bucket, nodes, islands, largest): connected parts of the mesh. More than one is a partition."""
    edges = samples.select("topic_id", "bucket", "node_id", "peer_id").repartition("topic_id", "bucket")
    return edges.mapInArrow(_find_islands(), ISLANDS_DDL)


def _find_islands() -> Any:
    def find(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        parents: dict[tuple[int, int], dict[int, int]] = {}
        for batch in batches:
            for topic, bucket, node, peer in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                roots = parents.setdefault((topic, bucket), {})
                ends = []
                for end in (node, peer):
                    roots.setdefault(end, end)
                    while roots[end] != end:
                        roots[end] = roots[roots[end]]
                        end = roots[end]
                    ends.append(end)
                roots[ends[0]] = ends[1]
        rows = []
        for (topic, bucket), roots in parents.items():
            sizes: dict[int, int] = {}
            for start in roots:
                end = start
                while roots[end] != end:
                    end = roots[end]
                sizes[end] = sizes.get(end, 0) + 1
            rows.append((topic, bucket, len(roots), len(sizes), max(sizes.values())))
        if rows:
            names = ["topic_id", "bucket", "nodes", "islands", "largest"]
            yield pa.RecordBatch.from_arrays(
                [pa.array(list(column), pa.int64()) for column in zip(*rows, strict=True)], names
            )

    return find
