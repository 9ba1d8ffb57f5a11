"""py-libp2p's Kademlia DHT over our streams: provider records under the hash of a namespace."""

import hashlib
import logging

import trio
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.tools.anyio_service import background_trio_service

from dep2p.errors import PeerNotFoundError
from dep2p.host.discovery.dht_stream import DhtStream
from dep2p.host.discovery.interface import Emit, HostView
from dep2p.host.discovery.namespaces import DEFAULT_NAMESPACE, run_rounds
from dep2p.host.interface import HostEvent, PeerConnected
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

_OPERATION_TIMEOUT_S = 30.0
_PROVIDERS_MAX = 64
_JOINED_MAX = 256
_PROVIDER_KEYS_MAX = 4_096


class DhtDiscovery:
    """Announces this host in the DHT and looks for others. Needs one connected DHT node to begin with."""

    name = "dht"

    def __init__(self, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._namespaces = {namespace: None}
        self._dht: KadDHT | None = None
        self._wake = trio.Event()

    async def run(self, host: HostView, emit: Emit) -> None:
        facade = host.facade()
        facade.stream_types[str(PROTOCOL_ID)] = DhtStream
        dht = KadDHT(facade.as_libp2p_host(), DHTMode.SERVER)
        bound_provider_keys(dht.provider_store)
        joined, incoming = trio.open_memory_channel[PeerId](_JOINED_MAX)

        def on_event(event: HostEvent) -> None:
            if isinstance(event, PeerConnected):
                try:
                    joined.send_nowait(event.connection.peer)
                except trio.WouldBlock:
                    logger.debug("a connected peer is not added to the DHT: too many at a time")

        unsubscribe = host.subscribe(on_event)
        for connection in host.connections()[:_JOINED_MAX]:
            joined.send_nowait(connection.peer)
        try:
            async with background_trio_service(dht):
                self._dht = dht
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._add_nodes, host, dht, incoming)
                    await run_rounds(
                        lambda: list(self._namespaces), self._advertise_if_possible, self.find, emit, lambda: self._wake
                    )
        finally:
            unsubscribe()
            self._dht = None

    async def _add_nodes(self, host: HostView, dht: KadDHT, incoming: trio.MemoryReceiveChannel[PeerId]) -> None:
        async for peer in incoming:
            for connection in host.connections(peer)[:1]:
                # A peer that accepts a stream of the protocol serves it; asking costs one round trip.
                try:
                    stream = await connection.open_stream(str(PROTOCOL_ID))
                except Exception as error:
                    logger.debug("%s is no DHT node: %r", peer, error)
                    continue
                await stream.close()
                if await dht.add_peer(ID.from_string(peer), skip_server_mode_check=True):
                    self._wake.set()
                    self._wake = trio.Event()

    async def _advertise_if_possible(self, namespace: str) -> None:
        if self._dht is not None and self._dht.get_routing_table_size():
            try:
                await self.advertise(namespace)
            except PeerNotFoundError as error:
                logger.debug("announced again in the next round: %s", error)

    async def advertise(self, namespace: str) -> None:
        """Announce this host under ``namespace``. Raises PeerNotFoundError when no DHT node is known or takes it."""
        self._namespaces[namespace] = None
        if self._dht is None or not self._dht.get_routing_table_size():
            raise PeerNotFoundError("no DHT node is known yet: connect to one first")
        is_taken = False
        with trio.move_on_after(_OPERATION_TIMEOUT_S):
            is_taken = await self._dht.provide(_key(namespace))
        if not is_taken:
            raise PeerNotFoundError(f"no DHT node took the announcement under {namespace!r}")

    async def find(self, namespace: str) -> dict[PeerId, list[str]]:
        """Return the peers announced under ``namespace``; {} when none is."""
        found: dict[PeerId, list[str]] = {}
        if self._dht is None:
            return found
        with trio.move_on_after(_OPERATION_TIMEOUT_S):
            for info in await self._dht.find_providers(_key(namespace), count=_PROVIDERS_MAX):
                # One provider comes once per node that knew it.
                addrs = found.setdefault(PeerId(str(info.peer_id)), [])
                addrs.extend(str(addr) for addr in info.addrs if str(addr) not in addrs)
        return found


def bound_provider_keys(store: ProviderStore) -> None:
    """Bound the keys of the provider store, which any peer may invent: py-libp2p bounds the providers of a key only."""
    add_provider = store.add_provider

    def add_if_room(key: bytes, provider: PeerInfo) -> None:
        if key in store.providers or len(store.providers) < _PROVIDER_KEYS_MAX:
            add_provider(key, provider)

    store.add_provider = add_if_room  # type: ignore[method-assign]


def _key(namespace: str) -> str:
    """Return the hex of a sha2-256 multihash, as provider records want it."""
    return "1220" + hashlib.sha256(b"dep2p-namespace:" + namespace.encode()).hexdigest()
