"""Multiaddresses that this host can dial or listen on, classified once, with a sentence for the user about those that
it cannot."""

import socket
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import Literal

import ifaddr
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dep2p.types import PeerId, parse_peer_id, with_base58_peers

Transport = Literal["tcp", "ws", "quic", "circuit"]

ADDR_BYTES_MAX = 512
"""Bytes of an address at most: none in use is longer, and a longer text is dropped before it is parsed."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed multiaddr without its last ``/p2p/…``."""

    text: str
    """The multiaddr without the trailing peer id; for a relayed one up to and including ``/p2p-circuit``."""
    transport: Transport
    host: str
    """IP literal or DNS name to dial (of the relay, for a relayed address)."""
    family: Literal["ip4", "ip6", "dns"]
    port: int
    peer: PeerId | None
    """The peer that is expected there, when the address names one."""
    relay: PeerId | None = None
    """The relay's id, of a relayed address."""

    @property
    def with_peer(self) -> str:
        """The text with ``/p2p/…`` when the peer is known."""
        return self.text if self.peer is None else f"{self.text}/p2p/{self.peer}"

    @property
    def is_wildcard(self) -> bool:
        """True for 0.0.0.0 and ``::``."""
        return self.family != "dns" and ip_address(self.host).is_unspecified


@lru_cache(maxsize=4096)
def parse_address(text: str) -> Address:
    """Read a multiaddr.

    Raises ``ValueError`` with a sentence for the user when it is malformed or its transport is not spoken here.
    """
    if len(text) > ADDR_BYTES_MAX:
        raise ValueError(f"an address of {len(text)} characters is too long: the limit is {ADDR_BYTES_MAX}")
    text = with_base58_peers(text)
    try:
        parts = [(proto.name, value) for proto, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError, TypeError, KeyError, UnicodeError) as error:
        raise ValueError(
            f"{text!r} is not a multiaddr ({_first_line(error)}): write it as /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW…"
        ) from None
    peer: PeerId | None = None
    if parts and parts[-1][0] == "p2p":
        peer = parse_peer_id(str(parts.pop()[1]))
    relay: PeerId | None = None
    circuit = bool(parts) and parts[-1][0] == "p2p-circuit"
    if circuit:
        parts.pop()
        if not parts or parts[-1][0] != "p2p":
            raise ValueError(f"{text!r} names no relay: write …/p2p/<relay>/p2p-circuit/p2p/<peer>")
        relay = parse_peer_id(str(parts.pop()[1]))
    return _classify(text, parts, peer, relay)


def _classify(text: str, parts: list[tuple[str, object]], peer: PeerId | None, relay: PeerId | None) -> Address:
    names = tuple(name for name, _ in parts)
    if not names or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6"):
        raise ValueError(f"{text!r} must start with /ip4, /ip6, /dns, /dns4 or /dns6")
    host = str(parts[0][1])
    transport: Transport
    match names[1:]:
        case ("tcp",):
            transport = "tcp"
        case ("tcp", "ws"):
            transport = "ws"
        case ("udp", "quic-v1"):
            transport = "quic"
        case _:
            raise ValueError(
                f"{text!r} uses a transport that is not spoken here: TCP (/tcp/4001), WebSocket (/tcp/4001/ws) and "
                "QUIC (/udp/4001/quic-v1) are"
            )
    family: Literal["ip4", "ip6", "dns"]
    family = "ip4" if names[0] == "ip4" else "ip6" if names[0] == "ip6" else "dns"
    base = "".join(f"/{name}" if value is None else f"/{name}/{value}" for name, value in parts)
    if relay is not None:
        base = f"{base}/p2p/{relay}/p2p-circuit"
        transport = "circuit"
    return Address(base, transport, host, family, int(str(parts[1][1])), peer, relay)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def expect_peer(text: str, peer: PeerId) -> Address:
    """Parse an address of ``peer``.

    Raises ``ValueError`` when it is malformed or names another peer.
    """
    address = parse_address(text)
    if address.peer is not None and address.peer != peer:
        raise ValueError(f"{text} is an address of {address.peer}, not of {peer}")
    return address


def socket_address(host: str, port: int, suffix: str = "tcp") -> str:
    """The multiaddr of a socket address; ``suffix`` is ``tcp``, ``tcp/ws`` or ``udp/quic-v1``."""
    host = host.split("%", 1)[0]
    if host.lower().startswith("::ffff:") and "." in host:
        host = host[7:]
    first, _, rest = suffix.partition("/")
    text = f"/{'ip6' if ':' in host else 'ip4'}/{host}/{first}/{port}"
    return f"{text}/{rest}" if rest else text


def expand_wildcard(address: Address) -> list[str]:
    """The texts of the addresses that a wildcard stands for, one per interface; the text itself for any other."""
    if not address.is_wildcard:
        return [address.text]
    tail = address.text.split("/", 3)[3]
    found: dict[str, None] = {}
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            if address.family == "ip4" and isinstance(ip.ip, str):
                found[f"/ip4/{ip.ip}/{tail}"] = None
            elif address.family == "ip6" and not isinstance(ip.ip, str) and not ip.ip[2]:
                found[f"/ip6/{ip.ip[0]}/{tail}"] = None  # scoped (link-local) ones cannot be dialled without a zone
    return list(found) or [address.text]


def dial_rank(address: Address) -> tuple[int, int]:
    """Sort key: the cheapest transport first, direct before relayed, IP literals before names."""
    order = {"tcp": 0, "ws": 1, "quic": 2, "circuit": 3}
    return order[address.transport], 1 if address.family == "dns" else 0


def socket_family(address: Address) -> socket.AddressFamily:
    """The socket family to bind for an IP address."""
    return socket.AF_INET6 if address.family == "ip6" else socket.AF_INET
