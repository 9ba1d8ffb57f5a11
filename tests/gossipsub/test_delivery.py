"""Whole networks under virtual time: everything is delivered, lost copies come by gossip, one seed is one run."""

import os
import subprocess
import sys

import pytest

from dep2p.gossipsub.events import ConfigureTopic, Join, Verdict
from dep2p.gossipsub.params import GossipParams, go_defaults
from dep2p.gossipsub.scoring.params import ScoreParams, standard_scores
from tests.gossipsub.network import Network


def scenario(
    *,
    nodes: int = 50,
    messages: int = 20,
    loss: float = 0.0,
    seed: int = 3,
    params: GossipParams | None = None,
    scores: ScoreParams | None = None,
    size: int = 200,
) -> Network:
    network = Network(seed=seed, loss=loss)
    network.add(nodes, params, scores)
    network.link(16)
    network.join_all("t")
    network.run(4.0)
    for number in range(messages):
        network.publish(4 + number * 0.1, network.rng.randrange(nodes), "t", b"%d" % number + b"x" * size)
    network.run(4 + messages * 0.1 + 10)
    return network


@pytest.mark.parametrize("size", [200, 2_000])
@pytest.mark.parametrize("scored", [False, True])
def test_without_loss_every_message_reaches_every_node(size: int, scored: bool) -> None:
    network = scenario(scores=standard_scores() if scored else None, size=size)
    assert len(network.delivered) == 20
    assert {len(nodes) for nodes in network.delivered.values()} == {50}
    for router in network.routers:
        assert 4 <= len(router.mesh("t")) <= 12
        assert all(score >= 0 for score in router.scores().values())


@pytest.mark.parametrize("loss", [0.1, 0.3])
def test_lost_copies_come_by_ihave_and_iwant(loss: float) -> None:
    network = scenario(loss=loss)
    assert {len(nodes) for nodes in network.delivered.values()} == {50}
    assert sum(router.counters().get("iwant answered", 0) for router in network.routers) > 0


def test_copies_per_delivery_stay_between_the_theory_s_bounds_with_go_s_defaults() -> None:
    network = scenario(nodes=100, params=go_defaults())
    copies = network.copies / (20 * 99)
    assert 5.0 <= copies <= 8.0


def test_idontwant_saves_copies_of_large_messages_that_take_longer_than_it() -> None:
    copies: dict[int, int] = {}
    for size in (1_000, 1_050):
        network = Network(seed=3, bytes_per_s=10_000.0)
        network.add(30)
        network.link(16, 0.001, 0.01)
        network.join_all("t")
        for number in range(30):
            network.schedule(0.0, number, ConfigureTopic("t", external=True))
        network.run(4.0)
        for number in range(10):
            network.publish(4 + number * 0.3, number, "t", b"%d" % number + b"x" * size)
        network.run(15.0)
        assert {len(nodes) for nodes in network.delivered.values()} == {30}
        copies[size] = network.copies
    assert copies[1_050] < 0.9 * copies[1_000]


def test_external_validation_delivers_too_and_a_rejected_message_spreads_no_further() -> None:
    network = Network(seed=5)
    network.verdict = lambda message: Verdict.REJECT if message.data.startswith(b"bad") else Verdict.ACCEPT
    network.add(30, scores=standard_scores())
    network.link(12)
    network.join_all("t")
    for number in range(30):
        network.schedule(0.0, number, ConfigureTopic("t", external=True))
    network.run(4.0)
    network.publish(4.0, 0, "t", b"good")
    network.publish(4.1, 1, "t", b"bad")
    network.run(10.0)
    assert sorted(len(nodes) for nodes in network.delivered.values()) == [1, 30]


def test_a_partition_that_heals_is_bridged_by_gossip() -> None:
    network = Network(seed=9)
    network.add(40, GossipParams(mcache_windows=20, mcache_gossip_windows=18))
    network.link(12)
    network.join_all("t")
    network.run(4.0)
    bridges = [(a, b) for a in range(20) for b in network.latency[a] if b >= 20]
    for a, b in bridges:
        network.cut(a, b)
    network.run(5.0)
    network.publish(5.0, 0, "t", b"during the partition")
    network.run(8.0)
    (nodes,) = network.delivered.values()
    assert max(nodes) < 20
    for a, b in bridges:
        network.dial(a, b, 0.05)
    network.run(16.0)
    assert len(nodes) == 40


def test_a_node_that_joins_late_gets_what_is_published_from_then_on() -> None:
    network = scenario(nodes=20, messages=1)
    network.add(1)
    for other in range(5):
        network.dial(20, other, 0.02)
    network.schedule(network.now, 20, Join("t"))
    start = network.now
    network.publish(start + 0.5, 3, "t", b"after it joined")
    network.run(start + 5)
    assert len(list(network.delivered.values())[-1]) == 21


_DIGEST = """
from tests.gossipsub.test_delivery import scenario
from dep2p.gossipsub.scoring.params import standard_scores
network = scenario(nodes=30, messages=10, loss=0.1, scores=standard_scores(), size=1500)
print(network.digest.hexdigest(), network.events, network.copies)
"""


def test_one_seed_gives_one_run_under_any_hash_seed() -> None:
    runs = [
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "4242")
    ]
    assert runs[0] == runs[1]
    assert runs[0].split()[0] != scenario(nodes=30, messages=10, seed=4).digest.hexdigest()
