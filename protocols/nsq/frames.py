"""Frames of a server: 4 bytes size, 4 bytes type, data (https://nsq.io/clients/tcp_protocol_spec.html)."""

import struct
from typing import Final

FRAME_RESPONSE: Final = 0
FRAME_ERROR: Final = 1
FRAME_MESSAGE: Final = 2
ID_BYTES: Final = 16

_HEAD: Final = struct.Struct(">ii")
_MESSAGE_HEAD: Final = struct.Struct(">iiqH16s")
_ATTEMPTS_MAX: Final = 65_535


def encode_frame(kind: int, data: bytes) -> bytes:
    """Return a frame; its size counts the type."""
    return _HEAD.pack(len(data) + 4, kind) + data


def encode_message(message_id: bytes, attempts: int, timestamp_ns: int, body: bytes) -> bytes:
    """Return a message's frame. ``message_id``: 16 ASCII characters; ``timestamp_ns``: Unix time of the publish."""
    head = _MESSAGE_HEAD.pack(len(body) + 30, FRAME_MESSAGE, timestamp_ns, min(attempts, _ATTEMPTS_MAX), message_id)
    return head + body


OK: Final = encode_frame(FRAME_RESPONSE, b"OK")
HEARTBEAT: Final = encode_frame(FRAME_RESPONSE, b"_heartbeat_")
CLOSE_WAIT: Final = encode_frame(FRAME_RESPONSE, b"CLOSE_WAIT")
