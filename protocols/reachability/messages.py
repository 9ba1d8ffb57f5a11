"""Messages of AutoNAT version 2: https://github.com/libp2p/specs/blob/master/autonat/autonat-v2.md. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

from dep2p.encoding.protobuf import VARINT, ProtoReader, encode_field, encode_fixed64, encode_uint
from dep2p.errors import ProtocolError

DIAL_REQUEST: Final = "/libp2p/autonat/2/dial-request"
DIAL_BACK: Final = "/libp2p/autonat/2/dial-back"

MESSAGE_BYTES_MAX: Final = 8_192
"""Bytes of a message between asker and server at most; go-libp2p has the same bound."""
DIAL_BACK_BYTES_MAX: Final = 64
"""Bytes of a message on a dial-back stream at most."""
ADDRS_MAX: Final = 50
"""Addresses of a request at most."""
ADDR_BYTES_MAX: Final = 512
DATA_BYTES_MAX: Final = 4_096
"""Bytes of dial data in one message at most, by the specification."""
NONCE_MAX: Final = 2**64 - 1


class DialStatus(IntEnum):
    """How the dial ended."""

    UNUSED = 0
    DIAL_ERROR = 100
    """No connection could be made."""
    DIAL_BACK_ERROR = 101
    """There was a connection, and the nonce could not be delivered."""
    OK = 200


class ResponseStatus(IntEnum):
    """Whether the server dialed."""

    INTERNAL_ERROR = 0
    REQUEST_REJECTED = 100
    """A rate or another bound refused the request."""
    DIAL_REFUSED = 101
    """The server can or will dial none of the addresses."""
    OK = 200


@dataclass(frozen=True, slots=True)
class DialRequest:
    """Ask the server to dial the first of these binary multiaddrs that it can, and to bring ``nonce`` there."""

    addrs: tuple[bytes, ...]
    nonce: int


@dataclass(frozen=True, slots=True)
class DialResponse:
    """The outcome. ``addr_index`` and ``dial_status`` mean something when ``status`` is OK."""

    status: ResponseStatus
    addr_index: int = 0
    dial_status: DialStatus = DialStatus.UNUSED


@dataclass(frozen=True, slots=True)
class DialDataRequest:
    """The server wants ``wanted_bytes`` of dial data before it dials another IP address than the asker's."""

    addr_index: int
    wanted_bytes: int


@dataclass(frozen=True, slots=True)
class DialData:
    """A part of the dial data, of ``data_bytes`` bytes. What the bytes are means nothing."""

    data_bytes: int


DialMessage = DialRequest | DialResponse | DialDataRequest | DialData
S = TypeVar("S", bound=IntEnum)


def encode_dial_message(message: DialMessage) -> bytes:
    """Return the message without its length prefix."""
    match message:
        case DialRequest(addrs, nonce):
            body = b"".join(encode_field(1, addr) for addr in addrs) + encode_fixed64(2, nonce)
            return encode_field(1, body)
        case DialResponse(status, index, dial_status):
            return encode_field(2, encode_uint(1, status) + encode_uint(2, index) + encode_uint(3, dial_status))
        case DialDataRequest(index, wanted_bytes):
            return encode_field(3, encode_uint(1, index) + encode_uint(2, wanted_bytes))
        case DialData(data_bytes):
            return encode_field(4, encode_field(1, bytes(data_bytes)))


def decode_dial_message(data: bytes) -> DialMessage:
    """Read a message. Raises ProtocolError, also for a status that is not known, and for more messages than one."""
    readers: dict[int, Callable[[ProtoReader], DialMessage]] = {
        1: _dial_request,
        2: _dial_response,
        3: _data_request,
        4: _dial_data,
    }
    found: DialMessage | None = None
    fields = ProtoReader(data, 0, len(data))
    while fields.next():
        read = readers.get(fields.number)
        if read is None:
            fields.skip()
        elif found is not None:
            raise ProtocolError("an AutoNAT message holds two messages")
        else:
            found = read(fields.sub())
    if found is None:
        raise ProtocolError("an AutoNAT message holds no message that is known here")
    return found


def encode_dial_back(nonce: int) -> bytes:
    """Return the message that brings a nonce, without its length prefix."""
    return encode_fixed64(1, nonce)


def decode_dial_back(data: bytes) -> int:
    """Return the nonce. Raises ProtocolError."""
    nonce: int | None = None
    fields = ProtoReader(data, 0, len(data))
    while fields.next():
        if fields.number == 1:
            nonce = fields.fixed64()
        else:
            fields.skip()
    if nonce is None:
        raise ProtocolError("a dial-back message holds no nonce")
    return nonce


def encode_dial_back_response() -> bytes:
    """Return the answer to a nonce: its status OK is 0, which protobuf leaves out."""
    return b""


def decode_dial_back_response(data: bytes) -> None:
    """Check the answer to a nonce. Raises ProtocolError for another status than OK."""
    if _numbers(ProtoReader(data, 0, len(data))).get(1, 0):
        raise ProtocolError("the peer did not take the nonce")


def _dial_request(fields: ProtoReader) -> DialRequest:
    addrs: list[bytes] = []
    nonce = 0
    while fields.next():
        if fields.number == 1:
            if len(addrs) >= ADDRS_MAX:
                raise ProtocolError(f"a dial request of more than {ADDRS_MAX} addresses")
            addrs.append(fields.bytes_(ADDR_BYTES_MAX))
        elif fields.number == 2:
            nonce = fields.fixed64()
        else:
            fields.skip()
    return DialRequest(tuple(addrs), nonce)


def _dial_response(fields: ProtoReader) -> DialResponse:
    numbers = _numbers(fields)
    status = _status(ResponseStatus, numbers, 1)
    return DialResponse(status, numbers.get(2, 0), _status(DialStatus, numbers, 3))


def _data_request(fields: ProtoReader) -> DialDataRequest:
    numbers = _numbers(fields)
    return DialDataRequest(numbers.get(1, 0), numbers.get(2, 0))


def _dial_data(fields: ProtoReader) -> DialData:
    data_bytes = 0
    while fields.next():
        if fields.number == 1:
            start, end = fields.span(DATA_BYTES_MAX)
            data_bytes = end - start
        else:
            fields.skip()
    return DialData(data_bytes)


def _numbers(fields: ProtoReader) -> dict[int, int]:
    numbers: dict[int, int] = {}
    while fields.next():
        if fields.wire_type == VARINT:
            numbers[fields.number] = fields.uint()
        elif fields.number <= 3:
            raise ProtocolError("an AutoNAT message has another wire type where a number belongs")
        else:
            fields.skip()
    return numbers


def _status(kind: type[S], numbers: Mapping[int, int], field: int) -> S:
    try:
        return kind(numbers.get(field, 0))
    except ValueError:
        raise ProtocolError(f"an AutoNAT status that is not known here: {numbers[field]}") from None
