"""The messages of /libp2p/dcutr, byte by byte."""

import pytest

from dep2p.errors import ProtocolError
from dep2p.protocols.hole_punching.messages import (
    ADDR_BYTES_MAX,
    ADDRS_MAX,
    MESSAGE_BYTES_MAX,
    HolePunch,
    MessageType,
    decode,
    encode,
)

ADDR = bytes.fromhex("04c6336401060fa1")
"""/ip4/198.51.100.1/tcp/4001"""


def test_the_bytes_of_the_specification() -> None:
    """``required Type type = 1`` (CONNECT = 100, SYNC = 300), ``repeated bytes ObsAddrs = 2``."""
    assert encode(HolePunch(MessageType.CONNECT, (ADDR,))) == b"\x08\x64\x12\x08" + ADDR
    assert encode(HolePunch(MessageType.SYNC)) == b"\x08\xac\x02"


@pytest.mark.parametrize(
    "message",
    [
        HolePunch(MessageType.CONNECT),
        HolePunch(MessageType.CONNECT, (ADDR, ADDR + b"\x01")),
        HolePunch(MessageType.SYNC, (ADDR,)),
    ],
)
def test_there_and_back(message: HolePunch) -> None:
    assert decode(encode(message)) == message


def test_the_type_may_come_last_and_unknown_fields_are_skipped() -> None:
    assert decode(b"\x12\x08" + ADDR + b"\x1a\x01x\x08\x64") == HolePunch(MessageType.CONNECT, (ADDR,))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x12\x08" + ADDR,
        b"\x08\x00",
        b"\x08\x65",
        b"\x08",
        b"\x0a\x01d",
        b"\x08\x64\x12\x09" + ADDR,
        b"\x08\x64\x10\x01",
        bytes(MESSAGE_BYTES_MAX + 1),
    ],
)
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


def test_long_addresses_and_too_many_are_left_out() -> None:
    long = bytes(ADDR_BYTES_MAX + 1)
    data = b"\x08\x64" + b"\x12\x81\x01" + long + b"".join(b"\x12\x01" + bytes([n]) for n in range(ADDRS_MAX + 3))
    assert decode(data).addrs == tuple(bytes([n]) for n in range(ADDRS_MAX))
    assert len(decode(encode(HolePunch(MessageType.CONNECT, (ADDR,) * 99))).addrs) == ADDRS_MAX
