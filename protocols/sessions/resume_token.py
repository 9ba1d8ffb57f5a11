"""The place of a client in a session, as text: with it another process of the same node can go on."""

import base64
import binascii
import struct
from typing import Final, NamedTuple

from dep2p.errors import SessionTokenError

_PREFIX: Final = "dps1_"
_HEAD: Final = struct.Struct(">16sQQB")


class SessionToken(NamedTuple):
    """A place in a session. It is no secret: only the peer that opened the session can use it."""

    session_id: bytes
    epoch: int
    handled: int
    """The last push that was handled."""
    server: bytes
    """The server's peer id, as its multihash bytes."""
    name: str


def encode_token(token: SessionToken) -> str:
    """Encode a token as one word of text."""
    head = _HEAD.pack(token.session_id, token.epoch, token.handled, len(token.server))
    return _PREFIX + base64.urlsafe_b64encode(head + token.server + token.name.encode()).decode().rstrip("=")


def decode_token(text: str) -> SessionToken:
    """Decode a token. Raises SessionTokenError."""
    if not text.startswith(_PREFIX):
        raise SessionTokenError(f"a session token starts with {_PREFIX}: copy the whole word")
    body = text[len(_PREFIX) :]
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True)
        session_id, epoch, handled, server_bytes = _HEAD.unpack_from(raw)
        end = _HEAD.size + server_bytes
        server, name = raw[_HEAD.size : end], raw[end:].decode()
    except (binascii.Error, struct.error, ValueError):
        raise SessionTokenError("this is no session token, or a part of it is missing: copy the whole word") from None
    if not epoch or not name or len(server) != server_bytes:
        raise SessionTokenError("this is no session token, or a part of it is missing: copy the whole word")
    return SessionToken(session_id, epoch, handled, server, name)
