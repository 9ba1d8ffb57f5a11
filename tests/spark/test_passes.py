"""How reports ask Spark: each query has the columns that its empty table claims; a second report compiles little."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from dep2p.spark_analytics.ingest.sample import write_sample
from dep2p.spark_analytics.ingest.silver import KIND_CODES, raw_files, read_silver, write_silver
from dep2p.spark_analytics.metrics import apps, mesh
from dep2p.spark_analytics.metrics.analysis import analyse
from dep2p.spark_analytics.metrics.queries import COLUMNS, Query, empty, first_queries, later_queries


@pytest.fixture(scope="module")
def silver(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("sample")
    write_sample(place / "traces")
    write_silver(raw_files(spark, [str(place / "traces")]), str(place / "silver"))
    return str(place / "silver")


def test_empty_tables_have_the_columns_of_their_queries(spark: Any, silver: str) -> None:
    opened = read_silver(spark, silver)
    rpcs = pd.DataFrame({"iwant": [1], "idontwant": [1]})
    queries = first_queries(opened) | later_queries(opened, frozenset(KIND_CODES), rpcs, 1_000_000)
    # What depends on the times of several nodes is asked when their clocks are known.
    queries["push_latency"] = Query(True, lambda: apps.push_latency(opened.app))
    assert queries.keys() == COLUMNS.keys()
    for name, query in queries.items():
        frame = query.frame()
        assert ", ".join(f"{column} {kind}" for column, kind in frame.dtypes) == COLUMNS[name], name
        found = frame.toPandas()
        if len(found) and not found.isna().any(axis=None):
            assert [str(kind) for kind in empty(name).dtypes] == [str(kind) for kind in found.dtypes], name


def test_a_second_report_compiles_nearly_nothing(spark: Any, silver: str) -> None:
    compiled = spark._jvm.org.apache.spark.metrics.source.CodegenMetrics.METRIC_COMPILATION_TIME()
    analyse(spark, silver)
    first = compiled.getCount()  # another test may have had the same queries compiled
    assert first, "nothing was ever compiled: the metric says nothing"
    analyse(spark, silver)
    # Nearly: when tasks end decides a little of how Spark plans what follows.
    again = compiled.getCount() - first
    assert again < 20, f"{again} of more than a hundred classes are generated again: they do not fit into Spark's cache"


def test_meshes_of_many_topics_are_sampled_by_workers_alike(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    size = 4_000
    begin = rng.integers(0, 50_000_000, size)
    links = pd.DataFrame(
        {
            "topic_id": rng.integers(1, 5, size),
            "node_id": rng.integers(1, 30, size),
            "peer_id": rng.integers(1, 30, size),
            "begin": begin,
            "end": begin + rng.integers(1, 9_000_000, size),
        }
    )
    due = links.drop(columns="peer_id").iloc[:500]
    traced = np.arange(1, 25)
    here = mesh.sampled(spark, links, due, traced, 1_000_000)
    monkeypatch.setattr(mesh, "_TOPICS_HERE", 0)
    there = mesh.sampled(spark, links, due, traced, 1_000_000)
    order = ["topic_id", "bucket"]
    assert len(here) > 150 and here["links"].sum() > 0
    pd.testing.assert_frame_equal(
        here.sort_values(order, ignore_index=True), there.sort_values(order, ignore_index=True), check_dtype=False
    )
    nothing = mesh.sampled(spark, links.iloc[:0], due.iloc[:0], traced, 1_000_000)
    assert list(nothing.columns) == list(here.columns) and not len(nothing)
