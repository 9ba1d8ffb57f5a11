"""Our host and a stock py-libp2p host speak to each other, both ways."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from dep2p.host.interface import PeerConnected

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),  # stock hosts warn
    pytest.mark.usefixtures("stock_hosts_leave_nothing"),
]


@asynccontextmanager
async def stock_host(listen: str, **options: Any) -> AsyncGenerator[Any, None]:
    host = new_host(
        key_pair=create_new_key_pair(),
        connection_config=ConnectionConfig(min_connections=0, low_watermark=0),
        listen_addrs=[Multiaddr(listen)],
        **options,
    )

    async def echo(stream: Any) -> None:
        try:
            while data := await stream.read(65_536):
                await stream.write(data)
        except StreamEOF:
            pass  # stock streams raise at the end
        await stream.close()

    host.set_stream_handler("/echo/1", echo)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with trio.fail_after(20):
        async with host.run([Multiaddr(listen)]):
            try:
                yield host
            finally:
                with trio.CancelScope(shield=True):  # pyright: ignore[reportCallIssue]
                    await host.close()


LISTENS = pytest.mark.parametrize(
    ("listen", "options"),
    [
        ("/ip4/127.0.0.1/tcp/0", {}),
        ("/ip4/127.0.0.1/tcp/0/ws", {"enable_tcp": False, "enable_websocket": True}),
        ("/ip4/127.0.0.1/udp/0/quic-v1", {"enable_quic": True}),
    ],
    ids=["tcp", "ws", "quic"],
)


@LISTENS
async def test_our_host_dials_a_stock_one(
    open_host: Any, eventually: Any, listen: str, options: dict[str, Any]
) -> None:
    async with stock_host(listen, **options) as stock, open_host() as host:
        addrs = [str(addr) for addr in stock.get_transport_addrs()]
        assert addrs
        connection = await host.dial(str(stock.get_id()), addrs)
        stream = await connection.open_stream("/echo/1")
        await stream.write(bytes(100_000))
        received = 0
        while received < 100_000:  # before the end: on QUIC the stock read may lose what comes with it
            data = await stream.read()
            assert data
            received += len(data)
        await stream.close_write()
        assert not await stream.read()
        assert await host.ping(connection.peer) > 0
        await eventually(lambda: "/echo/1" in host.peer_protocols(connection.peer))


@LISTENS
async def test_a_stock_host_dials_ours(open_host: Any, event_log: Any, listen: str, options: dict[str, Any]) -> None:
    async with stock_host(listen, **options) as stock, open_host(listen=[listen]) as host:
        log = event_log(host)
        await stock.connect(PeerInfo(ID.from_string(host.peer_id), [Multiaddr(addr) for addr in host.listen_addrs()]))
        stream = await stock.new_stream(ID.from_string(host.peer_id), ["/nobody/1", "/echo/1"])
        await stream.write(b"hello")
        assert await stream.read(5) == b"hello"
        await stream.close()
        assert (await log.wait(PeerConnected)).connection.peer == str(stock.get_id())
