"""Limits of one client. The values are nsqd's defaults (nsqio/nsq, nsqd/options.go) where it has any."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NsqLimits:
    """Times in milliseconds, as the protocol has them; sizes in bytes."""

    line_bytes_max: int = 4_096
    """Bytes of a command before its line feed (nsqd: its read buffer, 16 KiB)."""
    message_bytes_max: int = 1_048_576
    body_bytes_max: int = 5_242_880
    """Bytes of the body of an IDENTIFY or MPUB."""
    mpub_items_max: int = 16_384
    """Messages of one MPUB: a million tiny ones would hold up all others for four seconds (nsqd: no limit)."""
    ready_max: int = 2_500
    msg_timeout_ms: int = 60_000
    """The message timeout that clients get when they ask for none: the daemon's default for queues."""
    msg_timeout_min_ms: int = 1_000
    msg_timeout_max_ms: int = 900_000
    defer_max_ms: int = 2_592_000_000
    """The longest delay of a DPUB: 30 days, since deferrals are durable here (nsqd: one hour)."""
    heartbeat_ms: int = 30_000
    heartbeat_min_ms: int = 1_000
    heartbeat_max_ms: int = 60_000
    output_buffer_bytes: int = 16_384
    output_buffer_min_bytes: int = 64
    output_buffer_max_bytes: int = 65_536
    output_buffer_timeout_ms: int = 250
    output_buffer_timeout_min_ms: int = 25
    output_buffer_timeout_max_ms: int = 30_000
