"""Streams that take longer than their time limits: what flows is not aborted, in whichever direction it flows."""

import random

import pytest
import trio

from dep2p.errors import RequestTimeoutError
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.nodes import settled, sides

BYTES_PER_S = 16_000


def noise(size: int) -> bytes:
    return random.Random(7).randbytes(size)  # does not compress


async def count_and_report(stream: MessageStream) -> None:
    """Answer at the end: with the number of bytes that came."""
    size = 0
    async for item in stream:
        size += len(item)
    await stream.send(b"%d" % size)
    await stream.send_eof()


@pytest.mark.parametrize("item_bytes", [50_000, 1_000_000])
async def test_one_that_sends_for_minutes_and_waits_for_the_verdict_is_not_aborted(
    autojump_clock: trio.abc.Clock, item_bytes: int
) -> None:
    network = MemoryNetwork(bytes_per_s=BYTES_PER_S)
    async with sides(network=network) as (a, b):
        b.messaging.on_stream("upload", count_and_report)
        began = trio.current_time()
        async with a.messaging.stream(b.peer, "upload") as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                for _ in range(4_000_000 // item_bytes):
                    await stream.send(noise(item_bytes))
                await stream.send_eof()

            nursery.start_soon(send)
            assert await stream.receive() == b"4000000"
        assert trio.current_time() - began > 240


async def test_one_large_item_that_takes_minutes_to_come_is_taken(autojump_clock: trio.abc.Clock) -> None:
    network = MemoryNetwork(bytes_per_s=BYTES_PER_S)
    item = noise(2_000_000)
    got: list[bytes] = []

    async def take(stream: MessageStream) -> None:
        got.extend([each async for each in stream])
        await stream.send(b"done")

    async with sides(network=network) as (a, b):
        b.messaging.on_stream("one", take)
        async with a.messaging.stream(b.peer, "one") as stream:
            await stream.send(item)
            await stream.send_eof()
            assert await stream.receive() == b"done"
    assert got == [item]


async def test_one_in_which_nothing_moves_any_more_is_aborted(autojump_clock: trio.abc.Clock) -> None:
    network = MemoryNetwork(bytes_per_s=BYTES_PER_S)
    async with sides(network=network) as (a, b):
        b.messaging.on_stream("upload", count_and_report)
        async with a.messaging.stream(b.peer, "upload") as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                while True:
                    await stream.send(noise(10_000))

            nursery.start_soon(send)
            with trio.move_on_after(100):
                await stream.receive()
            network.partition(a.peer, b.peer)
            cut_at = trio.current_time()
            with pytest.raises(RequestTimeoutError, match="no item came in time"):
                await stream.receive()
            limits = Limits()
            assert trio.current_time() - cut_at <= 2.5 * limits.stream_first_item_timeout_s
            nursery.cancel_scope.cancel()


async def test_what_was_sent_arrives_after_the_opener_has_left_though_it_takes_minutes(
    autojump_clock: trio.abc.Clock,
) -> None:
    network = MemoryNetwork(bytes_per_s=BYTES_PER_S)
    sizes: list[int] = []

    async def take(stream: MessageStream) -> None:
        sizes.extend([len(item) async for item in stream])

    async with sides(network=network) as (a, b):
        b.messaging.on_stream("last", take)
        async with a.messaging.stream(b.peer, "last") as stream:
            await stream.send(noise(3_000_000))
            await stream.send_eof()
        await trio.sleep(300)
        await settled()
        assert sizes == [3_000_000]
        assert a.count("streams_closed_unfinished") == 0
        assert a.open_streams == b.open_streams == 0
