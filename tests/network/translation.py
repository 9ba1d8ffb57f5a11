"""The address translation of a home router, pure: IP packets in, IP packets out.

The words are those of RFC 4787: which public port a mapping has (mapping), and who may send to it (filtering).
"""

import ipaddress
import struct
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["none", "cone", "restricted", "symmetric"]
"""none: routes only. cone: one public port for all destinations, open to all senders. restricted: the same, open to
hosts that were sent to. symmetric: another public port for each destination, open to that destination only."""

Endpoint = tuple[str, int]
_TCP: Final = 6
_UDP: Final = 17
_ICMP: Final = 1
_ICMP6: Final = 58
_CHECKSUM_AT: Final = {_TCP: 16, _UDP: 6, _ICMP: 2, _ICMP6: 2}
_ECHO_TYPES: Final = (8, 0, 128, 129)
_FIRST_RANDOM_PORT: Final = 20_000


@dataclass(frozen=True, slots=True)
class _Packet:
    """The parts of a packet that translation looks at. The id of an echo is its port on both sides."""

    protocol: int
    transport_at: int
    source: Endpoint
    destination: Endpoint


@dataclass(slots=True)
class _Mapping:
    inside: Endpoint
    contacted: dict[Endpoint, None] = field(default_factory=dict[Endpoint, None])


def _parse(packet: bytes) -> _Packet | None:
    """Return the addresses of a packet; None for one that is not translated (fragments, options of IPv6, errors)."""
    if packet[0] >> 4 == 4:
        at, protocol = (packet[0] & 15) * 4, packet[9]
        source, destination = packet[12:16], packet[16:20]
        if struct.unpack_from("!H", packet, 6)[0] & 0x3FFF:
            return None
    else:
        at, protocol = 40, packet[6]
        source, destination = packet[8:24], packet[24:40]
    if protocol in (_TCP, _UDP):
        source_port, destination_port = struct.unpack_from("!HH", packet, at)
    elif protocol in (_ICMP, _ICMP6) and packet[at] in _ECHO_TYPES:
        source_port = destination_port = struct.unpack_from("!H", packet, at + 4)[0]
    else:
        return None
    return _Packet(
        protocol,
        at,
        (str(ipaddress.ip_address(source)), source_port),
        (str(ipaddress.ip_address(destination)), destination_port),
    )


def _corrected(checksum: int, old: bytes, new: bytes) -> int:
    """Return a checksum after the words ``old`` have become ``new`` (RFC 1624)."""
    total = ~checksum & 0xFFFF
    for (before,), (after,) in zip(struct.iter_unpack("!H", old), struct.iter_unpack("!H", new), strict=True):
        total += (~before & 0xFFFF) + after
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _rewritten(packet: bytes, found: _Packet, endpoint: Endpoint, *, is_source: bool) -> bytes:
    """Return the packet with another source or destination."""
    out = bytearray(packet)
    at, is_ip4 = found.transport_at, packet[0] >> 4 == 4
    new_address = ipaddress.ip_address(endpoint[0]).packed
    size = len(new_address)
    address_at = (12 if is_ip4 else 8) + (0 if is_source else size)
    old_address = packet[address_at : address_at + size]
    out[address_at : address_at + size] = new_address
    if is_ip4:
        header_checksum = _corrected(struct.unpack_from("!H", packet, 10)[0], old_address, new_address)
        struct.pack_into("!H", out, 10, header_checksum)
    is_echo = found.protocol in (_ICMP, _ICMP6)
    port_at = at + (4 if is_echo else 0 if is_source else 2)
    old_port, new_port = packet[port_at : port_at + 2], struct.pack("!H", endpoint[1])
    out[port_at : port_at + 2] = new_port
    checksum_at = at + _CHECKSUM_AT[found.protocol]
    checksum = struct.unpack_from("!H", packet, checksum_at)[0]
    if found.protocol == _UDP and not checksum:
        return bytes(out)
    has_pseudo_header = found.protocol != _ICMP
    old, new = (old_address + old_port, new_address + new_port) if has_pseudo_header else (old_port, new_port)
    struct.pack_into("!H", out, checksum_at, _corrected(checksum, old, new))
    return bytes(out)


class Translator:
    """The mappings of one router.

    >>> router = Translator("cone", ["203.0.113.11"])
    >>> router.public
    ('203.0.113.11',)
    """

    def __init__(self, kind: Kind, public: list[str]) -> None:
        """``public``: the router's addresses outside, one of each family that it translates."""
        self.kind: Kind = kind
        self.public: tuple[str, ...] = tuple(str(ipaddress.ip_address(each)) for each in public)
        self.dropped: int = 0
        """Packets from outside that no mapping admits."""
        self._by_inside: dict[tuple[int, Endpoint, Endpoint | None], Endpoint] = {}
        self._by_public: dict[tuple[int, Endpoint], _Mapping] = {}
        self._next_port = _FIRST_RANDOM_PORT

    def translate(self, packet: bytes) -> bytes | None:
        """Return the packet to send on; None drops it."""
        found = _parse(packet)
        if found is None:
            return None
        return self._inbound(packet, found) if found.destination[0] in self.public else self._outbound(packet, found)

    def _outbound(self, packet: bytes, found: _Packet) -> bytes | None:
        key = found.protocol, found.source, found.destination if self.kind == "symmetric" else None
        public = self._by_inside.get(key)
        if public is None:
            address = next((each for each in self.public if (":" in each) == (":" in found.source[0])), None)
            if address is None:
                return None
            public = self._by_inside[key] = (address, self._free_port(found, address))
            self._by_public[found.protocol, public] = _Mapping(found.source)
        self._by_public[found.protocol, public].contacted[found.destination] = None
        return _rewritten(packet, found, public, is_source=True)

    def _free_port(self, found: _Packet, address: str) -> int:
        wanted = found.source[1]
        if self.kind != "symmetric" and (found.protocol, (address, wanted)) not in self._by_public:
            return wanted  # as most routers do
        while (found.protocol, (address, self._next_port)) in self._by_public:
            self._next_port += 1
        self._next_port += 1
        return self._next_port - 1

    def _inbound(self, packet: bytes, found: _Packet) -> bytes | None:
        mapping = self._by_public.get((found.protocol, found.destination))
        if mapping is None or not self._admits(mapping, found.source):
            self.dropped += 1
            return None
        return _rewritten(packet, found, mapping.inside, is_source=False)

    def _admits(self, mapping: _Mapping, sender: Endpoint) -> bool:
        if self.kind == "cone":
            return True
        if self.kind == "restricted":
            return any(host == sender[0] for host, _port in mapping.contacted)
        return sender in mapping.contacted
