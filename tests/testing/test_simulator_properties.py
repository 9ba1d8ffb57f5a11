"""Invariants of the router in any small network, with any faults."""

from typing import Any

from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st

from dep2p.gossipsub.params import GossipParams, go_defaults
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.scoring.params import hardening_scores, standard_scores
from dep2p.testing import Churn, Latency, Partition, Scenario
from dep2p.testing.simulator.attacks import ATTACKS
from dep2p.testing.simulator.calendar import NO_SENDER, Agenda
from dep2p.testing.simulator.simulator import TOPIC, Simulation
from dep2p.testing.simulator.topology import random_graph

FORGETFUL = GossipParams(d=3, d_lo=2, d_hi=4, d_score=2, d_out=1, seen_items_max=8)
STORM = Scenario(
    nodes=16,
    messages=20,
    rate_per_s=20.0,
    message_bytes=16,
    seed=524,
    degree=14,
    params=FORGETFUL,
    partition=Partition(0.1, 1.0),
    churn=Churn(0.5, 1.0, 4.0),
    settle_s=6.0,
)
SCENARIOS = st.builds(
    Scenario,
    nodes=st.integers(2, 16),
    publishers=st.integers(1, 2),
    messages=st.integers(0, 25),
    rate_per_s=st.sampled_from([2.0, 20.0, 1_000.0]),
    message_bytes=st.sampled_from([16, 1_100]),
    seed=st.integers(0, 1 << 32),
    degree=st.integers(2, 20),
    latency=st.sampled_from([Latency(), Latency("fixed", 0.0), Latency("lognormal", 0.1, 1.0)]),
    loss=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    validation_s=st.sampled_from([0.0, 0.0, 0.05]),
    params=st.sampled_from([GossipParams(), go_defaults(), FORGETFUL]),
    scores=st.sampled_from([None, standard_scores(), hardening_scores()]),
    partition=st.sampled_from([None, None, Partition(0.1, 1.0), Partition(0.5, 4.0, 0.2)]),
    churn=st.sampled_from([Churn(), Churn(), Churn(1.0, 0.0, 1.0), Churn(0.5, 1.0, 4.0)]),
    attack=st.sampled_from([None, None, *ATTACKS]),
    sybils_per_node=st.sampled_from([1.0, 3.0]),
    sybil_degree=st.integers(1, 2),
    wire=st.sampled_from(["none", "none", "realm", "libp2p"]),
    settle_s=st.sampled_from([1.0, 6.0]),
)


COPIES_MAX = 100_000
"""Twenty times what the largest of these networks needs."""


def give_up_storms(simulation: Simulation) -> None:
    """With a seen cache smaller than what is under way, messages come again and are forwarded again, forever."""
    counted = simulation.metrics.sent

    def sent(*args: Any) -> None:
        counted(*args)
        if simulation.metrics.copies > COPIES_MAX:
            reject()

    simulation.metrics.sent = sent  # type: ignore[assignment]


def check_bounds(router: Router, params: GossipParams) -> None:
    sizes = router.sizes()
    assert sizes["seen"] <= params.seen_items_max
    assert sizes["mcache"] <= params.mcache_items_max
    assert sizes["backoffs"] <= params.backoff_items_max
    assert sizes["validating"] <= params.validation_max
    assert sizes["unwanted"] <= sizes["peers"] * params.idontwant_ids_max * params.idontwant_ticks
    assert sizes["topics"] <= 1
    # Above D_hi only by peers that this node dialed itself, and until the next heartbeat.
    assert len(router.mesh(TOPIC)) <= min(params.d_hi + 10, sizes["peers"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SCENARIOS)
@example(STORM)
def test_no_run_breaks_an_invariant(scenario: Scenario) -> None:
    simulation = Simulation(scenario)
    if scenario.params.seen_items_max < scenario.messages:
        give_up_storms(simulation)
    checks = 0

    def check(now: float) -> None:
        nonlocal checks
        checks += 1
        if checks % 50 == 0:
            for router in simulation.routers():
                check_bounds(router, scenario.params)

    simulation.run(check)
    report = simulation.report()
    # A seen cache too small for the traffic forgets what came; any other router delivers once.
    if scenario.params.seen_items_max > scenario.messages:
        assert report.delivered_twice == 0
    assert report.forged_delivered == 0
    assert report.publishes_refused == 0
    assert 0 <= report.deliveries.made <= report.deliveries.expected
    assert report.deliveries.expected <= scenario.messages * (scenario.nodes - 1)
    for router in simulation.routers():
        check_bounds(router, scenario.params)
        mesh = router.mesh(TOPIC)
        assert len(dict.fromkeys(mesh)) == len(mesh)
        assert router.peers().count(simulation.world.peers[0]) <= 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32), st.integers(13, 40), st.sampled_from([GossipParams(), go_defaults()]))
def test_in_a_healthy_network_meshes_are_within_bounds_symmetric_and_all_is_delivered(
    seed: int, nodes: int, params: GossipParams
) -> None:
    simulation = Simulation(Scenario(nodes=nodes, publishers=3, messages=10, seed=seed, degree=12, params=params))
    simulation.run()
    report = simulation.report()
    assert report.deliveries.ratio == 1.0
    world = simulation.world
    meshes = [dict.fromkeys(router.mesh(TOPIC)) for router in simulation.routers()]
    for number, mesh in enumerate(meshes):
        known = len(world.links[number])
        assert min(params.d_lo, known) <= len(mesh) <= params.d_hi
        for peer in mesh:
            assert world.peers[number] in meshes[world.numbers[peer]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60), st.data())
def test_the_agenda_gives_entries_in_order_also_those_put_while_it_is_worked_off(times: list[float], data: Any) -> None:
    agenda = Agenda()
    for number, at in enumerate(times):
        agenda.put((at, number, NO_SENDER, None))
    seen: list[tuple[float, int]] = []
    extra = len(times)
    while (bucket := agenda.open(100.0)) is not None:
        for at, number, _, _ in bucket:
            agenda.now = at
            seen.append((at, number))
            if extra < 2 * len(times):
                delay = data.draw(st.sampled_from([0.0, 0.0001, 0.003, 0.3]))
                agenda.put((at + delay, extra, NO_SENDER, None))
                extra += 1
        agenda.close()
    assert [at for at, _ in seen] == sorted(at for at, _ in seen)
    assert agenda.events == extra == 2 * len(times)
    assert sorted(number for _, number in seen) == list(range(extra))
    assert agenda.open(1e9) is None


@given(st.integers(2, 30), st.integers(2, 40), st.integers(0, 1 << 30))
def test_random_graphs_have_no_loops_and_no_link_twice(nodes: int, degree: int, seed: int) -> None:
    from random import Random

    links = random_graph(nodes, degree, Random(seed))
    undirected = [(min(link), max(link)) for link in links]
    assert len(dict.fromkeys(undirected)) == len(undirected)
    assert all(a != b for a, b in links)
