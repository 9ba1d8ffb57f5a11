"""Rendezvous points: py-libp2p's client and server over our streams."""

import logging
from collections.abc import Sequence

import trio
from libp2p.discovery.rendezvous.client import RendezvousClient
from libp2p.discovery.rendezvous.config import RENDEZVOUS_PROTOCOL
from libp2p.discovery.rendezvous.errors import RendezvousError
from libp2p.discovery.rendezvous.pb.rendezvous_pb2 import Message
from libp2p.discovery.rendezvous.service import RendezvousService
from libp2p.peer.id import ID

from dep2p.errors import PeerNotFoundError
from dep2p.host.addresses import parse_address
from dep2p.host.discovery.interface import Emit, HostView
from dep2p.host.discovery.namespaces import DEFAULT_NAMESPACE, run_rounds
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

_TTL_S = 7_200
_POINT_TTL_S = 30 * 86_400.0
_NAMESPACES_MAX = 1_024
_FAILURES = (RendezvousError, OSError, ValueError, EOFError)


class RendezvousDiscovery:
    """Registers this host at rendezvous points and asks them for others."""

    name = "rendezvous"

    def __init__(self, points: Sequence[str], namespace: str = DEFAULT_NAMESPACE) -> None:
        """``points``: addresses that end in ``/p2p/<peer>``. Raises ``ValueError`` for any other."""
        self._points: dict[PeerId, list[str]] = {}
        for text in points:
            address = parse_address(text)
            if address.peer is None:
                raise ValueError(f"{text} does not say which peer it is: end it with /p2p/<peer id>")
            self._points.setdefault(address.peer, []).append(address.text)
        self._namespaces = {namespace: None}
        self._clients: list[RendezvousClient] = []
        self._own_peer: PeerId | None = None
        self._never = trio.Event()

    async def run(self, host: HostView, emit: Emit) -> None:
        self._own_peer = host.peer_id
        libp2p_host = host.facade().as_libp2p_host()
        for peer, addrs in self._points.items():
            host.add_addrs(peer, addrs, ttl_s=_POINT_TTL_S)
        self._clients = [RendezvousClient(libp2p_host, ID.from_string(peer)) for peer in self._points]
        try:
            await run_rounds(lambda: list(self._namespaces), self.advertise, self.find, emit, lambda: self._never)
        finally:
            self._clients = []

    async def advertise(self, namespace: str) -> None:
        """Register at every point. Raises PeerNotFoundError when none takes it."""
        self._namespaces[namespace] = None
        failures: list[str] = []
        for client in self._clients:
            try:
                await client.register(namespace, _TTL_S)
            except _FAILURES as error:
                failures.append(f"{client.rendezvous_peer}: {error}")
            except Exception as error:  # py-libp2p's stream errors have no common base
                failures.append(f"{client.rendezvous_peer}: {error!r}")
        if len(failures) == len(self._clients):
            raise PeerNotFoundError(
                f"no rendezvous point takes the registration: {'; '.join(failures) or 'none is set'}"
            )

    async def find(self, namespace: str) -> dict[PeerId, list[str]]:
        """Return the peers registered at any point, without this host."""
        found: dict[PeerId, list[str]] = {}
        for client in self._clients:
            try:
                infos, _ = await client.discover(namespace)
            except Exception as error:
                logger.debug("rendezvous point %s: %r", client.rendezvous_peer, error)
                continue
            for info in infos:
                peer = PeerId(str(info.peer_id))
                if peer != self._own_peer:
                    found.setdefault(peer, []).extend(str(addr) for addr in info.addrs)
        return found


class _BoundedService(RendezvousService):
    """A rendezvous service that also bounds namespaces: py-libp2p's server bounds only registrations per namespace."""

    def _handle_register(self, peer_id: ID, register_msg: Message.Register) -> Message:
        if register_msg.ns not in self.registrations and len(self.registrations) >= _NAMESPACES_MAX:
            refusal = Message(type=Message.REGISTER_RESPONSE)
            refusal.registerResponse.status = Message.ResponseStatus.E_UNAVAILABLE
            refusal.registerResponse.statusText = f"this point serves {_NAMESPACES_MAX} namespaces, its limit"
            return refusal
        return super()._handle_register(peer_id, register_msg)


class RendezvousServer:
    """Makes this host a rendezvous point."""

    name = "rendezvous_server"

    async def run(self, host: HostView, emit: Emit) -> None:
        libp2p_host = host.facade().as_libp2p_host()
        _BoundedService(libp2p_host)
        try:
            await trio.sleep_forever()
        finally:
            libp2p_host.remove_stream_handler(RENDEZVOUS_PROTOCOL)
