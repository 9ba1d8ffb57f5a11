"""Attacks of strangers on a host: pings, identify messages, relayed circuits, slots."""

import errno
import gc
import weakref
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.relay.circuit_v2.pb import circuit_pb2
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import StreamClosedError
from dep2p.host.connections.connection import NEGOTIATING_UNPROVEN_MAX
from dep2p.host.connections.identify import IDENTIFY_PUSH, PING, PingServer
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream
from dep2p.host.transports.relay.messages import HOP, STOP
from dep2p.host.transports.relay.server import RelayServer
from dep2p.host.transports.tcp import TCPListener
from dep2p.limits import Limits
from dep2p.protocols.relay.bounds import CircuitBounds
from dep2p.testing import MemoryHost, MemoryNetwork
from dep2p.types import peer_id_bytes

Clock = trio.testing.MockClock


def pinged_host(network: MemoryNetwork) -> tuple[MemoryHost, Counters]:
    host, counters = network.host(), Counters()
    host.set_stream_handler(PING, PingServer(counters).serve)
    return host, counters


async def test_pings_whose_answers_no_one_reads_are_not_kept(autojump_clock: Clock) -> None:
    """A whole window of pings waits in memory behind each answer that cannot be sent."""
    network = MemoryNetwork()
    host, _ = pinged_host(network)
    stream = await (await network.host().dial(host.peer_id, [host.addr])).open_stream(PING)
    stream.write_nowait(bytes(1_000_000))
    await trio.sleep(1_100)  # 8,192 answers are a window; 8 leave in a second
    (connection,) = host.connections()
    assert connection.streams == {}
    with pytest.raises(StreamClosedError):
        await stream.drain()


async def test_pings_of_one_connection_have_a_rate(autojump_clock: Clock) -> None:
    """All its streams share it; another connection has its own."""
    network = MemoryNetwork()
    host, counters = pinged_host(network)
    connection = await network.host().dial(host.peer_id, [host.addr])
    streams = [await connection.open_stream(PING) for _ in range(2)]
    answered = [0, 0]

    async def count(number: int) -> None:
        while data := await streams[number].read():
            answered[number] += len(data) // 32

    async with trio.open_nursery() as nursery:
        for number, stream in enumerate(streams):
            stream.write_nowait(bytes(32 * 200))
            nursery.start_soon(count, number)
        await trio.sleep(0.01)
        assert sum(answered) == 32
        await trio.sleep(10)
        assert 32 + 75 <= sum(answered) <= 32 + 81
        assert counters["pings_delayed"] >= 75
        other = await (await network.host().dial(host.peer_id, [host.addr])).open_stream(PING)
        other.write_nowait(bytes(32))
        with trio.fail_after(0.1):
            assert await other.read() == bytes(32)
        nursery.cancel_scope.cancel()


async def test_ping_streams_of_one_connection_are_bounded(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    host, counters = pinged_host(network)
    connection = await network.host().dial(host.peer_id, [host.addr])
    streams = [await connection.open_stream(PING) for _ in range(9)]
    await trio.sleep(1)
    assert counters["ping_stream_refused"] == 1
    await streams[0].close()
    await trio.sleep(1)
    again = await connection.open_stream(PING)
    again.write_nowait(bytes(32))
    assert await again.read() == bytes(32)


@pytest.mark.real
async def test_identify_pushes_without_end_are_refused_and_leave_nothing(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (host, stranger):
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: bool(host.peer_protocols(stranger.peer_id)))
        for _ in range(40):
            with suppress(StreamClosedError):  # refused
                stream = await connection.open_stream(IDENTIFY_PUSH)
                stream.write_nowait(b"\x00")
                await stream.close()
        await eventually(lambda: host.counters().get("identify_push_refused_rate", 0) >= 20)
        await stranger.disconnect(host.peer_id)
        await eventually(lambda: not host.connections())
        assert host.peer_protocols(stranger.peer_id) == ()


BOUNDS = CircuitBounds()


def relay_and_client(network: MemoryNetwork) -> tuple[MemoryHost, MemoryHost, Counters]:
    """A relay, and a host that reserves there and serves circuits when ``answer`` is set."""
    middle, target, counters = network.host(), network.host(), Counters()
    RelayServer(middle, counters, timeout_s=5.0)
    return middle, target, counters


async def reserve(middle: MemoryHost, target: MemoryHost) -> None:
    connection = await target.dial(middle.peer_id, [middle.addr])
    stream = await connection.open_stream(HOP)
    stream.write_nowait(encode_length_prefixed(HopMessage(type=HopMessage.RESERVE).SerializeToString()))
    assert HopMessage.FromString(await read_length_prefixed(stream, 4_096)).status == circuit_pb2.OK
    await stream.close()


def connect_message(target: MemoryHost) -> bytes:
    ask = HopMessage(type=HopMessage.CONNECT)
    ask.peer.id = peer_id_bytes(target.peer_id)
    return encode_length_prefixed(ask.SerializeToString())


async def test_circuits_asked_for_at_the_same_time_keep_to_the_limit(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    middle, target, counters = relay_and_client(network)

    async def accept(stream: ByteStream) -> None:
        await read_length_prefixed(stream, 4_096)
        await trio.sleep(1)
        answer = StopMessage(type=StopMessage.STATUS, status=circuit_pb2.OK)
        await stream.write(encode_length_prefixed(answer.SerializeToString()))
        await trio.sleep_forever()

    target.set_stream_handler(STOP, accept)
    await reserve(middle, target)
    connection = await network.host().dial(middle.peer_id, [middle.addr])
    for _ in range(3 * BOUNDS.per_source_max):
        (await connection.open_stream(HOP)).write_nowait(connect_message(target))
    await trio.sleep(3)
    assert counters["relay_circuits"] == BOUNDS.per_pair_max
    assert counters["relay_refused_circuits_max"] == 3 * BOUNDS.per_source_max - BOUNDS.per_pair_max
    await connection.close()
    await trio.sleep(3)
    again = await (await network.host().dial(middle.peer_id, [middle.addr])).open_stream(HOP)
    again.write_nowait(connect_message(target))
    assert HopMessage.FromString(await read_length_prefixed(again, 4_096)).status == circuit_pb2.OK


async def test_a_circuit_that_its_target_does_not_answer_leaves_nothing(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    middle, target, counters = relay_and_client(network)

    async def never_answer(stream: ByteStream) -> None:
        await trio.sleep_forever()

    target.set_stream_handler(STOP, never_answer)
    await reserve(middle, target)
    connection = await network.host().dial(middle.peer_id, [middle.addr])
    for _ in range(40):
        (await connection.open_stream(HOP)).write_nowait(connect_message(target))
    await trio.sleep(10)
    assert counters["relay_circuits"] == 0 and counters["relay_refused_timeout"] == BOUNDS.per_pair_max
    assert middle.connections(target.peer_id)[0].streams == {}


async def test_a_host_without_files_left_says_so_once_a_minute(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()

    class Exhausted:
        socket = trio.socket.socket()

        async def accept(self) -> None:
            await trio.lowlevel.checkpoint()
            raise OSError(errno.EMFILE, "Too many open files")

    async def refuse(*_: Any) -> None:
        raise AssertionError("nothing is accepted")

    listener: Any = Exhausted()
    with trio.move_on_after(179):
        await TCPListener(listener, "tcp", refuse, None, counters).serve()
    assert counters["accept_out_of_resources"] > 1_000
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 3


def refs(connection: Any) -> list[weakref.ref[object]]:
    """Weak references to the parts of a connection."""
    return [weakref.ref(part) for part in (connection, connection._muxer, connection._muxer._yamux)]


@pytest.mark.real
async def test_a_connection_that_ended_is_no_work_for_the_garbage_collector(two_hosts: Any, eventually: Any) -> None:
    """Thousands of them in cycles made the collector hold up all requests for a tenth of a second."""
    async with two_hosts() as (host, stranger):
        ended = list[weakref.ref[object]]()
        gc.disable()
        try:
            for _ in range(3):
                connection = await stranger.dial(host.peer_id, host.listen_addrs())
                await stranger.ping(host.peer_id)
                ended += refs(host.connections()[0]) + refs(connection)
                del connection
                await stranger.disconnect(host.peer_id)
                await eventually(lambda: not host.connections())
            assert len(ended) == 18
            await eventually(lambda: not any(part() for part in ended))
        finally:
            gc.enable()


@pytest.mark.real
async def test_streams_that_never_send_are_not_a_task_each(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts(limits=Limits(stream_open_timeout_s=1.0)) as (host, stranger):
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        await stranger.ping(host.peer_id)
        await trio.testing.wait_all_tasks_blocked(0.05)
        before = trio.lowlevel.current_statistics().tasks_living
        held = [await connection._muxer.open() for _ in range(20)]
        await eventually(lambda: trio.lowlevel.current_statistics().tasks_living >= before + NEGOTIATING_UNPROVEN_MAX)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert trio.lowlevel.current_statistics().tasks_living <= before + NEGOTIATING_UNPROVEN_MAX
        assert await stranger.ping(host.peer_id, timeout_s=10) > 0  # its own turn comes when those before it gave up
        assert len(held) == 20


async def hold(stream: ByteStream) -> None:
    """A handler that reads nothing."""
    await trio.sleep_forever()


@pytest.mark.real
async def test_a_stranger_that_fills_its_windows_is_ended_and_a_verified_peer_is_not(
    two_hosts: Any, open_host: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve such connections held 900 MiB."""
    limits = Limits(stream_open_timeout_s=30.0)
    async with two_hosts(limits=limits) as (host, stranger), open_host(limits=limits) as member:
        host.set_stream_handler("/hold/1", hold)
        await member.dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: bool(host.connections(member.peer_id)))
        (verified,) = host.connections(member.peer_id)
        host.protect(verified, "a realm")
        ends = [await other.dial(host.peer_id, host.listen_addrs()) for other in (stranger, member)]
        await eventually(lambda: len(host.connections()) == 2)
        for connection in ends:
            for stream in [await connection.open_stream("/hold/1") for _ in range(12)]:
                stream.write_nowait(bytes(250_000))
        await eventually(lambda: not host.connections(stranger.peer_id))
        await eventually(lambda: host.counters()["memory_bytes"] >= 12 * 250_000)
        assert not verified.is_closed
        counters = host.counters()
        assert counters["resources_ended_connection"] == 1
        assert counters["memory_bytes_unproven"] == 0
        assert counters["memory_bytes_largest_peer"] >= 12 * 250_000
        assert "memory" in caplog.text and "resources_ended_connection" in caplog.text
        host.unprotect(verified, "a realm")
        assert host.counters()["memory_bytes_unproven"] >= 12 * 250_000
        await member.disconnect(host.peer_id)
        await eventually(lambda: host.counters()["memory_bytes"] == 0)


@pytest.mark.real
async def test_a_flood_of_control_frames_ends_the_connection_and_reports_why(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (host, stranger):
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        yamux = connection._muxer._yamux
        for number in range(20_000):
            yamux._core.ping(number)
            if number % 500 == 0:
                await trio.lowlevel.checkpoint()
        await eventually(lambda: not host.connections(stranger.peer_id))
        await eventually(lambda: connection.is_closed)
        assert host.counters()["mux_control_rate_exceeded"] == 1
        assert await stranger.ping(host.peer_id) > 0  # a new connection begins anew


@pytest.mark.real
async def test_strangers_of_an_address_block_do_not_end_the_connections_that_a_relay_serves(
    open_host: Any, eventually: Any
) -> None:
    """The target's connection to the relay was the oldest unproven one of its block, and made room for strangers."""
    few = Limits(connections_unproven_per_address_block_max=6)
    async with (
        open_host(relay="server", limits=few) as middle,
        open_host(relay="client", listen=[]) as target,
        open_host(relay="client", listen=[]) as dialler,
    ):
        await target.dial(middle.peer_id, middle.listen_addrs())
        await eventually(lambda: bool(target.listen_addrs()))
        connection = await dialler.dial(target.peer_id, target.listen_addrs())
        async with AsyncExitStack() as stack:
            for _ in range(12):
                stranger = await stack.enter_async_context(open_host(listen=[]))
                await stranger.dial(middle.peer_id, middle.listen_addrs())
            assert middle.counters()["resources_ended_address_block"] >= 8
            await dialler.ping(target.peer_id)
        assert not connection.is_closed
        assert target.counters().get("relay_reservation_lost", 0) == 0
