"""The payloads of an ordered session's frames (docs/spec/session.md), byte by byte."""

import struct
from typing import Final, Literal, NamedTuple

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.frame import FrameType, encode_frame, encode_header

PUSH: Final = 0
"""A push of the app."""
BEFORE: Final = 1
"""A push that goes in front of a request's response."""
RESPONSE: Final = 2
"""The response itself."""
FAILURE: Final = 3
"""A response that is an error: u32 code, UTF-8 text."""
AFTER: Final = 4
"""A push that goes behind a request's response."""
SKIP: Final = 5
"""An empty number; the body is the reason, UTF-8."""
END: Final = 6
"""The server has ended the session, and nothing follows. The body is empty, or the reason of a failure, UTF-8."""
RESET: Final = 7
"""Never on the wire: marks where a reader's queue goes over to another epoch."""
_KIND_MAX: Final = END

ITEM: Final = struct.Struct(">BII")
"""kind, request id, length of the body."""
ITEM_BYTES: Final = ITEM.size
_SEQ: Final = struct.Struct(">Q")
SEQ_BYTES: Final = _SEQ.size
_ACK: Final = struct.Struct(">QQ")
_TAKEN: Final = struct.Struct(">I")
_RESUME: Final = struct.Struct(">16sQQQIIIB")
_ANSWER: Final = struct.Struct(">BQQI")
_TIMEOUT: Final = struct.Struct(">I")
_CODE: Final = struct.Struct(">I")

OPENED: Final = 0
"""A new session."""
RESUMED: Final = 1
"""The session goes on at the client's place."""
RESET_UNKNOWN: Final = 2
"""The server does not have the session: a new one begins."""
RESET_RELEASED: Final = 3
"""The server has the session, but not all items that the client asks for: they were acknowledged before."""
_STATUS_MAX: Final = RESET_RELEASED

SESSION_ID_BYTES: Final = 16
NAME_BYTES_MAX: Final = 255
SEQ_MAX: Final = 0xFFFF_FFFF_FFFF_FFFF
REQUEST_MAX: Final = 0xFFFF_FFFF
WINDOW_MAX: Final = 0xFFFF_FFFF
REASON_BYTES_MAX: Final = 1_024

_PUSH_TYPE = int(FrameType.PUSH)
_ACK_TYPE = int(FrameType.PUSH_ACK)
_RESUME_TYPE = int(FrameType.RESUME)
_REQUEST_TYPE = int(FrameType.REQUEST)


class Push(NamedTuple):
    """One numbered item of a session. ``kind`` is one of the numbers above, ``request_id`` 0 when bound to none."""

    seq: int
    body: bytes
    kind: int
    request_id: int

    @property
    def place(self) -> Literal["", "before", "after"]:
        """The place of a bound push beside the response; "" for one that is not bound."""
        if not self.request_id:
            return ""
        return "before" if self.kind == BEFORE else "after" if self.kind == AFTER else ""


class Resume(NamedTuple):
    """The client's first frame on a stream."""

    session_id: bytes
    epoch: int
    """The client's epoch; 0: none yet."""
    handled: int
    received: int
    window_items: int
    window_bytes: int
    requests_given: int
    """The highest request id that the client has used: after a reset, ids go on behind it."""
    name: str
    data: bytes
    """Data for the server's handler, when the session is new."""


class SessionAnswer(NamedTuple):
    """The server's first frame."""

    status: int
    epoch: int
    next_seq: int
    """The number of the first push that follows."""
    requests_taken: int
    """The highest request that the server has taken."""


def encode_item(kind: int, request_id: int, data: bytes) -> bytes:
    """Encode one numbered item, as it is kept and sent."""
    return ITEM.pack(kind, request_id, len(data)) + data


def push_header(first_seq: int, items_bytes: int) -> bytes:
    """Return the bytes in front of a run of items that make a PUSH frame of them."""
    return encode_header(_PUSH_TYPE, SEQ_BYTES + items_bytes) + _SEQ.pack(first_seq)


def first_seq_of(payload: bytes) -> int:
    """Return the number of a PUSH frame's first item. Raises ProtocolError."""
    if len(payload) < SEQ_BYTES + ITEM_BYTES:
        raise ProtocolError("PUSH without an item")
    return int(_SEQ.unpack_from(payload)[0])


def encode_ack(received: int, handled: int) -> bytes:
    """Encode a client's PUSH_ACK frame."""
    return encode_frame(_ACK_TYPE, _ACK.pack(received, handled))


def decode_ack(payload: bytes) -> tuple[int, int]:
    """Decode ``received`` and ``handled`` of a client's PUSH_ACK. Raises ProtocolError."""
    if len(payload) != _ACK.size:
        raise ProtocolError(f"PUSH_ACK of {len(payload)} bytes: a client's has {_ACK.size}")
    received, handled = _ACK.unpack(payload)
    return received, handled


def encode_taken(request_id: int) -> bytes:
    """Encode a server's PUSH_ACK frame: every request up to this one was taken."""
    return encode_frame(_ACK_TYPE, _TAKEN.pack(request_id))


def decode_taken(payload: bytes) -> int:
    """Decode the request id of a server's PUSH_ACK. Raises ProtocolError."""
    if len(payload) != _TAKEN.size:
        raise ProtocolError(f"PUSH_ACK of {len(payload)} bytes: a server's has {_TAKEN.size}")
    return int(_TAKEN.unpack(payload)[0])


def encode_resume(resume: Resume) -> bytes:
    """Encode a client's RESUME frame."""
    name = resume.name.encode()
    head = _RESUME.pack(
        resume.session_id,
        resume.epoch,
        resume.handled,
        resume.received,
        resume.window_items,
        resume.window_bytes,
        resume.requests_given,
        len(name),
    )
    return encode_frame(_RESUME_TYPE, head + name + resume.data)


def decode_resume(payload: bytes) -> Resume:
    """Decode a client's RESUME frame. Raises ProtocolError."""
    if len(payload) < _RESUME.size:
        raise ProtocolError("RESUME is too short")
    session_id, epoch, handled, received, items, size, given, name_bytes = _RESUME.unpack_from(payload)
    end = _RESUME.size + name_bytes
    if not name_bytes or len(payload) < end:
        raise ProtocolError("RESUME without a name")
    if handled > received:
        raise ProtocolError(f"RESUME has handled {handled} of {received} received")
    try:
        name = payload[_RESUME.size : end].decode()
    except UnicodeDecodeError:
        raise ProtocolError("the name in RESUME is not UTF-8") from None
    return Resume(session_id, epoch, handled, received, items, size, given, name, payload[end:])


def encode_session_answer(answer: SessionAnswer) -> bytes:
    """Encode a server's RESUME frame."""
    return encode_frame(_RESUME_TYPE, _ANSWER.pack(*answer))


def decode_session_answer(payload: bytes) -> SessionAnswer:
    """Decode a server's RESUME frame. Raises ProtocolError."""
    if len(payload) != _ANSWER.size:
        raise ProtocolError(f"RESUME of {len(payload)} bytes: a server's has {_ANSWER.size}")
    answer = SessionAnswer(*_ANSWER.unpack(payload))
    if answer.status > _STATUS_MAX or not answer.epoch or not answer.next_seq:
        raise ProtocolError("RESUME with an unknown status, or without an epoch or number")
    return answer


def encode_request(request_id: int, data: bytes, timeout_ms: int) -> bytes:
    """Encode a client's REQUEST frame; ``timeout_ms`` 0 leaves the choice to the server."""
    return encode_frame(_REQUEST_TYPE, _TIMEOUT.pack(timeout_ms) + data, req_id=request_id)


def decode_request(payload: bytes) -> tuple[int, bytes]:
    """Decode ``timeout_ms`` and the body. Raises ProtocolError."""
    if len(payload) < _TIMEOUT.size:
        raise ProtocolError("REQUEST without a timeout")
    return int(_TIMEOUT.unpack_from(payload)[0]), payload[_TIMEOUT.size :]


def encode_failure(code: int, text: str) -> bytes:
    """Encode the body of a FAILURE; the text is cut to 1,024 bytes."""
    return _CODE.pack(code) + cut_text(text)


def decode_failure(body: bytes) -> tuple[int, str]:
    """Decode code and text of a FAILURE. Raises ProtocolError."""
    if not _CODE.size <= len(body) <= _CODE.size + REASON_BYTES_MAX:
        raise ProtocolError(f"a response that is an error has {len(body)} bytes")
    return int(_CODE.unpack_from(body)[0]), body[_CODE.size :].decode("utf-8", "replace")


def cut_text(text: str) -> bytes:
    """Encode a text as at most 1,024 bytes of UTF-8, cut at a character's edge."""
    raw = text.encode("utf-8", "replace")
    if len(raw) > REASON_BYTES_MAX:
        raw = raw[:REASON_BYTES_MAX].decode("utf-8", "ignore").encode()
    return raw


def reset_mark(epoch: int, next_seq: int, reason: str) -> Push:
    """Make the mark where a reader's queue goes over to another epoch, or to a later number."""
    return Push(next_seq, _SEQ.pack(epoch) + reason.encode(), RESET, 0)


def read_reset(push: Push) -> tuple[int, int, str]:
    """Decode epoch, next number and reason of a RESET."""
    return int(_SEQ.unpack_from(push.body)[0]), push.seq, push.body[_SEQ.size :].decode()


_new_push = tuple[object, ...].__new__  # NamedTuple's own constructor costs twice as much


def read_items(payload: bytes, first_seq: int, skip: int, data_bytes_max: int) -> tuple[list[Push], int]:
    """Decode the items of a PUSH frame after the first ``skip``; return them, and how many were skipped.

    Raises ProtocolError for a frame that is cut off, holds an unknown kind, or an item over ``data_bytes_max``.
    """
    pushes: list[Push] = []
    append = pushes.append
    unpack = ITEM.unpack_from
    size = len(payload)
    last = size - ITEM_BYTES
    position = SEQ_BYTES
    seq = first_seq
    skip_to = first_seq + skip
    while position <= last:
        kind, request_id, length = unpack(payload, position)
        start = position + ITEM_BYTES
        position = start + length
        if kind > _KIND_MAX or length > data_bytes_max or position > size:
            raise ProtocolError(f"PUSH with an item of kind {kind} and {length} bytes")
        if seq >= skip_to:
            append(_new_push(Push, (seq, payload[start:position], kind, request_id)))
        seq += 1
    if position != size:
        raise ProtocolError("PUSH is cut off")
    if seq - 1 > SEQ_MAX:
        raise ProtocolError("PUSH runs over the last sequence number")
    return pushes, seq - first_seq - len(pushes)
