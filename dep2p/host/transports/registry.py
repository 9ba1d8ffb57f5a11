"""All ways to listen and to dial one address: TCP, WebSocket, QUIC and, when a relay is wired, relayed connections."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import trio
from libp2p.crypto.keys import KeyPair
from libp2p.io.abc import ReadWriteCloser

from dep2p.errors import StreamClosedError
from dep2p.host.addresses import Address, expand_wildcard
from dep2p.host.connections.circuit_limit import meter_of
from dep2p.host.connections.connection import PeerConnection, Upgraded
from dep2p.host.connections.swarm import Swarm
from dep2p.host.connections.upgrade import SimultaneousOpenError, UpgradeError, upgrade_inbound, upgrade_outbound
from dep2p.host.counters import Counters
from dep2p.host.interface import Direction
from dep2p.host.scopes import shielded
from dep2p.host.supervisor import Supervisor
from dep2p.host.transports.listening_ports import ListeningPorts
from dep2p.host.transports.tcp import TCPListener, connect_tcp, open_tcp_listener
from dep2p.host.transports.websocket import WebSocketStream
from dep2p.limits import Limits
from dep2p.types import PeerId

if TYPE_CHECKING:
    from dep2p.host.transports.quic import QuicEndpoint

logger: logging.Logger = logging.getLogger("dep2p.host")

DialRelayed = Callable[[Address, PeerId], Awaitable[ReadWriteCloser]]
"""Gives the raw connection through a relay, to be upgraded. Raises UpgradeError."""


class Transports:
    """The transports with which a host listens and dials."""

    def __init__(
        self, swarm: Swarm, key_pair: KeyPair, supervisor: Supervisor, limits: Limits, counters: Counters
    ) -> None:
        self._swarm = swarm
        self._key_pair = key_pair
        self._supervisor = supervisor
        self._limits = limits
        self._counters = counters
        self._tcp: list[TCPListener] = []
        self._ports = ListeningPorts()
        self._quic: QuicEndpoint | None = None
        self._quic_starting = trio.Lock()
        self._quic_addrs: list[Address] = []
        self.dial_relayed: DialRelayed | None = None

    def listen_texts(self) -> list[str]:
        """Return the addresses in use, wildcards expanded, without the peer id."""
        bound = [*(listener.address for listener in self._tcp), *self._quic_addrs]
        return list(dict.fromkeys(text for address in bound for text in expand_wildcard(address)))

    async def listen(self, address: Address) -> None:
        """Listen on one address. Raises ListenError."""
        nursery = self._nursery()
        if address.transport == "quic":
            self._quic_addrs.append(await (await self._quic_endpoint()).listen(address))
            return
        if address.transport == "ws":
            listener = await open_tcp_listener(
                address, self._swarm.accept, self._counters, suffix="tcp/ws", prepare=WebSocketStream.accept
            )
        else:
            listener = await open_tcp_listener(address, self._swarm.accept, self._counters)
            self._ports.add(listener.socket)
        self._tcp.append(listener)
        nursery.start_soon(self._supervisor.run, f"listener on {listener.address.text}", listener.serve)

    def _nursery(self) -> trio.Nursery:
        if self._swarm.nursery is None:
            raise StreamClosedError("the host is not open")
        return self._swarm.nursery

    async def _quic_endpoint(self) -> "QuicEndpoint":
        async with self._quic_starting:
            if self._quic is None:
                from dep2p.host.transports.quic import (
                    QuicEndpoint,  # only hosts that speak QUIC import aioquic
                )

                endpoint = QuicEndpoint(self._key_pair, self._limits, self._counters, self._take_inbound)
                ready = trio.Event()
                self._nursery().start_soon(self._supervisor.run, "QUIC endpoint", lambda: endpoint.run(ready=ready.set))
                await ready.wait()
                self._quic = endpoint
            return self._quic

    async def _take_inbound(self, upgraded: Upgraded, remote_addr: str) -> None:
        try:
            await self._admit(upgraded, "inbound", remote_addr)
        except StreamClosedError as error:
            logger.debug("inbound connection of %s refused: %s", upgraded.peer, error)

    async def _admit(self, upgraded: Upgraded, direction: Direction, remote_addr: str) -> PeerConnection:
        try:
            return self._swarm.admit(upgraded, direction, remote_addr)
        except StreamClosedError:
            with shielded(self._limits.close_timeout_s):
                await upgraded.muxer.close()
            raise

    async def connect_once(self, address: Address, peer: PeerId) -> PeerConnection:
        """Dial, upgrade and admit over one address. Raises OSError, IOException, UpgradeError, StreamClosedError."""
        match address.transport:
            case "quic":
                upgraded = await (await self._quic_endpoint()).dial(address, peer)
                return await self._admit(upgraded, "outbound", address.text)
            case "tcp":
                return await self._connect_tcp(address, peer)
            case "ws":
                raw: ReadWriteCloser = await WebSocketStream.connect(address)
            case "circuit":
                if self.dial_relayed is None:
                    raise UpgradeError("this host is no relay client: set relay to client to dial such addresses")
                raw = await self.dial_relayed(address, peer)
        return await self._upgrade(raw, address, peer)

    async def _connect_tcp(self, address: Address, peer: PeerId) -> PeerConnection:
        """From the port of a listener, where that is possible."""
        found = await self._ports.connect(address)
        if found is not None:
            raw, port = found
            try:
                return await self._upgrade(raw, address, peer, listening_port=port)
            except SimultaneousOpenError:  # the peer has found it, too, and dials again as well
                self._counters.add("dial_simultaneous_open")
        return await self._upgrade(await connect_tcp(address), address, peer)

    async def answer_once(self, address: Address, peer: PeerId) -> PeerConnection:
        """Dial a TCP address from the port of a listener while the peer dials this node, and answer it: the peer is the
        client of the one connection that comes of both dials.

        Raises OSError, IOException, UpgradeError, StreamClosedError.
        """
        found = await self._ports.connect(address)
        if found is None:
            raise UpgradeError("no listener lends its port to a dial there")
        raw, port = found
        admitted = False
        try:
            upgraded = await upgrade_inbound(self._swarm.upgrader, raw)
            if upgraded.peer != peer:
                raise UpgradeError(f"another node answers there: {upgraded.peer}")
            connection = await self._admit(replace(upgraded, listening_port=port), "inbound", address.text)
            admitted = True
            return connection
        finally:
            if not admitted:
                with shielded(self._limits.close_timeout_s):
                    await raw.close()

    async def _upgrade(
        self, raw: ReadWriteCloser, address: Address, peer: PeerId, *, listening_port: int | None = None
    ) -> PeerConnection:
        admitted = False
        try:
            upgraded = await upgrade_outbound(self._swarm.upgrader, raw, peer)
            upgraded = replace(upgraded, meter=meter_of(raw), listening_port=listening_port)
            connection = await self._admit(upgraded, "outbound", address.text)
            admitted = True
            return connection
        finally:
            if not admitted:
                with shielded(self._limits.close_timeout_s):
                    await raw.close()

    async def send_random(self, address: Address, size_bytes: int) -> bool:
        """Send a datagram of random bytes to a QUIC address from the listener's socket; False when there is none."""
        return self._quic is not None and await self._quic.send_random(address, size_bytes)

    async def close(self) -> None:
        """Stop listening."""
        for listener in self._tcp:
            listener.close()
        if self._quic is not None:
            with shielded(self._limits.close_timeout_s):
                await self._quic.close()
