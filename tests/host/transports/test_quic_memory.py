"""Bytes that a stranger on QUIC sends out of order make a node hold little, and end the connection above that."""

# pyright: reportPrivateUsage=false

import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from aioquic import tls
from aioquic.quic import events
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.stream import QuicStreamSender

from dep2p.errors import StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.host.resources.receiving import CRYPTO_BYTES_MAX, STREAM_WINDOW_UNPROVEN_BYTES, WINDOW_UNPROVEN_BYTES
from dep2p.host.upstream.quic_internals import aioquic_of, transmit
from dep2p.identity import Identity
from tests.host.certificates import Recipe

QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
PROPOSAL = b"\x13/multistream/1.0.0\n\x08/echo/1\n"


class Stranger:
    """A QUIC client that says what aioquic would never say."""

    def __init__(self, udp: Any, port: int) -> None:
        config = QuicConfiguration(is_client=True, alpn_protocols=["libp2p"], verify_mode=ssl.CERT_NONE)
        recipe = Recipe(identity=Identity.generate())
        config.certificate, config.private_key = recipe.make(), recipe.key
        self.quic = QuicConnection(configuration=config)
        self.is_ready = self.is_over = False
        self.received = 0
        self._udp = udp
        self._to = ("127.0.0.1", port)
        self.quic.connect(self._to, now=trio.current_time())

    async def flush(self) -> None:
        for datagram, _ in self.quic.datagrams_to_send(trio.current_time()):
            await self._udp.send(datagram)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Exchange datagrams until a condition holds or the node has ended the connection."""
        with trio.fail_after(20):
            while not condition() and not self.is_over:
                await self._step()

    async def _step(self) -> None:
        await self.flush()
        timer = self.quic.get_timer()
        with trio.move_on_at(min(timer or 1e9, trio.current_time() + 0.2)):
            self.quic.receive_datagram(await self._udp.recv(65_536), self._to, trio.current_time())
        timer = self.quic.get_timer()
        if timer is not None and timer <= trio.current_time():
            self.quic.handle_timer(trio.current_time())
        while (event := self.quic.next_event()) is not None:
            self.is_ready = self.is_ready or isinstance(event, events.HandshakeCompleted)
            self.is_over = self.is_over or isinstance(event, events.ConnectionTerminated)
            if isinstance(event, events.StreamDataReceived):
                self.received += len(event.data)

    async def exchange(self) -> None:
        """Wait for the answer to a ping that follows what was sent."""
        self.quic.send_ping(0)
        await self.flush()
        sent = self.quic._packet_number - 1
        await self.until(lambda: self.quic._loss.spaces[-1].largest_acked_packet >= sent)

    def sender(self, stream: int) -> QuicStreamSender:
        return self.quic._get_or_create_stream_for_send(stream).sender

    @property
    def window(self) -> int:
        """The furthest offset that the node has granted on stream 0."""
        stream = self.quic._get_or_create_stream_for_send(0)
        return min(stream.max_stream_data_remote, self.quic._remote_max_data)

    def write_at(self, sender: QuicStreamSender, offset: int, data: bytes) -> None:
        sender._buffer.clear()
        sender._pending = RangeSet()
        sender._buffer_start = sender._buffer_stop = sender.highest_offset = offset
        sender.write(data)
        self.quic._remote_max_data_used = 0


@asynccontextmanager
async def stranger_of(host: Any) -> AsyncGenerator[Stranger, None]:
    """A stranger whose handshake is complete."""
    port = int(host.listen_addrs()[0].split("/")[4])
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
        await udp.connect(("127.0.0.1", port))
        stranger = Stranger(udp, port)
        await stranger.until(lambda: stranger.is_ready)
        with trio.fail_after(10):
            while not host.connections():
                await stranger._step()
        yield stranger


@pytest.mark.real
async def test_a_byte_at_the_end_of_each_window_gets_no_wider_window(open_host: Any) -> None:
    """aioquic doubled the window each time, and allocated the gap: 3 KB held 512 MB."""
    async with open_host(listen=[QUIC]) as host, stranger_of(host) as stranger:
        for _ in range(12):
            stranger.write_at(stranger.sender(0), stranger.window - 1, b"x")
            await stranger.exchange()
        assert stranger.window == STREAM_WINDOW_UNPROVEN_BYTES
        assert host.counters()["memory_bytes_unproven"] >= STREAM_WINDOW_UNPROVEN_BYTES


@pytest.mark.real
async def test_the_gaps_of_all_streams_stay_within_a_window(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as host, stranger_of(host) as stranger:
        for number in range(12):
            stranger.write_at(stranger.sender(4 * number), STREAM_WINDOW_UNPROVEN_BYTES - 1, b"x")
            await stranger.exchange()
            assert host.counters().get("memory_bytes_unproven", 0) <= 2 * WINDOW_UNPROVEN_BYTES
        assert stranger.is_over  # it went on beyond the window


@pytest.mark.real
async def test_what_is_held_of_a_stream_is_released_at_its_reset(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as host, stranger_of(host) as stranger:
        for number in range(8):
            sender = stranger.sender(4 * number)
            stranger.write_at(sender, STREAM_WINDOW_UNPROVEN_BYTES - 1, b"x")
            await stranger.exchange()
            assert not stranger.is_over
            assert host.counters()["memory_bytes_unproven"] >= STREAM_WINDOW_UNPROVEN_BYTES
            sender.reset(0)
            await stranger.exchange()
        assert host.counters()["memory_bytes_unproven"] < STREAM_WINDOW_UNPROVEN_BYTES // 2


@pytest.mark.real
async def test_handshake_bytes_far_ahead_end_the_connection(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as host, stranger_of(host) as stranger:
        sender = stranger.quic._crypto_streams[tls.Epoch.ONE_RTT].sender
        stranger.write_at(sender, CRYPTO_BYTES_MAX, b"x")
        await stranger.until(lambda: False)
        assert stranger.is_over
        assert host.counters()["resources_ended_connection"] == 1
        assert host.counters()["memory_bytes_unproven"] == 0


@pytest.mark.real
async def test_handshake_bytes_far_ahead_end_a_handshake_that_is_under_way(open_host: Any, eventually: Any) -> None:
    async with open_host(listen=[QUIC]) as host:
        port = int(host.listen_addrs()[0].split("/")[4])
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
            await udp.connect(("127.0.0.1", port))
            stranger = Stranger(udp, port)
            stranger.write_at(stranger.quic._crypto_streams[tls.Epoch.INITIAL].sender, CRYPTO_BYTES_MAX, b"x")
            await stranger.flush()
            await eventually(lambda: host.counters().get("inbound_quic_ended_memory", 0) == 1)
            assert not host.connections()


@pytest.mark.real
async def test_gaps_without_number_end_the_connection(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as host, stranger_of(host) as stranger:
        sender = stranger.sender(0)
        for number in range(2_000):
            stranger.write_at(sender, 2 * number + 1, b"x")
            await stranger.flush()
            if number % 32 == 0:
                await stranger.exchange()
            if stranger.is_over:
                break
        assert stranger.is_over
        assert host.counters()["resources_ended_connection"] == 1


@pytest.mark.real
async def test_data_on_streams_that_wait_for_their_turn_stays_within_a_window(open_host: Any) -> None:
    """64 streams negotiate at a time; py-libp2p buffered 8 MiB for each of the others."""
    async with open_host(listen=[QUIC]) as host, stranger_of(host) as stranger:
        for number in range(64):
            stranger.quic.send_stream_data(4 * number, b"\x13/mul")
        await stranger.exchange()
        for number in range(64, 100):
            stranger.quic.send_stream_data(4 * number, bytes(100_000))
        used = -1
        while used != stranger.quic._remote_max_data_used:
            used = stranger.quic._remote_max_data_used
            for _ in range(8):
                await stranger.exchange()
        assert stranger.is_over or used <= 2 * WINDOW_UNPROVEN_BYTES
        assert host.counters()["memory_bytes_unproven"] <= 2 * WINDOW_UNPROVEN_BYTES


@pytest.mark.real
async def test_the_window_moves_on_for_bytes_in_order(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as host, stranger_of(host) as stranger:
        size = 6 * WINDOW_UNPROVEN_BYTES
        stranger.quic.send_stream_data(0, PROPOSAL + bytes(size))
        await stranger.until(lambda: stranger.received >= size)
        assert not stranger.is_over
        assert host.counters().get("resources_ended_connection", 0) == 0


@pytest.mark.real
async def test_a_slow_reader_holds_its_sender_back(open_host: Any) -> None:
    """aioquic granted more, read or not: the stream was reset at 8 MiB, and a stranger's connection ended at 1."""
    may_read, received = trio.Event(), 0

    async def read_late(stream: ByteStream) -> None:
        nonlocal received
        await may_read.wait()
        while data := await stream.read():
            received += len(data)
        await stream.close()

    size = 12 * STREAM_WINDOW_UNPROVEN_BYTES
    async with open_host(listen=[QUIC]) as host, open_host(listen=[QUIC]) as stranger:
        host.set_stream_handler("/late/1", read_late)
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        stream = await connection.open_stream("/late/1")
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def send() -> None:
                await stream.write(bytes(size))
                await stream.close_write()

            held, before = 1, 0
            with trio.fail_after(20):
                while held != before:
                    before = held
                    await trio.sleep(0.3)  # longer than QUIC waits with an acknowledgement
                    held = host.counters()["memory_bytes_unproven"]
            assert STREAM_WINDOW_UNPROVEN_BYTES <= held <= 2 * STREAM_WINDOW_UNPROVEN_BYTES
            may_read.set()
            assert await stream.read() == b""
        assert received == size


async def identified(*hosts: Any) -> None:
    """Wait until the hosts have told each other of themselves: only streams of pings are open."""
    with trio.fail_after(10):
        while not all(  # noqa: ASYNC110 - identify has no event for it
            host._peer_store.protocols(connection.peer)
            and all("/ping/" in repr(stream) for stream in connection._muxer._streams.values())
            for host in hosts
            for connection in host.connections()
        ):
            await trio.sleep(0.01)


@pytest.mark.real
async def test_a_node_that_was_dialled_gets_no_wider_window_either(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as listener, open_host(listen=[]) as host:
        await host.dial(listener.peer_id, listener.listen_addrs())
        with trio.fail_after(10):
            while not listener.connections():  # noqa: ASYNC110 - the other end learns of it later
                await trio.sleep(0.01)
        (connection,) = listener.connections()
        await identified(listener, host)
        muxed = connection._muxer._quic
        quic, granted = aioquic_of(muxed), [0]
        while len(granted) < 12:
            stream = quic._get_or_create_stream_for_send(81)  # beyond those that identify uses
            sender, window = stream.sender, min(stream.max_stream_data_remote, quic._remote_max_data)
            granted.append(window)
            sender._buffer.clear()
            sender._pending = RangeSet()
            sender._buffer_start = sender._buffer_stop = sender.highest_offset = window - 1
            sender.write(b"x")
            quic._remote_max_data_used = 0
            await transmit(muxed)
            assert await host.ping(listener.peer_id) > 0  # it has answered what came before
        assert granted[1:] == [STREAM_WINDOW_UNPROVEN_BYTES] * 11
        assert STREAM_WINDOW_UNPROVEN_BYTES <= host.counters()["memory_bytes_unproven"] <= 2 * WINDOW_UNPROVEN_BYTES


@pytest.mark.real
async def test_a_stream_that_cannot_begin_fails_alone_and_the_host_goes_on(open_host: Any) -> None:
    async with open_host(listen=[QUIC]) as listener, open_host(listen=[]) as host:
        await host.dial(listener.peer_id, listener.listen_addrs())
        (connection,) = host.connections()
        quic = aioquic_of(connection._muxer._quic)
        # aioquic takes streams below one that was written to for finished, as at the end of a connection.
        quic._get_or_create_stream_for_send(80)
        with pytest.raises(StreamClosedError, match="the connection is ending"):
            await connection.open_stream("/echo/1", timeout_s=5)
        await host._identify.push(connection)  # the host does this by itself, and ended by its error
        async with open_host(listen=[QUIC]) as another:
            await host.dial(another.peer_id, another.listen_addrs())
            assert await host.ping(another.peer_id) > 0
