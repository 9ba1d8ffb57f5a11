"""Limits of the daemon's resources for one control client, and for all of them together."""

from dataclasses import dataclass
from typing import Final

from dep2p.limits import Limits

BODY_BYTES_PER_S_MIN: Final = 4_096
"""The slowest rate at which a body of a request may come, after its first seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlBounds:
    """Bounds of the control API. They follow from the node's limits or are fixed: they need no tuning."""

    connections_max: int = 256
    head_timeout_s: float = 10.0
    """Seconds for the head of a request, from its connection's opening (this ends a client that sends it byte by
    byte)."""
    keep_alive_timeout_s: float = 60.0
    """Seconds between two requests of a connection."""
    body_timeout_s: float = 30.0
    """Seconds for a whole JSON body, and one more for each BODY_BYTES_PER_S_MIN of it that have come; and seconds in
    which nothing more of an item of a stream comes."""
    write_stall_timeout_s: float = 600.0
    """Seconds after which a reader that takes nothing at all is cut off; until then it may pause."""
    half_close_timeout_s: float = 5.0
    """Seconds for the answer to a TCP client that sends no more: it may have hung up. A Unix socket shows which."""
    linger_timeout_s: float = 1.0
    linger_bytes_max: int = 16_777_216
    """Bytes that the daemon reads and throws away after an early answer, so that the client gets to see the answer."""
    tls_handshake_timeout_s: float = 5.0
    token_timeout_s: float = 30.0
    """Seconds for a TLS connection to bring the token."""
    connections_unproven_max: int = 64
    """TLS connections that have not brought the token; one more replaces the oldest of the address that has most."""
    connections_unproven_per_block_max: int = 16
    """Those of one IPv4 address, or of one IPv6 network of 64 bits."""
    wrong_token_delay_s: float = 1.0
    """Seconds until a wrong token is answered: with connections_unproven_max, the rate of guesses."""
    json_bytes_max: int = 1_572_864
    message_bytes_max: int = 1_048_576
    """Bytes of data that such a body is for, for the error of a larger one."""
    subscriptions_max: int = 128
    subscription_items_max: int = 1_024
    subscription_bytes_max: int = 8_388_608
    replies_concurrency_max: int = 4_096
    confirm_warn_s: float = 30.0
    """Seconds after which the log names a program that has a reliable message in hand."""
    confirm_timeout_s: float = 300.0
    """Seconds after which such a program loses its subscription, and the message goes to another one: the messages of
    its sender wait behind it, by default for so long."""
    streams_max: int = 256
    stream_unattached_timeout_s: float = 60.0
    """Seconds after which a stream without an attached client is reset."""
    topic_bytes_max: int = 1_024
    """Bytes of a topic's name; the router's own bound."""
    topic_buffer_items_max: int = 65_536
    """Messages in the largest buffer that the reader of a topic may ask for; subscription_bytes_max bounds it, too."""
    topic_idle_timeout_s: float = 60.0
    """Seconds after which the daemon leaves a topic without readers."""
    timeout_max_s: float = 3_600.0
    """Seconds of the longest timeout that a call may ask for."""
    ping_count_max: int = 1_000

    @classmethod
    def for_limits(cls, limits: Limits) -> "ControlBounds":
        """Return bounds that have room for a message of the largest size in base64, with headers, in a JSON body."""
        return cls(
            json_bytes_max=limits.message_bytes_max * 4 // 3 + limits.headers_bytes_max * 4 + 65_536,
            message_bytes_max=limits.message_bytes_max,
            subscription_bytes_max=max(8_388_608, limits.message_bytes_max * 2),
        )
