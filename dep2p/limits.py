"""Every bound of a node in one place. Units are in the names; all of it can be set in the config file's [limits]."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one node. The defaults are the seed's where it names one (flow control, timeouts, retries)."""

    # Wire
    message_bytes_max: int = 1_048_576
    """A request, response, notify or stream part, decompressed (seed: 1 MB)."""
    headers_bytes_max: int = 16_384
    error_text_bytes_max: int = 1_024
    stream_item_bytes_max: int = 16_777_216
    """One item of a stream, put together from its parts."""
    compress_bytes_min: int = 4_096
    """Payloads from this size on are compressed when both sides offer zstd; 0 turns compression off."""

    # Connections
    connections_max: int = 512
    """All connections; an eighth of them is kept for dials of our own, so that strangers cannot take every place."""
    connections_per_peer_max: int = 4
    connections_inbound_pending_max: int = 128
    """Inbound connections that have not finished their handshake."""
    streams_per_connection_max: int = 1_024
    peers_known_max: int = 4_096

    # Links (one pooled stream per peer and protocol)
    link_out_items_max: int = 4_096
    link_out_bytes_max: int = 8_388_608
    link_in_items_max: int = 4_096
    link_in_bytes_max: int = 8_388_608
    requests_in_flight_per_peer_max: int = 4_096
    handlers_per_peer_max: int = 1_024
    """Request handlers at work for one peer; above it requests get OVERLOADED."""
    requests_per_peer_per_s: float = 0.0
    """Token bucket for inbound requests of one peer; 0 means no limit."""
    notifies_per_peer_per_s: float = 0.0
    streams_inbound_per_peer_max: int = 256

    # Realm
    realms_max: int = 16
    members_per_realm_max: int = 10_000
    handshake_failures_per_address_per_min: int = 10

    # Times, seconds
    dial_timeout_s: float = 10.0
    stream_open_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    stream_first_item_timeout_s: float = 10.0
    stream_item_timeout_s: float = 60.0
    link_idle_timeout_s: float = 300.0
    close_timeout_s: float = 5.0
    handshake_timeout_s: float = 5.0
    liveness_interval_s: float = 15.0
    """Between probes of a connection; 0 turns probing off."""
    liveness_timeout_s: float = 10.0
    """A silent peer is noticed after at most interval + timeout."""
    drain_timeout_s: float = 10.0
    request_retry_initial_s: float = 0.1
    request_retry_max_s: float = 30.0
    request_tries_max: int = 5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0:
                raise ValueError(f"{field.name} is {value}: a limit cannot be negative")
