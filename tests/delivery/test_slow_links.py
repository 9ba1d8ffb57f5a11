"""Reliable messages over links so slow that a message takes longer than its tries: it is not sent again meanwhile."""

import random

import trio
from trio.testing import MockClock

from dep2p.host.interface import ByteStream
from dep2p.protocols.delivery.states import DeliveryState
from dep2p.protocols.messaging.incoming import Notification
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import host_of, pubsub_nodes


async def test_large_messages_that_flow_slowly_are_sent_once_and_acknowledged(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    got: list[int] = []
    async with pubsub_nodes(2, network=network) as (a, b):

        @b.on_notify("news")
        async def take(notification: Notification) -> None:
            got.append(len(notification.body))

        network.bytes_per_s = 32_000
        body = random.Random(7).randbytes(1_000_000)  # 31 s each; four tries of 5 s are 20 s
        receipts = [await a.send(b.peer_id, "news", body, reliable=True) for _ in range(3)]
        for receipt in receipts:
            with trio.fail_after(300):
                await receipt.wait()
        assert got == [1_000_000] * 3
        assert [receipt.tries for receipt in receipts] == [1, 1, 1]


async def test_a_receiver_that_reads_nothing_is_given_up_after_the_usual_tries(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):

        async def hold(stream: ByteStream) -> None:
            await trio.sleep_forever()

        host_of(b).set_stream_handler(a.delivery().context.protocol, hold)
        receipt = await a.send(b.peer_id, "news", random.Random(7).randbytes(50_000), reliable=True)
        with trio.move_on_after(60):
            await receipt.until_ended()
        assert receipt.state is DeliveryState.FAILED
        assert receipt.tries == 4
