"""The state that the router's parts share: peers, topics, caches, counters."""

from dep2p.gossipsub.events import Validator, Version
from dep2p.gossipsub.matched_topics import MatchedTopics
from dep2p.gossipsub.messages.message_cache import MessageCache
from dep2p.gossipsub.messages.seen_cache import SeenCache
from dep2p.gossipsub.options import RouterOptions
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.patterns import PatternSet, has_wildcard, pattern_tokens
from dep2p.gossipsub.scoring.params import ScoreThresholds
from dep2p.gossipsub.scoring.peer_gater import PeerGater, Source
from dep2p.gossipsub.scoring.score import PeerScorer, PeerStats
from dep2p.gossipsub.state.backoff import Backoffs
from dep2p.gossipsub.state.control_rate import NeighbourControlRate
from dep2p.gossipsub.state.effect_buffer import EffectBuffer
from dep2p.gossipsub.state.promises import Promises
from dep2p.gossipsub.state.wanted import WantedMessages
from dep2p.gossipsub.tracing.libp2p_events import GraftPeer, PrunePeer
from dep2p.gossipsub.validation import ValidationQueue
from dep2p.types import PeerId, Rng


class PeerState:
    """A connected peer."""

    __slots__ = (
        "asked_ids",
        "control",
        "declined",
        "direct",
        "early_grafts",
        "identity",
        "idontwant_ids",
        "ihave_rpcs",
        "is_gossip",
        "is_graylisted",
        "iwant_ids",
        "lost_meshes",
        "outbound",
        "peer",
        "protocol",
        "pruned_topics",
        "reopen_tries",
        "source",
        "stale",
        "stale_tick",
        "stats",
        "topic_bytes",
        "topics",
        "unheard_leaves",
        "unwanted",
        "version",
        "writable",
    )

    def __init__(self, peer: PeerId, identity: bytes, version: Version, *, outbound: bool, stats: PeerStats) -> None:
        self.peer: PeerId = peer
        self.identity: bytes = identity
        self.version: Version = version
        self.is_gossip: bool = version > Version.FLOODSUB
        self.outbound: bool = outbound
        self.stats: PeerStats = stats
        self.source: Source | None = None
        self.protocol: str = ""
        self.direct: bool = False
        self.writable: bool = False
        """Our stream to it is open. Only writable peers are in meshes, fanouts and `TopicState.extra`."""
        self.reopen_tries: int = 0
        self.topics: dict[str, TopicState] = {}
        """The topics that the peer is subscribed to."""
        self.topic_bytes: int = 0
        self.unwanted: dict[bytes, int] = {}
        """Ids that it has or is about to have (IDONTWANT), and the tick until which that counts."""
        self.is_graylisted: bool = False
        # What it did since the last heartbeat; code that counts here puts the peer into `RouterState.busy`:
        self.ihave_rpcs: int = 0
        self.asked_ids: int = 0
        self.iwant_ids: int = 0
        self.idontwant_ids: int = 0
        self.pruned_topics: dict[str, None] = {}
        self.early_grafts: dict[str, int] = {}
        """Topics that it grafted before its subscription or our stream to it was there, and the tick of that."""
        self.lost_meshes: dict[str, None] = {}
        """Topics in whose mesh it was when our stream to it was lost: it may still have us in its own."""
        self.unheard_leaves: dict[str, None] = {}
        """Topics that we left while our stream to it was down."""
        self.stale: dict[str, None] = {}
        """Subscriptions said on an earlier stream and not again on the present one."""
        self.stale_tick: int | None = None
        """The tick at which they end; None while none are in doubt."""
        self.declined: dict[str, float] = {}
        """Topics that match its pattern and that it does not take for now, and the time until which it does not."""
        self.control: NeighbourControlRate = NeighbourControlRate()
        """Subscriptions, grafts and prunes that are taken from it."""


class TopicState:
    """A topic with subscribers: peers, this node, or both."""

    __slots__ = (
        "counts_deliveries",
        "delivers",
        "external",
        "extra",
        "fanout",
        "fanout_last",
        "implied",
        "inline",
        "is_configured",
        "is_own_pattern",
        "joined",
        "mesh",
        "name",
        "pattern",
        "peers",
        "used_tick",
    )

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.peers: dict[PeerId, PeerState] = {}
        """Subscribers, writable or not."""
        self.mesh: dict[PeerId, PeerState] = {}
        self.extra: dict[PeerId, PeerState] = {}
        """Writable subscribers that get every message outside of any mesh: direct ones and floodsub."""
        self.fanout: dict[PeerId, PeerState] = {}
        self.fanout_last: float | None = None
        """When it was last published to without having joined."""
        self.pattern: tuple[str, ...] | None = None
        """Its tokens when it is no topic but a pattern that peers or this node subscribe to."""
        self.is_own_pattern: bool = False
        self.implied: int = 0
        """The `RouterState.patterns_version` at which peers' patterns were compared with its name."""
        self.used_tick: int = 0
        """The tick at which a message of it was here, for a topic that was joined by a pattern."""
        self.joined: bool = False
        self.delivers: bool = False
        self.inline: Validator | None = None
        self.external: bool = False
        self.is_configured: bool = False
        self.counts_deliveries: bool = False
        """Copies after the first matter to the score (P3)."""


class RouterState:
    """Everything one router knows."""

    __slots__ = (
        "backoffs",
        "blocked_authors",
        "blocked_peers",
        "busy",
        "by_identity",
        "counts",
        "deliveries",
        "direct",
        "duplicates",
        "gater",
        "has_patterns",
        "has_unwanted",
        "identity",
        "matched",
        "mcache",
        "out",
        "own",
        "own_patterns",
        "params",
        "patterns",
        "patterns_version",
        "peers",
        "promises",
        "rng",
        "scores",
        "seen",
        "thresholds",
        "tick",
        "topics",
        "traces_implied",
        "traces_rpcs",
        "tracing",
        "validating",
        "wanted",
        "watches_duplicates",
    )

    def __init__(
        self,
        own: PeerId,
        identity: bytes,
        params: GossipParams,
        options: RouterOptions,
        rng: Rng,
        now: float,
    ) -> None:
        scores, gater, tracing = options.scores, options.gater, options.tracing
        self.own: PeerId = own
        self.identity: bytes = identity
        self.params: GossipParams = params
        self.rng: Rng = rng
        self.tracing: bool = tracing
        self.traces_implied: bool = tracing
        """Also events that say what another effect says: a `Deliver`, a `Send`, or the node's own publish."""
        self.traces_rpcs: bool = tracing
        self.out: EffectBuffer = EffectBuffer(tracing=tracing)
        self.peers: dict[PeerId, PeerState] = {}
        self.busy: dict[PeerId, PeerState] = {}
        """Peers with something to count anew at the heartbeat: see the end of `PeerState`."""
        self.has_unwanted: bool = False
        """Some peer may have said IDONTWANT; while this is False no peer's list has to be read."""
        self.by_identity: dict[bytes, PeerState] = {}
        self.topics: dict[str, TopicState] = {}
        self.seen: SeenCache = SeenCache(params.seen_ttl_s, params.seen_items_max, refresh=params.seen_refresh)
        self.mcache: MessageCache = MessageCache(
            params.mcache_windows,
            params.mcache_gossip_windows,
            items_max=params.mcache_items_max,
            bytes_max=params.mcache_bytes_max,
        )
        self.backoffs: Backoffs = Backoffs(params.backoff_items_max, params.backoff_slack_s)
        self.promises: Promises = Promises(params.iwant_followup_s)
        self.wanted: WantedMessages = WantedMessages(params.wanted_items_max, params.wanted_bytes_max)
        self.scores: PeerScorer = PeerScorer(scores, now)
        self.thresholds: ScoreThresholds = scores.thresholds if scores is not None else ScoreThresholds()
        self.gater: PeerGater | None = PeerGater(gater, rng, now) if gater is not None else None
        self.validating: ValidationQueue = ValidationQueue(params)
        self.deliveries: dict[bytes, dict[PeerId, None]] = {}
        """Peers that delivered a message lately, by its id, in topics where copies after the first count."""
        self.has_patterns: bool = options.patterns
        """Names with wildcards are patterns on this network."""
        self.patterns: PatternSet[TopicState] = PatternSet()
        """Those that peers subscribe to, and this node."""
        self.patterns_version: int = 0
        """Grows when a peer's pattern comes, so that topics are compared with it."""
        self.own_patterns: PatternSet[str] = PatternSet()
        self.matched: MatchedTopics = MatchedTopics(params.matched_topics_max)
        """Topics that are joined because an own pattern matches, and for nothing else."""
        self.direct: dict[PeerId, None] = {}
        self.blocked_peers: dict[PeerId, None] = {}
        self.blocked_authors: dict[bytes, None] = {}
        self.tick: int = 0
        self.counts: dict[str, int] = {}
        self.duplicates: int = 0
        self.watches_duplicates: bool = tracing or params.seen_refresh or gater is not None
        """A duplicate is more than a number: something else wants to know of it."""

    def trace(self, *, on: bool, rpcs: bool, implied: bool) -> None:
        """Make trace events from now on, or none; with ``rpcs`` also those of each RPC that comes and goes.

        Without ``implied`` none that says what another effect of the same call says.
        """
        self.tracing = on
        self.traces_rpcs = on and rpcs
        self.traces_implied = on and implied
        self.out.tracing = on and rpcs and implied
        self.watches_duplicates = (
            on
            or self.params.seen_refresh
            or self.gater is not None
            or any(topic.counts_deliveries for topic in self.topics.values())
        )

    def settled(self, message_id: bytes) -> None:
        """A message was judged: no peer owes it any more, and none is asked for it."""
        self.promises.fulfilled(message_id)
        self.wanted.settled(message_id)

    def count(self, name: str, by: int = 1) -> None:
        """Count something under a name; drops are ``drop: reason``."""
        self.counts[name] = self.counts.get(name, 0) + by

    def topic(self, name: str) -> TopicState:
        """The topic, made when it is new. `release` it when it may be empty."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = TopicState(name)
            if self.has_patterns and has_wildcard(name):
                topic.pattern = pattern_tokens(name)
                self.patterns.add(topic.pattern, topic)
            topic.counts_deliveries = self.scores.counts_deliveries(name)
            if topic.counts_deliveries:
                self.watches_duplicates = True
        return topic

    def release(self, topic: TopicState) -> None:
        """Forget a topic without subscribers: a peer must not be able to leave anything behind."""
        if not (
            topic.joined or topic.peers or topic.is_configured or topic.fanout_last is not None or topic.is_own_pattern
        ):
            if self.topics.pop(topic.name, None) is not None:
                if topic.pattern is not None:
                    self.patterns.remove(topic.pattern)
                self.scores.forget_topic(topic.name)

    def add_to_mesh(self, topic: TopicState, state: PeerState, now: float) -> None:
        """Both a graft of ours and one that we took."""
        topic.mesh[state.peer] = state
        self.scores.graft(state.stats, topic.name, now)
        if self.tracing:
            self.out.effects.append(GraftPeer(state.peer, topic.name))

    def drop_from_mesh(self, topic: TopicState, state: PeerState) -> bool:
        """Without telling the peer. Whether it was in the mesh."""
        if topic.mesh.pop(state.peer, None) is None:
            return False
        self.scores.prune(state.stats, topic.name)
        if self.tracing:
            self.out.effects.append(PrunePeer(state.peer, topic.name))
        return True

    def detach(self, topic: TopicState, state: PeerState) -> None:
        """The peer can get nothing of this topic any more: it left it, or our stream to it is gone."""
        self.drop_from_mesh(topic, state)
        topic.extra.pop(state.peer, None)
        topic.fanout.pop(state.peer, None)

    def attach_extra(self, topic: TopicState, state: PeerState) -> None:
        """Send it everything when it is direct or knows no meshes."""
        if state.writable and (state.direct or not state.is_gossip):
            topic.extra[state.peer] = state
