"""Every bound of a node in one place. Units are in the names; all of it can be set in the config file's [limits]."""

from dataclasses import dataclass, fields
from typing import Final

NOTIFY_CONCURRENCY: Final = 64
"""Notifies of one name that a handler works on at a time unless its registration says another number."""
HANDLER_CONCURRENCY: Final = 80
"""Requests, or streams, of one name that a handler works on at a time unless its registration says another number. One
member may have seven eighths of them: with 80 a member that keeps 64 in flight never waits for a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one node. Each default is given with its unit; docs/reference/config.md lists them."""

    # Wire
    message_bytes_max: int = 1_048_576
    """Bytes of a request, response, notify or stream part, decompressed."""
    headers_bytes_max: int = 16_384
    """Bytes of all headers of one message, encoded."""
    error_text_bytes_max: int = 1_024
    """Bytes of an error's text to a peer; longer texts are cut."""
    stream_item_bytes_max: int = 16_777_216
    """Bytes of one item of a stream, put together from its parts."""
    compress_bytes_min: int = 4_096
    """Bytes of a payload from which on it is compressed when both sides offer zstd; 0 turns compression off."""

    # Connections
    connections_max: int = 512
    """All connections. An eighth of them is kept for our own dials, so that strangers cannot take every slot."""
    connections_per_peer_max: int = 4
    """Connections to one peer; two are usual for a moment when both sides dial at once. Above it the oldest ends."""
    connections_inbound_pending_max: int = 128
    """Inbound connections that have not finished their handshake."""
    streams_per_connection_max: int = 1_024
    """Open streams of one connection."""
    connections_unproven_per_address_block_max: int = 128
    """Inbound connections from one IPv4 /24 or IPv6 /56 whose peers no realm has verified; the oldest makes room."""
    memory_bytes_max: int = 268_435_456
    """Received bytes that wait for their readers, and open streams, of all connections; above it the largest ends."""
    memory_bytes_per_peer_max: int = 67_108_864
    """Memory of the connections of one verified peer; above it the peer's streams are reset."""
    memory_bytes_unproven_max: int = 67_108_864
    """Memory of all connections whose peers no realm has verified; above it the largest of them ends."""
    memory_bytes_per_address_block_max: int = 33_554_432
    """Memory of the unverified connections from one IPv4 /24 or IPv6 /56; above it the largest of them ends."""
    memory_bytes_per_unproven_connection_max: int = 1_048_576
    """Memory of one unverified connection; above it the connection ends."""
    streams_unproven_per_protocol_max: int = 1_024
    """Streams of one protocol whose peers no realm has verified; above it they are refused."""
    control_frames_per_s: float = 16_384.0
    """Frames without data that a verified peer may send a second; above it its connection ends. 0 means no limit."""
    control_frames_unproven_per_s: float = 512.0
    """Frames without data that a peer that no realm has verified may send a second."""
    peers_known_max: int = 4_096
    """Peers whose addresses are kept, in memory and on disk."""

    # Links (one pooled stream per peer and protocol)
    link_out_items_max: int = 4_096
    """Messages that wait to be sent to one peer; above it senders wait."""
    link_out_bytes_max: int = 8_388_608
    """The same in bytes."""
    link_in_items_max: int = 4_096
    """Notifies of one peer that wait for their handler; above it the peer is held back."""
    link_in_bytes_max: int = 8_388_608
    """The same in bytes."""
    requests_in_flight_per_peer_max: int = 4_096
    """Requests to one peer that wait for an answer; above it further ones wait."""
    handlers_per_peer_max: int = 1_024
    """Request handlers at work for one peer; above it requests get OVERLOADED."""
    answers_unread_bytes_max: int = 67_108_864
    """Answers to one peer that wait until it reads; further ones are dropped, and it gets TIMEOUT in their place."""
    answers_unread_timeout_s: float = 30.0
    """A peer whose answers wait and that reads none of them for so long loses its link."""
    requests_per_peer_per_s: float = 0.0
    """Token bucket for inbound requests of one peer; 0 means no limit."""
    notifies_per_peer_per_s: float = 0.0
    """Token bucket for inbound notifies of one peer; 0 means no limit."""
    streams_inbound_per_peer_max: int = 256
    """Streams that one peer may have open to this node; above it they are refused."""

    # Pub/sub (per realm; the router's own parameters are dep2p.gossipsub.params)
    pubsub_publish_per_s: float = 100.0
    """Own publishes a second over all realms, averaged; above it a publish waits or fails. 0 means no limit."""
    pubsub_publish_burst: int = 10_000
    """Publishes that may come at once before that limit holds them."""
    pubsub_topics_max: int = 100
    """Topics that this node may be in at once, over all realms."""
    pubsub_matched_topics_max: int = 128
    """Topics of one realm that this node may be in besides, because patterns of its subscriptions match them."""
    pubsub_out_items_max: int = 16_384
    """Messages that wait to be sent to one peer; above it publishes wait, and messages of others are dropped."""
    pubsub_out_bytes_max: int = 16_777_216
    """The same in bytes."""
    pubsub_out_control_items_max: int = 1_024
    """Control RPCs that wait to be sent to one peer; above it they are repeated at a later heartbeat."""
    pubsub_out_gossip_items_max: int = 256
    """Gossip RPCs that wait to be sent to one peer; above it they are dropped."""
    pubsub_slow_peer_s: float = 2.0
    """Seconds for which a peer may hold up publishes while others are idle; then no publish waits for it until it
    catches up."""
    pubsub_validating_max: int = 1_024
    """Received messages whose signatures or validators are at work; above half of it peers are held back."""
    pubsub_trace_items_max: int = 65_536
    """Trace events kept until they are read or written; further ones are dropped."""
    trace_items_max: int = 65_536
    """Events of the node's trace that wait to be written; further ones are dropped, and the trace says how many."""

    # Ordered sessions (per realm)
    sessions_max: int = 1_024
    """Sessions that this node serves at once; it may open as many."""
    sessions_per_peer_max: int = 64
    """Sessions of one peer that this node serves at once; further ones are refused."""
    session_items_max: int = 4_096
    """Pushes of one session that wait or are not handled yet; above it a push waits or fails."""
    session_bytes_max: int = 8_388_608
    """The same in bytes."""
    session_retries_max: int = 3
    """Times that unacknowledged pushes are sent again; then the session fails."""

    # Queues that this node keeps: what one member may have of them
    queues_per_peer_max: int = 256
    """Queues that one member may have made here; further ones are refused."""
    queue_bytes_per_peer_max: int = 4_294_967_296
    """Bytes of messages in the queues that one member made here; above it publishes of members to them wait."""
    queue_consumers_per_peer_max: int = 256
    """Consumers that one member may have here at once, over all queues."""
    queue_receives_per_peer_max: int = 64
    """Receives of one member that may wait for a message at once."""
    queue_changes_per_peer_per_s: float = 20.0
    """Queues and channels that one member may make, change and delete in a second, averaged; 200 may come at once. 0
    means no limit."""
    queue_messages_per_peer_per_s: float = 0.0
    """Messages that one member may publish to queues here in a second, averaged over ten; 0 means no limit."""

    # Reliable delivery (per realm)
    delivery_queue_items_max: int = 1_000
    """Reliable messages that wait for their acknowledgement; above it sending waits."""
    delivery_queue_bytes_max: int = 67_108_864
    """The same in bytes."""
    delivery_ack_timeout_s: float = 5.0
    """Seconds without an answer of a connected receiver, after which a message is sent again."""
    delivery_retries: int = 3
    """Times that a message is sent again before it fails; 0 never sends again."""
    delivery_age_max_s: float = 300.0
    """Seconds until a message that was not acknowledged expires, connected or not, unless it has a time of its own."""
    delivery_lost_items_max: int = 1_000
    """Lost messages (failed, expired) that are kept to look at and to send again; above it the oldest is forgotten."""
    delivery_lost_bytes_max: int = 16_777_216
    """The same in bytes."""

    # Realm
    realms_max: int = 16
    """Realms that this node may be in at once."""
    members_per_realm_max: int = 10_000
    """Members of one realm that are remembered."""
    handshake_failures_per_peer_per_min: int = 10
    """Failed proofs of membership that one peer may make in a minute; above it the peer is refused for a while."""

    # Times, seconds
    dial_timeout_s: float = 10.0
    """Seconds to connect to a peer, over all its addresses together."""
    stream_open_timeout_s: float = 10.0
    """Seconds to open a stream on a connection and agree on its protocol."""
    request_timeout_s: float = 30.0
    """Seconds for a request that names no timeout, over all its tries together."""
    stream_first_item_timeout_s: float = 10.0
    """Seconds in which nothing of a stream moves, in either direction, until its first item arrives."""
    stream_item_timeout_s: float = 60.0
    """The same until each later item; a stream in which nothing moves for longer is aborted."""
    link_idle_timeout_s: float = 300.0
    """Seconds after which a link without traffic is closed; the next message opens it again. 0 keeps it open."""
    close_timeout_s: float = 5.0
    """Seconds for a stream or connection to close in good order; then it is cut."""
    handshake_timeout_s: float = 5.0
    """Seconds for a peer to prove its membership of a realm."""
    session_ack_timeout_s: float = 15.0
    """Seconds until pushes that the client does not acknowledge are sent again."""
    session_resume_timeout_s: float = 300.0
    """Seconds for which a session is kept while its client is away."""
    liveness_interval_s: float = 15.0
    """Seconds between probes of a connection; 0 turns probing off."""
    liveness_timeout_s: float = 10.0
    """Seconds for the answer to a probe: a silent peer is noticed after at most interval + timeout."""
    drain_timeout_s: float = 10.0
    """Seconds for work in flight to finish when the node stops."""
    request_retry_initial_s: float = 0.1
    """Seconds before the second try of a request; doubled for each further one."""
    request_retry_max_s: float = 30.0
    """Seconds between two tries of a request at most."""
    request_tries_max: int = 5
    """Tries of an idempotent request, the first one included."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:  # nor NaN
                raise ValueError(f"{field.name} is {value}: a limit cannot be negative")
            if not value and field.name.endswith("_max"):
                raise ValueError(f"{field.name} is 0: nothing could ever pass, and callers would wait without an end")
