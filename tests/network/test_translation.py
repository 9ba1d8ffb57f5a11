"""What each kind of router does to packets."""

import ipaddress
import struct

import pytest

from tests.network.translation import Endpoint, Kind, Translator

INNER, FIRST, SECOND = ("192.168.1.10", 4001), ("203.0.113.1", 53), ("203.0.113.2", 53)
INNER6, FIRST6 = ("fd00:1::10", 4001), ("2001:db8::1", 53)


def total(data: bytes) -> int:
    """The sum of the 16-bit words, 0xffff where a checksum is right."""
    data += b"\0" * (len(data) % 2)
    value: int = sum(word for (word,) in struct.iter_unpack("!H", data))
    while value >> 16:
        value = (value & 0xFFFF) + (value >> 16)
    return value


def udp(source: Endpoint, destination: Endpoint, body: bytes = b"hi!") -> bytes:
    """A UDP packet with right checksums."""
    a, b = ipaddress.ip_address(source[0]).packed, ipaddress.ip_address(destination[0]).packed
    size = 8 + len(body)
    datagram = struct.pack("!HHHH", source[1], destination[1], size, 0) + body
    checksum = 0xFFFF - total(a + b + struct.pack("!HH", 17, size) + datagram)
    datagram = datagram[:6] + struct.pack("!H", checksum) + datagram[8:]
    if len(a) == 16:
        return struct.pack("!IHBB", 0x60000000, size, 17, 64) + a + b + datagram
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + size, 1, 0, 64, 17, 0) + a + b
    return head[:10] + struct.pack("!H", 0xFFFF - total(head)) + head[12:] + datagram


def ends(packet: bytes | None) -> tuple[Endpoint, Endpoint]:
    """Source and destination of a packet whose checksums are right."""
    assert packet is not None
    at, size, first = (20, 4, 12) if packet[0] >> 4 == 4 else (40, 16, 8)
    a, b = packet[first : first + size], packet[first + size : first + 2 * size]
    datagram = packet[at:]
    assert total(a + b + struct.pack("!HH", 17, len(datagram)) + datagram) == 0xFFFF
    assert size == 16 or total(packet[:20]) == 0xFFFF
    ports = struct.unpack_from("!HH", datagram)
    return (str(ipaddress.ip_address(a)), ports[0]), (str(ipaddress.ip_address(b)), ports[1])


@pytest.mark.parametrize("kind", ["cone", "restricted", "symmetric"])
@pytest.mark.parametrize(("inner", "first", "public"), [(INNER, FIRST, "203.0.113.9"), (INNER6, FIRST6, "2001:db8::9")])
def test_there_and_back(kind: Kind, inner: Endpoint, first: Endpoint, public: str) -> None:
    router = Translator(kind, [public])
    seen, _ = ends(router.translate(udp(inner, first)))
    assert seen[0] == public
    assert ends(router.translate(udp(first, seen))) == (first, inner)


def test_a_symmetric_router_alone_has_a_port_for_each_destination() -> None:
    for kind in ("cone", "restricted"):
        router = Translator(kind, ["203.0.113.9"])
        assert ends(router.translate(udp(INNER, FIRST)))[0] == ends(router.translate(udp(INNER, SECOND)))[0]
    router = Translator("symmetric", ["203.0.113.9"])
    assert ends(router.translate(udp(INNER, FIRST)))[0] != ends(router.translate(udp(INNER, SECOND)))[0]


@pytest.mark.parametrize(
    ("kind", "stranger", "other_port"), [("cone", True, True), ("restricted", False, True), ("symmetric", False, False)]
)
def test_who_may_send_to_a_mapping(kind: Kind, stranger: bool, other_port: bool) -> None:
    router = Translator(kind, ["203.0.113.9"])
    seen, _ = ends(router.translate(udp(INNER, FIRST)))
    assert (router.translate(udp(SECOND, seen)) is not None) is stranger
    assert (router.translate(udp((FIRST[0], 99), seen)) is not None) is other_port
    assert router.translate(udp(FIRST, ("203.0.113.9", 9))) is None
