"""A peer that reads nothing costs bounded memory for a bounded time, also after it broke the protocol or stopped."""

from contextlib import suppress
from random import Random

import trio
import trio.testing

from dep2p.errors import Dep2pError, ErrorCode, StreamClosedError
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream
from dep2p.protocols.wire.frame import HEADERS, Frame, FrameDecoder, FrameType, encode_error, encode_frame
from dep2p.protocols.wire.headers import encode_headers
from tests.messaging.nodes import quietly, settled, sides

NOISE = Random(7).randbytes(1_000_000)  # nothing that compression would make small


async def test_a_link_of_ours_whose_peer_breaks_the_protocol_and_does_not_read_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(close_timeout_s=5.0)
    async with sides(limits=limits) as (a, b):
        theirs: list[ByteStream] = []

        async def hostile(stream: ByteStream) -> None:
            stream.set_receiver(lambda data: None, lambda error: None)
            stream.pause_receiving()
            theirs.append(stream)

        b.host.set_stream_handler(b.message_protocol, hostile)
        for _ in range(5):
            await a.messaging.notify(b.peer, "n", NOISE)
        await settled()
        link = a.link_to(b)
        assert link.stream.unsent_bytes or link.out.items
        theirs[0].write_nowait(b"GET / HTTP/1.1\r\n")
        await settled()
        assert link.error is not None
        await trio.sleep(2 * limits.close_timeout_s)
        assert not link.out.items and not link.stream.unsent_bytes, "it keeps what nobody reads"
        assert b.peer not in a.messaging._pool.links  # pyright: ignore[reportPrivateUsage]


async def test_a_stream_that_was_aborted_does_not_wait_for_a_peer_that_does_not_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(close_timeout_s=5.0)
    async with sides(limits=limits) as (a, b):

        async def much(stream: MessageStream) -> None:
            for _ in range(10):
                await stream.send(NOISE)

        b.messaging.on_stream("much", much)
        connection = await a.gate.connect(b.peer)
        raw = await connection.open_stream(b.stream_protocol)
        raw.set_receiver(lambda data: None, lambda error: None)
        raw.pause_receiving()
        raw.write_nowait(encode_frame(FrameType.REQUEST, encode_headers({1: "much"}), flags=HEADERS, req_id=1))
        await settled()
        assert b.open_streams == 1
        raw.write_nowait(encode_error(ErrorCode.UNKNOWN, "never mind", req_id=1))
        await trio.sleep(4 * limits.close_timeout_s)
        assert b.open_streams == 0


async def test_a_handler_that_never_reads_ends_when_its_opener_is_lost_with_an_item_unread(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(close_timeout_s=5.0, stream_item_timeout_s=60.0)
    async with sides(limits=limits) as (a, b):

        async def pusher(stream: MessageStream) -> None:
            await trio.sleep_forever()

        b.messaging.on_stream("push", pusher, concurrency=1)
        with suppress(StreamClosedError):
            async with a.messaging.stream(b.peer, "push") as stream:
                await stream.send(b"an item that nobody takes")
                await settled()
                stream.reset()
        await settled()
        await trio.sleep(limits.stream_item_timeout_s + 10)
        assert b.open_streams == 0
        async with a.messaging.stream(b.peer, "push"):
            pass


async def test_a_slow_handler_still_gets_all_items_of_an_opener_that_is_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(close_timeout_s=5.0, stream_item_timeout_s=60.0)
    async with sides(limits=limits) as (a, b):
        got: list[bytes] = []

        async def slow(stream: MessageStream) -> None:
            async for item in stream:
                await trio.sleep(50)
                got.append(item)

        b.messaging.on_stream("slow", slow)
        with suppress(StreamClosedError):
            async with a.messaging.stream(b.peer, "slow") as stream:
                for n in range(6):
                    await stream.send(b"%d" % n)
                await settled()
                stream.reset()
        await trio.sleep(400)
        assert got == [b"0", b"1", b"2", b"3", b"4"] or got == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert b.open_streams == 0


async def test_leaving_a_stream_while_another_task_reads_it_ends_that_task(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with sides() as (a, b), trio.open_nursery() as nursery:

        async def echo(stream: MessageStream) -> None:
            async for item in stream:
                await stream.send(item)

        b.messaging.on_stream("echo", echo)
        ended: list[object] = []

        async def read(stream: MessageStream) -> None:
            try:
                async for _ in stream:
                    pass
                ended.append(None)
            except Dep2pError as error:
                ended.append(error)

        async with a.messaging.stream(b.peer, "echo") as stream:
            nursery.start_soon(read, stream)
            await settled()
        await settled()
        assert len(ended) == 1


async def test_a_place_that_a_caller_gave_up_while_it_waited_for_space_goes_to_the_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(requests_in_flight_per_peer_max=1, link_out_items_max=4, request_timeout_s=1000.0)
    async with sides(limits=limits) as (a, b):
        theirs: list[ByteStream] = []
        seen: list[Frame] = []
        decoder = FrameDecoder(2_000_000)

        async def server(stream: ByteStream) -> None:
            stream.set_receiver(lambda data: seen.extend(decoder.feed(data)), lambda error: None)
            theirs.append(stream)

        b.host.set_stream_handler(b.message_protocol, server)
        scope = trio.CancelScope()

        async def ask() -> None:
            with scope:
                await quietly(a, b, "gives up")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(quietly, a, b, "holds the place")
            await settled()
            theirs[0].pause_receiving()
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(quietly, a, b, "next")
            with trio.move_on_after(1):
                while True:
                    await a.messaging.notify(b.peer, "n", NOISE)
            theirs[0].write_nowait(encode_frame(FrameType.RESPONSE, b"", req_id=1))
            await settled()
            scope.cancel()
            await settled()
            theirs[0].resume_receiving()
            await settled()
            asked = [frame.payload for frame in seen if frame.type == FrameType.REQUEST]
            assert len(asked) == 2 and b"next" in asked[1]
            nursery.cancel_scope.cancel()
