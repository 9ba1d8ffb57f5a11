"""Streams that fail, are left, lost or cut off."""

import logging

import pytest
import trio

from dep2p.errors import (
    HandlerError,
    LocalProtocolError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream
from tests.messaging.nodes import settled, sides


async def echo(stream: MessageStream) -> None:
    async for item in stream:
        await stream.send(item)


# Failing


async def test_a_handler_that_fails_aborts_its_stream_only(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with sides() as (a, b):

        async def broken(stream: MessageStream) -> None:
            await stream.send(b"one")
            raise KeyError("secret detail")

        async def outspoken(stream: MessageStream) -> None:
            assert await stream.receive() == b"x"
            raise HandlerError("disk is full")

        b.messaging.on_stream("broken", broken)
        b.messaging.on_stream("outspoken", outspoken)
        b.messaging.on_stream("echo", echo)
        with caplog.at_level(logging.ERROR, "dep2p.io"):
            async with a.messaging.stream(b.peer, "broken") as stream:
                assert await stream.receive() == b"one"
                with pytest.raises(HandlerError) as failed:
                    await stream.receive()
                assert str(failed.value) == "the handler failed"
                with pytest.raises(HandlerError):
                    await stream.send(b"x")
            assert "secret detail" in caplog.text
            caplog.clear()
            with pytest.raises(HandlerError, match="disk is full"):
                async with a.messaging.stream(b.peer, "outspoken") as stream:
                    await stream.send(b"x")  # and nothing is read: leaving the block tells
            assert not caplog.records
        async with a.messaging.stream(b.peer, "echo") as stream:
            await stream.send(b"x")
            assert await stream.receive() == b"x"


async def test_items_before_an_abort_are_delivered_before_the_error(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def handler(stream: MessageStream) -> None:
            for index in range(5):
                await stream.send(str(index).encode())
            raise HandlerError("enough")

        b.messaging.on_stream("h", handler)
        got: list[bytes] = []
        with pytest.raises(HandlerError, match="enough"):
            async with a.messaging.stream(b.peer, "h") as stream:
                await settled()
                async for item in stream:
                    got.append(item)
        assert got == [b"0", b"1", b"2", b"3", b"4"]


async def test_leaving_the_block_by_an_exception_resets_the_stream(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        ended: list[BaseException] = []

        async def handler(stream: MessageStream) -> None:
            try:
                async for _ in stream:
                    pass
            except StreamClosedError as error:
                ended.append(error)
                raise

        b.messaging.on_stream("h", handler)
        with pytest.raises(RuntimeError, match="mine"):
            async with a.messaging.stream(b.peer, "h") as stream:
                await stream.send(b"x")
                raise RuntimeError("mine")
        await settled()
        assert len(ended) == 1
        assert a.open_streams == b.open_streams == 0
        assert b.count("handlers_failed") == 0


async def test_a_handler_that_does_not_look_is_cancelled_after_the_peer_is_gone(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(close_timeout_s=5)) as (a, b):
        ended_at: list[float] = []

        async def deaf(stream: MessageStream) -> None:
            try:
                await trio.sleep_forever()
            finally:
                ended_at.append(trio.current_time())

        b.messaging.on_stream("deaf", deaf)
        with trio.move_on_after(1):
            async with a.messaging.stream(b.peer, "deaf"):
                await trio.sleep_forever()
        left_at = trio.current_time()
        await trio.sleep(20)
        assert ended_at[0] - left_at == pytest.approx(5, abs=0.1)


async def test_leaving_the_block_early_stops_an_endless_sender(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        ended: list[str] = []

        async def endless(stream: MessageStream) -> None:
            try:
                while True:
                    await stream.send(bytes(10_000))
                    await trio.sleep(0.01)
            except StreamClosedError as error:
                ended.append(str(error))
                raise

        b.messaging.on_stream("endless", endless)
        began = trio.current_time()
        async with a.messaging.stream(b.peer, "endless") as stream:
            async for _ in stream:
                break
        assert trio.current_time() - began < 0.2
        await settled()
        assert ended == ["the peer reads no more items"]
        assert a.open_streams == b.open_streams == 0
        assert b.count("handlers_failed") == 0


async def test_what_was_sent_before_the_block_was_left_is_all_handled(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got: list[bytes] = []

        async def slow(stream: MessageStream) -> None:
            async for item in stream:
                await trio.sleep(1)
                got.append(item)

        b.messaging.on_stream("slow", slow)
        async with a.messaging.stream(b.peer, "slow") as stream:
            for index in range(30):
                await stream.send(str(index).encode())
        await trio.sleep(60)
        assert got == [str(index).encode() for index in range(30)]
        assert a.open_streams == b.open_streams == 0


async def test_what_a_handler_sent_before_it_returned_stays_readable(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def handler(stream: MessageStream) -> None:
            for _ in range(20):
                await stream.send(bytes(100_000))

        b.messaging.on_stream("h", handler)
        async with a.messaging.stream(b.peer, "h") as stream:
            total = 0
            async for item in stream:
                await trio.sleep(2)
                total += len(item)
            assert total == 2_000_000


async def test_a_lost_connection_is_an_error_on_both_sides(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        errors: list[str] = []

        async def handler(stream: MessageStream) -> None:
            try:
                async for _ in stream:
                    pass
            except StreamClosedError:
                errors.append("handler")
                raise

        b.messaging.on_stream("h", handler)
        async with a.messaging.stream(b.peer, "h") as stream:
            await stream.send(b"x")
            await settled()
            await a.host.disconnect(b.peer)
            with pytest.raises(StreamClosedError):
                await stream.receive()
            with pytest.raises(StreamClosedError):
                await stream.send(b"y")
        await settled()
        assert errors == ["handler"]


async def test_sending_after_send_eof_is_a_mistake_of_ours(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "echo") as stream:
            await stream.send_eof()
            await stream.send_eof()
            with pytest.raises(LocalProtocolError):
                await stream.send(b"x")
            assert await stream.receive() is None


async def test_only_one_task_may_read(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "echo") as stream, trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive)
            await trio.sleep(1)
            with pytest.raises(trio.BusyResourceError):
                await stream.receive()
            await stream.send(b"x")


async def test_items_of_several_tasks_never_mix(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(compress_bytes_min=0)) as (a, b):
        got: list[bytes] = []

        async def sink(stream: MessageStream) -> None:
            async for item in stream:
                got.append(item)

        b.messaging.on_stream("sink", sink)
        async with a.messaging.stream(b.peer, "sink") as stream:
            async with trio.open_nursery() as nursery:
                for sender in range(5):

                    async def send(letter: bytes) -> None:
                        for _ in range(4):
                            await stream.send(letter * 700_000)

                    nursery.start_soon(send, bytes([65 + sender]))
            await stream.send_eof()
            assert await stream.receive() is None
        assert len(got) == 20
        assert all(len(item) == 700_000 and len(set(item)) == 1 for item in got)
