"""py-libp2p as it comes: default host, default muxer and security, its own request/response helper."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.request_response import BytesCodec, RequestContext, RequestResponse
from multiaddr import Multiaddr

from bench.sides.interface import Arrivals, DialTimes, Send

_REQUEST = TProtocol("/bench/request/1.0.0")
_NOTIFY = TProtocol("/bench/notify/1.0.0")
_BULK = TProtocol("/bench/bulk/1.0.0")
_NOTIFY_READ_BYTES = 65_536
_BULK_READ_BYTES = 65_536
_CODEC = BytesCodec()
_LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True, slots=True)
class StockServer:
    """The listening host."""

    address: str
    arrivals: Arrivals


class StockClient:
    """A host connected to the server."""

    def __init__(self, host: IHost, peer: ID) -> None:
        self._host = host
        self._peer = peer
        self._requests = RequestResponse(host)

    async def request(self, data: bytes) -> bytes:
        """One exchange of the library's helper, which opens a stream for it."""
        return await self._requests.send_request(self._peer, [_REQUEST], data, _CODEC)

    @asynccontextmanager
    async def open_notify(self) -> AsyncGenerator[Send, None]:
        """One long-lived stream, one write for a message."""
        async with self._stream(_NOTIFY) as send:
            yield send

    @asynccontextmanager
    async def open_bulk(self) -> AsyncGenerator[Send, None]:
        """One long-lived stream, one write for a piece."""
        async with self._stream(_BULK) as send:
            yield send

    @asynccontextmanager
    async def _stream(self, protocol: TProtocol) -> AsyncGenerator[Send, None]:
        stream = await self._host.new_stream(self._peer, [protocol])
        yield stream.write
        await stream.close()


@asynccontextmanager
async def _running_host(*listen: str) -> AsyncGenerator[IHost, None]:
    host = new_host()
    async with host.run(listen_addrs=[Multiaddr(text) for text in listen]):
        try:
            yield host
        finally:
            await host.close()


class StockSide:
    """Two default hosts."""

    @asynccontextmanager
    async def serve(self, secret: str) -> AsyncGenerator[StockServer, None]:
        """Listen on a free loopback port."""
        arrivals = Arrivals()

        async def echo(data: bytes, context: RequestContext) -> bytes:
            return data

        async def count(stream: INetStream, read_bytes: int) -> None:
            try:
                while data := await stream.read(read_bytes):
                    arrivals.add(0, len(data))
            except StreamError:
                return

        async def count_small(stream: INetStream) -> None:
            await count(stream, _NOTIFY_READ_BYTES)

        async def count_bulk(stream: INetStream) -> None:
            await count(stream, _BULK_READ_BYTES)

        async with _running_host(*_LISTEN) as host:
            RequestResponse(host).set_handler(_REQUEST, echo, _CODEC)
            host.set_stream_handler(_NOTIFY, count_small)
            host.set_stream_handler(_BULK, count_bulk)
            address = str(host.get_addrs()[0])
            yield StockServer(address, arrivals)

    @asynccontextmanager
    async def connect(self, secret: str, address: str, *, listen: bool = True) -> AsyncGenerator[StockClient, None]:
        """A new host, connected."""
        info = info_from_p2p_addr(Multiaddr(address))
        async with _running_host(*_LISTEN if listen else ()) as host:
            await host.connect(info)
            yield StockClient(host, info.peer_id)

    async def dial_fresh(self, secret: str, address: str) -> DialTimes:
        """``host.connect`` of a host that is up already, then one exchange."""
        info = info_from_p2p_addr(Multiaddr(address))
        async with _running_host(*_LISTEN) as host:
            began_s = time.monotonic()
            await host.connect(info)
            usable_s = time.monotonic()
            await StockClient(host, info.peer_id).request(b"first")
            return DialTimes((usable_s - began_s) * 1_000, (time.monotonic() - began_s) * 1_000)
