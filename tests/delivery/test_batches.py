"""Reliable messages that travel together, and who waits for room in a full outbox."""

from collections import Counter
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node
from dep2p.errors import DeliveryFailedError, ErrorCode
from dep2p.limits import Limits
from dep2p.links.pull_link import SessionLink
from dep2p.messaging.handlers import HandlerAwayError
from dep2p.protocols.delivery.wire import encode_batch
from dep2p.protocols.messaging.incoming import Notification
from dep2p.protocols.wire.frame import HEADERS, Frame, FrameType, encode_frame
from dep2p.testing import MemoryNetwork
from tests.delivery.test_hostile import HEAD, Raw, hello, listen, message
from tests.pubsub.nodes import pubsub_nodes, until

BATCH = int(FrameType.ACK_REQUESTS)


async def _send(a: Node, b: Node, data: bytes, **options: Any) -> None:
    await a.send(b.peer_id, "news", data, reliable=True, **options)


@pytest.fixture
def frame_types(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the frames that come in on delivery links, by type."""
    types: Counter[int] = Counter()
    receive = SessionLink.receive

    def counting(link: SessionLink, frames: list[Frame]) -> None:
        types.update(frame.type for frame in frames)
        receive(link, frames)

    monkeypatch.setattr(SessionLink, "receive", counting)
    return types


async def test_messages_alike_travel_as_one_frame_and_others_one_by_one(
    autojump_clock: MockClock, frame_types: Counter[int]
) -> None:
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        for n in range(20):
            await _send(a, b, b"%d" % n)
        await a.delivery().flush()
        assert frame_types[BATCH] and frame_types[FrameType.ACK_REQUEST] == 1  # HELLO
        batches = frame_types[BATCH]
        for n in range(20, 30):
            await _send(a, b, b"%d" % n, headers={"n": n})
        await a.delivery().flush()
        assert frame_types[BATCH] == batches and frame_types[FrameType.ACK_REQUEST] == 11
        assert got == [b"%d" % n for n in range(30)]


async def test_large_messages_among_small_ones_keep_their_place(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        bodies = [b"%d" % n * (5_000 if n % 3 else 1) for n in range(60)]
        for body in bodies:
            await _send(a, b, body)
        await a.delivery().flush()
        assert got == bodies


async def test_messages_without_a_body_travel_together(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        for _ in range(200):
            await _send(a, b, b"")
        await a.delivery().flush()
        assert got == [b""] * 200


async def test_an_app_that_goes_in_the_middle_of_a_batch_leaves_the_rest_to_the_next_app(
    autojump_clock: MockClock, frame_types: Counter[int]
) -> None:
    async with pubsub_nodes(2) as (a, b):
        got: list[Notification] = []

        async def take_two(notification: Notification) -> None:
            if len(got) == 2:
                leave()
                raise HandlerAwayError
            got.append(notification)

        leave = b.messaging().on_notify("news", take_two, concurrency=1)
        for n in range(6):
            await _send(a, b, b"%d" % n)
        await until(lambda: b.counters().get("delivery_messages_left_no_handler") == 4)
        assert frame_types[BATCH] and len(got) == 2

        @b.on_notify("news")
        async def take_the_rest(notification: Notification) -> None:
            got.append(notification)

        await a.delivery().flush()
        assert [each.body for each in got] == [b"%d" % n for n in range(6)]
        assert all(each.is_reliable for each in got)


async def test_one_that_is_too_large_for_the_receiver_fails_alone(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with (
        pubsub_nodes(1, network=network) as (a,),
        Node.open(
            a.realm(), host=(host := network.host()), identity=host.identity, limits=Limits(message_bytes_max=1_000)
        ) as b,
    ):
        await a.membership().connect(b.peer_id, b.listen_addrs())
        got = listen(b)
        receipts = [await a.send(b.peer_id, "news", b"x" * (2_000 if n == 5 else n), reliable=True) for n in range(12)]
        await a.delivery().flush()
        assert sorted(map(len, got)) == [n for n in range(12) if n != 5]
        with pytest.raises(DeliveryFailedError, match="rejected"):
            await receipts[5].wait()


BAD_BATCHES: dict[str, bytes] = {
    "no flag HEADERS": encode_frame(BATCH, bytes.fromhex("000100000000"), req_id=1),
    "number 0": b"".join(encode_batch(0, HEAD, [b"", b""])),
    "no messages": encode_frame(BATCH, b"\0\0" + HEAD, flags=HEADERS, req_id=1),
    "cut in the sizes": encode_frame(BATCH, b"\0\x05\0\0\0\0", flags=HEADERS, req_id=1),
    "sizes of more than there is": encode_frame(BATCH, b"\0\x01\0\0\0\x09" + HEAD, flags=HEADERS, req_id=1),
    "sizes of less than there is": encode_frame(BATCH, b"\0\x01\0\0\0\x01" + HEAD + b"xy", flags=HEADERS, req_id=1),
    "no headers": encode_frame(BATCH, b"\0\x01\0\0\0\x01\xff", flags=HEADERS, req_id=1),
    "numbers beyond the last": b"".join(encode_batch(0xFFFF_FFFF, HEAD, [b"", b""])),
    "outside the window": b"".join(encode_batch(10_000_000, HEAD, [b"", b""])),
    "too many": b"".join(encode_batch(1, HEAD, [b""] * 1_025)),
    "a name that no handler can have": b"".join(encode_batch(1, b"\xa1\x01\x60", [b"", b""])),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
async def test_a_malformed_batch_ends_the_stream_by_a_named_error_and_nothing_else(
    autojump_clock: MockClock, name: str
) -> None:
    frames = BAD_BATCHES[name]
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        raw = await Raw.open(a, b)
        raw.send(hello(), frames)
        code, _text = await raw.refused()
        assert code is ErrorCode.INVALID_REQUEST
        await _send(a, b, b"still served")
        await a.delivery().flush()
        assert got == [b"still served"]


async def test_a_batch_before_hello_is_a_violation(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        raw = await Raw.open(a, b)
        raw.send(*encode_batch(1, HEAD, [b"", b""]))
        assert (await raw.refused())[1] == "a message before HELLO"


async def test_what_came_before_is_not_handled_again_in_a_batch(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        raw = await Raw.open(a, b)
        raw.send(hello(), message(2, b"2"), *encode_batch(1, HEAD, [b"1", b"2", b"3"]))
        raw.send(*encode_batch(2, HEAD, [b"2", b"3", b"4"]))
        told: set[int] = set()
        while told != {1, 2, 3, 4}:
            told |= set(await raw.handled(1))
        assert got == [b"2", b"1", b"3", b"4"]


async def test_a_sender_that_is_full_again_and_again_writes_half_an_outbox_at_a_time(
    autojump_clock: MockClock, frame_types: Counter[int]
) -> None:
    async with pubsub_nodes(2, limits=Limits(delivery_queue_items_max=64)) as (a, b):
        got = listen(b)
        for n in range(3_200):
            await _send(a, b, b"%d" % n)
        await a.delivery().flush()
        assert len(got) == 3_200
        assert 3_200 / (frame_types[BATCH] + frame_types[FrameType.ACK_REQUEST]) >= 16


async def test_who_waits_for_space_is_admitted_soon_however_slow_the_receiver_is(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2, limits=Limits(delivery_queue_items_max=64)) as (a, b):

        @b.on_notify("news")
        async def take_one_now_and_then(notification: Notification) -> None:
            await trio.sleep(10)

        for n in range(64):
            await _send(a, b, b"%d" % n)
        await until(lambda: a.counters().get("delivery_messages_acknowledged") == 1)
        began = trio.current_time()
        await _send(a, b, b"one place is free")
        assert trio.current_time() - began < 0.1


async def test_a_slow_peer_that_has_nearly_all_the_room_does_not_stop_a_fast_one(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(3, limits=Limits(delivery_queue_items_max=64)) as (a, slow, fast):
        got = listen(fast)

        @slow.on_notify("news")
        async def never(notification: Notification) -> None:
            await trio.sleep_forever()

        for n in range(60):
            await _send(a, slow, b"%d" % n)
        began = trio.current_time()
        for n in range(400):
            await _send(a, fast, b"%d" % n)
        await until(lambda: len(got) == 400)
        assert trio.current_time() - began < 2


@pytest.mark.parametrize("later", [1, 5, 21])
async def test_what_an_app_that_was_admitted_sends_goes_out_soon_also_when_it_stops_there(
    autojump_clock: MockClock, later: int
) -> None:
    async with pubsub_nodes(2, limits=Limits(delivery_queue_items_max=64)) as (a, b):
        got: list[bytes] = []

        @b.on_notify("news", concurrency=1)
        async def take_it(notification: Notification) -> None:
            got.append(notification.body)
            if len(got) == 64:
                await trio.sleep(1_000)  # no more acknowledgements

        for n in range(64 + later):
            await _send(a, b, b"%d" % n)
        link = next(iter(b.delivery().inbound._receiving))  # pyright: ignore[reportPrivateUsage]
        began = trio.current_time()
        await until(lambda: len(link._inbox) == later)  # pyright: ignore[reportPrivateUsage]
        assert trio.current_time() - began < 0.1
