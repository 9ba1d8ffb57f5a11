"""The synthetic trace of the benchmark, and Spark's numbers of it against DuckDB's SQL over the same files."""

from pathlib import Path
from typing import Any

import pytest

from bench.spark.benchmark import agree, registered
from bench.spark.synthetic_trace import write_trace
from dep2p.spark_analytics.ingest.silver import raw_files, write_silver
from dep2p.spark_analytics.metrics import analysis
from dep2p.spark_analytics.metrics.analysis import Analysis, analyse
from dep2p.traces.files import read_events, trace_files


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("synthetic")
    write_trace(place, 120_000)
    return place


def test_no_one_has_a_message_before_the_one_that_it_came_from(traces: Path) -> None:
    had: dict[tuple[str, str], int] = {}
    copies: list[tuple[str, str, str, int]] = []
    for path in trace_files([traces]):
        for event in read_events(path):
            if event["kind"] in ("publish", "deliver"):
                had.setdefault((event["msg"], event["node"]), event["t"])
            if event["kind"] in ("deliver", "duplicate") and "peer" in event:
                copies.append((event["msg"], event["node"], event["peer"], event["t"]))
    assert len(copies) > 50_000
    # Else the delays of links are negative, and clocks that are right look wrong.
    assert [copy for copy in copies if had[copy[0], copy[2]] > copy[3]] == []


def test_duckdb_finds_the_same_and_no_clock_is_corrected(
    spark: Any, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas as pd

    pytest.importorskip("duckdb")
    from bench.spark.peers import RESULTS, duckdb_metrics

    silver = str(tmp_path / "silver")
    write_silver(raw_files(spark, [str(traces)]), silver)
    asked: list[list[int]] = []

    def named(silver: Any, ids: list[int]) -> Any:
        asked.append(ids)
        return pd.DataFrame({"id": [], "name": []})

    monkeypatch.setattr(analysis, "_named", named)
    found = analyse(spark, silver)
    assert asked == [], "nodes name all peers: an id that nobody names has lost bits on its way"
    assert found.offsets == {}
    agree(found, duckdb_metrics(silver, raw=False, bucket_us=found.bucket_us, fine_us=5_000_000))
    pytest.importorskip("polars")
    from bench.spark.polars_peer import polars_metrics

    theirs = polars_metrics(silver, bucket_us=found.bucket_us, fine_us=5_000_000)
    agree(found, registered(theirs), "Polars")
    other = duckdb_metrics(silver, raw=False, bucket_us=found.bucket_us, fine_us=5_000_000)
    rows = {name: other.execute(f"SELECT count(*) FROM {name}").fetchone() for name in RESULTS}
    assert {name: (table.height,) for name, table in theirs.items()} == rows
    wrong = Analysis(**{name: getattr(found, name) for name in Analysis.__slots__})
    wrong.tables = {**found.tables, "links": found.tables["links"].iloc[1:]}
    with pytest.raises(Exception, match="Polars disagree about links"):
        agree(wrong, registered(theirs), "Polars")
    with pytest.raises(Exception, match="DuckDB disagree about links"):
        agree(wrong, duckdb_metrics(silver, raw=False, bucket_us=found.bucket_us, fine_us=5_000_000))


def test_the_cold_peer_reads_the_raw_files_alike(traces: Path) -> None:
    pytest.importorskip("duckdb")
    from bench.spark.peers import RESULTS, duckdb_metrics

    raw = duckdb_metrics(str(traces), raw=True, bucket_us=30_000_000, fine_us=5_000_000)
    events = sum(1 for path in trace_files([traces]) for _ in read_events(path))
    assert raw.execute("SELECT sum(events) FROM activity").fetchone() == (events,)
    assert all(raw.execute(f"SELECT count(*) FROM {name}").fetchone() is not None for name in RESULTS)
