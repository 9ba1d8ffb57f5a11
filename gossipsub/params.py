"""Every parameter of the router, with when to change it, and the relations between them.

`GossipParams()` is dep2p's profile; :func:`go_defaults` is go-libp2p-pubsub's. docs/reference/gossipsub-params.md
lists both side by side.
"""

from dataclasses import dataclass, fields, replace
from typing import Final

from dep2p.gossipsub.signing.merkle_batch import BATCH_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipParams:
    """Parameters of one router. Raises ``ValueError`` that names the broken relation.

    ``d = d_lo = d_hi = d_score = d_out = 0`` is allowed: a bootstrapper that gossips and exchanges peers but carries
    no messages.
    """

    # Mesh ------------------------------------------------------------------------------------------------------------
    d: int = 6
    """Mesh peers wanted per topic. Raise for fewer hops and more copies of each message, lower to save bandwidth."""
    d_lo: int = 4
    """Below it the heartbeat grafts up to `d`. Raise towards `d` when links are lost often."""
    d_hi: int = 12
    """At it and above, the heartbeat prunes down to `d`. Raise when many peers join at once and grafts are refused."""
    d_score: int = 4
    """How many of the best scored peers always survive that pruning. Raise under attack, at most `d`."""
    d_out: int = 2
    """Mesh peers that this node dialed itself, against eclipse by inbound sybils. Below `d_lo`, at most half of `d`."""

    graft_on_subscribe: bool = True
    """Graft a new subscriber at once while the mesh is below `d_lo`, instead of at the next heartbeat."""

    # Gossip ----------------------------------------------------------------------------------------------------------
    d_lazy: int = 6
    """Peers outside the mesh that hear of message ids at each heartbeat. Raise on lossy networks."""
    gossip_factor: float = 0.25
    """The same as a share of those peers; the larger of the two counts. Raise (0.4) against sybils."""
    mcache_windows: int = 5
    """Heartbeats for which a message can be asked for. Raise when peers are often slower than that."""
    mcache_gossip_windows: int = 3
    """Heartbeats for which its id is announced. Below `mcache_windows`, so that the last to hear it can still ask."""
    mcache_items_max: int = 50_000
    """Messages kept. Lower to save memory."""
    mcache_bytes_max: int = 67_108_864
    """Payload bytes kept. Raise when 1 MiB messages come faster than a dozen a second."""
    gossip_retransmissions: int = 3
    """How often one peer gets the same message by asking. Higher only helps who drops what it asked for."""
    iwant_followup_s: float = 3.0
    """After it, an id that a peer announced and did not send counts as a broken promise. Raise on slow links."""
    iwant_retry_s: float = 0.5
    """A message is asked of one peer at a time: after this time, another one that announced it. Raise on slow links."""
    wanted_items_max: int = 16_384
    """Messages asked for that have not come; above it the oldest may be asked of several peers at once."""
    wanted_bytes_max: int = 1_048_576
    """Their ids together."""

    # Timers ----------------------------------------------------------------------------------------------------------
    heartbeat_interval_s: float = 1.0
    """Upkeep of meshes and gossip. Shorter repairs faster and costs CPU on each node."""
    heartbeat_initial_delay_s: float = 0.1
    """From the start to the first heartbeat."""
    fanout_ttl_s: float = 60.0
    """How long the peers for a topic that is published to but not joined are kept after the last publish."""
    direct_connect_ticks: int = 300
    """Heartbeats between attempts to reach direct peers that are away; 0 never tries."""

    # Backoff ---------------------------------------------------------------------------------------------------------
    prune_backoff_s: float = 60.0
    """How long a pruned peer must not graft again. Shorter heals faster and churns more."""
    unsubscribe_backoff_s: float = 10.0
    """The same after leaving a topic, so that joining again soon finds a mesh."""
    backoff_slack_s: float = 2.0
    """Added before we graft again, never when we judge a peer's graft: clocks and links differ."""
    backoff_max_s: float = 3600.0
    """The longest backoff in seconds that a peer may ask for; longer ones are clamped."""
    backoff_items_max: int = 65_536
    """Backoffs kept over all topics; the oldest go first."""
    graft_flood_threshold_s: float = 10.0
    """A graft within this time after a prune is punished twice."""

    # Peer exchange ---------------------------------------------------------------------------------------------------
    px_send: bool = False
    """Name other peers in PRUNE. Turn it on at bootstrappers of a network without another discovery."""
    px_peers_max: int = 16
    """Peers named in one PRUNE, and taken from one."""
    px_dials_max: int = 8
    """Dial hints out of one PRUNE."""

    # Opportunistic grafting ------------------------------------------------------------------------------------------
    opportunistic_graft_ticks: int = 60
    """Heartbeats between looks at the mesh's median score; 0 turns it off."""
    opportunistic_graft_peers: int = 2
    """Better scored peers grafted then."""

    # Floods ----------------------------------------------------------------------------------------------------------
    ihave_rpcs_max: int = 10
    """IHAVE messages taken from one peer in a heartbeat. Raise with the number of topics shared with one peer."""
    ihave_ids_max: int = 5_000
    """Ids asked of one peer in a heartbeat, and ids announced per topic. Raise for topics above 1,500 messages/s."""
    iwant_ids_max: int = 5_000
    """Ids taken from the IWANTs of one peer in a heartbeat."""
    iwant_ids_per_rpc_max: int = 500
    """Ids in one IWANT. A node lowers it to half of `pubsub_validating_max`: it can judge the answer as a whole."""
    idontwant_ids_max: int = 2_000
    """IDONTWANT ids taken from one peer in a heartbeat. Raise when large messages come faster than that."""
    idontwant_bytes_min: int = 1_024
    """Payload size from which IDONTWANT is sent. Below it the notice costs more than the copies that it saves."""
    idontwant_ticks: int = 3
    """Heartbeats for which a received IDONTWANT counts."""
    idontwant_on_publish: bool = False
    """Also for own publishes. Only useful when the same message is published at several nodes."""
    message_id_bytes_max: int = 1_024
    """Longer ids in control messages are dropped. Raise only for an id function of your own."""

    # Publishing ------------------------------------------------------------------------------------------------------
    flood_publish: bool = False
    """Send own publishes to every peer above the publish threshold. Lower latency under attack, more upload."""
    emit_self: bool = False
    """Deliver own publishes to the own subscribers too."""
    publish_rate_per_s: float = 100.0
    """Own publishes a second, averaged (token bucket); 0 means no limit."""
    publish_burst: int = 10_000
    """Publishes that may come at once before `publish_rate_per_s` holds them."""
    sign_batch_max: int = 16
    """Own messages that wait to be written and share one signature; realm wire only. 1 signs each of them alone."""
    pending_publish_items_max: int = 1_000
    """Publishes that wait for a first peer of their topic, over all topics."""
    pending_publish_bytes_max: int = 8_388_608
    """The same in payload bytes."""
    pending_publish_ttl_s: float = 30.0
    """How long they wait."""

    # Sizes -----------------------------------------------------------------------------------------------------------
    message_bytes_max: int = 1_048_576
    """Payload of one message. All nodes of a network must agree."""
    rpc_bytes_max: int = 1_064_960
    """An RPC sent; larger ones are split. 65,536 for networks with rust-libp2p's defaults."""
    rpc_control_bytes_max: int = 16_384
    """Subscriptions and control in one RPC sent: rust-libp2p refuses more."""
    rpc_messages_max: int = 500
    """Messages in one RPC sent: rust-libp2p refuses more."""

    # Subscriptions ---------------------------------------------------------------------------------------------------
    topics_max: int = 100
    """Topics that this node joins."""
    matched_topics_max: int = 128
    """Topics that this node is in because its patterns match them, beside `topics_max`. With that, not above
    `topics_per_peer_max` of its neighbours: they forget the others."""
    matched_topic_idle_ticks: int = 300
    """Heartbeats without a message after which it leaves such a topic, which only other patterns hold."""
    topic_bytes_max: int = 1_024
    """UTF-8 bytes of a topic name."""
    topics_per_peer_max: int = 256
    """Topics remembered for one peer, some 800 bytes each. Raise where nodes join more."""
    topic_bytes_per_peer_max: int = 262_144
    """Their names together."""

    # Seen cache ------------------------------------------------------------------------------------------------------
    seen_ttl_s: float = 120.0
    """How long an id counts as a duplicate. Raise when old messages come again, see also `seen_refresh`."""
    seen_refresh: bool = False
    """Count that time from the last copy instead of the first. Stops loops of old messages, keeps more ids."""
    seen_items_max: int = 262_144
    """Ids remembered. At least the network's messages a second times `seen_ttl_s`."""

    # Validation ------------------------------------------------------------------------------------------------------
    validation_max: int = 8_192
    """Messages whose validators are at work."""
    validation_per_topic_max: int = 1_024
    """The same for one topic."""
    validation_bytes_max: int = 67_108_864
    """The same in payload bytes."""
    validation_timeout_s: float = 30.0
    """A validator that has not answered by then has ignored the message."""

    # Peers -----------------------------------------------------------------------------------------------------------
    peers_max: int = 4_096
    """Peers that the router talks to; further ones are refused."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}: it cannot be negative")
        self._check_mesh()
        self._check_times()
        self._check_sizes()

    def _check_mesh(self) -> None:
        if self.d or self.d_lo or self.d_hi or self.d_score or self.d_out:
            if not 1 <= self.d_lo <= self.d <= self.d_hi:
                raise ValueError(f"1 <= d_lo <= d <= d_hi must hold, not {self.d_lo}, {self.d}, {self.d_hi}")
            if self.d_score > self.d:
                raise ValueError(f"d_score {self.d_score} must not be above d {self.d}")
            if self.d_out >= self.d_lo or 2 * self.d_out > self.d:
                raise ValueError(f"d_out {self.d_out} must be below d_lo {self.d_lo} and at most half of d {self.d}")
        if not 1 <= self.mcache_gossip_windows <= self.mcache_windows:
            raise ValueError("1 <= mcache_gossip_windows <= mcache_windows must hold")
        if self.gossip_factor > 1:
            raise ValueError(f"gossip_factor {self.gossip_factor} is a share: at most 1")

    def _check_times(self) -> None:
        if self.heartbeat_interval_s <= 0:
            raise ValueError("heartbeat_interval_s must be above 0")
        if self.seen_ttl_s < self.mcache_windows * self.heartbeat_interval_s:
            raise ValueError("seen_ttl_s must cover mcache_windows heartbeats, or peers send again what was seen")
        if self.backoff_max_s < max(self.prune_backoff_s, self.unsubscribe_backoff_s):
            raise ValueError("backoff_max_s must not be below prune_backoff_s and unsubscribe_backoff_s")
        if self.graft_flood_threshold_s > self.prune_backoff_s:
            raise ValueError("graft_flood_threshold_s must not be above prune_backoff_s")

    def _check_sizes(self) -> None:
        for name in (
            "topics_max",
            "topic_bytes_max",
            "rpc_messages_max",
            "iwant_ids_per_rpc_max",
            "peers_max",
            "seen_items_max",
            "message_bytes_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in (
            "mcache_items_max",
            "validation_max",
            "validation_per_topic_max",
            "backoff_items_max",
            "wanted_items_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.rpc_control_bytes_max < self.topic_bytes_max + self.message_id_bytes_max + RPC_OVERHEAD_BYTES:
            raise ValueError("rpc_control_bytes_max must hold a topic name and a message id")
        if self.rpc_bytes_max < self.message_bytes_max + self.topic_bytes_max + RPC_OVERHEAD_BYTES:
            raise ValueError("rpc_bytes_max must hold a message of message_bytes_max, its topic and a signature")
        if self.rpc_bytes_max < self.rpc_control_bytes_max:
            raise ValueError("rpc_bytes_max must not be below rpc_control_bytes_max")
        if not 1 <= self.sign_batch_max <= BATCH_MAX:
            raise ValueError(f"sign_batch_max {self.sign_batch_max} must be between 1 and {BATCH_MAX}")
        if self.publish_rate_per_s and self.publish_burst < 1:
            raise ValueError("publish_burst must be at least 1 when publish_rate_per_s is set")


RPC_OVERHEAD_BYTES: Final = 1_024
"""Bytes that a codec adds to a message beside payload and topic: author, seqno, signature, key, lengths."""


def go_defaults() -> GossipParams:
    """The constants of go-libp2p-pubsub 0.16: for comparisons with published figures and for its networks."""
    return GossipParams(
        d_lo=5,
        graft_on_subscribe=False,
        message_bytes_max=1_044_480,
        rpc_bytes_max=1_048_576,
        publish_rate_per_s=0.0,
    )


def with_rust_limits(params: GossipParams) -> GossipParams:
    """The same for a network with default rust-libp2p nodes, which refuse RPCs above 64 KiB: smaller messages too."""
    return replace(params, rpc_bytes_max=65_536, message_bytes_max=min(params.message_bytes_max, 61_440))
