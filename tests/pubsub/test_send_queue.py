"""The lanes of one peer's outbound queue."""

import trio
import trio.testing

from dep2p import Limits
from dep2p.gossipsub.effects import Lane
from dep2p.gossipsub.rpc import IHave, Rpc, RpcMessage
from dep2p.host.interface import ByteStream
from dep2p.pubsub.send_queue import PeerQueue
from dep2p.pubsub.wire_formats import Pace
from dep2p.testing import MemoryNetwork
from dep2p.types import PeerId

CONTROL = Rpc(graft=("t",))
GOSSIP = Rpc(ihave=(IHave("t", (b"1",)),))


def message(number: int) -> Rpc:
    return Rpc((RpcMessage(b"id%d" % number, b"", b"", "t", b""),))


class Recorder:
    """A queue and what it told."""

    def __init__(self, *, pace: Pace | None = None, **limits: int) -> None:
        self.gossip_dropped: list[Rpc] = []
        self.lows = 0
        self.queue = PeerQueue(
            PeerId("peer"), Limits(**limits), lambda _peer, rpc: self.gossip_dropped.append(rpc), self._low, pace
        )

    def _low(self, _queue: PeerQueue) -> None:
        self.lows += 1


async def stream_pair() -> tuple[ByteStream, ByteStream]:
    network = MemoryNetwork()
    a, b = network.host(), network.host()
    accepted: list[ByteStream] = []

    async def accept(stream: ByteStream) -> None:
        accepted.append(stream)

    b.set_stream_handler("/t", accept)
    connection = await a.dial(b.peer_id, b.listen_addrs())
    stream = await connection.open_stream("/t")
    return stream, accepted[0]


async def test_control_overtakes_messages_and_messages_gossip_in_one_write(
    autojump_clock: trio.testing.MockClock,
) -> None:
    queue = Recorder().queue
    assert queue.put(Lane.GOSSIP, b"gossip", GOSSIP)
    assert queue.put(Lane.MESSAGE, b"first,", message(1))
    assert queue.put(Lane.MESSAGE, b"second,", message(2))
    assert queue.put(Lane.CONTROL, b"control,", CONTROL)
    ours, theirs = await stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.write_to, ours)
        with trio.fail_after(5):
            assert await theirs.read() == b"control,first,second,gossip"
        assert (queue.writes, queue.items_written, queue.items, queue.waiting_bytes) == (1, 4, 0, 0)
        queue.put(Lane.MESSAGE, b"later", message(3))
        with trio.fail_after(5):
            assert await theirs.read() == b"later"
        queue.close()


def test_each_lane_is_bounded_in_items_on_its_own() -> None:
    queue = Recorder(pubsub_out_items_max=2, pubsub_out_control_items_max=1, pubsub_out_gossip_items_max=1).queue
    assert [queue.put(Lane.MESSAGE, b"m", message(n)) for n in range(3)] == [True, True, False]
    assert [queue.put(Lane.CONTROL, b"c", CONTROL) for _ in range(2)] == [True, False]
    assert [queue.put(Lane.GOSSIP, b"g", GOSSIP) for _ in range(2)] == [True, False]


def test_gossip_makes_room_for_messages_and_is_reported() -> None:
    recorder = Recorder(pubsub_out_bytes_max=100)
    queue = recorder.queue
    assert queue.put(Lane.MESSAGE, bytes(30), message(1))
    assert queue.put(Lane.GOSSIP, bytes(60), GOSSIP)
    assert not queue.put(Lane.GOSSIP, bytes(60), GOSSIP)
    assert queue.put(Lane.MESSAGE, bytes(60), message(2))
    assert recorder.gossip_dropped == [GOSSIP]
    assert not queue.put(Lane.MESSAGE, bytes(60), message(3))
    assert queue.waiting_bytes == 90


def test_an_empty_lane_takes_a_message_larger_than_its_bound() -> None:
    queue = Recorder(pubsub_out_bytes_max=100).queue
    assert queue.put(Lane.MESSAGE, bytes(1_000), message(1))
    assert not queue.put(Lane.MESSAGE, b"x", message(2))


async def test_what_the_peer_has_by_now_is_not_sent(autojump_clock: trio.testing.MockClock) -> None:
    queue = Recorder().queue
    for number in range(3):
        queue.put(Lane.MESSAGE, b"%d" % number, message(number))
    assert queue.discard(b"id1")
    assert not queue.discard(b"id1")
    assert not queue.discard(b"other")
    assert queue.waiting_bytes == 2
    ours, theirs = await stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.write_to, ours)
        with trio.fail_after(5):
            assert await theirs.read() == b"02"
        assert not queue.discard(b"id0")
        queue.close()
    assert not queue.has_messages


def test_a_lost_stream_costs_control_and_gossip_but_no_message() -> None:
    queue = Recorder().queue
    queue.put(Lane.MESSAGE, b"m", message(1))
    queue.put(Lane.CONTROL, b"c", CONTROL)
    queue.put(Lane.GOSSIP, b"g", GOSSIP)
    assert queue.clear(keep_messages=True) == 0
    assert (queue.items, queue.waiting_bytes) == (1, 1)
    assert queue.clear() == 1
    assert (queue.items, queue.waiting_bytes) == (0, 0)


async def test_a_paced_queue_gives_the_peer_time_between_its_writes(autojump_clock: trio.testing.MockClock) -> None:
    queue = Recorder(pace=Pace(8, 0.005)).queue
    for number in range(100):
        assert queue.put(Lane.MESSAGE, b"%03d," % number, message(number))
    queue.put(Lane.CONTROL, b"control,", CONTROL)
    ours, theirs = await stream_pair()
    came: list[tuple[float, int]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.write_to, ours)
        started = trio.current_time()
        rest = b""
        while sum(count for _, count in came) < 100:
            rest += (await theirs.read()).replace(b"control,", b"")
            came.append((trio.current_time() - started, len(rest) // 4))
            rest = rest[len(rest) // 4 * 4 :]
        queue.close()
    assert max(count for _, count in came) <= 8
    assert 0.06 < came[-1][0] < 0.09  # twelve pauses
    assert queue.paced == 12


def test_what_was_sent_in_a_burst_is_announced_once_and_counted_when_it_is_asked_for() -> None:
    queue = Recorder(pace=Pace()).queue
    for burst in (24, 25):
        for number in range(burst):
            queue.put(Lane.MESSAGE, b"x", message(number))
        while queue.items:
            queue._take()  # pyright: ignore[reportPrivateUsage]
        found = queue.take_burst()
        assert found == ({} if burst == 24 else {"t": [b"id%d" % number for number in range(25)]})
    assert queue.count_dropped([b"id3", b"id4", b"unknown"]) == 2
    assert queue.count_dropped([b"id3"]) == 0
    assert queue.take_burst() == {}


def test_without_a_pace_nothing_is_remembered() -> None:
    queue = Recorder().queue
    for number in range(100):
        queue.put(Lane.MESSAGE, b"x", message(number))
    queue._take()  # pyright: ignore[reportPrivateUsage]
    assert queue.take_burst() == {}
