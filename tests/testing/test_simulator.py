"""Simulated networks: one seed is one run, messages arrive in spite of faults, figures agree with published ones."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from dep2p.gossipsub.effects import Effect
from dep2p.gossipsub.params import GossipParams, go_defaults
from dep2p.gossipsub.rpc import Rpc
from dep2p.gossipsub.scoring.params import ScoreParams, hardening_scores, standard_scores
from dep2p.testing import Attack, Churn, Latency, Partition, Report, Scenario, Stage, Sybil, simulate
from dep2p.testing.simulator.attacks import ATTACKS
from dep2p.types import PeerId

SMALL = Scenario(nodes=40, publishers=4, messages=12, degree=12)

_RUN = """
import json
from dep2p.testing import Churn, Latency, Partition, Scenario, simulate
report = simulate(Scenario(
    nodes=40, publishers=4, messages=20, degree=12, seed={seed}, loss=0.05, latency=Latency("lognormal", 0.04, 0.5),
    partition=Partition(1.0, 3.0), churn=Churn(1.0, 1.0, 2.0), attack={attack!r}, sybils_per_node=1.0, settle_s=8.0,
    message_bytes=1500, validation_s=0.01,
))
found = report.as_object()
del found["performance"]
print(json.dumps(found))
"""


def run_in_process(seed: int, hash_seed: str, attack: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(seed=seed, attack=attack)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_one_seed_is_one_run_under_any_hash_seed(attack: str) -> None:
    first, second = run_in_process(7, "1", attack), run_in_process(7, "4242", attack)
    assert first == second
    assert first["trace_hash"] != run_in_process(8, "1", attack)["trace_hash"]


def test_another_loss_or_latency_is_another_run() -> None:
    hashes = {
        simulate(scenario).trace_hash
        for scenario in (SMALL, replace(SMALL, loss=0.01), replace(SMALL, latency=Latency("fixed", 0.05)), SMALL)
    }
    assert len(hashes) == 3


def test_the_simulator_loads_no_io_library() -> None:
    code = (
        "import sys; from dep2p.testing import Scenario, simulate\n"
        "simulate(Scenario(nodes=3, publishers=1, messages=1))\n"
        "heavy = {'trio', 'libp2p', 'anyio', 'asyncio', 'socket', 'httpx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def everything_arrived_once(report: Report) -> bool:
    return report.deliveries.ratio == 1.0 and not report.delivered_twice and not report.forged_delivered


@pytest.mark.parametrize(
    "latency",
    [Latency("fixed", 0.0), Latency("fixed", 0.05), Latency("uniform", 0.0, 0.3), Latency("lognormal", 0.06, 0.6)],
)
def test_everything_arrives_once_whatever_the_latency(latency: Latency) -> None:
    report = simulate(replace(SMALL, latency=latency))
    assert everything_arrived_once(report)
    assert report.deliveries.expected == 12 * 39
    if latency.kind == "fixed":
        hops = report.deliveries.hops
        assert report.deliveries.latency_ms.max == pytest.approx(hops.max * latency.first * 1_000)


@pytest.mark.parametrize("scores", [None, standard_scores(), hardening_scores()])
@pytest.mark.parametrize("params", [GossipParams(), go_defaults()])
def test_lost_copies_come_by_gossip(scores: ScoreParams | None, params: GossipParams) -> None:
    report = simulate(replace(SMALL, loss=0.2, params=params, scores=scores, settle_s=8.0))
    assert report.drops["lost"] > 100
    assert report.counters["iwant answered"] > 0
    assert report.deliveries.ratio > 0.995
    assert not report.delivered_twice


@pytest.mark.parametrize("wire", ["realm", "libp2p"])
def test_encoding_and_decoding_every_rpc_changes_no_delivery(wire: Literal["realm", "libp2p"]) -> None:
    plain = simulate(replace(SMALL, loss=0.05))
    encoded = simulate(replace(SMALL, loss=0.05, wire=wire))
    assert everything_arrived_once(encoded)
    assert encoded.deliveries == plain.deliveries
    assert encoded.rpcs == plain.rpcs


def test_time_for_validation_is_paid_at_every_hop() -> None:
    plain = simulate(replace(SMALL, latency=Latency("fixed", 0.01)))
    slow = simulate(replace(SMALL, latency=Latency("fixed", 0.01), validation_s=0.1))
    assert everything_arrived_once(slow)
    assert slow.deliveries.latency_ms.p50 > plain.deliveries.latency_ms.p50 + 100


def test_copies_per_delivery_with_go_s_defaults_are_as_published() -> None:
    """6.29 in gerbil-simsub's scenario: 1,000 nodes, 60 messages."""
    report = simulate(Scenario(nodes=1_000, publishers=10, messages=60, seed=7, params=go_defaults()))
    assert everything_arrived_once(report)
    assert report.copies_per_delivery == pytest.approx(6.29, rel=0.05)
    assert report.mesh_degree_min >= 5


def test_after_a_partition_gossip_bridges_what_was_published_in_it() -> None:
    params = GossipParams(mcache_windows=20, mcache_gossip_windows=18)
    scenario = replace(SMALL, messages=40, partition=Partition(2.0, 6.0), params=params, settle_s=15.0)
    report = simulate(scenario)
    assert report.drops["no link"] > 0
    assert everything_arrived_once(report)
    assert report.deliveries.latency_ms.max > 1_000
    assert simulate(replace(scenario, params=GossipParams())).deliveries.ratio < 1.0


def test_nodes_that_leave_and_crash_come_back_and_the_others_miss_nothing() -> None:
    report = simulate(replace(SMALL, messages=60, churn=Churn(0.5, 0.5, 3.0), settle_s=8.0))
    assert report.deliveries.expected < 60 * 39
    assert report.deliveries.ratio > 0.995
    assert not report.delivered_twice


def test_a_lone_publish_to_a_node_that_is_down_goes_to_the_next() -> None:
    report = simulate(replace(SMALL, messages=40, publishers=1, churn=Churn(0.0, 3.0, 5.0), settle_s=8.0))
    assert report.deliveries.expected > 0
    assert report.publishes_refused == 0


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_four_sybils_for_each_node_do_not_keep_messages_from_honest_nodes(attack: str) -> None:
    report = simulate(Scenario(nodes=60, publishers=6, messages=40, seed=5, attack=attack))
    assert report.scenario.sybils == 240
    assert report.deliveries.ratio >= 0.99
    assert not report.forged_delivered
    assert not report.delivered_twice
    assert not report.disconnects.get("honest peers")


def test_without_outbound_quota_gossip_and_scores_the_same_attack_succeeds() -> None:
    """Else the attack would prove nothing."""
    params = GossipParams(d_out=0, d_lazy=0, gossip_factor=0.0, graft_on_subscribe=False)
    scenario = Scenario(
        nodes=60, publishers=6, messages=40, seed=5, attack="cold-boot-eclipse", params=params, scores=None
    )
    assert simulate(scenario).deliveries.ratio < 0.9


def test_who_floods_with_grafts_or_forgeries_is_thrown_out() -> None:
    for attack in ("graft-flood", "message-spam"):
        report = simulate(Scenario(nodes=40, publishers=4, messages=30, seed=5, attack=attack))
        assert report.disconnects["sybils"] >= report.scenario.sybils
    assert report.mesh_sybil_share < 0.05


@pytest.mark.parametrize("wire", ["none", "realm", "libp2p"])
def test_forgeries_are_seen_through_on_every_wire(wire: Literal["none", "realm", "libp2p"]) -> None:
    scenario = Scenario(nodes=15, publishers=3, messages=10, seed=5, degree=8, attack="message-spam", wire=wire)
    report = simulate(replace(scenario, sybils_per_node=1.0))
    assert report.counters["rejected: invalid signature"] > 100
    assert not report.counters.get("drop: malformed rpc")
    assert everything_arrived_once(report)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"nodes": 1}, "nodes"),
        ({"publishers": 41}, "41 publishers"),
        ({"loss": 1.0}, "loss"),
        ({"rate_per_s": 0.0}, "rate_per_s"),
        ({"attack": "none such"}, "cold-boot-eclipse"),
        ({"message_bytes": 2_000_000}, "1048576"),
        ({"warmup_s": 0.5}, "warmup_s"),
        ({"sybil_degree": 0}, "sybil_degree"),
        ({"settle_s": -1.0}, "settle_s"),
    ],
)
def test_a_scenario_that_makes_no_sense_says_why(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        replace(SMALL, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "fixed", "fixed:x", "uniform:10", "uniform:20:10", "gauss:1:2", "fixed:9999999"])
def test_a_latency_that_is_none_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="fixed:50"):
        Latency.parse(text)


def test_latencies_and_partitions_are_read_from_text() -> None:
    assert Latency.parse("fixed:50") == Latency("fixed", 0.05, 0.0)
    assert Latency.parse("uniform:10:150") == Latency()
    assert Latency.parse("lognormal:60:0.5") == Latency("lognormal", 0.06, 0.5)
    assert Partition.parse("2:8") == Partition(2.0, 8.0, 0.5)
    assert Partition.parse("2:8:0.3") == Partition(2.0, 8.0, 0.3)
    for text in ("", "1", "8:2", "1:2:3", "a:b"):
        with pytest.raises(ValueError, match="START:END"):
            Partition.parse(text)


@pytest.mark.parametrize("attack", ["target-eclipse", "publisher-censorship"])
def test_an_attack_on_one_node_or_publisher_reports_what_came_of_it(attack: str) -> None:
    report = simulate(Scenario(nodes=40, publishers=4, messages=16, seed=7, attack=attack))
    target = report.target
    assert target is not None
    assert target.expected == (16 if attack == "target-eclipse" else 4 * 39)
    assert target.ratio == 1.0
    assert report.as_object()["target"] is not None
    assert simulate(Scenario(nodes=40, publishers=4, messages=4, seed=7)).target is None


def test_early_forgeries_need_large_messages_and_a_check_that_takes_time() -> None:
    scenario = Scenario(nodes=30, publishers=3, messages=9, seed=7, attack="early-forgery", message_bytes=100)
    assert (scenario.payload_bytes, scenario.check_s) == (2_048, 0.005)
    report = simulate(scenario)
    assert report.deliveries.ratio == 1.0 and report.forged_delivered == 0
    assert report.rpcs["idontwant"] > 0


def test_an_attack_of_ones_own_plays_its_sybils_where_it_wants_them() -> None:
    made: list[Stage] = []

    class Silent(Sybil):
        def receive(self, peer: PeerId, rpc: Rpc, now: float) -> list[Effect]:
            return []

    def make(stage: Stage, _make_router: object) -> Silent:
        made.append(stage)
        return Silent(stage)

    def links(stage: Stage, degree: int) -> list[int]:
        return [stage.number % stage.victims]

    attack = Attack(summary="sybils do nothing", make=make, links=links, target="node")
    report = simulate(Scenario(nodes=30, publishers=3, messages=9, seed=7, attack=attack, sybils_per_node=1.0))
    assert len(made) == 30 and made[0].target not in made[0].publishers
    assert report.deliveries.ratio == 1.0
    assert report.as_object()["attack"] == "sybils do nothing"


def test_the_page_s_example_of_an_attack_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/howto/simulate.md").read_text()
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "class Echo" in block]
    exec(example, {"__name__": "example"})
    assert float(capsys.readouterr().out) == 1.0
