"""Parameters of peer scoring, and two profiles of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicScoreParams:
    """Weights of one topic. Weights of faults are at most 0, those of merits at least 0; a weight of 0 turns it off."""

    weight: float = 0.5
    """How much this topic counts in the whole."""

    mesh_time_weight: float = 1.0
    """P1: time in our mesh."""
    mesh_time_quantum_s: float = 1.0
    mesh_time_cap: float = 30.0

    first_weight: float = 1.0
    """P2: first copies of valid messages."""
    first_decay: float = 0.5
    first_cap: float = 30.0

    delivery_weight: float = 0.0
    """P3: the deficit of a mesh peer that delivers too little, squared. Off, since it punishes every quiet topic: set
    it only where the rate of messages is known and steady."""
    delivery_decay: float = 0.5
    delivery_cap: float = 100.0
    delivery_threshold: float = 20.0
    delivery_activation_s: float = 5.0
    delivery_window_s: float = 0.01
    """Seconds after the first copy within which further copies still count as delivered."""

    failure_weight: float = 0.0
    """P3b: deficits that a peer had when it left the mesh."""
    failure_decay: float = 0.5

    invalid_weight: float = -1.0
    """P4: invalid messages, squared."""
    invalid_decay: float = 0.3

    def __post_init__(self) -> None:
        _check_signs(self)
        if self.mesh_time_quantum_s <= 0:
            raise ValueError("mesh_time_quantum_s must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreThresholds:
    """Scores below which a peer loses rights. Order: graylist <= publish <= gossip <= 0 <= the other two."""

    gossip: float = -10.0
    """Below it no gossip is sent or taken."""
    publish: float = -50.0
    """Below it own publishes are not flooded to it, nor sent by fanout."""
    graylist: float = -80.0
    """Below it everything from it is dropped unread."""
    accept_px: float = 10.0
    """From it on, peers that it names in PRUNE are dialed."""
    opportunistic_graft: float = 20.0
    """A mesh whose median is below it looks for better peers."""

    def __post_init__(self) -> None:
        if not self.graylist <= self.publish <= self.gossip <= 0:
            raise ValueError("graylist <= publish <= gossip <= 0 must hold")
        if self.accept_px < 0 or self.opportunistic_graft < 0:
            raise ValueError("accept_px and opportunistic_graft must not be negative")


def _no_topics() -> Mapping[str, TopicScoreParams]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreParams:
    """Parameters of peer scoring."""

    thresholds: ScoreThresholds = field(default_factory=ScoreThresholds)
    topics: Mapping[str, TopicScoreParams] = field(default_factory=_no_topics)
    default_topic: TopicScoreParams | None = field(default_factory=TopicScoreParams)
    """For topics that are not listed; None does not score them."""
    topic_cap: float = 3600.0
    """The most that all topics together add to a score; 0 means no cap."""

    app_weight: float = 1.0
    """P5: the score that the app gave."""
    colocation_weight: float = -5.0
    """P6: peers on one address (IPv6 also by /64) above the threshold, squared. Set 0 when many nodes share a host."""
    colocation_threshold: int = 10
    behaviour_weight: float = -10.0
    """P7: grafts in backoff, broken promises, malformed RPCs, squared above the threshold."""
    behaviour_threshold: float = 0.0
    behaviour_decay: float = 0.9
    slow_weight: float = -0.2
    """RPCs dropped because the peer does not read, not squared."""
    slow_threshold: float = 10.0
    slow_decay: float = 0.5

    decay_interval_s: float = 1.0
    decay_to_zero: float = 0.01
    """Counters below it become 0."""
    retain_s: float = 3600.0
    """How long a peer with a score of 0 or less is remembered after it left."""
    retained_max: int = 4_096
    """Peers that left and are remembered at most; the oldest go first."""

    def __post_init__(self) -> None:
        _check_signs(self)
        if self.decay_interval_s <= 0:
            raise ValueError("decay_interval_s must be above 0")
        if not 0 < self.decay_to_zero < 1:
            raise ValueError("decay_to_zero must be between 0 and 1")

    def for_topic(self, topic: str) -> TopicScoreParams | None:
        """The parameters of a topic; None when it is not scored."""
        return self.topics.get(topic, self.default_topic)


_MERITS = ("mesh_time_weight", "first_weight", "weight", "app_weight", "topic_cap", "retain_s")


def _check_signs(params: "TopicScoreParams | ScoreParams") -> None:
    for entry in fields(params):
        value: object = getattr(params, entry.name)
        if not isinstance(value, int | float):
            continue
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{entry.name} must be a finite number")
        if entry.name.endswith("_decay"):
            if not 0 < value < 1:
                raise ValueError(f"{entry.name} is {value}: a decay is between 0 and 1")
        elif entry.name.endswith("_weight") and entry.name not in _MERITS:
            if value > 0:
                raise ValueError(f"{entry.name} is {value}: the weight of a fault is at most 0")
        elif value < 0:
            raise ValueError(f"{entry.name} is {value}: it cannot be negative")


def decay_for(duration_s: float, *, interval_s: float = 1.0, to_zero: float = 0.01) -> float:
    """Return the decay factor that brings a counter of 1 below ``to_zero`` after ``duration_s``."""
    return float(to_zero ** (interval_s / duration_s))


def standard_scores() -> ScoreParams:
    """Return the default: thresholds of rust-libp2p and js-libp2p, P3 off, faults forgotten within minutes."""
    return ScoreParams(
        default_topic=TopicScoreParams(
            first_decay=decay_for(60), first_cap=30, invalid_weight=-10, invalid_decay=decay_for(600)
        ),
        behaviour_decay=decay_for(300),
    )


def hardening_scores() -> ScoreParams:
    """Return the profile of the published attack evaluations (gossipsub-hardening): long memory, deep thresholds.

    Many simulated nodes share addresses there, so P6 is off.
    """
    return ScoreParams(
        thresholds=ScoreThresholds(gossip=-4000, publish=-5000, graylist=-10_000, accept_px=0, opportunistic_graft=0),
        default_topic=TopicScoreParams(
            weight=0.25,
            mesh_time_weight=0.0027,
            mesh_time_cap=3600,
            first_weight=0.664,
            first_decay=0.9916,
            first_cap=1500,
            delivery_weight=-0.25,
            delivery_decay=0.997,
            delivery_cap=400,
            delivery_threshold=10,
            delivery_activation_s=60,
            delivery_window_s=0.005,
            failure_weight=-0.25,
            failure_decay=0.997,
            invalid_weight=-99,
            invalid_decay=0.9994,
        ),
        topic_cap=0,
        colocation_weight=0,
        behaviour_weight=-15.92,
        behaviour_threshold=6,
        behaviour_decay=decay_for(600),
        retain_s=30,
    )
