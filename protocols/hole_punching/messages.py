"""The messages of /libp2p/dcutr: https://github.com/libp2p/specs/blob/master/relay/DCUtR.md. Pure.

Each is a protobuf with a length prefix: a type, and the multiaddrs, in binary, at which others see the sender.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from dep2p.encoding.protobuf import ProtoReader, encode_field
from dep2p.encoding.varint import encode_varint
from dep2p.errors import ProtocolError

DCUTR: Final = "/libp2p/dcutr"
MESSAGE_BYTES_MAX: Final = 4_096
"""Bytes of a message at most (specification)."""
ADDRS_MAX: Final = 16
"""Addresses that are read of a message; further ones are left out."""
ADDR_BYTES_MAX: Final = 128
"""A longer address is left out: one of an IP address and a port takes 30 bytes."""
_TYPE: Final = 1
_OBS_ADDRS: Final = 2


class MessageType(IntEnum):
    """The kind of a message."""

    CONNECT = 100
    SYNC = 300


@dataclass(frozen=True, slots=True)
class HolePunch:
    """One message. ``addrs``: multiaddrs in binary, those of the sender."""

    type: MessageType
    addrs: tuple[bytes, ...] = ()


def encode(message: HolePunch) -> bytes:
    """Return the message without its length prefix. It names at most ADDRS_MAX addresses."""
    head = bytes((_TYPE << 3,)) + encode_varint(message.type)
    return head + b"".join(encode_field(_OBS_ADDRS, addr) for addr in message.addrs[:ADDRS_MAX])


def decode(data: bytes) -> HolePunch:
    """Read a message without its length prefix. Raises ProtocolError.

    assert decode(encode(HolePunch(MessageType.SYNC))) == HolePunch(MessageType.SYNC)
    """
    if len(data) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of hole punching of {len(data)} bytes is over {MESSAGE_BYTES_MAX}")
    reader = ProtoReader(data, 0, len(data))
    kind: MessageType | None = None
    addrs: list[bytes] = []
    while reader.next():
        if reader.number == _TYPE:
            kind = _type(reader.uint())
        elif reader.number == _OBS_ADDRS:
            addr = reader.bytes_(MESSAGE_BYTES_MAX)
            if len(addr) <= ADDR_BYTES_MAX and len(addrs) < ADDRS_MAX:
                addrs.append(addr)
        else:
            reader.skip()
    if kind is None:
        raise ProtocolError("a message of hole punching has no type")
    return HolePunch(kind, tuple(addrs))


def _type(value: int) -> MessageType:
    try:
        return MessageType(value)
    except ValueError:
        raise ProtocolError(f"a message of hole punching has the unknown type {value}") from None
