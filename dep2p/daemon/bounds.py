"""What one control client, and all of them together, may cost the daemon."""

from dataclasses import dataclass

from dep2p.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlBounds:
    """Bounds of the control API. They follow from the node's limits or are fixed: nobody needs to tune them."""

    connections_max: int = 256
    head_timeout_s: float = 10.0
    """For the head of a request, from its connection's opening (a client that sends it byte by byte is cut off)."""
    keep_alive_timeout_s: float = 60.0
    """Between two requests of a connection."""
    body_timeout_s: float = 30.0
    """For a whole JSON body, and for the rest of an item of a stream."""
    write_stall_timeout_s: float = 600.0
    """A reader that takes nothing at all for this long is cut off; until then it may pause as it likes."""
    linger_timeout_s: float = 1.0
    linger_bytes_max: int = 16_777_216
    """What is read and thrown away after an early answer, so that the client gets to see it."""
    json_bytes_max: int = 1_572_864
    subscriptions_max: int = 128
    subscription_items_max: int = 1_024
    subscription_bytes_max: int = 8_388_608
    replies_concurrency_max: int = 4_096
    streams_max: int = 256
    stream_unattached_timeout_s: float = 60.0
    """A stream to which no client is attached is reset after this."""
    topic_bytes_max: int = 1_024
    """A topic's name; the router's own bound."""
    topic_buffer_items_max: int = 65_536
    """The largest buffer that the reader of a topic may ask for; subscription_bytes_max bounds it, too."""
    topic_idle_timeout_s: float = 60.0
    """A topic that nobody reads any more is left after this."""
    timeout_max_s: float = 3_600.0
    """The longest timeout that a call may ask for."""
    ping_count_max: int = 1_000

    @classmethod
    def for_limits(cls, limits: Limits) -> "ControlBounds":
        """Room for a message of the largest size in base64, with headers, in a JSON body."""
        return cls(
            json_bytes_max=limits.message_bytes_max * 4 // 3 + limits.headers_bytes_max * 4 + 65_536,
            subscription_bytes_max=max(8_388_608, limits.message_bytes_max * 2),
        )
