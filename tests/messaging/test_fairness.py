"""One member's flood, or its refusal to read, costs that member and no other."""

import pytest
import trio
import trio.testing

from dep2p.errors import ErrorCode, OverloadedError, StreamClosedError
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream, Notification, Request
from dep2p.protocols.fairness.turns import UNITS_PER_TURN
from dep2p.protocols.wire.frame import HEADERS, FrameDecoder, FrameType, decode_error, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, encode_headers
from tests.messaging.nodes import Side, quietly, settled, sides


def request_frames(name: str, count: int, *, first_id: int = 1, timeout_ms: int | None = None) -> bytes:
    """Requests as a client that cares for nothing would send them."""
    headers: dict[int, object] = {HeaderKey.NAME: name}
    if timeout_ms is not None:
        headers[HeaderKey.TIMEOUT_MS] = timeout_ms
    head = encode_headers(headers)
    return b"".join(
        encode_frame(FrameType.REQUEST, head + b"x", flags=HEADERS, req_id=first_id + number) for number in range(count)
    )


async def asks_and_reads_nothing(member: Side, broker: Side, name: str, count: int) -> None:
    """A raw link whose requests never time out and whose answers stay unread."""
    connection = await member.gate.connect(broker.peer)
    stream = await connection.open_stream(broker.message_protocol)
    stream.set_receiver(lambda data: None, lambda error: None)
    stream.pause_receiving()
    for first in range(1, count, 100):
        stream.write_nowait(request_frames(name, min(100, count - first + 1), first_id=first, timeout_ms=2**32 - 1))
    await settled()


@pytest.mark.parametrize("concurrency", [1, 2, 8, 64])
async def test_a_member_that_reads_no_answers_holds_no_place_of_the_handler(
    concurrency: int, autojump_clock: trio.testing.MockClock
) -> None:
    limits = Limits(link_out_bytes_max=200_000, compress_bytes_min=0, answers_unread_timeout_s=1e6)
    async with sides(3, limits=limits) as (deaf, b, gentle):

        async def large(request: Request) -> bytes:
            await trio.sleep(0.001)
            return bytes(50_000)

        b.messaging.on_request("large", large, concurrency=concurrency)
        await asks_and_reads_nothing(deaf, b, "large", 1_000)
        await trio.sleep(5)
        began = trio.current_time()
        for _ in range(3):
            assert len(await gentle.messaging.request(b.peer, "large", b"", timeout_s=5)) == 50_000
        assert trio.current_time() - began < 0.5
        (stats,) = [each for each in b.messaging.stats() if each.peer == deaf.peer]
        assert stats.queued_out_bytes <= limits.link_out_bytes_max + 60_000
        assert stats.requests_in <= limits.handlers_per_peer_max


async def test_a_member_that_reads_nothing_for_too_long_loses_its_link_and_may_come_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(link_out_bytes_max=200_000, compress_bytes_min=0, answers_unread_timeout_s=30.0)
    async with sides(2, limits=limits) as (deaf, b):

        async def large(request: Request) -> bytes:
            return bytes(50_000)

        b.messaging.on_request("large", large)
        await asks_and_reads_nothing(deaf, b, "large", 500)
        assert [each.links_in for each in b.messaging.stats()] == [1]
        await trio.sleep(29)
        assert b.count("links_cut_answers_unread") == 0
        await trio.sleep(10)
        assert b.count("links_cut_answers_unread") == 1
        assert [each.links_in for each in b.messaging.stats()] == []
        assert b.fairness.ledger.refused["unread_answers"] >= 1
        assert len(await deaf.messaging.request(b.peer, "large", b"")) == 50_000


async def test_a_member_that_reads_slowly_keeps_its_link_and_gets_every_answer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(link_out_bytes_max=200_000, compress_bytes_min=0, answers_unread_timeout_s=30.0)
    async with sides(2, limits=limits) as (slow, b):

        async def large(request: Request) -> bytes:
            return bytes(50_000)

        b.messaging.on_request("large", large)
        connection = await slow.gate.connect(b.peer)
        stream = await connection.open_stream(b.message_protocol)
        stream.write_nowait(request_frames("large", 200, timeout_ms=2**32 - 1))
        decoder, answers = FrameDecoder(100_000), 0
        while answers < 200:
            await trio.sleep(20)
            answers += len(decoder.feed(await stream.read(400_000)))
        assert b.count("links_cut_answers_unread") == 0


async def test_answers_beyond_the_bound_are_dropped_and_the_member_gets_the_reason(
    autojump_clock: trio.testing.MockClock,
) -> None:
    limits = Limits(
        link_out_bytes_max=100_000,
        answers_unread_bytes_max=500_000,
        compress_bytes_min=0,
        answers_unread_timeout_s=1e6,
    )
    async with sides(2, limits=limits) as (deaf, b):
        gate = trio.Event()

        async def large(request: Request) -> bytes:
            await gate.wait()
            return bytes(50_000)

        b.messaging.on_request("large", large)
        connection = await deaf.gate.connect(b.peer)
        stream = await connection.open_stream(b.message_protocol)
        got: list[bytes] = []
        stream.set_receiver(lambda data: got.append(bytes(data)), lambda error: None)
        stream.write_nowait(request_frames("large", 56, timeout_ms=2**32 - 1))
        await settled()
        stream.pause_receiving()
        gate.set()
        await settled()
        dropped = b.count("responses_dropped_unread")
        assert dropped > 0
        assert b.fairness.ledger.refused == {"unread_answers": dropped}
        stream.resume_receiving()
        await settled()
        frames = FrameDecoder(100_000).feed(b"".join(got))
        errors = [decode_error(frame.payload) for frame in frames if frame.type == FrameType.ERROR]
        assert len(frames) == 56 and len(errors) == dropped
        # The handlers ran, so that a code which says that none did (OVERLOADED) would make callers ask again.
        assert all(code == ErrorCode.TIMEOUT and "answers_unread_bytes_max" in text for code, text in errors)


async def test_one_member_s_slow_requests_leave_places_for_others(autojump_clock: trio.testing.MockClock) -> None:
    async with sides(3) as (flood, b, gentle):

        async def slow(request: Request) -> bytes:
            await trio.sleep(1_000 if request.body == b"hang" else 0.001)
            return b"ok"

        b.messaging.on_request("slow", slow, concurrency=64)
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(_hang, flood, b)
            await settled()
            began = trio.current_time()
            for _ in range(20):
                assert await gentle.messaging.request(b.peer, "slow", b"") == b"ok"
            assert trio.current_time() - began < 1
            nursery.cancel_scope.cancel()


async def _hang(a: Side, b: Side) -> None:
    try:
        await a.messaging.request(b.peer, "slow", b"hang", timeout_s=900)
    except OverloadedError:
        pass


async def test_one_member_s_streams_leave_places_for_others(autojump_clock: trio.testing.MockClock) -> None:
    async with sides(3) as (flood, b, gentle), trio.open_nursery() as nursery:

        async def hold(stream: MessageStream) -> None:
            async for _ in stream:
                pass

        b.messaging.on_stream("hold", hold, concurrency=64)
        refused = 0

        async def one() -> None:
            nonlocal refused
            try:
                async with flood.messaging.stream(b.peer, "hold"):
                    await trio.sleep_forever()
            except OverloadedError:
                refused += 1

        for _ in range(100):
            nursery.start_soon(one)
        await settled()
        assert refused == 100 - 56
        assert b.fairness.ledger.refused == {"stream_places": refused}
        async with gentle.messaging.stream(b.peer, "hold"):
            pass
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["requests", "notifies", "refused requests", "requests in line"])
async def test_a_flood_is_served_in_turns_and_another_member_at_once(
    kind: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with sides(3) as (flood, b, gentle):
        handled: list[str] = []

        async def handle(request: Request) -> bytes:
            handled.append("gentle" if request.peer == gentle.peer else "flood")
            return b""

        async def note(notification: Notification) -> None:
            handled.append("flood")

        b.messaging.on_request("n", handle, concurrency=1 if kind == "requests in line" else 64)
        b.messaging.on_notify("n", note)
        await gentle.messaging.request(b.peer, "n", b"")
        connection = await flood.gate.connect(b.peer)
        stream = await connection.open_stream(b.message_protocol)
        count = 900
        if kind == "notifies":
            head = encode_headers({HeaderKey.NAME: "n"})
            data = encode_frame(FrameType.NOTIFY, head + b"x", flags=HEADERS) * count
        else:
            data = request_frames("nobody" if kind == "refused requests" else "n", count)
        handled.clear()
        got: list[bytes] = []
        stream.set_receiver(lambda answer: got.append(bytes(answer)), lambda error: None)
        stream.write_nowait(data)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(gentle.messaging.request, b.peer, "n", b"")
        served_before = handled.index("gentle") if "gentle" in handled else len(handled)
        assert handled.count("gentle") == 5
        assert served_before <= 8 * UNITS_PER_TURN, "the flood went first"
        await trio.sleep(10)
        await settled()
        assert b.fairness.turns_waited > 0
        if kind == "refused requests":
            frames = FrameDecoder(100_000).feed(b"".join(got))
            assert len(frames) == count
        else:
            assert handled.count("flood") == count


async def test_a_flood_waits_while_another_member_is_active_and_loses_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with sides(3) as (flood, b, gentle):
        got: list[int] = []

        async def note(notification: Notification) -> None:
            if notification.peer == flood.peer:
                got.append(int(notification.body))

        b.messaging.on_notify("n", note)
        async with trio.open_nursery() as nursery:

            async def ping() -> None:
                while True:
                    await gentle.messaging.notify(b.peer, "n", b"0")
                    await trio.sleep(0.001)

            nursery.start_soon(ping)
            for number in range(5_000):
                await flood.messaging.notify(b.peer, "n", b"%d" % number)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
        assert got == list(range(5_000))


async def test_a_violation_behind_frames_that_wait_for_their_turn_ends_the_link_after_them(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with sides(3) as (flood, b, gentle):
        got = 0

        async def note(notification: Notification) -> None:
            nonlocal got
            got += 1

        b.messaging.on_notify("n", note)
        await gentle.messaging.notify(b.peer, "n", b"")
        await settled()
        got = 0
        connection = await flood.gate.connect(b.peer)
        stream = await connection.open_stream(b.message_protocol)
        head = encode_headers({HeaderKey.NAME: "n"})
        stream.write_nowait(encode_frame(FrameType.NOTIFY, head, flags=HEADERS) * 300 + b"GET / HTTP/1.1\r\n")
        last = b""
        with trio.fail_after(20):
            while data := await stream.read():
                last += data
        assert FrameDecoder(10_000).feed(last)[-1].type == FrameType.ERROR
        await settled()
        assert got == 300
        assert b.count("links_refused_unsupported_version") == 1


async def test_a_member_that_half_closes_behind_a_flood_still_gets_its_answers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with sides(3) as (flood, b, gentle):

        async def handle(request: Request) -> bytes:
            return b"ok"

        b.messaging.on_request("n", handle)
        await gentle.messaging.request(b.peer, "n", b"")
        connection = await flood.gate.connect(b.peer)
        stream = await connection.open_stream(b.message_protocol)
        stream.write_nowait(request_frames("n", 500))
        await stream.close_write()
        data = b""
        with trio.fail_after(20):
            while piece := await stream.read():
                data += piece
        assert len(FrameDecoder(10_000).feed(data)) == 500
        await settled()
        assert [each.links_in for each in b.messaging.stats() if each.peer == flood.peer] == []


async def test_a_flood_whose_member_is_gone_leaves_nothing_behind(autojump_clock: trio.testing.MockClock) -> None:
    async with sides(3) as (flood, b, gentle):

        async def handle(request: Request) -> bytes:
            await trio.sleep(1)
            return b"ok"

        b.messaging.on_request("n", handle, concurrency=4)
        await gentle.messaging.request(b.peer, "n", b"")
        connection = await flood.gate.connect(b.peer)
        stream = await connection.open_stream(b.message_protocol)
        stream.write_nowait(request_frames("n", 800))
        await trio.sleep(0.01)
        stream.reset()
        await trio.sleep(5)
        load = b.messaging._loads[flood.peer]  # pyright: ignore[reportPrivateUsage]
        assert load.is_idle and not load.jobs_bytes and not load.answers_bytes
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(quietly, gentle, b, "n")
        with pytest.raises(StreamClosedError):
            stream.write_nowait(b"x")
