"""Our host against an unmodified py-libp2p host over TCP, Noise and yamux, both ways; and py-libp2p over our muxer."""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from dep2p.host.connections.noise_yamux_upgrade import HardenedUpgrader
from dep2p.host.yamux.connection import YamuxConnection
from dep2p.limits import Limits
from dep2p.types import PeerId

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("stock_hosts_leave_nothing")]

BULK_BYTES = 2_000_000
STREAMS = 100
"""At once: fewer than the 128 that a peer without a proof may hold open here."""


async def read_all(stream: INetStream) -> bytes:
    data = bytearray()
    try:
        while more := await stream.read(65_536):
            data += more
    except StreamEOF:
        return bytes(data)
    return bytes(data)


@asynccontextmanager
async def stock_host(traffic: Any, *, with_our_upgrader: bool = False) -> AsyncGenerator[tuple[IHost, Multiaddr], None]:
    """A host as `libp2p.new_host` makes it, serving echo and sink."""
    key_pair = create_new_key_pair()
    host = new_host(key_pair=key_pair)
    if with_our_upgrader:
        network: Any = host.get_network()
        network.upgrader = HardenedUpgrader(key_pair, limits=Limits())

    async def echo(stream: INetStream) -> None:
        try:
            while data := await stream.read(65_536):
                await stream.write(data)
        except StreamEOF:
            await stream.close()

    async def sink(stream: INetStream) -> None:
        data = await read_all(stream)
        await stream.write(f"{len(data)} {hashlib.sha256(data).hexdigest()}".encode())
        await stream.close()

    host.set_stream_handler(TProtocol(traffic.ECHO), echo)
    host.set_stream_handler(TProtocol(traffic.SINK), sink)
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        try:
            yield host, host.get_addrs()[0]
        finally:
            with trio.CancelScope(shield=True):
                await host.close()


def info_of(host: Any) -> PeerInfo:
    addr, _, peer = host.listen_addrs()[0].rpartition("/p2p/")
    return PeerInfo(ID.from_string(peer), [Multiaddr(addr)])


async def test_we_dial_a_stock_host(our_host: Any, traffic: Any) -> None:
    right: list[int] = []
    with trio.fail_after(60):
        async with our_host() as ours, stock_host(traffic) as (stock, addr):
            connection = await ours.dial(PeerId(str(stock.get_id())), [str(addr)])
            stream = await connection.open_stream(traffic.ECHO)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(traffic.send, stream, BULK_BYTES)
                assert await traffic.receive(stream) == (BULK_BYTES, traffic.digest(BULK_BYTES))

            async def ask(number: int) -> None:
                small = await connection.open_stream(traffic.ECHO)
                await small.write(b"stream %d" % number)
                await small.close_write()
                count, sha256 = await traffic.receive(small)
                text = b"stream %d" % number
                assert (count, sha256) == (len(text), hashlib.sha256(text).hexdigest())
                right.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(STREAMS):
                    nursery.start_soon(ask, number)
            assert len(right) == STREAMS


@pytest.mark.parametrize("with_our_upgrader", [False, True], ids=["stock muxer", "our muxer"])
async def test_a_host_of_py_libp2p_dials_us(our_host: Any, traffic: Any, with_our_upgrader: bool) -> None:
    right: list[int] = []
    with trio.fail_after(60):
        async with our_host() as ours, stock_host(traffic, with_our_upgrader=with_our_upgrader) as (stock, _):
            info = info_of(ours)
            await stock.connect(info)
            connection: Any = stock.get_network().get_connections(info.peer_id)[0]
            assert isinstance(connection.muxed_conn, YamuxConnection) == with_our_upgrader
            stream = await stock.new_stream(info.peer_id, [TProtocol(traffic.ECHO)])
            data = b"".join(traffic.generate(BULK_BYTES))
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    await stream.write(data)
                    await stream.close()

                nursery.start_soon(send)
                assert await read_all(stream) == data

            async def ask(number: int) -> None:
                small = await stock.new_stream(info.peer_id, [TProtocol(traffic.ECHO)])
                await small.write(b"stream %d" % number)
                await small.close()
                assert await read_all(small) == b"stream %d" % number
                right.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(STREAMS):
                    nursery.start_soon(ask, number)
            assert len(right) == STREAMS
            assert await PingService(stock).ping(info.peer_id)


async def test_a_host_of_py_libp2p_over_our_muxer_identifies_a_stock_one(traffic: Any) -> None:
    with trio.fail_after(60):
        async with stock_host(traffic) as (stock, addr), stock_host(traffic, with_our_upgrader=True) as (host, _):
            address = Multiaddr(str(addr).rpartition("/p2p/")[0] or str(addr))
            await host.connect(PeerInfo(stock.get_id(), [address]))
            stream = await host.new_stream(stock.get_id(), [TProtocol(traffic.SINK)])
            await stream.write(b"abc")
            await stream.close()
            assert await read_all(stream) == b"3 " + hashlib.sha256(b"abc").hexdigest().encode()
            known = host.get_peerstore().get_protocols(stock.get_id())
            while traffic.ECHO not in known:
                await trio.sleep(0.01)
                known = host.get_peerstore().get_protocols(stock.get_id())
            await host.disconnect(stock.get_id())
