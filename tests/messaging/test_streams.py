"""Logical streams in memory: half-close, back-pressure, aborts, time limits, membership."""

import pytest
import trio

from dep2p.errors import (
    MessageTooLargeError,
    NoHandlerError,
    NotMemberError,
    OverloadedError,
    RateLimitedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.nodes import settled, sides


async def echo(stream: MessageStream) -> None:
    async for item in stream:
        await stream.send(item)


async def test_both_sides_send_and_end_on_their_own(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        seen: list[object] = []

        async def handler(stream: MessageStream) -> None:
            seen.append((stream.peer, stream.name, stream.body, stream.headers))
            items = [item async for item in stream]
            for item in reversed(items):
                await stream.send(item)
            await stream.send_eof()

        b.messaging.on_stream("reverse", handler)
        async with a.messaging.stream(b.peer, "reverse", b"first", headers={"h": 1}) as stream:
            assert (stream.peer, stream.name) == (b.peer, "reverse")
            for item in (b"1", b"", b"333"):
                await stream.send(item)
            await stream.send_eof()
            assert [item async for item in stream] == [b"333", b"", b"1"]
            assert await stream.receive() is None
        assert seen == [(a.peer, "reverse", b"first", {"h": 1})]
        await settled()
        assert a.open_streams == b.open_streams == 0


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 262_144, 262_145, 1_000_000, 16_777_216])
async def test_items_of_every_size_come_through(size: int, autojump_clock: trio.abc.Clock) -> None:
    item = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with sides() as (a, b):
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "echo") as stream:
            await stream.send(item)
            await stream.send(bytearray(b"after"))  # type: ignore[arg-type]
            await stream.send_eof()
            assert [each async for each in stream] == [item, b"after"]


async def test_too_large_an_item_is_not_sent_and_the_stream_lives_on(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(stream_item_bytes_max=1_000)) as (a, b):
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "echo") as stream:
            with pytest.raises(MessageTooLargeError):
                await stream.send(bytes(1_001))
            await stream.send(bytes(1_000))
            assert await stream.receive() == bytes(1_000)
        with pytest.raises(MessageTooLargeError):
            async with a.messaging.stream(b.peer, "echo", bytes(2_000_000)):
                pass


async def test_a_peer_with_a_smaller_item_limit_aborts_by_name(autojump_clock: trio.abc.Clock) -> None:
    limits = [Limits(compress_bytes_min=0), Limits(stream_item_bytes_max=300_000)]
    async with sides(limits=limits) as (a, b):
        b.messaging.on_stream("echo", echo)
        with pytest.raises(MessageTooLargeError):
            async with a.messaging.stream(b.peer, "echo") as stream:
                await stream.send(bytes(1_000_000))
                await stream.receive()


async def test_a_name_without_a_handler(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        with pytest.raises(NoHandlerError, match="'nobody'"):
            async with a.messaging.stream(b.peer, "nobody"):
                raise AssertionError
        await settled()
        assert a.open_streams == b.open_streams == 0


async def test_a_slow_reader_makes_the_sender_wait_and_memory_stays_bounded(autojump_clock: trio.abc.Clock) -> None:
    async with sides(features=frozenset()) as (a, b):
        may_read = trio.Event()
        got = 0

        async def handler(stream: MessageStream) -> None:
            nonlocal got
            await may_read.wait()
            async for item in stream:
                got += len(item)

        b.messaging.on_stream("sink", handler)
        sent = 0
        async with a.messaging.stream(b.peer, "sink") as stream:
            async with trio.open_nursery() as nursery:

                async def send_all() -> None:
                    nonlocal sent
                    for _ in range(200):
                        await stream.send(bytes(100_000))
                        sent += 1

                nursery.start_soon(send_all)
                await trio.sleep(30)
                # One window in flight, what may be unsent, and the reader's queue.
                assert 1 < sent < 40
                stuck = sent
                await trio.sleep(30)
                assert sent == stuck
                may_read.set()
            await stream.send_eof()
            assert await stream.receive() is None
        assert got == 200 * 100_000


async def test_a_few_compressed_bytes_do_not_fill_the_reader_s_memory(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        streams: list[MessageStream] = []
        may_read = trio.Event()
        got: list[int] = []

        async def handler(stream: MessageStream) -> None:
            streams.append(stream)
            await may_read.wait()
            async for item in stream:
                got.append(len(item))

        b.messaging.on_stream("sink", handler)
        async with a.messaging.stream(b.peer, "sink") as stream:
            for _ in range(200):
                await stream.send(bytes(1_000_000))  # each travels as less than a hundred bytes
            await settled()
            assert streams[0]._items_bytes < 2_100_000  # pyright: ignore[reportPrivateUsage]
            may_read.set()
            await stream.send_eof()
            assert await stream.receive() is None
        assert got == [1_000_000] * 200


async def test_a_stream_that_is_not_read_holds_up_no_other(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def hang(stream: MessageStream) -> None:
            await trio.sleep_forever()

        b.messaging.on_stream("hang", hang)
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "hang") as stuck, trio.open_nursery() as nursery:

            async def flood() -> None:
                while True:
                    await stuck.send(bytes(100_000))

            nursery.start_soon(flood)
            await trio.sleep(5)
            async with a.messaging.stream(b.peer, "echo") as stream:
                for _ in range(50):
                    await stream.send(b"x")
                    assert await stream.receive() == b"x"
            nursery.cancel_scope.cancel()
            stuck.reset()


# Time limits


async def test_the_first_item_and_the_later_ones_have_time_limits(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):

        async def lazy(stream: MessageStream) -> None:
            await trio.sleep(float(stream.body))
            await stream.send(b"1")
            await trio.sleep(float(stream.headers["then"]))  # type: ignore[arg-type]
            await stream.send(b"2")

        b.messaging.on_stream("lazy", lazy)
        async with a.messaging.stream(b.peer, "lazy", b"9", headers={"then": 59}) as stream:
            assert [item async for item in stream] == [b"1", b"2"]
        for first, then, expected in ((b"11", 0, 10.0), (b"1", 61, 61.0)):
            began = trio.current_time()
            with pytest.raises(RequestTimeoutError):
                async with a.messaging.stream(b.peer, "lazy", first, headers={"then": then}) as stream:
                    async for _ in stream:
                        pass
            assert trio.current_time() - began == pytest.approx(expected, abs=0.2)


async def test_a_reader_that_is_away_does_not_use_up_the_peer_s_time(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "echo") as stream:
            for _ in range(3):
                await stream.send(b"x")
                await trio.sleep(55)  # the handler waits at most 60 s between items
                assert await stream.receive() == b"x"


async def test_a_peer_that_opens_a_stream_and_says_nothing_is_not_kept(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        connection = await a.gate.connect(b.peer)
        raw = await connection.open_stream(b.stream_protocol)
        await trio.sleep(5)
        assert b.open_streams == 1
        await trio.sleep(6)
        with trio.fail_after(5):
            assert b"in time" in await raw.read()
        await raw.close()
        await settled()
        assert b.open_streams == 0


async def test_an_accept_that_does_not_come_is_a_timeout(autojump_clock: trio.abc.Clock) -> None:
    network = MemoryNetwork()
    async with sides(network=network) as (a, b):
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "echo"):
            pass
        network.partition(a.peer, b.peer)
        began = trio.current_time()
        with pytest.raises(RequestTimeoutError):
            async with a.messaging.stream(b.peer, "echo"):
                pass
        assert trio.current_time() - began <= 21


# Limits and membership


async def test_streams_over_the_limits_are_refused(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(streams_inbound_per_peer_max=3)) as (a, b):
        b.messaging.on_stream("few", echo, concurrency=2)
        b.messaging.on_stream("rare", echo, rate_per_s=1)
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "few"), a.messaging.stream(b.peer, "few"):
            with pytest.raises(OverloadedError):
                async with a.messaging.stream(b.peer, "few"):
                    pass
            async with a.messaging.stream(b.peer, "echo"):
                with pytest.raises(OverloadedError, match="has 3 streams here"):
                    async with a.messaging.stream(b.peer, "echo"):
                        pass
        await settled()
        async with a.messaging.stream(b.peer, "rare"):
            pass
        with pytest.raises(RateLimitedError) as limited:
            async with a.messaging.stream(b.peer, "rare"):
                pass
        assert 500 < limited.value.retry_after_ms <= 1_001


async def test_draining_refuses_new_streams(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(drain_timeout_s=1)) as (a, b):
        b.messaging.on_stream("echo", echo)
        async with a.messaging.stream(b.peer, "echo") as stream, trio.open_nursery() as nursery:
            nursery.start_soon(b.messaging.drain)
            await trio.sleep(0.1)
            with pytest.raises(OverloadedError):
                async with a.messaging.stream(b.peer, "echo"):
                    pass
            await stream.send(b"x")
            assert await stream.receive() == b"x"


async def test_an_unknown_peer_s_stream_reaches_no_handler(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        ran = False

        async def handler(stream: MessageStream) -> None:
            nonlocal ran
            ran = True

        b.messaging.on_stream("h", handler)
        b.gate.expel(a.peer)
        with pytest.raises(NotMemberError):
            async with a.messaging.stream(b.peer, "h"):
                pass
        assert not ran
        assert b.count("streams_refused_not_member") == 1


@pytest.mark.parametrize("tell", [True, False])
async def test_a_member_that_is_expelled_in_mid_stream(tell: bool, autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got: list[bytes] = []
        ended: list[BaseException] = []

        async def handler(stream: MessageStream) -> None:
            try:
                async for item in stream:
                    got.append(item)
            except NotMemberError as error:
                ended.append(error)
                raise

        b.messaging.on_stream("h", handler)
        with pytest.raises(NotMemberError):
            async with a.messaging.stream(b.peer, "h") as stream:
                await stream.send(b"before")
                await settled()
                b.gate.expel(a.peer, tell=tell)
                await stream.send(b"after")
                await stream.receive()
        await settled()
        assert got == [b"before"]
        assert len(ended) == 1


async def test_we_send_nothing_to_a_peer_that_is_no_member_any_more(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got: list[bytes] = []

        async def handler(stream: MessageStream) -> None:
            async for item in stream:
                got.append(item)

        b.messaging.on_stream("h", handler)
        with pytest.raises(NotMemberError):
            async with a.messaging.stream(b.peer, "h") as stream:
                a.gate.expel(b.peer, tell=False)
                await stream.send(b"secret")
        await settled()
        assert got == []


async def test_stopping_messaging_ends_all_streams(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        b.messaging.on_stream("echo", echo)
        async with trio.open_nursery() as nursery:

            async def hold() -> None:
                with pytest.raises(StreamClosedError):
                    async with a.messaging.stream(b.peer, "echo") as stream:
                        await stream.receive()

            nursery.start_soon(hold)
            await trio.sleep(1)
            b.stop()
        await settled()
        assert a.open_streams == b.open_streams == 0
