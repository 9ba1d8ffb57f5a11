"""Connections that bring a nonce back: from fresh ports, under a throw-away identity, in no table of the host.

The peer would take a second connection of the same identity for the newest one to use. A fresh port keeps a NAT that
has let this host's answers in from letting the dial in, too.
"""

import socket

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.exceptions import IOException

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import Dep2pError
from dep2p.host.addresses import Address, socket_family
from dep2p.host.connections.swarm import Swarm
from dep2p.host.connections.upgrade import UpgradeError, new_upgrader
from dep2p.host.counters import Counters
from dep2p.host.supervisor import Supervisor
from dep2p.host.transports.registry import Transports
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.reachability.messages import (
    DIAL_BACK,
    DIAL_BACK_BYTES_MAX,
    DialStatus,
    decode_dial_back_response,
    encode_dial_back,
)
from dep2p.types import PeerId

DIAL_S = 5.0
"""Seconds for a connection; and again for the delivery of the nonce."""


class BackDialer:
    """Dials addresses of other nodes to bring nonces there."""

    def __init__(self, nursery: trio.Nursery, limits: Limits) -> None:
        self._nursery = nursery
        self._limits = limits
        self._parts: tuple[Swarm, Transports] | None = None

    def _transports(self) -> Transports:
        if self._parts is None:  # most hosts are never asked
            identity, counters = Identity.generate(), Counters()
            key_pair = create_new_key_pair(identity.private_seed)
            upgrader = new_upgrader(key_pair, self._limits, counters)
            swarm = Swarm(identity.peer_id, upgrader, self._limits, counters, is_pinned=lambda _peer: False)
            swarm.nursery = self._nursery
            self._parts = swarm, Transports(swarm, key_pair, Supervisor(), self._limits, counters)
        return self._parts[1]

    async def bring(self, address: Address, peer: PeerId, nonce: int) -> DialStatus:
        """Dial the peer at the address, and bring it the nonce."""
        connection = None
        try:
            with trio.move_on_after(DIAL_S):
                connection = await self._transports().connect_once(address, peer)
        except (OSError, IOException, UpgradeError, Dep2pError):
            return DialStatus.DIAL_ERROR
        if connection is None:
            return DialStatus.DIAL_ERROR
        try:
            with trio.move_on_after(DIAL_S):
                stream = await connection.open_stream(DIAL_BACK, timeout_s=DIAL_S)
                await stream.write(encode_length_prefixed(encode_dial_back(nonce)))
                decode_dial_back_response(await read_length_prefixed(stream, DIAL_BACK_BYTES_MAX))
                return DialStatus.OK
        except Dep2pError:
            return DialStatus.DIAL_BACK_ERROR
        finally:
            await connection.close()
        return DialStatus.DIAL_BACK_ERROR

    async def close(self) -> None:
        """End all connections."""
        if self._parts is not None:
            swarm, transports = self._parts
            await swarm.close_all("this host was closed")
            await transports.close()


def has_route(address: Address) -> bool:
    """Whether this machine knows a way to the address. It sends nothing."""
    try:
        with socket.socket(socket_family(address), socket.SOCK_DGRAM) as probe:
            probe.connect((address.host, address.port))
    except OSError:
        return False
    return True


def source_address() -> str:
    """Return the IPv4 address of this machine on its way to the internet; "" when it has none. It sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
