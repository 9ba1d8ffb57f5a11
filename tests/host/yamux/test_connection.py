"""The yamux connection on trio: tasks, cancellation, liveness, closing."""

import os
import unittest.mock
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from dep2p.errors import LocalProtocolError, StreamClosedError
from dep2p.host.interface import ByteStream, Connection
from dep2p.host.scopes import new_scope
from dep2p.host.yamux.byte_stream import YamuxByteStream
from dep2p.host.yamux.connection import LINGER_S, WRITE_HIGH_BYTES, YamuxConnection, YamuxStream
from dep2p.host.yamux.frames import DATA, FIN, SYN, WINDOW_INITIAL_BYTES, WINDOW_UPDATE, encode_header
from dep2p.limits import Limits

MIB = 1_048_576
NO_CONNECTION: Any = None  # these tests never ask a stream for the host's connection

Streams = tuple[YamuxByteStream, YamuxByteStream]


def as_bytes(stream: YamuxStream) -> YamuxByteStream:
    return YamuxByteStream(stream, NO_CONNECTION, "/test/1")


async def open_streams(one: YamuxConnection, other: YamuxConnection) -> Streams:
    mine = await one.open_stream()
    return as_bytes(mine), as_bytes(await other.accept_stream())


async def read_exactly(stream: ByteStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = await stream.read(size - len(data))
        assert more, f"ended after {len(data)} of {size} bytes"
        data += more
    return bytes(data)


async def read_to_end(stream: ByteStream) -> bytes:
    data = bytearray()
    while more := await stream.read():
        data += more
    return bytes(data)


async def echo(connection: YamuxConnection) -> None:
    """Send back what comes on every stream."""

    async def serve(stream: ByteStream) -> None:
        while data := await stream.read():
            await stream.write(data)
        await stream.close()

    async with trio.open_nursery() as nursery:
        try:
            while True:
                nursery.start_soon(serve, as_bytes(await connection.accept_stream()))
        except MuxedConnUnavailable:
            nursery.cancel_scope.cancel()


async def still_works(one: YamuxConnection, other: YamuxConnection) -> None:
    mine, theirs = await open_streams(one, other)
    await mine.write(b"still")
    await mine.close_write()
    assert await read_to_end(theirs) == b"still"
    await theirs.close()


async def cancelled_after(steps: int, call: Callable[[], Awaitable[Any]]) -> bool:
    """Run ``call`` and cancel it after ``steps`` turns of the scheduler; True when that came before its end."""
    with new_scope() as scope:
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            nursery.start_soon(stop)
            await call()
            nursery.cancel_scope.cancel()
    return scope.cancelled_caught


# Carrying bytes


@pytest.mark.parametrize("kind", ["socket", "memory"])
async def test_both_directions_carry_bytes_whole(open_pair: Any, kind: str) -> None:
    data = bytes(range(256)) * 12_000
    with trio.fail_after(20):
        async with open_pair(kind) as (one, other), trio.open_nursery() as nursery:
            nursery.start_soon(echo, other)
            stream = as_bytes(await one.open_stream())

            async def send() -> None:
                await stream.write(data)
                await stream.close_write()

            nursery.start_soon(send)
            assert await read_to_end(stream) == data
            nursery.cancel_scope.cancel()


async def test_a_thousand_streams_at_once(open_pair: Any) -> None:
    answered = 0

    with trio.fail_after(30):
        async with open_pair() as (one, other), trio.open_nursery() as nursery:
            nursery.start_soon(echo, other)

            async def ask(number: int) -> None:
                nonlocal answered
                stream = as_bytes(await one.open_stream())
                await stream.write(b"%d" % number)
                await stream.close_write()
                assert await read_to_end(stream) == b"%d" % number
                answered += 1

            async with trio.open_nursery() as asking:
                for number in range(1_024):
                    asking.start_soon(ask, number)
            assert answered == 1_024
            await trio.testing.wait_all_tasks_blocked()
            assert one.stream_count == other.stream_count == 0
            nursery.cancel_scope.cancel()


async def test_urgent_and_queued_writes_arrive_in_order(open_pair: Any) -> None:
    with trio.fail_after(20):
        async with open_pair() as (one, other):
            mine, theirs = await open_streams(one, other)
            expected = bytearray()
            for number in range(2_000):
                part = b"%06d" % number * (1 + number % 40)
                expected += part
                mine.write_nowait(part, urgent=number % 3 != 0)
                if number % 50 == 0:
                    await mine.drain(WRITE_HIGH_BYTES)
                if number % 7 == 0:
                    await trio.lowlevel.checkpoint()
            assert await read_exactly(theirs, len(expected)) == expected


async def test_an_urgent_write_is_on_the_wire_before_the_caller_goes_on(open_pair: Any) -> None:
    async with open_pair(start_other=False) as (one, other):
        stream = as_bytes(await one.open_stream())
        wire: Any = other.secured_conn
        socket = wire._socket.socket._sock
        await trio.testing.wait_all_tasks_blocked()
        before = len(socket.recv(65_536, trio.socket.MSG_PEEK))
        stream.write_nowait(b"now", urgent=True)
        assert len(socket.recv(65_536, trio.socket.MSG_PEEK)) == before + 2 + 12 + 3 + 16
        stream.write_nowait(b"later")
        assert stream.unsent_bytes == 5


async def test_what_many_streams_queue_goes_out_in_few_writes(open_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_pair() as (one, other):
        pairs = [await open_streams(one, other) for _ in range(100)]
        await trio.testing.wait_all_tasks_blocked()
        writes: list[int] = []
        write = os.write

        def counting(fd: int, data: bytes | memoryview) -> int:
            writes.append(len(data))
            return write(fd, data)

        monkeypatch.setattr(os, "write", counting)
        for mine, _ in pairs:
            for _ in range(10):
                mine.write_nowait(bytes(50))
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.undo()
        assert [len(await theirs.read()) for _, theirs in pairs] == [500] * 100
        assert len(writes) == 1


# Back-pressure


async def test_a_paused_receiver_stops_the_sender(open_pair: Any) -> None:
    with trio.fail_after(20):
        async with open_pair() as (one, other), trio.open_nursery() as nursery:
            mine, theirs = await open_streams(one, other)
            got = bytearray()
            ended = trio.Event()
            theirs.set_receiver(got.extend, lambda _error: ended.set())
            theirs.pause_receiving()
            written = 0

            async def send() -> None:
                nonlocal written
                for _ in range(100):
                    await mine.write(bytes(65_536))
                    written += 65_536
                await mine.close_write()

            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            assert not got
            assert written <= WINDOW_INITIAL_BYTES + WRITE_HIGH_BYTES + 65_536
            assert one.unsent_bytes == mine.unsent_bytes <= WRITE_HIGH_BYTES + 65_536
            theirs.resume_receiving()
            await ended.wait()
            assert len(got) == 100 * 65_536


async def test_bulk_streams_leave_space_for_a_small_request(open_pair: Any) -> None:
    with trio.fail_after(30):
        async with open_pair() as (one, other), trio.open_nursery() as nursery:
            nursery.start_soon(echo, other)
            small = as_bytes(await one.open_stream())
            sent = 0

            async def flood() -> None:
                nonlocal sent
                stream = as_bytes(await one.open_stream())
                stream.set_receiver(lambda _data: None, lambda _error: None)
                while True:
                    await stream.write(bytes(65_536))
                    sent += 65_536

            for _ in range(4):
                nursery.start_soon(flood)
            for _ in range(20):
                before = sent
                small.write_nowait(b"ping", urgent=True)
                assert await read_exactly(small, 4) == b"ping"
                # What may be on the way before it: socket buffers and one round of the writer, not the streams' queues.
                assert sent - before < 4 * MIB
            nursery.cancel_scope.cancel()


async def test_drain_waits_for_the_mark_and_ends_with_the_stream(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            mine, theirs = await open_streams(one, other)
            mine.write_nowait(bytes(WINDOW_INITIAL_BYTES + 100_000))
            await mine.drain(100_000)
            assert mine.unsent_bytes == 100_000
            failed: list[str] = []

            async def wait() -> None:
                with pytest.raises(StreamClosedError):
                    await mine.drain()
                failed.append("drain")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                theirs.reset()
            assert failed == ["drain"]
            with pytest.raises(StreamClosedError):
                await mine.drain(1_000_000)


# Cancellation


@pytest.mark.parametrize("kind", ["socket", "memory"])
@pytest.mark.parametrize("steps", range(12))
async def test_cancelling_any_call_leaves_the_connection_usable(open_pair: Any, steps: int, kind: str) -> None:
    with trio.fail_after(20):
        async with open_pair(kind) as (one, other):
            mine, theirs = await open_streams(one, other)
            data = bytes(range(256)) * 3_000
            await cancelled_after(steps, lambda: theirs.read())
            await cancelled_after(steps, lambda: mine.write(data))  # taken whole or not at all
            await cancelled_after(steps, lambda: mine.drain())
            sent = data if mine.unsent_bytes or one.counters()["bytes_out"] > 10_000 else b""
            await cancelled_after(steps, lambda: one.open_stream())
            await cancelled_after(steps, lambda: mine.close_write())
            await mine.close_write()
            assert await read_to_end(theirs) == sent
            await cancelled_after(steps, lambda: theirs.close())
            await theirs.close()
            await cancelled_after(steps, lambda: other.accept_stream())
            muxed = await one.open_stream()
            await cancelled_after(steps, lambda: muxed.write(b"x" * 1_000_000))
            await cancelled_after(steps, lambda: muxed.reset())
            await muxed.reset()
            while (accepted := await accept_now(other)) is not None:
                accepted.reset_nowait()
            await still_works(one, other)


async def accept_now(connection: YamuxConnection) -> YamuxStream | None:
    """A stream that waits to be accepted, once all frames have arrived."""
    await trio.testing.wait_all_tasks_blocked()
    with trio.move_on_after(0.01):
        return await connection.accept_stream()
    return None


@pytest.mark.parametrize("steps", range(8))
async def test_a_cancelled_close_still_closes(open_pair: Any, steps: int) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            mine, theirs = await open_streams(one, other)
            await cancelled_after(steps, lambda: one.close())
            assert one.is_closed
            assert one.close_reason == "closed on this side"
            await other.event_closed.wait()
            for stream in (mine, theirs):
                with pytest.raises(StreamClosedError):
                    await stream.read()


async def test_cancelling_the_connection_task_closes_it(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair(start_other=False) as (one, other):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other.start)
                await open_streams(one, other)
                nursery.cancel_scope.cancel()
            assert other.is_closed
            await one.event_closed.wait()
            assert not one.is_established


# Liveness


async def test_a_peer_that_stops_is_noticed_within_interval_and_timeout(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    limits = Limits(liveness_interval_s=15, liveness_timeout_s=10)
    async with open_pair("memory", limits=limits, other_limits=Limits(liveness_interval_s=0)) as (one, other):
        mine, theirs = await open_streams(one, other)
        await trio.sleep(100)
        assert not one.is_closed
        assert one.rtt_s is not None
        assert 0 <= one.rtt_s < 1
        frozen: Any = other.secured_conn
        frozen._raw.is_frozen = True
        stopped_s = trio.current_time()
        await one.event_closed.wait()
        assert one.close_reason == "liveness"
        assert trio.current_time() - stopped_s <= 25 + 1
        with pytest.raises(StreamClosedError, match="liveness"):
            await mine.read()
        assert theirs.unsent_bytes == 0


async def test_a_blocked_writer_does_not_hide_a_peer_that_stopped(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    limits = Limits(liveness_interval_s=15, liveness_timeout_s=10)
    async with open_pair(limits=limits, start_other=False) as (one, _):
        streams = [as_bytes(await one.open_stream()) for _ in range(20)]
        for stream in streams:
            stream.write_nowait(bytes(WINDOW_INITIAL_BYTES))  # more than the sockets buffer
        with trio.fail_after(26):
            await one.event_closed.wait()
        assert one.close_reason == "liveness"
        for stream in streams:
            with pytest.raises(StreamClosedError):
                await stream.drain()


async def test_a_busy_peer_without_a_pong_is_not_taken_for_dead(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    limits = Limits(liveness_interval_s=5, liveness_timeout_s=2)
    async with open_pair("memory", limits=limits, other_limits=Limits(liveness_interval_s=0)) as (one, other):
        mine, theirs = await open_streams(one, other)
        mute: Any = other
        mute._core.send_control = unittest.mock.Mock()  # neither pongs nor updates any more
        mine.set_receiver(lambda _data: None, lambda _error: None)
        for _ in range(60):
            theirs.write_nowait(b"busy")
            await trio.sleep(1)
        assert not one.is_closed
        await trio.sleep(5 + 2 * 2 + 1)
        assert one.close_reason == "liveness"


async def test_streams_closed_here_are_reset_when_the_peer_keeps_them_open(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_pair("memory", limits=Limits()) as (one, other):
        mine, theirs = await open_streams(one, other)
        await mine.close()
        await trio.sleep(LINGER_S - 16)
        assert one.stream_count == other.stream_count == 1
        await trio.sleep(60)
        assert one.stream_count == other.stream_count == 0
        assert one.counters()["resets_lingering"] == 1
        with pytest.raises(StreamClosedError):
            theirs.write_nowait(b"x")


async def test_a_stream_closed_here_is_kept_while_its_bytes_go(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_pair("memory", limits=Limits()) as (one, other):
        mine, theirs = await open_streams(one, other)
        mine.write_nowait(bytes(2_000_000))
        await mine.close()
        got = 0
        while data := await theirs.read(5_000):  # 400 s for all
            got += len(data)
            await trio.sleep(1)
        assert got == 2_000_000
        await theirs.close()
        assert one.counters()["resets_lingering"] == 0


def grant(connection: Any, size: int) -> None:
    """Let the other end send so many bytes on the only stream, read or not."""
    [stream] = connection._core.streams.values()
    stream.receive_credit += size
    connection._core.send_control(WINDOW_UPDATE, 0, stream.id, size)


async def test_a_peer_that_lets_a_byte_go_now_and_then_holds_no_stream_that_was_closed(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_pair("memory", limits=Limits()) as (one, other):
        mine, _theirs = await open_streams(one, other)
        mine.write_nowait(bytes(2_000_000))
        await mine.close()
        for _ in range(30):
            if one.stream_count == 0:
                break
            grant(other, 1)
            await trio.sleep(20)
        assert one.stream_count == 0
        assert one.counters()["resets_lingering"] == 1


async def test_a_peer_that_grants_more_than_it_can_have_read_holds_no_stream_that_was_closed(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_pair("memory", limits=Limits()) as (one, other):
        mine, _theirs = await open_streams(one, other)
        await mine.write(b"all of it")
        await mine.close()
        for _ in range(30):
            if one.stream_count == 0:
                break
            grant(other, 16_777_216)
            await trio.sleep(20)
        assert one.stream_count == 0 and not one.is_closed


async def test_a_ping_behind_bytes_that_go_slowly_is_waited_for(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    limits = Limits(liveness_interval_s=5, liveness_timeout_s=2)
    async with open_pair("memory", limits=limits, other_limits=Limits(liveness_interval_s=0)) as (one, other):
        mute: Any = other
        mute._core.send_control = unittest.mock.Mock()
        began = trio.current_time()

        class SlowWayUp:
            """The connection, with the kernel's word on what has arrived: after 100 s the ping."""

            offered_bytes = 1_000_000

            def __init__(self, pipe: Any) -> None:
                self._pipe = pipe

            def __getattr__(self, name: str) -> Any:
                return getattr(self._pipe, name)

            def arrived_bytes(self) -> int:
                return int((trio.current_time() - began) * 10_000)

        slow: Any = one
        slow._pipe = SlowWayUp(slow._pipe)
        await trio.sleep(98)
        assert not one.is_closed
        await trio.sleep(8)
        assert one.close_reason == "liveness"


# Closing


async def test_closing_is_idempotent_and_calls_back_once(open_pair: Any) -> None:
    calls: list[str] = []
    with trio.fail_after(10):
        async with open_pair() as (one, other):

            async def on_close() -> None:
                calls.append("one")
                await one.close()  # as py-libp2p's swarm does

            def on_close_sync() -> None:
                calls.append("other")

            one.on_close = on_close
            other.on_close = on_close_sync
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(one.close)
            await one.close()
            await other.event_closed.wait()
        assert sorted(calls) == ["one", "other"]


async def test_what_is_queued_leaves_before_the_connection_closes(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            mine, theirs = await open_streams(one, other)
            got = bytearray()
            theirs.set_receiver(got.extend, lambda _error: None)
            mine.write_nowait(bytes(200_000))
            await one.close()
            await other.event_closed.wait()
            assert len(got) == 200_000
            assert other.close_reason.startswith("the peer")


async def test_closing_a_stuck_connection_takes_a_bounded_time(
    open_pair: Any, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_pair(start_other=False) as (one, _):
        for _ in range(20):
            (await one.open_stream()).write_nowait(bytes(WINDOW_INITIAL_BYTES))
        began_s = trio.current_time()
        await one.close()
        assert trio.current_time() - began_s <= 0.3
        assert one.unsent_bytes == 0


async def test_a_connection_that_failed_before_it_was_started_ends_when_it_is(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair(start_other=False) as (_one, other):
            other.fail("lost before the start")
            await other.start()
            await other.close()
            assert other.event_closed.is_set()


async def test_a_connection_closed_before_it_was_started_never_runs(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair(start_other=False) as (one, other):
            await other.close()
            assert other.is_closed
            await other.start()
            assert other.event_started.is_set()
            await one.event_closed.wait()


async def test_after_the_end_every_call_fails(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            mine, theirs = await open_streams(one, other)
            ends: list[BaseException | None] = []
            theirs.set_receiver(lambda _data: None, ends.append)
            waiting: list[str] = []

            async def accept() -> None:
                with pytest.raises(MuxedConnUnavailable):
                    await other.accept_stream()
                waiting.append("accept")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept)
                await trio.testing.wait_all_tasks_blocked()
                await one.close()
            assert waiting == ["accept"]
            assert [type(end) for end in ends] == [StreamClosedError]
            for stream in (mine, theirs):
                assert stream.is_write_closed
                stream.reset()
                await stream.close()
                for call in (stream.write, stream.write_nowait):
                    with pytest.raises(StreamClosedError):
                        result = call(b"x")
                        if result is not None:
                            await result
            with pytest.raises(StreamClosedError):
                await one.open_stream()
            with pytest.raises(MuxedStreamError):
                await one.open_stream()


async def test_a_violation_ends_the_connection_and_reports_the_peer(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            rogue: Any = one
            rogue._core.send_queue.send_control(7, 0, 0, 0)
            await other.event_closed.wait()
            assert other.close_reason == "protocol error: yamux frame type 7"
            await one.event_closed.wait()
            assert one.close_reason == "the peer ended the connection with yamux code 1"


# Limits


async def test_streams_beyond_the_limit_fail_at_once_on_both_sides(open_pair: Any) -> None:
    few, many = Limits(liveness_interval_s=0, streams_per_connection_max=3), Limits(liveness_interval_s=0)
    with trio.fail_after(10):
        async with open_pair(limits=many, other_limits=few) as (one, other):
            opened = [await one.open_stream() for _ in range(5)]
            await trio.testing.wait_all_tasks_blocked()
            assert [stream.error is None for stream in opened] == [True] * 3 + [False] * 2
            assert other.counters()["streams_refused_limit"] == 2
            with pytest.raises(StreamClosedError, match="3 streams"):
                await other.open_stream()


async def test_opening_waits_while_the_peer_has_not_acknowledged_256_streams(open_pair: Any) -> None:
    opened = 0
    with trio.fail_after(10):
        async with open_pair() as (one, other), trio.open_nursery() as nursery:

            async def open_many() -> None:
                nonlocal opened
                for _ in range(300):
                    await one.open_stream()
                    opened += 1

            nursery.start_soon(open_many)
            await trio.testing.wait_all_tasks_blocked()
            assert opened == 256
            for _ in range(300):
                await other.accept_stream()
            await trio.testing.wait_all_tasks_blocked()
            assert opened == 300
            assert other.counters()["streams_refused_backlog"] == 0


async def test_a_flood_of_streams_is_refused_and_counted(open_pair: Any) -> None:
    with trio.fail_after(20):
        async with open_pair(start_other=False) as (one, other):
            for first in range(2, 20_002, 2_000):
                opened = range(first, first + 2_000, 2)
                await other.secured_conn.write(
                    b"".join(encode_header(WINDOW_UPDATE, SYN, number, 0) for number in opened)
                )
                await trio.testing.wait_all_tasks_blocked()
                await other.secured_conn.read(MIB)
            assert one.stream_count == 256
            assert one.counters()["streams_refused_backlog"] == 10_000 - 256
            assert not one.is_closed


async def test_what_came_before_sending_failed_is_read(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair(start_other=False) as (one, other):
            await other.secured_conn.write(encode_header(WINDOW_UPDATE, SYN, 2, 0))
            stream = as_bytes(await one.accept_stream())
            await trio.testing.wait_all_tasks_blocked()
            await other.secured_conn.read(MIB)  # or else closing would be a reset of the socket
            # All in one step, so that the write fails before anything is read.
            assert other.secured_conn.send_now(encode_header(DATA, FIN, 2, 5) + b"adieu")
            other.secured_conn.abort()
            stream.write_nowait(b"into the void", urgent=True)
            await one.event_closed.wait()
            assert await read_to_end(stream) == b"adieu"
            with pytest.raises(StreamClosedError):
                await stream.write(b"x")


# py-libp2p's face


async def test_the_face_for_py_libp2p_raises_its_exceptions(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            mine = await one.open_stream()
            theirs = await other.accept_stream()
            assert (mine.stream_id, mine.muxed_conn, await mine.read(0)) == (1, one, b"")
            await mine.write(b"abc")
            assert (await theirs.read(2), await theirs.read()) == (b"ab", b"c")
            await mine.close()
            with pytest.raises(MuxedStreamClosed):
                await mine.write(b"x")
            with pytest.raises(MuxedStreamEOF):
                await theirs.read()
            await theirs.write(b"after your close")
            assert await mine.read(-1) == b"after your close"
            await theirs.reset()
            for call in (mine.read, theirs.read, lambda: theirs.write(b"x"), lambda: mine.write(b"x")):
                with pytest.raises(MuxedStreamReset):
                    await call()
            with pytest.raises(NotImplementedError):
                mine.set_deadline(1)
            async with await one.open_stream() as scoped:
                await other.accept_stream()
            assert scoped.is_write_closed


async def test_our_face_keeps_the_contract_of_byte_stream(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            mine, theirs = await open_streams(one, other)
            stream: ByteStream = mine
            connection: Connection = stream.connection
            assert connection is NO_CONNECTION
            assert stream.protocol == "/test/1"
            mine.set_protocol("/test/2")
            assert stream.protocol == "/test/2"
            assert await mine.read(0) == b""
            await theirs.write(b"")
            await theirs.write(b"late")
            await mine.close()
            with pytest.raises(StreamClosedError):
                await mine.read()
            assert await theirs.read() == b""
            theirs.write_nowait(b"nobody reads this, and nobody minds")
            await theirs.close_write()
            await trio.testing.wait_all_tasks_blocked()
            assert one.stream_count == other.stream_count == 0
            mine, theirs = await open_streams(one, other)
            mine.set_receiver(lambda _data: None, lambda _error: None)
            with pytest.raises(LocalProtocolError):
                await mine.read()
            theirs.reset()
            assert "reset" in repr(theirs) or theirs.is_write_closed


async def test_a_reader_that_waits_is_woken_by_the_close_of_its_own_side(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            mine, _ = await open_streams(one, other)
            failed: list[str] = []

            async def read() -> None:
                with pytest.raises(StreamClosedError):
                    await mine.read()
                failed.append("read")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.testing.wait_all_tasks_blocked()
                await mine.close()
            assert failed == ["read"]
