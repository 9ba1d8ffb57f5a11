"""The arithmetic of the benchmark contract."""

import pytest

from bench.harness.environment import LoadMeter, describe
from bench.harness.report import Report, Result, Sample
from dep2p.protocols.timing.percentile import percentile


def test_the_ratio_of_a_rate_is_ours_over_the_peers() -> None:
    result = Result("request/1", "1/s", "peer", [Sample(400.0), Sample(100.0), Sample(300.0)], [Sample(100.0)])
    assert (result.value, result.peer_value, result.ratio) == (300.0, 100.0, 3.0)


@pytest.mark.parametrize("unit", ["ms", "MB", "KB"])
def test_the_ratio_of_times_and_sizes_is_the_peers_over_ours(unit: str) -> None:
    assert Result("dial", unit, "peer", [Sample(20.0)], [Sample(250.0)]).ratio == 12.5


def test_latencies_are_left_out_where_none_were_taken() -> None:
    with_latencies = Result("dial", "ms", "peer", [Sample(2.0, 1.0, 3.0)], [Sample(4.0)]).as_object()
    without = Result("notify", "1/s", "peer", [Sample(2.0)], [Sample(1.0)]).as_object()
    assert (with_latencies["p50_ms"], with_latencies["p99_ms"]) == (1.0, 3.0)
    counted = Result("queue", "1/s", "peer", [Sample(2.0, cpu_us=20.0, fsyncs=1 / 64)], [Sample(1.0)])
    assert (counted.as_object()["cpu_us"], counted.as_object()["fsyncs"]) == (20.0, 0.01562)
    assert "0.0156" in Report("queue", {}, [counted]).as_table()
    assert set(without) == {"name", "value", "unit", "peer", "peer_value", "ratio"}


def test_percentiles_are_values_of_the_sequence() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.5) == 51.0
    assert percentile(values, 0.99) == 100.0
    assert percentile([7.0], 0.99) == 7.0


def test_the_table_names_every_result_its_peer_and_the_environment() -> None:
    result = Result("stream", "MB/s", "some peer", [Sample(300.0)], [Sample(200.0)])
    table = Report("stream", {"cpu": "a cpu", "packages": {"libp2p": "1.2.3"}}, [result]).as_table()
    for text in ("stream", "some peer", "300", "200", "1.50", "cpu: a cpu", "packages: libp2p 1.2.3"):
        assert text in table


def test_the_environment_has_what_the_contract_asks_for() -> None:
    environment = describe()
    assert {"cpu", "cores", "python", "commit", "packages"} <= set(environment)
    assert isinstance(environment["packages"], dict)
    assert "libp2p" in environment["packages"]


def test_the_load_of_others_is_never_negative() -> None:
    load = LoadMeter()
    assert load.other_cores == 0.0
    load.begin([])
    sum(range(100_000))
    load.end([])
    assert load.other_cores >= 0.0
