"""Every bound of a node in one place. Units are in the names; all of it can be set in the config file's [limits]."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one node. The defaults are the seed's where it names one (flow control, timeouts, retries)."""

    # Wire
    message_bytes_max: int = 1_048_576
    """A request, response, notify or stream part, decompressed (seed: 1 MB)."""
    headers_bytes_max: int = 16_384
    """All headers of one message, encoded."""
    error_text_bytes_max: int = 1_024
    """The text of an error that goes to a peer; longer ones are cut."""
    stream_item_bytes_max: int = 16_777_216
    """One item of a stream, put together from its parts."""
    compress_bytes_min: int = 4_096
    """Payloads from this size on are compressed when both sides offer zstd; 0 turns compression off."""

    # Connections
    connections_max: int = 512
    """All connections; an eighth of them is kept for dials of our own, so that strangers cannot take every place."""
    connections_per_peer_max: int = 4
    """Two are usual for a moment when both sides dial at once."""
    connections_inbound_pending_max: int = 128
    """Inbound connections that have not finished their handshake."""
    streams_per_connection_max: int = 1_024
    """Open streams of one connection."""
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
    requests_per_peer_per_s: float = 0.0
    """Token bucket for inbound requests of one peer; 0 means no limit."""
    notifies_per_peer_per_s: float = 0.0
    """Token bucket for inbound notifies of one peer; 0 means no limit."""
    streams_inbound_per_peer_max: int = 256
    """Streams that one peer may have open to this node; above it they are refused."""

    # Pub/sub (per realm; the router's own parameters are dep2p.gossipsub.params)
    pubsub_publish_per_s: float = 100.0
    """Own publishes a second over all realms, averaged (seed: 100); above it one waits or fails. 0 means no limit."""
    pubsub_publish_burst: int = 10_000
    """Publishes that may come at once before that limit holds them."""
    pubsub_topics_max: int = 100
    """Topics that this node may be in at once, over all realms (seed: 100)."""
    pubsub_out_items_max: int = 16_384
    """Messages that wait to be sent to one peer; above it publishes wait, and messages of others are dropped."""
    pubsub_out_bytes_max: int = 16_777_216
    """The same in bytes."""
    pubsub_out_control_items_max: int = 1_024
    """Control RPCs that wait to be sent to one peer; above it they are said again at a later heartbeat."""
    pubsub_out_gossip_items_max: int = 256
    """Gossip RPCs that wait to be sent to one peer; above it they are dropped."""
    pubsub_slow_peer_s: float = 2.0
    """A peer that holds up publishes for so long while others are idle is waited for no more until it catches up."""
    pubsub_validating_max: int = 1_024
    """Received messages whose signatures or validators are at work; above half of it peers are held back."""
    pubsub_trace_items_max: int = 65_536
    """Trace events kept until they are read or written; further ones are dropped."""
    trace_items_max: int = 65_536
    """Events of the node's trace that wait to be written; further ones are dropped, and the trace says how many."""

    # Ordered sessions (per realm)
    sessions_max: int = 1_024
    """Sessions that this node serves at once, and as many that it has open."""
    sessions_per_peer_max: int = 64
    """Sessions of one peer that this node serves at once; further ones are refused."""
    session_items_max: int = 4_096
    """Pushes of one session that wait or are not handled yet; above it a push waits or fails (seed: 1000)."""
    session_bytes_max: int = 8_388_608
    """The same in bytes."""
    session_retries_max: int = 3
    """Times that unacknowledged pushes are sent again (seed: 3); then the session fails."""

    # Reliable delivery (per realm)
    delivery_queue_items_max: int = 1_000
    """Reliable messages that wait for their acknowledgement; above it sending waits (seed: QueueSize 1000)."""
    delivery_queue_bytes_max: int = 67_108_864
    """The same in bytes."""
    delivery_ack_timeout_s: float = 5.0
    """A connected receiver that says nothing for so long is sent the message again (seed: AckTimeout 5 s)."""
    delivery_retries: int = 3
    """So often, then the message has failed (seed: MaxRetries 3); 0 never sends again."""
    delivery_age_max_s: float = 300.0
    """A message that was not acknowledged by then has expired, connected or not (seed: MessageMaxAge 5 min)."""

    # Realm
    realms_max: int = 16
    """Realms that this node may be in at once."""
    members_per_realm_max: int = 10_000
    """Members of one realm that are remembered."""
    handshake_failures_per_address_per_min: int = 10
    """Failed proofs of membership that are heard from one address in a minute."""

    # Times, seconds
    dial_timeout_s: float = 10.0
    """To connect to a peer, over all its addresses together."""
    stream_open_timeout_s: float = 10.0
    """To open a stream on a connection and agree on its protocol."""
    request_timeout_s: float = 30.0
    """For a request that names no timeout, over all its tries together."""
    stream_first_item_timeout_s: float = 10.0
    """For the first item of a stream to arrive."""
    stream_item_timeout_s: float = 60.0
    """For each later item; a stream that is silent for longer is aborted."""
    link_idle_timeout_s: float = 300.0
    """A link that carries nothing for so long is closed, and opened again by the next message; 0 keeps it open."""
    close_timeout_s: float = 5.0
    """For a stream or connection to close in good order; then it is cut."""
    handshake_timeout_s: float = 5.0
    """For a peer to prove its membership of a realm."""
    session_ack_timeout_s: float = 15.0
    """Pushes that the client does not acknowledge for so long are sent again (seed: half of 30 s)."""
    session_resume_timeout_s: float = 300.0
    """A session whose client is away is kept for so long (seed: 5 minutes)."""
    liveness_interval_s: float = 15.0
    """Between probes of a connection; 0 turns probing off."""
    liveness_timeout_s: float = 10.0
    """A silent peer is noticed after at most interval + timeout."""
    drain_timeout_s: float = 10.0
    """For what is in flight to finish when the node stops."""
    request_retry_initial_s: float = 0.1
    """Before the second try of a request; doubled for each further one."""
    request_retry_max_s: float = 30.0
    """The longest wait between two tries."""
    request_tries_max: int = 5
    """Tries of an idempotent request, the first one included."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:  # nor NaN
                raise ValueError(f"{field.name} is {value}: a limit cannot be negative")
            if not value and field.name.endswith("_max"):
                raise ValueError(f"{field.name} is 0: nothing could ever pass, and callers would wait for ever")
