"""The proxy with faults, on real sockets of loopback."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio

from dep2p.testing import FaultProxy

pytestmark = pytest.mark.real


@asynccontextmanager
async def echo_behind_a_proxy() -> AsyncGenerator[tuple[FaultProxy, int], None]:
    async def echo(stream: trio.SocketStream) -> None:
        try:
            async for data in stream:
                await stream.send_all(data)
        except trio.BrokenResourceError:
            pass

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, echo, [listener])
            async with FaultProxy.open() as proxy:
                yield proxy, await proxy.forward("127.0.0.1", listener.socket.getsockname()[1])
            nursery.cancel_scope.cancel()


async def read(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = await stream.receive_some()
        assert piece, "the stream ended early"
        data += piece
    return data


async def test_bytes_and_the_end_pass_both_ways() -> None:
    async with echo_behind_a_proxy() as (proxy, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            sent = bytes(range(256)) * 4_000

            async def send() -> None:
                await stream.send_all(sent)
                await stream.send_eof()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                assert await read(stream, len(sent)) == sent
                assert await stream.receive_some() == b""
        assert proxy.counters["connections"] == 1
        assert proxy.counters["bytes"] == 2 * len(sent)


async def test_a_cut_resets_and_refuses_until_resumed() -> None:
    async with echo_behind_a_proxy() as (proxy, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"x")
            assert await read(stream, 1) == b"x"
            proxy.cut()
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        assert proxy.counters["cut"] == proxy.counters["refused"] == 1
        proxy.resume()
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"y")
            assert await read(stream, 1) == b"y"


async def test_held_nothing_passes_and_nothing_is_lost() -> None:
    async with echo_behind_a_proxy() as (proxy, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            proxy.hold()
            await stream.send_all(b"x")
            with trio.move_on_after(0.05) as scope:
                await stream.receive_some()
            assert scope.cancelled_caught
            proxy.resume()
            assert await read(stream, 1) == b"x"


async def test_delay_and_throttle() -> None:
    async with echo_behind_a_proxy() as (proxy, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            proxy.delay_s = 0.05
            started = trio.current_time()
            await stream.send_all(b"x")
            assert await read(stream, 1) == b"x"
            assert trio.current_time() - started >= 0.1
            proxy.delay_s = 0.0
            proxy.bytes_per_s = 10_000
            started = trio.current_time()
            for _ in range(2):
                await stream.send_all(b"x" * 500)
                await read(stream, 500)
            assert trio.current_time() - started >= 0.05


async def test_a_target_that_does_not_answer_is_a_reset() -> None:
    with trio.fail_after(10):
        async with FaultProxy.open() as proxy:
            [closed] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            target = closed.socket.getsockname()[1]
            await closed.aclose()
            port = await proxy.forward("127.0.0.1", target)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()
            assert proxy.counters["refused"] == 1
