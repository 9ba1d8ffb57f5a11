"""Peers that speak the bytes of reliable delivery and not its rules: only their own stream suffers."""

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node
from dep2p.delivery.receipts import Receipt
from dep2p.errors import DeliveryFailedError, DeliveryQueueFullError, ErrorCode
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.protocols.delivery.states import DeliveryState
from dep2p.protocols.delivery.wire import (
    WINDOW_MAX,
    Ack,
    Hello,
    decode_ack,
    decode_hello,
    encode_ack,
    encode_hello,
)
from dep2p.protocols.messaging.incoming import Notification
from dep2p.protocols.wire.frame import HEADERS, Frame, FrameDecoder, FrameType, decode_error, encode_error, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, encode_headers
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import host_of, pubsub_nodes, until

EPOCH = b"12345678"
HEAD = encode_headers({HeaderKey.NAME: "news"})


def message(number: int, body: bytes = b"") -> bytes:
    """A message for the handler of "news"."""
    return encode_frame(FrameType.ACK_REQUEST, HEAD + body, flags=HEADERS, req_id=number)


def hello(settled: int = 0, epoch: bytes = EPOCH) -> bytes:
    return encode_hello(Hello(epoch, settled))


class Raw:
    """A stream of the delivery protocol in our own hand."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self.decoder = FrameDecoder(1 << 24)
        self.frames: list[Frame] = []

    @classmethod
    async def open(cls, sender: Node, receiver: Node) -> "Raw":
        await until(lambda: sender.membership().verified_connection(receiver.peer_id) is not None)
        connection = await sender.membership().connect(receiver.peer_id)
        return cls(await connection.open_stream(receiver.delivery().context.protocol))

    def send(self, *frames: bytes) -> None:
        self.stream.write_nowait(b"".join(frames))

    async def next(self) -> Frame | None:
        """The next frame; None at the end."""
        with trio.fail_after(100):
            while not self.frames:
                data = await self.stream.read()
                if not data:
                    return None
                self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    async def handled(self, count: int) -> list[int]:
        """The numbers told as handled, in the order of telling, until there are so many."""
        numbers: list[int] = []
        while len(numbers) < count:
            frame = await self.next()
            assert frame is not None and frame.type == FrameType.ACK
            for low, high in decode_ack(frame).handled:
                numbers += range(low, high + 1)
        return numbers

    async def refused(self) -> tuple[ErrorCode, str]:
        """The ERROR that ends the stream."""
        while (frame := await self.next()) is not None:
            if frame.type == FrameType.ERROR:
                code, text = decode_error(frame.payload)
                return ErrorCode(code), text
        raise AssertionError("the stream ended without a word")


def listen(node: Node) -> list[bytes]:
    """Collect the messages that its handler of "news" takes."""
    got: list[bytes] = []

    @node.on_notify("news")
    async def take_it(notification: Notification) -> None:
        got.append(notification.body)

    del take_it
    return got


async def _send(a: Node, b: Node, data: bytes) -> Receipt:
    return await a.send(b.peer_id, "news", data, reliable=True)


# A sender without rules

VIOLATIONS = {
    "a message before HELLO": (message(1), "before HELLO"),
    "an ACK from the sender": (hello() + encode_ack(Ack(handled=[(1, 1)])), "on a delivery link"),
    "another epoch": (hello() + hello(epoch=b"87654321"), "another epoch"),
    "a short HELLO": (encode_frame(FrameType.ACK_REQUEST, b"short"), "HELLO"),
    "flags on HELLO": (encode_frame(FrameType.ACK_REQUEST, bytes(12), flags=HEADERS), "HELLO"),
    "ten million in flight": (hello() + message(10_000_000), "above the settled"),
    "one over the window": (hello(7) + message(7 + WINDOW_MAX + 1), "above the settled"),
    "a message without a name": (hello() + encode_frame(FrameType.ACK_REQUEST, b"", req_id=1), ""),
    "an unknown type": (hello() + encode_frame(0x33, b""), "frame type 0x33"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_ends_the_stream_by_a_named_error_and_nothing_else(
    autojump_clock: MockClock, name: str
) -> None:
    frames, words = VIOLATIONS[name]
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        raw = await Raw.open(a, b)
        raw.send(frames)
        code, text = await raw.refused()
        assert code is ErrorCode.INVALID_REQUEST and words in text
        await (await _send(a, b, b"still served")).wait()
        assert got == [b"still served"]


async def test_the_edge_of_the_window_is_taken(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        raw = await Raw.open(a, b)
        raw.send(hello(), message(WINDOW_MAX, b"edge"))
        assert await raw.handled(1) == [WINDOW_MAX]
        assert got == [b"edge"]


async def test_duplicates_replays_and_any_order_reach_the_handler_once(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        got = listen(b)
        raw = await Raw.open(a, b)
        frames = [message(number, b"%d" % number) for number in (3, 1, 2)]
        raw.send(hello(), *frames, *frames, hello(), *reversed(frames))
        assert sorted(set(await raw.handled(3))) == [1, 2, 3]
        again = await Raw.open(a, b)  # and on another stream
        again.send(hello(), *frames)
        assert sorted(await again.handled(3)) == [1, 2, 3]
        assert got == [b"3", b"1", b"2"]


async def test_the_numbering_of_another_is_worth_nothing_and_costs_its_owner_nothing(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(3) as (a, b, thief):
        got = listen(b)
        await (await _send(a, b, b"1")).wait()
        epoch = a.delivery()._sending[b.peer_id].core.epoch  # pyright: ignore[reportPrivateUsage]
        raw = await Raw.open(thief, b)
        raw.send(hello(60_000, epoch), message(60_001, b"thief"))
        assert await raw.handled(1) == [60_001]
        await (await _send(a, b, b"2")).wait()
        assert got == [b"1", b"thief", b"2"]


@pytest.mark.parametrize("outbox", ["memory", "disk"])
async def test_a_sender_that_reads_nothing_costs_bounded_memory_and_goes_on_when_it_reads(
    tmp_path: Path, outbox: str
) -> None:
    limits = Limits(link_out_items_max=64, link_in_items_max=256)
    network = MemoryNetwork()
    host = network.host()
    directory = tmp_path if outbox == "disk" else None
    async with (
        pubsub_nodes(1, network=network) as (a,),
        Node.open(a.realm(), host=host, identity=host.identity, limits=limits, data_dir=directory) as b,
    ):
        await b.connect(a.listen_addrs()[0])
        got = listen(b)
        raw = await Raw.open(a, b)
        raw.stream.pause_receiving()
        odd = [message(number) for number in range(1, 40_000, 2)]  # a range of its own for each
        raw.send(hello(), *odd)
        for _ in range(8):
            raw.send(*odd)
        [receiving] = b.delivery().inbound._receiving  # pyright: ignore[reportPrivateUsage]
        before = -1
        with trio.fail_after(100):
            while raw.stream.unsent_bytes != before:
                before = raw.stream.unsent_bytes
                await trio.sleep(0.5)
        assert raw.stream.unsent_bytes > 1_000_000, "it takes whatever comes"
        unreported = receiving._handled  # pyright: ignore[reportPrivateUsage]
        assert len(unreported) <= 10_000
        assert receiving.link.out.items <= 2_000
        raw.stream.resume_receiving()
        told: set[int] = set()
        raw.send(message(2, b"last"))
        with trio.fail_after(100):
            while 2 not in told:
                told.update(await raw.handled(1))
        assert told == {2, *range(1, 40_000, 2)}
        assert len(got) == 20_001


# A receiver without rules


class HostileReceiver:
    """Answers on each delivery stream as it is told to."""

    def __init__(self, node: Node, *answers: bytes) -> None:
        self.numbers: list[int] = []
        self.hellos: list[Hello] = []
        self.streams = 0
        self._answers = answers
        host_of(node).set_stream_handler(node.delivery().context.protocol, self._serve)

    async def _serve(self, stream: ByteStream) -> None:
        self.streams += 1
        raw = Raw(stream)
        stream.write_nowait(b"".join(self._answers))
        while (frame := await raw.next()) is not None and frame.type != FrameType.ERROR:
            if frame.req_id:
                self.numbers.append(frame.req_id)
            else:
                self.hellos.append(decode_hello(frame))


@pytest.mark.parametrize(
    "answer",
    [
        encode_ack(Ack(received=2)),
        encode_ack(Ack(handled=[(1, 2)])),
        encode_ack(Ack(handled=[(2**32 - 1, 2**32 - 1)])),
        encode_ack(Ack(rejected=[(9, "no")])),
        message(1),
        hello(),
        encode_frame(FrameType.ACK, b"short"),
        encode_error(ErrorCode.INVALID_REQUEST, "nonsense", req_id=77),
    ],
)
async def test_an_ack_from_the_future_or_nonsense_ends_nothing_but_the_stream(
    autojump_clock: MockClock, answer: bytes
) -> None:
    async with pubsub_nodes(3) as (a, b, other):
        got = listen(other)
        hostile = HostileReceiver(b, answer)
        receipt = await _send(a, b, b"kept")
        await until(lambda: hostile.streams > 2)
        assert not receipt.has_ended
        await (await _send(a, other, b"x")).wait()
        assert got == [b"x"]


async def test_a_peer_acknowledges_its_own_messages_only(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(3) as (a, b, hostile):
        HostileReceiver(b)  # silent
        receipt = await _send(a, b, b"for b")
        HostileReceiver(hostile, encode_ack(Ack(1, [(1, 1)])))
        own = await _send(a, hostile, b"for the other")
        raw = await Raw.open(hostile, a)
        raw.send(encode_ack(Ack(1, [(1, 1)])))
        await raw.refused()
        await trio.sleep(3)
        assert receipt.state is DeliveryState.SENDING
        with pytest.raises(DeliveryFailedError, match="tries are used up"):
            await receipt.wait()
        assert own.reason != receipt.reason or not own.has_ended or own.state is DeliveryState.ACKNOWLEDGED


async def test_a_receiver_that_acknowledges_nothing_costs_a_bounded_outbox_and_is_visible(
    autojump_clock: MockClock,
) -> None:
    async with pubsub_nodes(2, limits=Limits(delivery_queue_items_max=50)) as (a, b):
        hostile = HostileReceiver(b)
        receipts = [await _send(a, b, b"%d" % number) for number in range(50)]
        with trio.move_on_after(10) as scope:
            await _send(a, b, b"over")
        assert scope.cancelled_caught
        for receipt in receipts:
            with pytest.raises(DeliveryFailedError, match="tries are used up"):
                await receipt.wait()
        assert hostile.numbers.count(1) == 4
        assert a.delivery().outbox() == []


async def test_duplicate_and_old_acks_change_nothing(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        ack = encode_ack(Ack(1, [(1, 1)], [(1, "no")]))

        async def serve(stream: ByteStream) -> None:
            raw = Raw(stream)
            while (frame := await raw.next()) is not None:
                if frame.req_id:
                    stream.write_nowait(ack * 3)

        host_of(b).set_stream_handler(b.delivery().context.protocol, serve)
        first = await _send(a, b, b"1")
        await first.wait()
        second = await _send(a, b, b"2")
        await trio.sleep(1)
        assert (first.state, second.has_ended) == (DeliveryState.ACKNOWLEDGED, False)
        assert a.delivery().stats().links_out == 1


async def test_a_receiver_that_is_away_leaves_a_part_of_the_outbox_to_others(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(3, limits=Limits(delivery_queue_items_max=64)) as (a, away, here):
        got: list[bytes] = []

        @here.on_notify("news")
        async def take(notification: Notification) -> None:
            got.append(notification.body)

        async def refuse(stream: ByteStream) -> None:
            stream.reset()

        host_of(away).set_stream_handler(away.delivery().context.protocol, refuse)
        sent = 0
        with trio.move_on_after(5):
            while True:
                await _send(a, away, b"%d" % sent)
                sent += 1
        assert sent == 56
        with pytest.raises(DeliveryQueueFullError, match="away"):
            await a.send(away.peer_id, "news", b"over", reliable=True, wait=False)
        began = trio.current_time()
        for number in range(40):
            await _send(a, here, b"%d" % number)
        await trio.sleep(0.5)
        assert len(got) == 40
        assert trio.current_time() - began < 2
