"""WebSocket and QUIC keep the promises of TCP, between real hosts."""

import signal
import socket
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import ListenError, PeerNotFoundError, ProtocolNotSupportedError, StreamClosedError
from dep2p.host.interface import ByteStream, PeerConnected, PeerDisconnected
from dep2p.identity import Identity
from dep2p.limits import Limits

pytestmark = pytest.mark.real

TCP = "/ip4/127.0.0.1/tcp/0"
WS = "/ip4/127.0.0.1/tcp/0/ws"
QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"

every = pytest.mark.parametrize("listen", [TCP, WS, QUIC], ids=["tcp", "ws", "quic"])
slower = pytest.mark.parametrize("listen", [WS, QUIC], ids=["ws", "quic"])


@every
async def test_bytes_come_back_whole_and_in_order(two_hosts: Any, listen: str) -> None:
    async with two_hosts(listen=[listen]) as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        assert connection.peer == other.peer_id
        stream = await connection.open_stream("/echo/1")
        sent = bytes(range(256)) * 800
        received = bytearray()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                for start in range(0, len(sent), 10_000):
                    await stream.write(sent[start : start + 10_000])
                await stream.close_write()

            nursery.start_soon(write)
            with trio.fail_after(20):
                while data := await stream.read():
                    received += data
        assert received == sent
        await stream.close()
        with pytest.raises(ProtocolNotSupportedError):
            await connection.open_stream("/nobody/1")


@every
async def test_pushed_bytes_and_the_end_reach_the_receiver(two_hosts: Any, listen: str) -> None:
    async with two_hosts(listen=[listen]) as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        stream = await connection.open_stream("/echo/1")
        received = bytearray()
        ended = trio.Event()
        errors: list[BaseException | None] = []

        def on_end(error: BaseException | None) -> None:
            errors.append(error)
            ended.set()

        def on_data(data: bytes | memoryview) -> None:
            received.extend(data)

        stream.set_receiver(on_data, on_end)
        stream.pause_receiving()
        await stream.write(b"held back")
        await one.ping(other.peer_id)
        assert received == b""
        stream.resume_receiving()
        await stream.write(b", then not")
        await stream.close_write()
        with trio.fail_after(5):
            await ended.wait()
        assert received == b"held back, then not"
        assert errors == [None]


@every
async def test_receiver_is_notified_of_a_lost_connection(two_hosts: Any, listen: str) -> None:
    async with two_hosts(listen=[listen]) as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        stream = await connection.open_stream("/echo/1")
        ended = trio.Event()
        errors: list[BaseException | None] = []

        def on_end(error: BaseException | None) -> None:
            errors.append(error)
            ended.set()

        def on_data(data: bytes | memoryview) -> None:
            """Nothing is expected."""

        stream.set_receiver(on_data, on_end)
        await other.disconnect(one.peer_id)
        with trio.fail_after(5):
            await ended.wait()
        assert isinstance(errors[0], StreamClosedError)


@every
async def test_both_sides_learn_of_an_end_once(two_hosts: Any, event_log: Any, listen: str) -> None:
    async with two_hosts(listen=[listen]) as (one, other):
        log_one, log_other = event_log(one), event_log(other)
        await one.dial(other.peer_id, other.listen_addrs())
        await log_other.wait(PeerConnected)
        assert await one.disconnect(other.peer_id)
        await log_other.wait(PeerDisconnected, timeout_s=2)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(log_one.of(PeerDisconnected)) == len(log_other.of(PeerDisconnected)) == 1
        await one.dial(other.peer_id, other.listen_addrs())


@slower
async def test_cancelled_writes_and_failing_handlers_cost_one_stream(two_hosts: Any, listen: str) -> None:
    async with two_hosts(listen=[listen]) as (one, other):

        async def handler(stream: ByteStream) -> None:
            raise RuntimeError("a bug of the app")

        other.set_stream_handler("/bug/1", handler)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        with trio.fail_after(5), pytest.raises(StreamClosedError):
            await (await connection.open_stream("/bug/1")).read()
        stream = await connection.open_stream("/echo/1")
        for _ in range(5):
            with trio.move_on_after(0.01):
                await stream.write(bytes(200_000))
        stream.reset()
        with trio.fail_after(5):
            again = await connection.open_stream("/echo/1")
            await again.write(b"usable")
            await again.close_write()
            assert await again.read() == b"usable"


@every
async def test_streams_opened_at_the_same_time(two_hosts: Any, listen: str) -> None:
    async with two_hosts(listen=[listen]) as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        done = 0

        async def use(number: int) -> None:
            nonlocal done
            stream = await connection.open_stream("/echo/1")
            await stream.write(b"%d" % number)
            await stream.close_write()
            data = b""
            while more := await stream.read():
                data += more
            assert data == b"%d" % number
            done += 1

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(use, number)
        assert done == 50


@slower
async def test_other_peer_at_the_address_is_an_error(two_hosts: Any, listen: str) -> None:
    async with two_hosts(listen=[listen]) as (one, other):
        addr = other.listen_addrs()[0].rsplit("/p2p/", 1)[0]
        with pytest.raises(PeerNotFoundError):
            await one.dial(Identity.generate().peer_id, [addr], timeout_s=5)
        assert one.connections() == []


@every
async def test_stopped_peer_is_noticed(open_host: Any, event_log: Any, peer_process: Any, listen: str) -> None:
    remote = peer_process("11" * 32, listen)
    async with open_host(limits=Limits(liveness_interval_s=0.3, liveness_timeout_s=0.6), listen=[listen]) as host:
        log = event_log(host)
        await host.dial(remote.peer, [remote.addr])
        remote.signal(signal.SIGSTOP)
        try:
            await log.wait(PeerDisconnected, timeout_s=5)
        finally:
            remote.signal(signal.SIGCONT)


@every
async def test_idle_connection_stays_and_its_round_trip_time_is_known(
    two_hosts: Any, eventually: Any, listen: str
) -> None:
    limits = Limits(liveness_interval_s=0.1, liveness_timeout_s=0.5)
    async with two_hosts(limits, listen=[listen]) as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        await eventually(lambda: connection.rtt_s is not None)
        await trio.sleep(1.0)  # several times the liveness interval
        assert not connection.is_closed
        await one.ping(other.peer_id)


async def test_taken_udp_port_is_an_error(open_host: Any) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        addr = f"/ip4/127.0.0.1/udp/{sharing.getsockname()[1]}/quic-v1"
        with pytest.raises(ListenError, match="UDP port") as caught:
            async with open_host(listen=[addr]):
                pass
        assert addr in str(caught.value)


async def test_one_host_on_all_transports(open_host: Any) -> None:
    async with open_host(listen=[TCP, WS, QUIC]) as host:
        kinds = [addr.split("/p2p/")[0] for addr in host.listen_addrs()]
        assert len(kinds) == 3
        for addr in host.listen_addrs():
            async with open_host(listen=[]) as dialler:
                connection = await dialler.dial(host.peer_id, [addr])
                assert connection.remote_addr == addr.split("/p2p/")[0]
                await dialler.ping(host.peer_id)


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 100, b"GET /" + b"a" * 50_000, b"\xff" * 3_000]
)
async def test_junk_to_a_websocket_port_costs_its_connection_only(open_host: Any, junk: bytes) -> None:
    async with open_host(listen=[WS], limits=Limits(handshake_timeout_s=1.0)) as host, open_host() as other:
        stream = await trio.open_tcp_stream("127.0.0.1", int(host.listen_addrs()[0].split("/")[4]))
        async with stream:
            await stream.send_all(junk)
            with trio.fail_after(5):
                try:
                    while await stream.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass  # closed with unread data: a reset
        await other.dial(host.peer_id, host.listen_addrs())


_UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


@pytest.mark.parametrize(
    "junk",
    [
        _UPGRADE.replace(b"Connection: Upgrade", b"Connection: Upgrade\xff") + b"\r\n",
        _UPGRADE.replace(b"Host: a", b"Host: \xff") + b"\r\n",
        _UPGRADE + b"Sec-WebSocket-Protocol: \xff\r\n\r\n",
        _UPGRADE + b"Sec-WebSocket-Extensions: \xff\r\n\r\n",
    ],
    ids=["connection", "host", "protocol", "extensions"],
)
async def test_one_websocket_request_with_bytes_outside_ascii_does_not_end_the_host(
    open_host: Any, junk: bytes
) -> None:
    """wsproto raises UnicodeDecodeError for it, which is no error of its own."""
    async with open_host(listen=[WS]) as host, open_host() as other:
        async with await trio.open_tcp_stream("127.0.0.1", int(host.listen_addrs()[0].split("/")[4])) as stream:
            await stream.send_all(junk)
            with trio.fail_after(5):
                assert await stream.receive_some() == b""
        await other.dial(host.peer_id, host.listen_addrs())
        assert host.counters()["inbound_handshake_failed"] == 1


async def test_junk_to_a_quic_port_costs_nothing(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as host, open_host(listen=[]) as other:
        port = int(host.listen_addrs()[0].split("/")[4])
        with socket.socket(type=socket.SOCK_DGRAM) as sock:
            for junk in (b"", b"\xff", b"\xc0" + bytes(1_200), bytes(range(256)) * 4, b"\x40" * 1_200):
                sock.sendto(junk, ("127.0.0.1", port))
        await other.dial(host.peer_id, host.listen_addrs())
