"""Peer scores: counts of a neighbour's behaviour that fade with time (P1 to P7 of GossipSub 1.1).

A score is computed at each heartbeat and when something bad happens; in between, `PeerStats.score` is read.
"""

from dataclasses import replace

from dep2p.gossipsub.scoring.params import ScoreParams, TopicScoreParams
from dep2p.types import PeerId


class TopicStats:
    """Counters of one peer in one topic."""

    __slots__ = ("delivered", "failure", "first", "graft_at", "in_mesh", "invalid", "is_active", "params")

    def __init__(self, params: TopicScoreParams) -> None:
        self.params: TopicScoreParams = params
        self.in_mesh: bool = False
        self.graft_at: float = 0.0
        self.is_active: bool = False
        """Whether the peer is in the mesh long enough for P3 to count."""
        self.first: float = 0.0
        self.delivered: float = 0.0
        self.failure: float = 0.0
        self.invalid: float = 0.0


class PeerStats:
    """Counters of one peer. Kept for a while after it left, so that leaving does not wash off a bad score."""

    __slots__ = ("app", "behaviour", "expires", "ips", "is_quiet", "peer", "score", "slow", "topics")

    def __init__(self, peer: PeerId) -> None:
        self.peer: PeerId = peer
        self.topics: dict[str, TopicStats] = {}
        self.ips: tuple[str, ...] = ()
        self.app: float = 0.0
        self.behaviour: float = 0.0
        self.slow: float = 0.0
        self.score: float = 0.0
        self.is_quiet: bool = False
        """All counters are 0 and stay so, and the score is not below 0: nothing to decay."""
        self.expires: float | None = None
        """When a peer that left is forgotten; None while connected."""


def colocation_keys(ips: tuple[str, ...]) -> tuple[str, ...]:
    """Return the places of some addresses, for P6: each address, for IPv6 its /64 too. Loopback counts not at all."""
    keys: dict[str, None] = {}
    for ip in ips:
        if ip == "::1" or ip.startswith("127."):
            continue
        keys[ip] = None
        if ":" in ip:
            keys[_prefix_64(ip)] = None
    return tuple(keys)


def _prefix_64(ip: str) -> str:
    head, double_colon, tail = ip.partition("::")
    groups = head.split(":") if head else []
    if double_colon:
        behind = tail.split(":") if tail else []
        groups += ["0"] * max(0, 8 - len(groups) - len(behind)) + behind
    return ":".join(group.lstrip("0") or "0" for group in groups[:4]) + "::/64"


class PeerScorer:
    """The stats of all peers. With ``params`` None nothing is counted and every score is 0."""

    __slots__ = ("_active", "_last_decay", "_params", "_per_key", "_retained", "enabled", "peers")

    def __init__(self, params: ScoreParams | None, now: float) -> None:
        self.enabled: bool = params is not None
        self._params = params or ScoreParams()
        self.peers: dict[PeerId, PeerStats] = {}
        """The stats of connected peers."""
        self._active: dict[PeerId, PeerStats] = {}
        """The stats of connected peers that are not quiet: only these change with time."""
        self._retained: dict[PeerId, PeerStats] = {}
        self._per_key: dict[str, int] = {}
        self._last_decay = now

    def __len__(self) -> int:
        return len(self.peers) + len(self._retained)

    def connect(self, peer: PeerId, ips: tuple[str, ...]) -> PeerStats:
        """Start counting, or continue with the counters that the peer left behind."""
        stats = self._retained.pop(peer, None) or PeerStats(peer)
        stats.expires = None
        stats.ips = colocation_keys(ips)
        self.peers[peer] = stats
        self._wake(stats)
        for key in stats.ips:
            self._per_key[key] = self._per_key.get(key, 0) + 1
        self.rescore(stats)
        return stats

    def disconnect(self, peer: PeerId, now: float) -> None:
        """Drop the merits of a peer that left, and keep its faults for a while."""
        stats = self.peers.pop(peer, None)
        if stats is None:
            return
        self._active.pop(peer, None)
        for key in stats.ips:
            left = self._per_key[key] - 1
            if left:
                self._per_key[key] = left
            else:
                del self._per_key[key]
        stats.ips = ()
        for counts in stats.topics.values():
            self._leave_mesh(counts)
            counts.first = 0.0
        self.rescore(stats)
        faults = stats.behaviour or any(counts.failure or counts.invalid for counts in stats.topics.values())
        if not self.enabled or stats.score > 0 or not (faults or stats.score):
            return
        if len(self._retained) >= self._params.retained_max:
            del self._retained[next(iter(self._retained))]
        stats.expires = now + self._params.retain_s
        self._retained[peer] = stats

    def _wake(self, stats: PeerStats) -> None:
        """Have the next `refresh` look at this peer again, since something changed."""
        stats.is_quiet = False
        if self.peers.get(stats.peer) is stats:
            self._active[stats.peer] = stats

    def _topic(self, stats: PeerStats, topic: str) -> TopicStats | None:
        counts = stats.topics.get(topic)
        if counts is None and self.enabled:
            params = self._params.for_topic(topic)
            if params is not None:
                counts = stats.topics[topic] = TopicStats(params)
        return counts

    def configure(self, topic: str, params: TopicScoreParams) -> None:
        """Score a topic by other parameters from now on."""
        topics = dict(self._params.topics)
        topics[topic] = params
        self._params = replace(self._params, topics=topics)
        for stats in (*self.peers.values(), *self._retained.values()):
            counts = stats.topics.get(topic)
            if counts is not None:
                counts.params = params

    def counts_deliveries(self, topic: str) -> bool:
        """Whether copies after the first count for the topic (P3)."""
        params = self._params.for_topic(topic)
        return self.enabled and params is not None and params.delivery_weight != 0

    def delivery_window_s(self, topic: str) -> float:
        """Return the seconds after the first copy in which further ones count."""
        params = self._params.for_topic(topic)
        return params.delivery_window_s if params is not None else 0.0

    def graft(self, stats: PeerStats, topic: str, now: float) -> None:
        """Note that the peer joined our mesh."""
        counts = self._topic(stats, topic)
        if counts is not None:
            self._wake(stats)
            counts.in_mesh = True
            counts.graft_at = now
            counts.is_active = False

    def prune(self, stats: PeerStats, topic: str) -> None:
        """Note that the peer left our mesh; a deficit sticks (P3b)."""
        counts = stats.topics.get(topic)
        if counts is not None:
            self._wake(stats)
            self._leave_mesh(counts)

    def _leave_mesh(self, counts: TopicStats) -> None:
        params = counts.params
        if counts.in_mesh and counts.is_active and counts.delivered < params.delivery_threshold:
            deficit = params.delivery_threshold - counts.delivered
            counts.failure += deficit * deficit
        counts.in_mesh = False
        counts.is_active = False

    def first(self, stats: PeerStats, topic: str) -> None:
        """Count the first copy of a valid message (P2, P3)."""
        counts = stats.topics.get(topic) or self._topic(stats, topic)
        if counts is None:
            return
        if stats.is_quiet:
            self._wake(stats)
        params = counts.params
        first = counts.first + 1.0
        counts.first = first if first < params.first_cap else params.first_cap
        if counts.in_mesh and params.delivery_weight:
            counts.delivered = min(counts.delivered + 1.0, params.delivery_cap)

    def near_first(self, stats: PeerStats, topic: str) -> None:
        """Count a copy that came soon after the first (P3)."""
        counts = stats.topics.get(topic)
        if counts is not None and counts.in_mesh:
            counts.delivered = min(counts.delivered + 1.0, counts.params.delivery_cap)

    def invalid(self, stats: PeerStats, topic: str) -> None:
        """Count an invalid message (P4)."""
        counts = self._topic(stats, topic)
        if counts is not None:
            self._wake(stats)
            counts.invalid += 1.0
            self.rescore(stats)

    def misbehaved(self, stats: PeerStats, count: float = 1.0) -> None:
        """Count a breach of the protocol's rules (P7)."""
        if self.enabled:
            self._wake(stats)
            stats.behaviour += count
            self.rescore(stats)

    def was_slow(self, stats: PeerStats, count: float = 1.0) -> None:
        """Count RPCs that were dropped since the peer does not read."""
        if self.enabled:
            self._wake(stats)
            stats.slow += count

    def set_app(self, stats: PeerStats, value: float) -> None:
        """Set the score that the app gives (P5)."""
        stats.app = value
        self._wake(stats)
        self.rescore(stats)

    def rescore(self, stats: PeerStats) -> None:
        """Compute `PeerStats.score` from the counters as they are."""
        if self.enabled:
            stats.score = self._score(stats)

    def _score(self, stats: PeerStats) -> float:
        params = self._params
        total = 0.0
        for counts in stats.topics.values():
            topic = counts.params
            value = topic.first_weight * counts.first
            if counts.in_mesh:
                mesh_s = self._last_decay - counts.graft_at
                if mesh_s > 0:
                    quanta = mesh_s // topic.mesh_time_quantum_s
                    cap = topic.mesh_time_cap
                    value += topic.mesh_time_weight * (quanta if quanta < cap else cap)
                if counts.is_active and counts.delivered < topic.delivery_threshold:
                    deficit = topic.delivery_threshold - counts.delivered
                    value += topic.delivery_weight * deficit * deficit
            if counts.failure:
                value += topic.failure_weight * counts.failure
            if counts.invalid:
                value += topic.invalid_weight * counts.invalid * counts.invalid
            total += topic.weight * value
        if params.topic_cap and total > params.topic_cap:
            total = params.topic_cap
        if stats.app:
            total += params.app_weight * stats.app
        if stats.ips and params.colocation_weight:
            for key in stats.ips:
                excess = self._per_key.get(key, 0) - params.colocation_threshold
                if excess > 0:
                    total += params.colocation_weight * excess * excess
        if stats.behaviour > params.behaviour_threshold:
            excess_faults = stats.behaviour - params.behaviour_threshold
            total += params.behaviour_weight * excess_faults * excess_faults
        if stats.slow > params.slow_threshold:
            total += params.slow_weight * (stats.slow - params.slow_threshold)
        return total

    def refresh(self, now: float) -> float:
        """Let the counters decay by the intervals that passed, forget peers that left long ago, compute all scores.

        Returns the lowest score of a connected peer, at most 0.
        """
        lowest = 0.0
        if not self.enabled:
            return lowest
        steps = int((now - self._last_decay) / self._params.decay_interval_s + 1e-9)
        if steps > 0:
            self._last_decay += steps * self._params.decay_interval_s
            for peer in [peer for peer, stats in self._retained.items() if (stats.expires or 0.0) <= now]:
                del self._retained[peer]
            for stats in self._retained.values():
                self._decay(stats, steps, now)
        quiet: list[PeerId] = []
        for peer, stats in self._active.items():
            if steps > 0:
                self._decay(stats, steps, now)
            score = stats.score = self._score(stats)
            if score < lowest:
                lowest = score
            elif steps > 0 and score >= 0 and self._is_quiet(stats):
                stats.is_quiet = True
                quiet.append(peer)
        for peer in quiet:
            del self._active[peer]
        return lowest

    def _is_quiet(self, stats: PeerStats) -> bool:
        if stats.behaviour or stats.slow or (stats.ips and self._params.colocation_weight):
            return False
        for counts in stats.topics.values():
            if counts.in_mesh or counts.first or counts.delivered or counts.failure or counts.invalid:
                return False
        return True

    def _decay(self, stats: PeerStats, steps: int, now: float) -> None:
        params = self._params
        floor = params.decay_to_zero
        for counts in stats.topics.values():
            topic = counts.params
            if counts.first:
                value = counts.first * topic.first_decay**steps
                counts.first = value if value > floor else 0.0
            if counts.delivered:
                value = counts.delivered * topic.delivery_decay**steps
                counts.delivered = value if value > floor else 0.0
            if counts.failure:
                value = counts.failure * topic.failure_decay**steps
                counts.failure = value if value > floor else 0.0
            if counts.invalid:
                value = counts.invalid * topic.invalid_decay**steps
                counts.invalid = value if value > floor else 0.0
            if counts.in_mesh and not counts.is_active and now - counts.graft_at > topic.delivery_activation_s:
                counts.is_active = topic.delivery_weight != 0
        if stats.behaviour:
            value = stats.behaviour * params.behaviour_decay**steps
            stats.behaviour = value if value > floor else 0.0
        if stats.slow:
            value = stats.slow * params.slow_decay**steps
            stats.slow = value if value > floor else 0.0

    def forget_topic(self, topic: str) -> None:
        """Drop the counters of a topic that is out of use, where they say nothing."""
        for stats in self.peers.values():
            counts = stats.topics.get(topic)
            if counts is not None and not (counts.in_mesh or counts.failure or counts.invalid):
                del stats.topics[topic]
