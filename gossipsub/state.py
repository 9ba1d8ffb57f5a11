"""The state that the router's parts share: peers, topics, caches, counters."""

from dep2p.gossipsub.backoff import Backoffs
from dep2p.gossipsub.effect_buffer import Outbox
from dep2p.gossipsub.events import Validator, Version
from dep2p.gossipsub.gossip_promises import Promises
from dep2p.gossipsub.message_cache import MessageCache
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.scoring.params import ScoreParams, ScoreThresholds
from dep2p.gossipsub.scoring.peer_gater import GaterParams, PeerGater, Source
from dep2p.gossipsub.scoring.score import PeerStats, ScoreBook
from dep2p.gossipsub.seen_cache import SeenCache
from dep2p.gossipsub.tracing.libp2p_events import GraftPeer, PrunePeer
from dep2p.gossipsub.validation import ValidationQueue
from dep2p.types import PeerId, Rng


class PeerState:
    """A connected peer."""

    __slots__ = (
        "asked_ids",
        "direct",
        "identity",
        "idontwant_ids",
        "ihave_rpcs",
        "is_gossip",
        "is_graylisted",
        "iwant_ids",
        "outbound",
        "peer",
        "protocol",
        "pruned_topics",
        "reopen_tries",
        "source",
        "stats",
        "topic_bytes",
        "topics",
        "unwanted",
        "version",
        "writable",
    )

    def __init__(self, peer: PeerId, identity: bytes, version: Version, *, outbound: bool, stats: PeerStats) -> None:
        self.peer = peer
        self.identity = identity
        self.version = version
        self.is_gossip = version > Version.FLOODSUB
        self.outbound = outbound
        self.stats = stats
        self.source: Source | None = None
        self.protocol = ""
        self.direct = False
        self.writable = False
        """Our stream to it is open. Only writable peers are in meshes, fanouts and `TopicState.extra`."""
        self.reopen_tries = 0
        self.topics: dict[str, TopicState] = {}
        """What it is subscribed to."""
        self.topic_bytes = 0
        self.unwanted: dict[bytes, int] = {}
        """Ids that it has or is about to have (IDONTWANT), and the tick until which that counts."""
        self.is_graylisted = False
        # What it did since the last heartbeat; whoever counts here puts the peer into `Core.busy`:
        self.ihave_rpcs = 0
        self.asked_ids = 0
        self.iwant_ids = 0
        self.idontwant_ids = 0
        self.pruned_topics: dict[str, None] = {}


class TopicState:
    """A topic that somebody is in: peers, this node, or both."""

    __slots__ = (
        "counts_deliveries",
        "delivers",
        "external",
        "extra",
        "fanout",
        "fanout_last",
        "inline",
        "is_configured",
        "joined",
        "mesh",
        "name",
        "peers",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.peers: dict[PeerId, PeerState] = {}
        """Subscribers, writable or not."""
        self.mesh: dict[PeerId, PeerState] = {}
        self.extra: dict[PeerId, PeerState] = {}
        """Writable subscribers that get every message outside of any mesh: direct ones and floodsub."""
        self.fanout: dict[PeerId, PeerState] = {}
        self.fanout_last: float | None = None
        """When it was last published to without having joined."""
        self.joined = False
        self.delivers = False
        self.inline: Validator | None = None
        self.external = False
        self.is_configured = False
        self.counts_deliveries = False
        """Copies after the first matter to the score (P3)."""


class Core:
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
        "has_unwanted",
        "identity",
        "mcache",
        "out",
        "own",
        "params",
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
        "watches_duplicates",
    )

    def __init__(
        self,
        own: PeerId,
        identity: bytes,
        params: GossipParams,
        scores: ScoreParams | None,
        gater: GaterParams | None,
        rng: Rng,
        now: float,
        *,
        tracing: bool,
    ) -> None:
        self.own = own
        self.identity = identity
        self.params = params
        self.rng = rng
        self.tracing = tracing
        self.traces_implied = tracing
        """Also events that say what another effect says: a `Deliver`, a `Send`, or the node's own publish."""
        self.traces_rpcs = tracing
        self.out = Outbox(tracing=tracing)
        self.peers: dict[PeerId, PeerState] = {}
        self.busy: dict[PeerId, PeerState] = {}
        """Peers with something to count anew at the heartbeat: see the end of `PeerState`."""
        self.has_unwanted = False
        """Some peer may have said IDONTWANT: else nobody has to be asked for it."""
        self.by_identity: dict[bytes, PeerState] = {}
        self.topics: dict[str, TopicState] = {}
        self.seen = SeenCache(params.seen_ttl_s, params.seen_items_max, refresh=params.seen_refresh)
        self.mcache = MessageCache(
            params.mcache_windows,
            params.mcache_gossip_windows,
            items_max=params.mcache_items_max,
            bytes_max=params.mcache_bytes_max,
        )
        self.backoffs = Backoffs(params.backoff_items_max, params.backoff_slack_s)
        self.promises = Promises(params.iwant_followup_s)
        self.scores = ScoreBook(scores, now)
        self.thresholds = scores.thresholds if scores is not None else ScoreThresholds()
        self.gater = PeerGater(gater, rng, now) if gater is not None else None
        self.validating = ValidationQueue(params)
        self.deliveries: dict[bytes, dict[PeerId, None]] = {}
        """Who delivered a message lately, where copies after the first count."""
        self.direct: dict[PeerId, None] = {}
        self.blocked_peers: dict[PeerId, None] = {}
        self.blocked_authors: dict[bytes, None] = {}
        self.tick = 0
        self.counts: dict[str, int] = {}
        self.duplicates = 0
        self.watches_duplicates = tracing or params.seen_refresh or gater is not None
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

    def count(self, name: str, by: int = 1) -> None:
        """Count something under a name; drops are ``drop: reason``."""
        self.counts[name] = self.counts.get(name, 0) + by

    def topic(self, name: str) -> TopicState:
        """The topic, made when it is new. `release` it when it may be empty."""
        topic = self.topics.get(name)
        if topic is None:
            topic = self.topics[name] = TopicState(name)
            topic.counts_deliveries = self.scores.counts_deliveries(name)
            if topic.counts_deliveries:
                self.watches_duplicates = True
        return topic

    def release(self, topic: TopicState) -> None:
        """Forget a topic that nobody is in: a peer must not be able to leave anything behind."""
        if not (topic.joined or topic.peers or topic.is_configured or topic.fanout_last is not None):
            if self.topics.pop(topic.name, None) is not None:
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
