"""Peer scores, P1 to P7, and the gater."""

import random
from dataclasses import replace

import pytest

from dep2p.gossipsub.scoring.params import ScoreParams, TopicScoreParams
from dep2p.gossipsub.scoring.peer_gater import GaterParams, PeerGater
from dep2p.gossipsub.scoring.score import PeerScorer, PeerStats, colocation_keys
from tests.gossipsub.network import peer

TOPIC = TopicScoreParams(
    weight=1.0,
    mesh_time_weight=0.0,
    first_weight=0.0,
    first_decay=0.5,
    first_cap=10,
    invalid_weight=0.0,
    invalid_decay=0.5,
)
PARAMS = ScoreParams(
    default_topic=TOPIC, colocation_weight=0, behaviour_weight=0, behaviour_decay=0.5, decay_to_zero=0.1
)


def scorer(**topic: float) -> tuple[PeerScorer, PeerStats]:
    scores = PeerScorer(replace(PARAMS, default_topic=replace(TOPIC, **topic)), 0.0)
    return scores, scores.connect(peer(1), ())


def test_p1_time_in_the_mesh_counts_by_quantum_and_is_capped() -> None:
    scores, stats = scorer(mesh_time_weight=2.0, mesh_time_quantum_s=1.0, mesh_time_cap=5)
    scores.graft(stats, "t", 0.0)
    scores.refresh(3.0)
    assert stats.score == 6.0
    scores.refresh(100.0)
    assert stats.score == 10.0
    scores.prune(stats, "t")
    scores.refresh(101.0)
    assert stats.score == 0.0


def test_p2_first_deliveries_count_are_capped_and_decay() -> None:
    scores, stats = scorer(first_weight=1.0)
    for _ in range(20):
        scores.first(stats, "t")
    scores.rescore(stats)
    assert stats.score == 10.0
    scores.refresh(1.0)
    assert stats.score == 5.0
    scores.refresh(100.0)
    assert stats.score == 0.0
    assert stats.is_quiet


def test_p3_a_deficit_counts_squared_once_the_peer_is_in_the_mesh_long_enough() -> None:
    scores, stats = scorer(delivery_weight=-1.0, delivery_threshold=4, delivery_activation_s=5, delivery_decay=0.9)
    scores.graft(stats, "t", 0.0)
    scores.refresh(5.0)
    assert stats.score == 0.0
    scores.refresh(6.0)
    assert stats.score == -16.0
    for _ in range(3):
        scores.first(stats, "t")
    scores.rescore(stats)
    assert stats.score == -1.0


def test_p3b_the_deficit_sticks_after_a_prune() -> None:
    scores, stats = scorer(
        delivery_weight=-1.0, delivery_threshold=3, delivery_activation_s=1, failure_weight=-1.0, failure_decay=0.5
    )
    scores.graft(stats, "t", 0.0)
    scores.refresh(2.0)
    scores.prune(stats, "t")
    scores.rescore(stats)
    assert stats.score == -9.0
    scores.refresh(3.0)
    assert stats.score == -4.5


def test_p4_invalid_messages_count_squared_at_once() -> None:
    scores, stats = scorer(invalid_weight=-2.0)
    scores.invalid(stats, "t")
    scores.invalid(stats, "t")
    assert stats.score == -8.0


def test_p5_is_what_the_app_said() -> None:
    scores, stats = scorer()
    scores.set_app(stats, -7.5)
    assert stats.score == -7.5
    scores.refresh(1.0)
    assert stats.score == -7.5


def test_p6_counts_peers_of_one_address_and_one_ipv6_network_but_not_loopback() -> None:
    params = replace(PARAMS, colocation_weight=-1.0, colocation_threshold=2)
    scores = PeerScorer(params, 0.0)
    stats = [scores.connect(peer(number), ("192.0.2.1",)) for number in range(4)]
    scores.refresh(1.0)
    assert [each.score for each in stats] == [-4.0] * 4
    for number in range(2):
        scores.disconnect(peer(number), 1.0)
    scores.refresh(2.0)
    assert stats[3].score == 0.0
    loopback = [scores.connect(peer(10 + number), ("127.0.0.1", "::1")) for number in range(5)]
    assert loopback[-1].score == 0.0
    assert colocation_keys(("2001:db8::1",)) == ("2001:db8::1", "2001:db8:0:0::/64")
    assert colocation_keys(("2001:0db8:0:0:1::2",))[1] == "2001:db8:0:0::/64"


def test_p7_counts_squared_above_its_threshold() -> None:
    scores = PeerScorer(replace(PARAMS, behaviour_weight=-1.0, behaviour_threshold=1.0), 0.0)
    stats = scores.connect(peer(1), ())
    scores.misbehaved(stats)
    assert stats.score == 0.0
    scores.misbehaved(stats, 3)
    assert stats.score == -9.0


def test_the_topics_sum_is_capped_but_faults_elsewhere_are_not() -> None:
    scores = PeerScorer(replace(PARAMS, default_topic=replace(TOPIC, first_weight=1.0), topic_cap=3.0), 0.0)
    stats = scores.connect(peer(1), ())
    for _ in range(9):
        scores.first(stats, "t")
    scores.set_app(stats, -1.0)
    assert stats.score == 2.0


def test_leaving_does_not_wash_off_a_bad_score_but_a_merit_is_lost() -> None:
    scores, stats = scorer(invalid_weight=-1.0, invalid_decay=0.99, first_weight=1.0)
    scores.invalid(stats, "t")
    scores.first(stats, "t")
    scores.disconnect(peer(1), 1.0)
    again = scores.connect(peer(1), ())
    assert again.score == -1.0
    good = scores.connect(peer(2), ())
    scores.first(good, "t")
    scores.disconnect(peer(2), 2.0)
    assert scores.connect(peer(2), ()).score == 0.0
    assert len(scores) == 2


def test_bad_scores_are_kept_for_the_retention_time_and_in_bounded_number() -> None:
    params = replace(PARAMS, default_topic=replace(TOPIC, invalid_weight=-1.0), retain_s=10, retained_max=3)
    scores = PeerScorer(params, 0.0)
    for number in range(6):
        scores.invalid(scores.connect(peer(number), ()), "t")
        scores.disconnect(peer(number), 0.0)
    assert len(scores) == 3
    scores.refresh(11.0)
    assert len(scores) == 0


def test_without_parameters_nothing_is_counted() -> None:
    scores = PeerScorer(None, 0.0)
    stats = scores.connect(peer(1), ("192.0.2.1",))
    scores.first(stats, "t")
    scores.invalid(stats, "t")
    scores.misbehaved(stats)
    scores.refresh(5.0)
    assert (stats.score, stats.topics) == (0.0, {})


def test_a_topic_s_parameters_can_be_set_later() -> None:
    scores, stats = scorer()
    scores.invalid(stats, "t")
    scores.configure("t", replace(TOPIC, invalid_weight=-5.0))
    scores.rescore(stats)
    assert stats.score == -5.0
    assert scores.counts_deliveries("t") is False


@pytest.fixture
def gater() -> PeerGater:
    return PeerGater(GaterParams(), random.Random(1), 0.0)


def test_the_gater_lets_everything_pass_while_validation_keeps_up(gater: PeerGater) -> None:
    source = gater.connect("a")
    source.reject = 100.0
    for _ in range(10):
        gater.validated()
    assert gater.accepts(source, 1.0)
    gater.throttled(1.0)
    assert gater.accepts(source, 1.0)


def test_the_gater_drops_more_of_who_sends_invalid_messages(gater: PeerGater) -> None:
    bad, good = gater.connect("bad"), gater.connect("good")
    bad.reject, good.deliver, good.duplicate = 10.0, 50.0, 10.0
    for _ in range(5):
        gater.validated()
        gater.throttled(1.0)
    accepted_bad = sum(gater.accepts(bad, 2.0) for _ in range(1000))
    accepted_good = sum(gater.accepts(good, 2.0) for _ in range(1000))
    assert accepted_bad < 30
    assert accepted_good > 950
    assert gater.accepts(bad, 100.0), "quiet for long: stand down"


def test_the_gater_forgets_addresses_and_is_bounded() -> None:
    gater = PeerGater(GaterParams(sources_max=3, retain_s=10), random.Random(1), 0.0)
    sources = [gater.connect(str(number)) for number in range(3)]
    for source in sources:
        gater.disconnect(source, 0.0)
    gater.connect("new").reject = 5.0
    gater.decay(100.0)
    assert gater.connect("0") is not sources[0]
