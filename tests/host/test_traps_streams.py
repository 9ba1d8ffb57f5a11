"""Stream traps of py-libp2p, against real hosts: hostile negotiation, failing handlers, limits, cancellation."""

from typing import Any

import pytest
import trio

from dep2p.errors import ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.connections.connection import PeerConnection
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits

pytestmark = pytest.mark.real

HEADER = b"\x13/multistream/1.0.0\n"


async def raw_stream(connection: Any) -> Any:
    """A stream without a negotiation, for bytes that no honest peer sends."""
    assert isinstance(connection, PeerConnection)
    return await connection._muxer.open()  # pyright: ignore[reportPrivateUsage]


async def assert_alive(host: Any, other: Any) -> None:
    connection = await host.dial(other.peer_id, other.listen_addrs())
    stream = await connection.open_stream("/echo/1")
    await stream.write(b"still there")
    await stream.close_write()
    assert await stream.read() == b"still there"


async def test_failing_handler_resets_its_stream_and_nothing_else(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):

        async def handler(stream: ByteStream) -> None:
            raise RuntimeError("a bug of the app")

        other.set_stream_handler("/bug/1", handler)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        for _ in range(3):
            with pytest.raises(StreamClosedError):  # the reset may overtake the agreement on the protocol
                await (await connection.open_stream("/bug/1")).read()
        await assert_alive(one, other)  # upstream: the whole swarm is dead, the process lives on as a zombie
        assert other.counters()["stream_handler_failed"] == 3
        assert not connection.is_closed


HOSTILE = {
    "invalid UTF-8 name": HEADER + b"\x05\xff\xfe\xfd\xfc\n",
    "no header": b"\x07hello!\n" * 4,
    "overlong varint": HEADER + b"\xff\xff\xff\xff\x7f" + b"a" * 40,
    "long name": HEADER + b"\x84\x10" + b"/" * 2051 + b"\n",
    "empty name": HEADER + b"\x01\n" + b"\x01\n" * 4,
    "zero length": HEADER + b"\x00\x00\x00\x00\x00",
    "no line feed": HEADER + b"\x06/echo/1",
    "too many proposals": HEADER + b"\x05/nop\n" * 40,
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_negotiation_costs_the_stream_only(two_hosts: Any, payload: bytes, eventually: Any) -> None:
    async with two_hosts() as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        stream = await raw_stream(connection)
        stream.write_nowait(payload)
        with trio.fail_after(5), pytest.raises(StreamClosedError):
            while await stream.read():
                pass
        await assert_alive(one, other)
        assert not connection.is_closed
        assert other.counters()["inbound_stream_malformed_negotiation"] == 1


async def test_silent_stream_is_reset_after_the_open_timeout(two_hosts: Any) -> None:
    async with two_hosts(Limits(stream_open_timeout_s=0.2)) as (one, other):
        stream = await raw_stream(await one.dial(other.peer_id, other.listen_addrs()))
        stream.write_nowait(HEADER)
        with trio.fail_after(5), pytest.raises(StreamClosedError):
            while await stream.read():
                pass
        assert other.counters()["inbound_stream_negotiation_timeout"] == 1


async def test_unknown_protocol_is_refused_by_name(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        with pytest.raises(ProtocolNotSupportedError, match="/nobody/1"):
            await connection.open_stream("/nobody/1")


async def test_handlers_come_and_go_at_run_time_and_peers_are_reported(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        await eventually(lambda: "/echo/1" in one.peer_protocols(other.peer_id))

        async def handler(stream: ByteStream) -> None:
            await stream.close()

        other.set_stream_handler("/late/1", handler)
        assert await (await connection.open_stream("/late/1")).read() == b""
        await eventually(lambda: "/late/1" in one.peer_protocols(other.peer_id))  # upstream: never pushed
        other.remove_stream_handler("/late/1")
        with pytest.raises(ProtocolNotSupportedError):
            await connection.open_stream("/late/1")
        await eventually(lambda: "/late/1" not in one.peer_protocols(other.peer_id))


async def test_10000_streams_in_sequence(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts(trusts=True) as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        before = trio.lowlevel.current_statistics().tasks_living
        for _ in range(10_000):
            stream = await connection.open_stream("/echo/1")
            await stream.close_write()
            assert await stream.read() == b""
            await stream.close()
        await eventually(lambda: trio.lowlevel.current_statistics().tasks_living <= before)
        assert connection.is_closed is False


async def test_stream_over_the_limit_is_refused_at_once(two_hosts: Any) -> None:
    async with two_hosts(trusts=True) as (one, other):
        released = trio.Event()

        async def handler(stream: ByteStream) -> None:
            await released.wait()

        other.set_stream_handler("/hold/1", handler)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        await one.ping(other.peer_id)
        streams: list[ByteStream] = []
        with trio.fail_after(20):
            while len(streams) < 1_024:
                streams.append(await connection.open_stream("/hold/1"))
        with trio.fail_after(0.5), pytest.raises(StreamClosedError):  # upstream: the 257th hangs forever
            await connection.open_stream("/hold/1")
        streams[0].reset()
        streams.append(await connection.open_stream("/hold/1"))
        released.set()


async def test_cancelled_write_leaves_the_connection_usable(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        received = bytearray()
        start, done = trio.Event(), trio.Event()

        async def handler(stream: ByteStream) -> None:
            await start.wait()
            while data := await stream.read():
                received.extend(data)
            done.set()

        other.set_stream_handler("/sink/1", handler)
        connection = await one.dial(other.peer_id, other.listen_addrs())
        stream = await connection.open_stream("/sink/1")
        sent = bytearray()
        for number in range(30):  # the receiver does not read: windows and sockets fill, writes block and are cancelled
            data = bytes([number]) * 50_000
            sent += data
            with trio.move_on_after(0.01):
                await stream.write(data)
        await assert_alive(one, other)  # upstream: half a Noise frame was written, nothing works any more
        start.set()
        with trio.fail_after(10):
            await stream.close_write()
            await done.wait()
        assert received == sent


async def test_cancelled_opens_leave_the_connection_usable(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        await one.ping(other.peer_id)
        before = trio.lowlevel.current_statistics().tasks_living

        async def open_and_reset() -> None:
            (await connection.open_stream("/echo/1")).reset()

        for steps in range(12):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_and_reset)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        await assert_alive(one, other)
        assert not connection.is_closed
        await eventually(lambda: trio.lowlevel.current_statistics().tasks_living <= before)


async def test_open_times_out_when_the_peer_does_not_answer(two_hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts() as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        await one.ping(other.peer_id)

        async def say_nothing(self: PeerConnection, stream: ByteStream) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(PeerConnection, "_serve", say_nothing)
        with pytest.raises(RequestTimeoutError):
            await connection.open_stream("/echo/1", timeout_s=0.2)


async def test_streams_of_a_closed_connection_fail(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        connection = await one.dial(other.peer_id, other.listen_addrs())
        stream = await connection.open_stream("/echo/1")
        await one.disconnect(other.peer_id)
        with pytest.raises(StreamClosedError):
            await stream.read()
        with pytest.raises(StreamClosedError):
            stream.write_nowait(b"x")
        with pytest.raises(StreamClosedError):
            await connection.open_stream("/echo/1")
        stream.reset()


async def test_ping_gives_seconds_as_a_float(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        await one.dial(other.peer_id, other.listen_addrs())
        rtt_s = await one.ping(other.peer_id)
        assert 0 < rtt_s < 1  # upstream: whole milliseconds, 0 here
