"""The yamux frame: a 12-byte header, and a body after DATA only.

Source: https://github.com/hashicorp/yamux/blob/master/spec.md. All integers are big-endian::

    0        1        2                4                                8                               12
    +--------+--------+----------------+--------------------------------+--------------------------------+
    | ver u8 | type u8|   flags u16    |         stream id u32          |           length u32           |
    +--------+--------+----------------+--------------------------------+--------------------------------+

``length`` is the body's size for DATA, the credit for WINDOW_UPDATE, the value for PING, the code for GO_AWAY.
"""

import struct
from enum import IntEnum

HEADER = struct.Struct("!BBHII")
HEADER_BYTES = HEADER.size
VERSION = 0

DATA = 0
WINDOW_UPDATE = 1
PING = 2
GO_AWAY = 3

SYN = 1
ACK = 2
FIN = 4
RST = 8

WINDOW_INITIAL_BYTES = 262_144
"""Credit that each side has on a new stream; fixed by the specification."""
WINDOW_MAX = 2**32 - 1
STREAM_ID_MAX = 2**32 - 1


class GoAway(IntEnum):
    """Codes of a GO_AWAY frame."""

    NORMAL = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2


def encode_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    """Return a frame's header. The integers must fit their fields."""
    return HEADER.pack(VERSION, kind, flags, stream_id, length)
