"""Every metric of the Spark jobs is what plain Python loops find in the same trace."""

import os
from collections import Counter
from typing import Any, NamedTuple

import pytest

from dep2p.spark_analytics.ingest.silver import raw_files, write_silver
from dep2p.spark_analytics.job import check_places
from dep2p.spark_analytics.metrics.analysis import Analysis, AnalysisOptions, analyse
from dep2p.spark_analytics.metrics.figures import Figures
from dep2p.spark_analytics.metrics.summary import summary
from dep2p.testing import Scenario, simulate
from dep2p.testing.simulator.faults import Churn, Partition
from tests.spark.app_trace import write_apps
from tests.spark.reference import Reference, load

SEEDS = range(int(os.environ.get("DEP2P_SPARK_SEEDS", "2")))


class Case(NamedTuple):
    """A trace, what Spark makes of it and what loops do."""

    found: Analysis
    truth: Reference
    figures: Figures


@pytest.fixture(scope="module", params=SEEDS)
def case(request: pytest.FixtureRequest, spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    seed: int = request.param
    base = tmp_path_factory.mktemp(f"seed{seed}")
    simulate(
        Scenario(
            nodes=24,
            publishers=4,
            messages=30,
            degree=8,
            loss=0.03,
            seed=seed,
            message_bytes=(400, 2_000)[seed % 2],  # the larger ones are announced by IDONTWANT
            validation_s=0.004,
            partition=Partition(2, 6, 0.3),
            churn=Churn(0.1, 0.2, 3.0),
            settle_s=6.0,
        ),
        trace_dir=base / "traces",
    )
    write_apps(base / "traces", seed)
    assert check_places([str(base / "traces")]) == []
    write_silver(raw_files(spark, [str(base / "traces")]), str(base / "silver"))
    options = AnalysisOptions(correct_clocks=False)
    found = analyse(spark, str(base / "silver"), options)
    truth = Reference(load(base / "traces"), settle_us=found.settle_us, bucket_us=found.bucket_us)
    return Case(found, truth, summary(found))


def rows(table: Any, *names: str) -> list[tuple[Any, ...]]:
    return [
        tuple(None if value != value else value for value in row) for row in table[list(names)].itertuples(index=False)
    ]


def test_nothing_is_missing(case: Case) -> None:
    assert case.figures["events"] == len(case.truth.events)
    assert case.figures["missing_events"] == 0
    assert len(case.found.tables["rejected_lines"]) == 0
    assert case.figures["runs"] == len(case.truth.run_ends) > 27, "some nodes came back"


def test_subscriptions(case: Case) -> None:
    assert sorted(rows(case.found.tables["subscriptions"], "topic", "node", "begin", "end")) == sorted(
        case.truth.subscriptions
    )


def test_spread_of_each_message(case: Case) -> None:
    names = ("eligible", "reached", "delivered", "t50", "t90", "t99", "t100", "last_us", "latency_sum")
    truth = case.truth.spread()
    by_publish = {(p["node"], p["t"]): msg for msg, p in case.truth.publishes.items()}
    seen = 0
    table = case.found.tables["spread"]
    for row in rows(table, "publisher", "t0", *names, "last_hops", "parents", "unreached", "published"):
        msg = by_publish[row[0], row[1]]
        *first, lowest, highest, parents, unreached = truth[msg]
        assert list(row[2:11]) == first
        assert lowest <= row[11] <= highest
        assert row[12:] == (parents, unreached, 1)
        seen += 1
    assert seen == len(truth) == 30


def test_links(case: Case) -> None:
    table = rows(case.found.tables["links"], "sender", "receiver", "firsts", "delay_sum", "delay_min", "delay_max")
    assert {row[:2]: row[2:] for row in table} == case.truth.links()


def test_hops_and_latencies(case: Case) -> None:
    assert Counter({row[:2]: row[2] for row in rows(case.found.tables["hops"], "topic", "hops", "deliveries")}) == (
        case.truth.hop_counts()
    )
    table = rows(case.found.tables["latency"], "topic", "publisher", "latency_us", "deliveries")
    assert Counter({row[:3]: row[3] for row in table}) == case.truth.latencies()
    exact = sorted(
        event["t"] - publish["t"]
        for msg, publish in case.truth.publishes.items()
        for event in case.truth.firsts[msg].values()
    )
    latency = case.figures["topics"][0]["latency_ms"]
    assert latency is not None
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        true = exact[-(-len(exact) * share // 100) - 1] / 1000
        assert true * 0.992 <= latency[name] <= true
    assert latency["max"] == exact[-1] / 1000
    assert latency["mean"] == pytest.approx(sum(exact) / len(exact) / 1000)


def test_coverage_of_each_node(case: Case) -> None:
    table = rows(case.found.tables["node_coverage"], "node", "bucket", "eligible", "reached", "delivered")
    assert {row[:2]: row[2:] for row in table} == case.truth.node_coverage()


def test_reliability(case: Case) -> None:
    spread = case.truth.spread().values()
    expected, reached = sum(row[0] for row in spread), sum(row[1] for row in spread)
    topic = case.figures["topics"][0]
    assert topic["expected"] == expected
    assert topic["reliability"] == round(reached / expected, 6) < 1, "the partition shows"
    assert topic["deliveries"] == sum(row[2] for row in spread)


def test_copies_and_redundancy(case: Case) -> None:
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows(
        case.found.tables["copies"], "node", "peer", "topic", "publishes", "firsts", "duplicates", "rejects"
    ):
        for kind, count in zip(("publish", "deliver", "duplicate", "reject"), row[3:], strict=True):
            found[(*row[:3], kind)] += count
    assert +found == case.truth.copies()
    topic = case.figures["topics"][0]
    duplicates = len(case.truth.of["duplicate"])
    assert topic["duplicates_per_delivery"] == round(duplicates / topic["deliveries"], 6)
    # Plumtree: of each message, copies received / (nodes that have it - 1) - 1.
    assert topic["rmr"] == round((topic["deliveries"] + duplicates) / topic["deliveries"] - 1, 6)


def test_recovery_by_iwant_and_idontwant(case: Case) -> None:
    assert dict(rows(case.found.tables["recovered"], "topic", "recovered")) == dict(case.truth.recovered())
    sent, answered, late = case.truth.idontwant()
    assert rows(case.found.tables["idontwant"], "sent", "answered", "late_copies") == [(sent, answered, late)]


def test_rpcs(case: Case) -> None:
    kinds = {6: "recv_rpc", 7: "send_rpc", 8: "drop_rpc"}
    names = ("rpcs", "messages", "message_bytes", "control_bytes", "ihave", "iwant", "idontwant")
    found = {
        (kinds[row[0]], row[1], row[2]): row[3:] for row in rows(case.found.tables["rpcs"], "k", "node", "peer", *names)
    }
    truth = case.truth.rpcs()
    assert found == truth
    sent = [sums for key, sums in truth.items() if key[0] == "send_rpc"]
    control, data = sum(row[3] for row in sent), sum(row[2] for row in sent)
    figures = case.figures["rpcs"]
    assert figures is not None
    assert figures["control_overhead"] == round(control / (control + data), 6)
    ihave, iwant = sum(row[4] for row in sent), sum(row[5] for row in sent)
    assert figures["iwant_per_ihave"] == round(iwant / ihave, 6)


def test_mesh_sessions(case: Case) -> None:
    found = rows(case.found.tables["mesh_sessions"], "node", "topic", "peer", "begin", "end")
    assert sorted(found) == case.truth.mesh_sessions()


def test_mesh_over_time(case: Case) -> None:
    truth = case.truth.mesh_samples()
    tables = case.found.tables
    degree = {
        r[:2]: r[2:] for r in rows(tables["degree"], "topic", "bucket", "nodes", "lowest", "mean", "highest", "without")
    }
    sides = {r[:2]: r[2:] for r in rows(tables["symmetry"], "topic", "bucket", "links", "one_way")}
    parts = {r[:2]: r[2:] for r in rows(tables["islands"], "topic", "bucket", "nodes", "islands", "largest")}
    assert {key for key, sample in truth.items() if sample["degree"]} == set(degree)
    for key, sample in truth.items():
        if sample["degree"]:
            assert degree[key][:4] == pytest.approx(sample["degree"])
            assert degree[key][4] == sample["without"]
        assert sides.get(key, (0, 0)) == (sample["links"], sample["one_way"])
        assert parts.get(key, (0, 0, 0)) == sample["islands"]


def test_churn(case: Case) -> None:
    found = {row[0]: row[1:] for row in rows(case.found.tables["churn"], "node", "grafts", "prunes")}
    grafts, prunes = (Counter(e["node"] for e in case.truth.of[kind]) for kind in ("graft", "prune"))
    assert found == {node: (grafts[node], prunes[node]) for node in grafts | prunes}


def test_delivery(case: Case) -> None:
    truth = case.truth.sent()
    names = ("messages", "acknowledged", "lost", "under_way", "retries", "retried")
    for row in rows(case.found.tables["delivery"], "node", "peer", *names):
        assert dict(zip(names, row[2:], strict=True)) == {name: truth[row[:2]][name] for name in names}
    assert len(case.found.tables["delivery"]) == len(truth) == 6
    assert Counter(dict(rows(case.found.tables["ack_latency"], "latency_us", "messages"))) == case.truth.ack_latency


def test_arrival_and_reordering(case: Case) -> None:
    truth = case.truth.arrived()
    found = rows(case.found.tables["arrival"], "node", "peer", "received", "repeated", "reordered")
    assert {row[:2]: row[2:] for row in found} == {
        link: (sums["received"], sums["repeated"], sums["reordered"]) for link, sums in truth.items()
    }
    assert case.figures["delivery"]["reordered"] > 0


def test_queues(case: Case) -> None:
    truth = case.truth.queues()
    names = ("messages", "finished", "redelivered", "hand_outs", "timeouts", "requeues", "dead")
    for row in rows(case.found.tables["queues"], "queue", "channel", *names):
        assert dict(zip(names, row[2:], strict=True)) == {name: truth[row[:2]][name] for name in names}
    assert len(case.found.tables["queues"]) == len(truth) == 4
    found = rows(case.found.tables["queue_times"], "queue", "channel", "what", "time_us", "messages")
    assert Counter({row[:4]: row[4] for row in found}) == case.truth.queue_times
    for queue in case.figures["queues"]:
        assert queue["order_violations"] == truth[queue["queue"], queue["channel"]]["violations"] > 0


def test_requests_sessions_and_scores(case: Case) -> None:
    found = rows(case.found.tables["requests"], "name", "side", "outcome", "duration_us", "requests")
    assert Counter({row[:4]: row[4] for row in found}) == case.truth.requests()
    sessions = {state: (value["times"], value["items"]) for state, value in case.figures["sessions"].items()}
    assert sessions == case.truth.sessions()
    found = case.found.tables["push_latency"]
    pushes = {(row.sender, row.receiver, row.latency_us): row.pushes for row in found.itertuples(index=False)}
    assert pushes == case.truth.push_latency()
    latency = case.figures["pushes"]["latency_ms"]
    assert latency is not None and latency["n"] == sum(pushes.values()) > 200
    assert {
        (each["name"], each["side"], each["state"]): (each["streams"], each["bytes_in"], each["bytes_out"])
        for each in case.figures["streams"]
    } == case.truth.streams()
    assert case.figures["sample"] == 1.0
    scores = {row[0]: row[1:] for row in rows(case.found.tables["peer_scores"], "peer", "raters", "mean", "lowest")}
    truth = case.truth.scores()
    assert scores.keys() == truth.keys()
    for peer, values in truth.items():
        assert scores[peer] == pytest.approx(values)


def test_the_tree_is_that_of_the_slowest_message(case: Case) -> None:
    tree = rows(case.found.tables["tree"], "msg", "node", "parent", "hops", "latency_us")
    slowest = max(case.truth.publishes, key=lambda msg: case.truth.spread()[msg][7])
    msg = tree[0][0]
    assert case.truth.spread()[msg][7] == case.truth.spread()[slowest][7]
    hops = case.truth.hops(msg)
    assert {row[1]: row[3] for row in tree[1:]} == hops
    assert {row[1]: row[2] for row in tree[1:]} == {node: e["peer"] for node, e in case.truth.firsts[msg].items()}
