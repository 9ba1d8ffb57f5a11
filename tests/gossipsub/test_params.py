"""Parameters: defaults of dep2p and of go, and every relation between them."""

import pytest

from dep2p.gossipsub.params import GossipParams, go_defaults, with_rust_limits
from dep2p.gossipsub.scoring.params import (
    ScoreParams,
    ScoreThresholds,
    TopicScoreParams,
    decay_for,
    hardening_scores,
    standard_scores,
)


def test_the_defaults_are_those_of_the_documentation() -> None:
    params = GossipParams()
    assert (params.d, params.d_lo, params.d_hi, params.d_lazy) == (6, 4, 12, 6)
    assert (params.heartbeat_interval_s, params.fanout_ttl_s) == (1.0, 60.0)
    assert (params.mcache_windows, params.mcache_gossip_windows) == (5, 3)
    assert (params.message_bytes_max, params.publish_rate_per_s, params.topics_max) == (1 << 20, 100.0, 100)


def test_go_defaults_differ_where_go_does() -> None:
    params = go_defaults()
    assert (params.d_lo, params.rpc_bytes_max, params.publish_rate_per_s) == (5, 1 << 20, 0.0)


def test_rust_limits_leave_space_for_a_signed_message() -> None:
    params = with_rust_limits(GossipParams())
    assert params.rpc_bytes_max == 65_536
    assert params.message_bytes_max < 65_536


def test_a_bootstrapper_may_have_no_mesh_at_all() -> None:
    assert GossipParams(d=0, d_lo=0, d_hi=0, d_score=0, d_out=0).d == 0


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"d_lo": 7}, "d_lo <= d"),
        ({"d_hi": 5}, "d <= d_hi"),
        ({"d_lo": 0}, "1 <= d_lo"),
        ({"d_score": 7}, "d_score"),
        ({"d_out": 4}, "d_out"),
        ({"d": 4, "d_lo": 4, "d_out": 3}, "d_out"),
        ({"mcache_gossip_windows": 6}, "mcache_gossip_windows"),
        ({"mcache_gossip_windows": 0}, "mcache_gossip_windows"),
        ({"gossip_factor": 1.5}, "gossip_factor"),
        ({"heartbeat_interval_s": 0.0}, "heartbeat_interval_s"),
        ({"heartbeat_interval_s": 30.0}, "seen_ttl_s"),
        ({"backoff_max_s": 30.0}, "backoff_max_s"),
        ({"graft_flood_threshold_s": 61.0}, "graft_flood_threshold_s"),
        ({"topics_max": 0}, "topics_max"),
        ({"validation_max": 0}, "validation_max"),
        ({"rpc_control_bytes_max": 2_000}, "rpc_control_bytes_max"),
        ({"rpc_bytes_max": 1 << 20}, "rpc_bytes_max"),
        ({"publish_burst": 0}, "publish_burst"),
        ({"iwant_followup_s": -1.0}, "iwant_followup_s"),
    ],
)
def test_a_broken_relation_is_named(values: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        GossipParams(**values)  # type: ignore[arg-type]


def test_score_profiles_are_valid_and_quiet_topics_cost_nothing_by_default() -> None:
    standard = standard_scores()
    assert standard.default_topic is not None
    assert standard.default_topic.delivery_weight == 0
    assert (standard.thresholds.gossip, standard.thresholds.publish, standard.thresholds.graylist) == (-10, -50, -80)
    hardening = hardening_scores()
    assert hardening.default_topic is not None
    assert hardening.default_topic.delivery_weight < 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopicScoreParams(invalid_weight=1.0),
        lambda: TopicScoreParams(first_weight=-1.0),
        lambda: TopicScoreParams(first_decay=1.0),
        lambda: TopicScoreParams(mesh_time_quantum_s=0.0),
        lambda: ScoreParams(behaviour_weight=1.0),
        lambda: ScoreParams(decay_to_zero=0.0),
        lambda: ScoreParams(decay_interval_s=0.0),
        lambda: ScoreParams(app_weight=float("nan")),
        lambda: ScoreThresholds(gossip=-60.0),
        lambda: ScoreThresholds(gossip=1.0),
        lambda: ScoreThresholds(accept_px=-1.0),
    ],
)
def test_a_score_parameter_with_the_wrong_sign_is_refused(make: object) -> None:
    with pytest.raises(ValueError):
        make()  # type: ignore[operator]


def test_decay_for_brings_a_counter_to_zero_in_that_time() -> None:
    assert decay_for(60) ** 60 == pytest.approx(0.01)
