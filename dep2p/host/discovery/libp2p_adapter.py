"""Adapters through which py-libp2p's DHT and rendezvous run over our streams: to them, this host looks like py-libp2p's
own.

Only what those protocols call is here. They get errors of py-libp2p's kinds, and an address book that is a bounded view
of ours.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from libp2p.abc import IHost
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.network.stream.exceptions import StreamClosed, StreamReset
from libp2p.peer.envelope import Envelope
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore
from multiaddr import Multiaddr

from dep2p.errors import Dep2pError, StreamClosedError
from dep2p.host.connections.peerstore import ADDRS_PER_PEER_MAX
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.protocols.addresses.dialable import addrs_for_others
from dep2p.types import PeerId

_STORE_PEERS_MAX = 2_048


class FacadeConnection:
    """The part of ``IMuxedConn`` that stream handlers look at."""

    def __init__(self, connection: Connection) -> None:
        self.peer_id: ID = ID.from_string(connection.peer)
        self.connection = connection

    @property
    def is_closed(self) -> bool:
        return self.connection.is_closed

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [Multiaddr(self.connection.remote_addr)] if self.connection.remote_addr else []


class FacadeStream:
    """py-libp2p's ``INetStream`` over a `ByteStream`."""

    metric_send_channel = None

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.muxed_conn: FacadeConnection = FacadeConnection(stream.connection)

    def get_protocol(self) -> str:
        return self.stream.protocol

    def set_protocol(self, protocol_id: str) -> None:
        """Do nothing: the protocol is negotiated already."""

    async def read(self, n: int | None = None) -> bytes:
        """Return up to ``n`` bytes; b"" at the end, which message readers tell from a failure. Raises StreamReset."""
        if n == 0:
            return b""
        try:
            return await self.stream.read(65_536 if n is None or n < 0 else n)
        except StreamClosedError as error:
            raise StreamReset(str(error)) from error

    async def write(self, data: bytes) -> None:
        try:
            await self.stream.write(data)
        except StreamClosedError as error:
            raise StreamClosed(str(error)) from error

    async def close(self) -> None:
        await self.stream.close()

    async def close_write(self) -> None:
        await self.stream.close_write()

    async def reset(self) -> None:
        self.stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class FacadeStore(PeerStore):
    """A peer store for py-libp2p's protocols: bounded, filled from our book and feeding it."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def addrs(self, peer_id: ID) -> list[Multiaddr]:
        peer = PeerId(str(peer_id))
        found = [Multiaddr(text) for text in self._host.addrs(peer)]
        if not found and peer_id in self.peer_data_map:
            found = self.peer_data_map[peer_id].get_addrs()
        return found

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        if len(self.peer_data_map) >= _STORE_PEERS_MAX and peer_id not in self.peer_data_map:
            self.peer_data_map.pop(next(iter(self.peer_data_map)))
        addrs = addrs[:ADDRS_PER_PEER_MAX]
        known = self.peer_data_map.get(peer_id)
        if known is not None and len(known.get_addrs()) + len(addrs) > ADDRS_PER_PEER_MAX:
            known.clear_addrs()  # upstream keeps every address that any peer ever named
        super().add_addrs(peer_id, addrs, ttl)
        self._host.add_addrs(PeerId(str(peer_id)), [str(addr) for addr in addrs], ttl_s=float(ttl))

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        # Held per peer and never evicted upstream. `DhtStream` takes them out of messages, so none comes here.
        return False


class FacadeNetwork:
    """The part of ``INetworkService`` that py-libp2p's protocols look at."""

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def connections(self) -> dict[ID, list[FacadeConnection]]:
        found: dict[ID, list[FacadeConnection]] = {}
        for connection in self._host.connections():
            facade = FacadeConnection(connection)
            found.setdefault(facade.peer_id, []).append(facade)
        return found


class FacadeHost:
    """py-libp2p's ``IHost`` over a `Host`."""

    def __init__(self, host: Host, key_pair: KeyPair) -> None:
        self._host = host
        self._key_pair = key_pair
        self._store = FacadeStore(host)
        self._network = FacadeNetwork(host)
        self.stream_types: dict[str, type[FacadeStream]] = {}
        """Protocols whose streams are more than a `FacadeStream`."""

    def as_libp2p_host(self) -> IHost:
        """Return the same object under py-libp2p's type: it has the methods that the DHT and rendezvous call, not all
        of ``IHost``."""
        return cast(IHost, self)

    def _facade_stream(self, stream: ByteStream) -> FacadeStream:
        return self.stream_types.get(stream.protocol, FacadeStream)(stream)

    def get_id(self) -> ID:
        return ID.from_string(self._host.peer_id)

    def get_public_key(self) -> PublicKey:
        return self._key_pair.public_key

    def get_private_key(self) -> PrivateKey:
        return self._key_pair.private_key

    def get_peerstore(self) -> FacadeStore:
        return self._store

    def get_network(self) -> FacadeNetwork:
        return self._network

    def get_addrs(self) -> list[Multiaddr]:
        return [Multiaddr(text) for text in addrs_for_others(self._host.listen_addrs())]

    def get_transport_addrs(self) -> list[Multiaddr]:
        return [Multiaddr(text.rsplit("/p2p/", 1)[0]) for text in addrs_for_others(self._host.listen_addrs())]

    def get_connected_peers(self) -> list[ID]:
        return [ID.from_string(peer) for peer in dict.fromkeys(one.peer for one in self._host.connections())]

    async def connect(self, peer_info: PeerInfo) -> None:
        """Dial the peer. Raises StreamClosed when no address answers."""
        try:
            await self._host.dial(PeerId(str(peer_info.peer_id)), [str(addr) for addr in peer_info.addrs])
        except Dep2pError as error:
            raise StreamClosed(str(error)) from error

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[str]) -> FacadeStream:
        """Dial if need be and open a stream. Raises StreamClosed."""
        try:
            connection = await self._host.dial(PeerId(str(peer_id)))
            return self._facade_stream(await connection.open_stream(str(protocol_ids[0])))
        except Dep2pError as error:
            raise StreamClosed(str(error)) from error

    def set_stream_handler(self, protocol_id: str, stream_handler: Callable[[FacadeStream], Awaitable[None]]) -> None:
        async def handle(stream: ByteStream) -> None:
            await stream_handler(self._facade_stream(stream))

        self._host.set_stream_handler(str(protocol_id), handle)

    def remove_stream_handler(self, protocol_id: str) -> None:
        self._host.remove_stream_handler(str(protocol_id))
