"""Publishes that are written together share a signature; one that is alone has its own."""

import pytest
import trio
import trio.testing

from dep2p import GossipParams
from dep2p.gossipsub.effects import Lane
from dep2p.identity import Identity
from dep2p.pubsub.send_queue import LateFrame, PeerQueue
from tests.pubsub.nodes import joined, pubsub_nodes, take
from tests.pubsub.test_send_queue import CONTROL, Recorder, message, stream_pair

Clock = trio.testing.MockClock


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Collect the bytes signed since the start: pub/sub messages and batches of them."""
    made: list[bytes] = []
    sign = Identity.sign

    def noting(self: Identity, data: bytes) -> bytes:
        if data.startswith(b"dep2p-pubsub"):
            made.append(data)
        return sign(self, data)

    monkeypatch.setattr(Identity, "sign", noting)
    return made


@pytest.mark.parametrize(("batch", "signatures"), [(1, 96), (16, 6), (256, 1)])
async def test_a_burst_is_signed_in_batches(
    autojump_clock: Clock, signed: list[bytes], batch: int, signatures: int
) -> None:
    async with pubsub_nodes(2, pubsub_params=GossipParams(sign_batch_max=batch)) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            for number in range(96):
                await a.publish(b"%d" % number)
            assert await take(messages, 96) == [b"%d" % number for number in range(96)]
        assert len(signed) == signatures
        assert "pubsub_rejected_invalid_signature" not in nodes[1].counters()


async def test_publishes_with_a_pause_between_have_signatures_of_their_own(
    autojump_clock: Clock, signed: list[bytes]
) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            for number in range(3):
                await a.publish(b"%d" % number)
                assert await take(messages, 1) == [b"%d" % number]
        assert [data.startswith(b"dep2p-pubsub:") for data in signed] == [True] * 3


async def test_what_waited_for_a_first_peer_is_signed_before_it_goes_out(
    autojump_clock: Clock, signed: list[bytes]
) -> None:
    async with pubsub_nodes(2) as nodes:
        a = await nodes[0].join("chat")
        for number in range(5):
            assert (await a.publish(b"%d" % number, on_no_peers="queue")).queued
        assert not signed
        b = await nodes[1].join("chat")
        async with b.subscribe() as messages:
            assert sorted(await take(messages, 5)) == [b"%d" % number for number in range(5)]
        assert len(signed) == 1


async def test_a_late_frame_is_made_once_for_all_its_peers_and_counts_its_size_before(autojump_clock: Clock) -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"frame"

    late = LateFrame(make, 40)
    queues = [Recorder().queue, Recorder().queue]
    for queue in queues:
        assert queue.put(Lane.MESSAGE, late, message(1))
        assert queue.waiting_bytes == 40
    assert not made
    assert [await written(queue) for queue in queues] == [b"frame"] * 2
    assert made == [1]
    assert [queue.waiting_bytes for queue in queues] == [0, 0]


async def test_a_message_that_need_not_be_sent_any_more_is_not_made(autojump_clock: Clock) -> None:
    queue = Recorder().queue
    assert queue.put(Lane.MESSAGE, LateFrame(lambda: pytest.fail("it was made"), 40), message(1))
    assert queue.discard(message(1).messages[0].id)
    assert queue.waiting_bytes == 0
    assert queue.put(Lane.CONTROL, b"other", CONTROL)
    assert await written(queue) == b"other"


async def written(queue: PeerQueue) -> bytes:
    """Return the bytes that a queue writes."""
    ours, theirs = await stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.write_to, ours)
        data = bytes(await theirs.read())
        nursery.cancel_scope.cancel()
    return data
