"""IDENTIFY: the settings that a client asks for, and those that it gets. Bounds and texts as nsqd's client_v2.go."""

import json
from dataclasses import dataclass
from typing import Final

from dep2p.encoding.shapes import is_text_map
from dep2p.protocols.nsq.errors import NsqError
from dep2p.protocols.nsq.limits import NsqLimits

VERSION: Final = "1.3.0+dep2p"
"""The version of nsqd whose protocol this server speaks. Tools compare it with versions that they know."""
_TEXT_MAX: Final = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The settings of one connection. Times are in milliseconds."""

    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    heartbeat_ms: int = 30_000
    """0: no heartbeats; the client cannot subscribe then."""
    output_buffer_bytes: int = 16_384
    """0: each message is written by itself."""
    output_buffer_timeout_ms: int = 250
    msg_timeout_ms: int = 0
    """0: the timeout of the queue."""
    sample_rate: int = 0
    """Percent of the messages that it gets; 0: all."""
    wants_answer: bool = False
    """Whether the client wants the features as JSON."""


def default_settings(limits: NsqLimits) -> ClientSettings:
    """Return the settings of a client that sends no IDENTIFY."""
    return ClientSettings(
        heartbeat_ms=limits.heartbeat_ms,
        output_buffer_bytes=limits.output_buffer_bytes,
        output_buffer_timeout_ms=limits.output_buffer_timeout_ms,
    )


def parse_identify(body: bytes, limits: NsqLimits) -> ClientSettings:
    """Parse the body of an IDENTIFY. Raises NsqError E_BAD_BODY, which names the fault."""
    try:
        decoded: object = json.loads(body)
    except (ValueError, RecursionError):
        raise NsqError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from None
    if not is_text_map(decoded):
        raise NsqError("E_BAD_BODY", "IDENTIFY failed to decode JSON body")
    given = decoded
    sample_rate = _integer(given, "sample_rate")
    if not 0 <= sample_rate <= 99:
        raise NsqError("E_BAD_BODY", f"IDENTIFY sample rate ({sample_rate}) is invalid")
    timeout_ms = _integer(given, "msg_timeout")
    if timeout_ms and not limits.msg_timeout_min_ms <= timeout_ms <= limits.msg_timeout_max_ms:
        raise NsqError("E_BAD_BODY", f"IDENTIFY msg timeout ({timeout_ms}) is invalid")
    # "short_id" and "long_id" are how clients of before 2013 name themselves.
    return ClientSettings(
        client_id=_text(given, "client_id") or _text(given, "short_id"),
        hostname=_text(given, "hostname") or _text(given, "long_id"),
        user_agent=_text(given, "user_agent"),
        heartbeat_ms=_chosen(
            given,
            "heartbeat_interval",
            "heartbeat interval",
            limits.heartbeat_ms,
            limits.heartbeat_min_ms,
            limits.heartbeat_max_ms,
        ),
        output_buffer_bytes=_chosen(
            given,
            "output_buffer_size",
            "output buffer size",
            limits.output_buffer_bytes,
            limits.output_buffer_min_bytes,
            limits.output_buffer_max_bytes,
        ),
        output_buffer_timeout_ms=_chosen(
            given,
            "output_buffer_timeout",
            "output buffer timeout",
            limits.output_buffer_timeout_ms,
            limits.output_buffer_timeout_min_ms,
            limits.output_buffer_timeout_max_ms,
        ),
        msg_timeout_ms=timeout_ms,
        sample_rate=sample_rate,
        wants_answer=given.get("feature_negotiation") is True,
    )


def identify_answer(settings: ClientSettings, limits: NsqLimits) -> bytes:
    """Return the answer to the client: TLS, compression and authentication are not offered."""
    if not settings.wants_answer:
        return b"OK"
    answer = {
        "max_rdy_count": limits.ready_max,
        "version": VERSION,
        "max_msg_timeout": limits.msg_timeout_max_ms,
        "msg_timeout": settings.msg_timeout_ms or limits.msg_timeout_ms,
        "tls_v1": False,
        "deflate": False,
        "deflate_level": 0,
        "max_deflate_level": 0,
        "snappy": False,
        "sample_rate": settings.sample_rate,
        "auth_required": False,
        "output_buffer_size": settings.output_buffer_bytes,
        "output_buffer_timeout": settings.output_buffer_timeout_ms,
        "topology_region": "",
        "topology_zone": "",
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def _integer(given: dict[str, object], name: str) -> int:
    value = given.get(name)
    if value is None:
        return 0
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NsqError("E_BAD_BODY", f"IDENTIFY failed to decode JSON body: {name} is no whole number")
    return value


def _text(given: dict[str, object], name: str) -> str:
    value = given.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise NsqError("E_BAD_BODY", f"IDENTIFY failed to decode JSON body: {name} is no text")
    return value[:_TEXT_MAX]


def _chosen(given: dict[str, object], name: str, what: str, default: int, low: int, high: int) -> int:
    """Return the setting that the client chose: -1 switches it off, 0 leaves the default."""
    value = _integer(given, name)
    if value == -1:
        return 0
    if value == 0:
        return default
    if not low <= value <= high:
        raise NsqError("E_BAD_BODY", f"IDENTIFY {what} ({value}) is invalid")
    return value
