"""py-libp2p's Kademlia DHT over our streams: provider records under the hash of a namespace."""

import hashlib
import logging
from typing import Any

import trio
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service

from dep2p.errors import PeerNotFoundError
from dep2p.host.discovery.interface import Emit, HostView
from dep2p.host.discovery.namespaces import DEFAULT_NAMESPACE, run_rounds
from dep2p.host.interface import HostEvent, PeerConnected
from dep2p.types import PeerId

logger = logging.getLogger("dep2p.host")

_OPERATION_TIMEOUT_S = 30.0
_PROVIDERS_MAX = 64
_JOINED_MAX = 256
_PROVIDER_KEYS_MAX = 4_096


class DhtDiscovery:
    """Announces this host in the DHT and looks for others. Needs one connected DHT node to begin with."""

    name = "dht"

    def __init__(self, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._namespaces = {namespace: None}
        self._dht: Any = None
        self._wake = trio.Event()

    async def run(self, host: HostView, emit: Emit) -> None:
        dht = KadDHT(host.facade(), DHTMode.SERVER)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        bound_provider_keys(dht.provider_store)
        joined, incoming = trio.open_memory_channel[PeerId](_JOINED_MAX)

        def on_event(event: HostEvent) -> None:
            if isinstance(event, PeerConnected):
                try:
                    joined.send_nowait(event.connection.peer)
                except trio.WouldBlock:
                    logger.debug("a connected peer is not told to the DHT: too many at a time")

        unsubscribe = host.subscribe(on_event)
        for connection in host.connections()[:_JOINED_MAX]:
            joined.send_nowait(connection.peer)
        try:
            async with background_trio_service(dht):
                self._dht = dht
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._add_nodes, host, incoming)
                    await run_rounds(
                        lambda: list(self._namespaces), self._advertise_if_possible, self.find, emit, lambda: self._wake
                    )
        finally:
            unsubscribe()
            self._dht = None

    async def _add_nodes(self, host: HostView, incoming: trio.MemoryReceiveChannel[PeerId]) -> None:
        async for peer in incoming:
            for connection in host.connections(peer)[:1]:
                # Whoever opens a stream of the protocol serves it; asking costs one round trip.
                try:
                    stream = await connection.open_stream(str(PROTOCOL_ID))
                except Exception as error:
                    logger.debug("%s is no DHT node: %r", peer, error)
                    continue
                await stream.close()
                if await self._dht.add_peer(ID.from_string(peer), skip_server_mode_check=True):
                    self._wake.set()
                    self._wake = trio.Event()

    async def _advertise_if_possible(self, namespace: str) -> None:
        if self._dht.get_routing_table_size():
            await self.advertise(namespace)

    async def advertise(self, namespace: str) -> None:
        """Announce this host under ``namespace``. Raises PeerNotFoundError when no DHT node is known or takes it."""
        self._namespaces[namespace] = None
        if self._dht is None or not self._dht.get_routing_table_size():
            raise PeerNotFoundError("no DHT node is known yet: connect to one first")
        with trio.move_on_after(_OPERATION_TIMEOUT_S):
            await self._dht.provide(_key(namespace))

    async def find(self, namespace: str) -> dict[PeerId, list[str]]:
        """Peers announced under ``namespace``; {} when none is."""
        found: dict[PeerId, list[str]] = {}
        if self._dht is None:
            return found
        with trio.move_on_after(_OPERATION_TIMEOUT_S):
            for info in await self._dht.find_providers(_key(namespace), count=_PROVIDERS_MAX):
                # One provider comes once per node that knew it.
                addrs = found.setdefault(PeerId(str(info.peer_id)), [])
                addrs.extend(str(addr) for addr in info.addrs if str(addr) not in addrs)
        return found


def bound_provider_keys(store: Any) -> None:
    """py-libp2p bounds the providers of a key, but not the keys, which anybody may invent."""
    add_provider = store.add_provider

    def add_if_room(key: bytes, provider: Any) -> None:
        if key in store.providers or len(store.providers) < _PROVIDER_KEYS_MAX:
            add_provider(key, provider)

    store.add_provider = add_if_room


def _key(namespace: str) -> str:
    """The hex of a sha2-256 multihash, as provider records want it."""
    return "1220" + hashlib.sha256(b"dep2p-namespace:" + namespace.encode()).hexdigest()
