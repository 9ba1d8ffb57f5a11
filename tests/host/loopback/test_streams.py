"""Streams of a host to itself: bytes, back-pressure, ends, resets, and what a handler's failure does."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dep2p.errors import LocalProtocolError, ProtocolNotSupportedError, StreamClosedError
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, StreamHandler
from dep2p.host.loopback.connection import LoopbackConnection
from dep2p.host.loopback.stream import WINDOW_BYTES
from dep2p.limits import Limits
from dep2p.types import PeerId

OWN = PeerId("12D3KooWGRUVh3JPoQ8qyEbSVRAqbKAqf4P8h2VNLkYrkvH8zH1J")
ECHO = "/test/echo/1.0.0"


@asynccontextmanager
async def loopback(
    handlers: dict[str, StreamHandler], **limits: int
) -> AsyncGenerator[tuple[LoopbackConnection, Counters]]:
    counters = Counters()
    connection = LoopbackConnection(OWN, handlers, Limits(**limits), counters)
    async with trio.open_nursery() as nursery:
        await nursery.start(connection.run)
        yield connection, counters
        nursery.cancel_scope.cancel()


async def echo(stream: ByteStream) -> None:
    while data := await stream.read():
        await stream.write(data)
    await stream.close()


async def read_all(stream: ByteStream, max_bytes: int = 65_536) -> bytes:
    parts = bytearray()
    while data := await stream.read(max_bytes):
        parts += data
    return bytes(parts)


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_537, WINDOW_BYTES + 1, 3_000_000])
async def test_bytes_come_back_whole(autojump_clock: MockClock, size: int) -> None:
    sent = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with loopback({ECHO: echo}) as (connection, _), trio.open_nursery() as nursery:
        stream = await connection.open_stream(ECHO)

        async def send() -> None:
            await stream.write(sent)
            await stream.close_write()

        nursery.start_soon(send)
        assert await read_all(stream, 1_000) == sent


async def test_a_writer_waits_for_a_reader_that_does_not_read(autojump_clock: MockClock) -> None:
    held: list[ByteStream] = []
    done = trio.Event()

    async def hold(stream: ByteStream) -> None:
        held.append(stream)
        await done.wait()

    async with loopback({ECHO: hold}) as (connection, _):
        stream = await connection.open_stream(ECHO)
        written = 0
        with trio.move_on_after(10):
            while True:
                await stream.write(bytes(50_000))
                written += 50_000
        assert WINDOW_BYTES <= written <= 3 * WINDOW_BYTES
        before = stream.unsent_bytes
        assert before > 0
        assert len(await held[0].read(200_000)) == 200_000
        await wait_all_tasks_blocked()
        assert stream.unsent_bytes < before
        done.set()


async def test_pushed_bytes_wait_while_the_receiver_pauses(autojump_clock: MockClock) -> None:
    got = bytearray()
    ends: list[BaseException | None] = []

    async def push(stream: ByteStream) -> None:
        stream.pause_receiving()
        stream.set_receiver(got.extend, ends.append)
        await trio.sleep(5)
        stream.resume_receiving()
        await trio.sleep_forever()

    async with loopback({ECHO: push}) as (connection, _):
        stream = await connection.open_stream(ECHO)
        stream.write_nowait(bytes(WINDOW_BYTES * 2))
        await stream.close_write()
        await trio.sleep(1)
        assert not got and stream.unsent_bytes == WINDOW_BYTES
        await trio.sleep(10)
        assert len(got) == WINDOW_BYTES * 2 and ends == [None] and stream.unsent_bytes == 0


async def test_a_receiver_is_never_called_from_within_the_writers_step(autojump_clock: MockClock) -> None:
    got: list[bytes] = []

    async def push(stream: ByteStream) -> None:
        stream.set_receiver(lambda data: got.append(bytes(data)), lambda _error: None)
        await trio.sleep_forever()

    async with loopback({ECHO: push}) as (connection, _):
        stream = await connection.open_stream(ECHO)
        await wait_all_tasks_blocked()
        stream.write_nowait(b"x", urgent=True)
        assert got == []
        await wait_all_tasks_blocked()
        assert got == [b"x"]


async def test_a_reset_ends_both_ends_and_all_waits(autojump_clock: MockClock) -> None:
    handler_error: list[Exception] = []

    async def wait(stream: ByteStream) -> None:
        try:
            await stream.read()
        except StreamClosedError as error:
            handler_error.append(error)

    async with loopback({ECHO: wait}) as (connection, _):
        stream = await connection.open_stream(ECHO)
        await wait_all_tasks_blocked()
        stream.reset()
        stream.reset()
        await wait_all_tasks_blocked()
        assert "peer reset" in str(handler_error[0])
        for call in (stream.read, stream.drain, lambda: stream.write(b"x")):
            with pytest.raises(StreamClosedError):
                await call()
        assert not connection._streams  # pyright: ignore[reportPrivateUsage]


async def test_a_handler_that_fails_resets_its_stream_alone(autojump_clock: MockClock) -> None:
    async def fail(stream: ByteStream) -> None:
        raise RuntimeError("a fault of this handler")

    async with loopback({"/test/fail/1.0.0": fail, ECHO: echo}) as (connection, counters):
        good = await connection.open_stream(ECHO)
        bad = await connection.open_stream("/test/fail/1.0.0")
        with pytest.raises(StreamClosedError):
            await bad.read()
        assert counters["stream_handler_failed"] == 1
        await good.write(b"still here")
        assert await good.read() == b"still here"


async def test_a_receiver_that_raises_ends_its_stream_alone(autojump_clock: MockClock) -> None:
    def bad_receiver(data: bytes | memoryview) -> None:
        raise RuntimeError("a fault of this receiver")

    async def push(stream: ByteStream) -> None:
        stream.set_receiver(bad_receiver, lambda _error: None)
        await trio.sleep_forever()

    async with loopback({"/test/push/1.0.0": push, ECHO: echo}) as (connection, counters):
        bad = await connection.open_stream("/test/push/1.0.0")
        await wait_all_tasks_blocked()  # the receiver is set
        await bad.write(b"x")
        await wait_all_tasks_blocked()
        assert counters["loopback_receiver_failed"] == 1
        good = await connection.open_stream(ECHO)
        await good.write(b"still here")
        assert await good.read() == b"still here"


async def test_limits_and_wrong_uses_have_clear_errors(autojump_clock: MockClock) -> None:
    async with loopback({ECHO: echo}, streams_per_connection_max=2) as (connection, counters):
        with pytest.raises(ProtocolNotSupportedError, match="does not speak /test/none"):
            await connection.open_stream("/test/none")
        first = await connection.open_stream(ECHO)
        await connection.open_stream(ECHO)
        with pytest.raises(StreamClosedError, match="close some first"):
            await connection.open_stream(ECHO)
        assert counters["loopback_streams_refused_limit"] == 1
        first.set_receiver(lambda _data: None, lambda _error: None)
        with pytest.raises(LocalProtocolError):
            await first.read()
        await first.close()
        await wait_all_tasks_blocked()
        assert await connection.open_stream(ECHO)
        assert first.is_write_closed
        with pytest.raises(StreamClosedError):
            first.write_nowait(b"x")


async def test_the_end_of_the_host_ends_every_stream(autojump_clock: MockClock) -> None:
    async with loopback({ECHO: echo}) as (connection, _):
        stream = await connection.open_stream(ECHO)
    with pytest.raises(StreamClosedError, match="closed"):
        await stream.read()
    with pytest.raises(StreamClosedError, match="closed"):
        await connection.open_stream(ECHO)
