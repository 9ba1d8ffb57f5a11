"""Nobody waits for a timer, or for ever, where the engine itself has something to do."""

import pytest
import trio
import trio.testing

from dep2p.io.queue_engine import QueueEngine
from dep2p.protocols.queue.consumer import Consumer
from dep2p.protocols.queue.message import NewMessage
from dep2p.storage.memory import MemoryStore
from tests.protocols.queue_world import World


@pytest.mark.parametrize("max_in_flight", [1, 2])
async def test_the_next_message_needs_no_timer(autojump_clock: trio.testing.MockClock, max_in_flight: int) -> None:
    engine = QueueEngine(MemoryStore())
    await engine.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.create_queue("", "jobs")
        consumer = await engine.subscribe("", "jobs", "work", max_in_flight=max_in_flight)
        await engine.publish("", "jobs", [NewMessage(b"x")] * 20)
        began_s = trio.current_time()
        taken = 0
        while taken < 20:
            messages = await consumer.receive()
            taken += len(messages)
            consumer.finish([(message.partition, message.seq) for message in messages])
        assert trio.current_time() == began_s  # the clock jumps only when all wait
        nursery.cancel_scope.cancel()
    await engine.aclose()


@pytest.mark.parametrize("is_late", [False, True])
def test_queues_deleted_while_a_page_of_theirs_is_read_take_no_turn_from_others(is_late: bool) -> None:
    world = World()
    kept = world.create("kept")
    world.channel(kept)
    world.publish(kept, *[b"x" * 500] * 20)
    for number in range(20):
        doomed = world.create(f"doomed{number}")
        world.channel(doomed)
        world.publish(doomed, b"x", b"y")
    world.crash()  # nothing is in memory
    channel = world.queue("kept").channel("work")
    for number in range(20):
        doomed = world.queue(f"doomed{number}")
        consumer = Consumer(
            "a",
            max_in_flight=5,
            bytes_max=1 << 30,
            msg_timeout_s=9,
            on_deliver=lambda _deliveries: None,
            on_closed=lambda _reason: None,
        )
        doomed.channel("work").attach(consumer)
        reads = world.book.pump(world.now, world.wall_us)
        assert reads
        world.book.delete(doomed)
        if is_late:
            world.book.pump(world.now, world.wall_us)
        for read in reads:
            rows = world.store.scan(read.partition, read.from_seq, items_max=read.items_max, bytes_max=read.bytes_max)
            world.book.loaded(read, rows)
    world.settle()
    assert len(world.consumer(channel).finish_all()) == 20
