"""The queue core at its edges: commits that fail, publishes that are sent again, pages that come late, long lines."""

from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import StoreError
from dep2p.protocols.queues.channel import EPHEMERAL_BACKLOG_MAX
from dep2p.protocols.queues.deduplication import PendingPublish
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.range_set import Ranges, as_ranges
from tests.protocols.queues.world import World, seqs


def _send(world: World, number: int, body: bytes) -> PendingPublish:
    return world.queue().publish(
        [NewMessage(body)], lambda _publish: None, wall_us=world.wall_us, publisher=(b"me", number)
    )


def test_a_publish_that_was_not_written_is_not_remembered_over_a_crash() -> None:
    world = World()
    world.channel(world.create())
    assert _send(world, 1, b"1").points() == [(1, 1)]
    world.settle()
    lost = _send(world, 2, b"2")
    world.fail_next = StoreError("the disk is ill")
    world.settle()
    assert lost.error is not None
    assert _send(world, 3, b"3").error is None
    world.settle()
    world.crash()
    _send(world, 2, b"2")
    again = _send(world, 3, b"3")
    world.settle()
    assert again.points() == [(1, 3)]
    taker = world.consumer(world.queue().channel("work"))
    assert sorted(taker.finish_all()) == [b"1", b"2", b"3"]


def test_a_publish_that_waits_for_the_next_batch_is_not_remembered_before_it_is_written() -> None:
    world = World()
    queue = world.create()
    world.channel(queue)
    first = queue.publish(
        [NewMessage(b"x")] * 2_000, lambda _publish: None, wall_us=world.wall_us, publisher=(b"me", 1)
    )
    second = _send(world, 2_001, b"late")
    world.commit()
    assert first.is_done
    assert not second.is_done
    world.crash()
    again = _send(world, 2_001, b"late")
    world.settle()
    assert again.is_done
    assert [row.body for row in world.store.scan(1, 2_001, items_max=9, bytes_max=999)] == [b"late"]


def test_a_batch_ends_with_the_publish_that_fills_it() -> None:
    """8 MiB of bodies, and at most one publish more: a commit is bounded, whoever waits in line."""
    world = World()
    queue = world.create()
    world.channel(queue)
    done = [world.publish(queue, bytes(1_000_000), settle=False) for _ in range(20)]
    sizes: list[int] = []
    while world.registry.has_changes:
        batch = world.registry.take_changes()
        sizes.append(sum(len(row.body) for row in batch.appends))
        world.registry.committed(batch)
    assert sizes == [9_000_000, 9_000_000, 2_000_000]
    assert all(each.is_done for each in done)


def test_a_replay_that_is_not_written_leaves_the_dead_letter_where_it_is() -> None:
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    taker = world.consumer(channel)
    world.publish(queue, b"x")
    taker.do(channel.reject, taker.got.pop(), "no")
    [letter] = world.store.scan_dead_letters(channel.id, 0, items_max=9)
    world.fail_next = StoreError("the disk is ill")
    made = queue.replay(channel, letter, lambda _publish: None, world.wall_us)
    world.settle()
    assert made.error is not None
    assert world.store.scan_dead_letters(channel.id, 0, items_max=9) == [letter]
    queue.replay(channel, letter, lambda _publish: None, world.wall_us)
    world.settle()
    assert taker.bodies() == [b"x"]
    assert world.store.scan_dead_letters(channel.id, 0, items_max=9) == []


def test_publishes_of_a_deleted_queue_do_not_shift_those_that_are_given_up() -> None:
    world = World()
    gone, kept = world.create("gone"), world.create("kept")
    world.channel(kept)
    lost = world.publish(gone, b"gone", settle=False)
    bad = world.publish(kept, b"bad", settle=False)
    good = world.publish(kept, b"good", settle=False)
    world.registry.delete(gone)
    batch = world.registry.take_changes()
    assert batch.groups == [1, 1]
    world.registry.failed(batch, StoreError("this one"), publishes=[0])
    world.settle()
    assert (lost.error is None, bad.error is None, good.error is None) == (False, False, True)


def test_a_delivery_that_its_consumer_never_saw_does_not_count() -> None:
    world = World()
    queue = world.create(max_attempts=1)
    channel = world.channel(queue)
    taker = world.consumer(channel)
    world.publish(queue, b"x", settle=False)
    world.commit()  # written; the next turn hands it out
    world.registry.pump(world.now, world.wall_us)
    batch = world.registry.take_changes()
    assert taker.core.held
    channel.detach(taker.core, world.now)
    world.store.commit(batch)
    world.registry.committed(batch)
    world.settle()
    assert taker.got == []
    other = world.consumer(channel)
    assert [(each.message.body, each.attempts) for each in other.got] == [(b"x", 1)]


def test_a_touch_that_is_cut_ends_before_others_that_were_not() -> None:
    world = World()
    queue = world.create(msg_timeout_s=10.0, msg_timeout_max_s=15.0)
    channel = world.channel(queue)
    taker = world.consumer(channel, msg_timeout_s=10.0)
    world.publish(queue, b"long")
    world.sleep(8.0)
    world.publish(queue, b"other")
    [long, _other] = taker.got
    world.sleep(1.0)
    assert taker.do(channel.touch, long, world.now) == world.now + 6.0
    assert world.registry.next_deadline() == world.now + 6.0
    world.sleep(6.5)
    assert [each.attempts for each in taker.got] == [1, 1, 2]
    assert taker.got[2].message.body == b"long"


def test_a_long_partition_does_not_keep_the_others_away() -> None:
    world = World()
    queue = world.create(partitions=2)
    channel = world.channel(queue)
    world.publish(queue, *[b"long"] * 5_000)
    world.publish(queue, *[b"short"] * 10)
    taker = world.consumer(channel, 1_100)  # a little more than what was looked at before there was anybody
    assert sum(each.message.body == b"short" for each in taker.got) == 10


def test_what_was_published_after_a_page_was_asked_for_is_not_taken_for_gone() -> None:
    world = World(cache_bytes=1)
    queue = world.create()
    channel = world.channel(queue)
    world.publish(queue, b"1", b"2")
    taker = world.consumer(channel, 0)
    channel.set_ready(taker.core, 10)
    [read] = world.registry.pump(world.now, world.wall_us)
    world.publish(queue, b"3", b"4")
    world.registry.loaded(read, [])  # the store says that it has nothing more
    world.settle()
    assert taker.bodies()[-2:] == [b"3", b"4"]


def test_a_number_that_was_never_written_holds_nothing_up_after_a_crash() -> None:
    world = World(cache_bytes=2_000)
    queue = world.create()
    world.channel(queue)
    world.channel(queue, "other")
    world.publish(queue, b"1")
    world.fail_next = StoreError("the disk is ill")
    world.publish(queue, b"never")
    world.publish(queue, b"3")
    taker = world.consumer(queue.channel("work"), 1)
    taker.finish(taker.got[0])
    world.crash()
    for name in ("work", "other"):
        assert world.consumer(world.queue().channel(name)).finish_all()[-1] == b"3"
    assert world.queue().items == 0


def test_what_is_too_old_while_it_is_held_leaves_nothing_behind() -> None:
    world = World()
    queue = world.create(ttl_s=20.0)
    channel = world.channel(queue)
    taker = world.consumer(channel, msg_timeout_s=30.0)
    world.publish(queue, b"x")
    world.sleep(25.0)
    queue.sweep(world.wall_us)
    world.settle()
    taker.requeue(taker.got.pop())
    assert taker.got == []
    record = world.store.load_partition(1)
    assert (record.messages, record.states[channel.id], record.cursors[channel.id].ack_floor) == (0, [], 1)


def test_an_ephemeral_channel_drops_what_is_too_much_and_does_not_hold_the_log() -> None:
    world = World()
    queue = world.create()
    world.channel(queue)
    watcher = world.channel(queue, "tail#ephemeral")
    for _ in range(3):
        world.publish(queue, *[b"x"] * 5_000)
    assert watcher.counts["dropped_overflow"] == 15_000 - EPHEMERAL_BACKLOG_MAX
    assert watcher.depth == EPHEMERAL_BACKLOG_MAX
    assert seqs(world.consumer(watcher, 1).got) == [5_001]


def test_deferred_messages_do_not_make_the_cursor_forget_what_was_handed_out() -> None:
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    world.publish(queue, b"later", delay_s=5.0)
    world.publish(queue, b"a", b"b")
    world.sleep(6.0)
    taker = world.consumer(channel, 3)
    assert len(taker.got) == 3
    world.crash()
    again = world.consumer(world.queue().channel("work"))
    assert sorted((each.message.body, each.attempts) for each in again.got) == [(b"a", 2), (b"b", 2), (b"later", 2)]


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "add", "take", "drop"]), st.integers(1, 30))))
def test_ranges_are_a_set(operations: list[tuple[str, int]]) -> None:
    ranges, model = Ranges(), dict[int, None]()
    for operation, number in operations:
        if operation == "add":
            assert ranges.add(number) is (number not in model)
            model[number] = None
        elif operation == "drop":
            ranges.drop_up_to(number)
            model = {each: None for each in model if each > number}
        elif not any(each <= number for each in model):
            last = number
            while last + 1 in model:
                last += 1
                del model[last]
            assert ranges.take_after(number) == last
        assert ranges.items == len(model)
        assert [number for number in range(32) if number in ranges] == sorted(model)
        assert len(ranges) == len(as_ranges(sorted(model)))
