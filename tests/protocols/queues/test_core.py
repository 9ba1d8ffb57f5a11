"""The queue core: what each operation does, also over a crash. Names say the behaviour; (#N): the report it answers."""

import pytest

from dep2p.errors import (
    ChannelNotFoundError,
    MessageTooLargeError,
    NotInFlightError,
    QueueExistsError,
    QueueFullError,
    QueueNotFoundError,
    StoreFullError,
)
from dep2p.protocols.queues.deduplication import PendingPublish
from dep2p.protocols.queues.failure_history import failures_of
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import check_name, logical_partition, ranges
from dep2p.protocols.queues.options import QueueOptions, options_from
from dep2p.protocols.wire.cbor import encode_canonical
from tests.protocols.queues.world import World, seqs


def test_messages_come_in_order_and_are_gone_when_finished() -> None:
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue))
    world.publish(queue, *[b"%d" % n for n in range(25)])
    assert seqs(taker.got) == list(range(1, 11))  # max_in_flight
    assert taker.finish_all() == [b"%d" % n for n in range(25)]
    assert queue.items == 0
    assert world.store.scan(1, 1, items_max=9, bytes_max=999) == []


def test_each_channel_gets_a_copy_and_its_consumers_share_it_fairly() -> None:
    world = World()
    queue = world.create()
    one, two = world.channel(queue, "one"), world.channel(queue, "two")
    a, b, c = world.consumer(one, 100), world.consumer(one, 100), world.consumer(two, 100)
    world.publish(queue, *[b"%d" % n for n in range(30)])
    assert len(a.got) == len(b.got) == 15
    assert sorted(seqs(a.got) + seqs(b.got)) == seqs(c.got) == list(range(1, 31))


def test_what_is_published_before_the_first_channel_is_kept_for_it_and_only_for_it() -> None:
    """(#1520) The policy is explicit: hold, or drop and count."""
    world = World()
    queue = world.create()
    world.publish(queue, b"1", b"2")
    first = world.consumer(world.channel(queue, "first"))
    assert first.finish_all() == [b"1", b"2"]
    world.publish(queue, b"3")
    second = world.consumer(world.channel(queue, "second"))
    assert second.got == []
    third = world.consumer(world.channel(queue, "third", from_start=True))
    assert third.bodies() == [b"3"]
    dropping = world.create("dropping", hold_without_channel=False)
    publish = world.publish(dropping, b"x")
    assert publish.is_done
    assert publish.error is None
    assert world.consumer(world.channel(dropping)).got == []
    assert dropping.counts["dropped_no_channel"] == 1


def test_a_message_that_is_not_settled_in_time_comes_again_without_a_person_or_client() -> None:
    """(#390) Expiry works with no client attached."""
    world = World()
    queue = world.create(requeue_on_disconnect=False)
    channel = world.channel(queue)
    taker = world.consumer(channel, msg_timeout_s=30.0)
    world.publish(queue, b"x")
    taker.leave()
    other = world.consumer(channel)
    world.sleep(29.0)
    assert other.got == []
    world.sleep(2.0)
    assert [(each.message.body, each.attempts) for each in other.got] == [(b"x", 2)]


def test_a_consumer_that_is_gone_gives_back_what_it_held_at_once() -> None:
    """(#137) Connection loss requeues at once, attempts kept; (qmq#50) a crashed consumer's messages are re-queued."""
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    taker, other = world.consumer(channel, 2), world.consumer(channel, 0)
    world.publish(queue, b"1", b"2", b"3")
    taker.leave()
    channel.set_ready(other.core, 10)
    world.settle()
    assert sorted((each.message.body, each.attempts) for each in other.got) == [(b"1", 2), (b"2", 2), (b"3", 1)]


def test_settling_what_is_not_held_is_refused_and_harms_nothing() -> None:
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    taker, other = world.consumer(channel, msg_timeout_s=5.0), world.consumer(channel, 0)
    world.publish(queue, b"x")
    [delivery] = taker.got
    assert other.finish(delivery) == [(1, 1)]
    with pytest.raises(NotInFlightError, match="not held by this consumer"):
        other.requeue(delivery)
    with pytest.raises(NotInFlightError):
        other.do(channel.reject, delivery, "no")
    taker.got.clear()
    world.sleep(6.0)  # its time is over, and it is given out again
    assert seqs(taker.got) == [1]
    assert taker.finish(delivery) == []
    assert taker.finish(delivery) == [(1, 1)]
    with pytest.raises(NotInFlightError):
        taker.do(channel.touch, delivery, world.now)


def test_touching_gives_more_time_up_to_the_most_allowed() -> None:
    """(go-nsq#172) Touch returns the new deadline, or an error."""
    world = World()
    queue = world.create(msg_timeout_s=10.0, msg_timeout_max_s=25.0)
    channel = world.channel(queue)
    taker = world.consumer(channel, msg_timeout_s=10.0)
    world.publish(queue, b"x")
    [delivery] = taker.got
    start = world.now
    world.sleep(8.0)
    assert taker.do(channel.touch, delivery, world.now) == world.now + 10.0
    world.sleep(9.0)
    assert taker.do(channel.touch, delivery, world.now) == start + 25.0
    world.sleep(7.0)
    assert taker.got == [delivery]
    world.sleep(2.0)
    assert len(taker.got) == 2


def test_a_requeue_waits_as_long_as_asked_and_no_longer_than_allowed() -> None:
    """(#865) A delay above the maximum is clamped."""
    world = World()
    queue = world.create(delay_max_s=100.0)
    taker = world.consumer(world.channel(queue))
    world.publish(queue, b"x")
    taker.requeue(taker.got.pop(), 5.0, "not now")
    world.sleep(4.9)
    assert taker.got == []
    world.sleep(0.2)
    assert [each.attempts for each in taker.got] == [2]
    taker.requeue(taker.got.pop(), 1e9)
    world.sleep(99.0)
    assert taker.got == []
    world.sleep(2.0)
    assert [each.attempts for each in taker.got] == [3]


def test_releasing_does_not_count_as_an_attempt() -> None:
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    taker = world.consumer(channel, 1)
    world.publish(queue, b"1", b"2")
    taker.do(channel.release, taker.got.pop())
    assert [(each.message.body, each.attempts) for each in taker.got] == [(b"1", 1)]


def test_after_the_last_attempt_a_message_is_a_dead_letter_with_its_history_and_can_be_replayed() -> None:
    """(#974) Dead letters; (pgmq#274) it is the server that counts."""
    world = World()
    queue = world.create(max_attempts=2)
    channel = world.channel(queue)
    others = world.consumer(world.channel(queue, "others"))
    taker = world.consumer(channel)
    world.publish(queue, b"poison", b"good")
    poison, good = taker.got
    taker.got.clear()
    taker.finish(good)
    taker.requeue(poison, 0.0, "it smells")
    taker.requeue(taker.got.pop(), 0.0, "it still smells")
    assert taker.got == []
    [letter] = world.store.scan_dead_letters(channel.id, 0, items_max=10)
    assert (letter.body, letter.attempts, letter.died_us) == (b"poison", 2, world.wall_us)
    assert [(each.attempt, each.reason) for each in failures_of(letter.history)] == [
        (1, "it smells"),
        (2, "it still smells"),
    ]
    others.finish_all()
    assert queue.items == 0  # the letter is a copy
    queue.replay(channel, letter, lambda _publish: None, world.wall_us)
    world.settle()
    assert [(each.message.body, each.attempts) for each in taker.got] == [(b"poison", 1)]
    assert others.got == []  # it is nobody else's
    assert world.store.scan_dead_letters(channel.id, 0, items_max=10) == []
    taker.finish_all()
    assert queue.items == 0


def test_a_message_that_kills_its_process_each_time_becomes_a_dead_letter() -> None:
    """NSQite stores attempts only at the end, so that a poison message comes forever."""
    world = World()
    queue = world.create(max_attempts=3)
    world.channel(queue)
    world.publish(queue, b"poison")
    for attempt in (1, 2, 3):
        queue = world.queue()
        taker = world.consumer(queue.channel("work"))
        assert [each.attempts for each in taker.got] == [attempt]
        world.crash()
    queue = world.queue()
    taker = world.consumer(queue.channel("work"))
    assert taker.got == []
    [letter] = world.store.scan_dead_letters(queue.channel("work").id, 0, items_max=10)
    assert letter.attempts == 3


def test_rejecting_buries_at_once_and_without_dead_letters_it_is_dropped_and_counted() -> None:
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    taker = world.consumer(channel)
    world.publish(queue, b"x")
    taker.do(channel.reject, taker.got.pop(), "no such order")
    [letter] = world.store.scan_dead_letters(channel.id, 0, items_max=10)
    assert [each.reason for each in failures_of(letter.history)] == ["no such order"]
    assert [(event[0], event[4]) for event in world.trace.events] == [
        ("published", ""),
        ("handed_out", ""),
        ("rejected", "no such order"),
        ("dead", "no such order"),
    ]
    plain = world.create("plain", dead_letters=False)
    channel = world.channel(plain)
    taker = world.consumer(channel)
    world.publish(plain, b"x")
    taker.do(channel.reject, taker.got.pop(), "")
    assert world.store.scan_dead_letters(channel.id, 0, items_max=10) == []
    assert channel.counts["dropped_attempts_used_up"] == 1
    assert world.trace.states()[4:] == ["published", "handed_out", "rejected", "dropped"]


def test_old_dead_letters_go_when_there_are_too_many() -> None:
    world = World()
    queue = world.create(dead_items_max=3)
    channel = world.channel(queue)
    taker = world.consumer(channel)
    for n in range(5):
        world.publish(queue, b"%d" % n)
        taker.do(channel.reject, taker.got.pop(), "")
    assert [each.body for each in world.store.scan_dead_letters(channel.id, 0, items_max=10)] == [b"2", b"3", b"4"]
    assert queue.counts["dead_dropped_overflow"] == 2


def test_a_deferred_publish_keeps_its_time_over_a_crash_and_whatever_the_memory() -> None:
    """(#1107, #674, #871, #1375) Deferral is durable and independent of memory limits."""
    for cache_bytes in (1, 1 << 26):
        world = World(cache_bytes=cache_bytes)
        queue = world.create()
        world.channel(queue)
        world.publish(queue, b"later", delay_s=100.0)
        world.publish(queue, b"now")
        taker = world.consumer(queue.channel("work"))
        assert taker.finish_all() == [b"now"]
        world.sleep(40.0)
        world.crash()
        taker = world.consumer(world.queue().channel("work"))
        world.sleep(59.0)
        assert taker.got == []
        world.sleep(1.5)
        assert [(each.message.body, each.attempts) for each in taker.got] == [(b"later", 1)]


def test_equal_due_times_keep_the_order_of_publishing() -> None:
    """(#1272, #1389)"""
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue), 100)
    world.publish(queue, *[b"%d" % n for n in range(20)], delay_s=10.0)
    world.sleep(11.0)
    assert taker.bodies() == [b"%d" % n for n in range(20)]


def test_a_clock_that_is_set_back_changes_nothing_in_a_running_process() -> None:
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue), msg_timeout_s=30.0)
    world.publish(queue, b"deferred", delay_s=10.0)
    world.publish(queue, b"held")
    world.wall_us -= 3_600_000_000
    world.sleep(10.5)
    assert taker.bodies() == [b"held", b"deferred"]
    world.sleep(20.0)
    assert taker.bodies() == [b"held"]


def test_everything_acknowledged_is_there_after_a_crash_and_what_was_in_flight_comes_back() -> None:
    """(#1386, #755)"""
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue), 4)
    world.publish(queue, *[b"%d" % n for n in range(10)])
    taker.finish(taker.got[1], taker.got[3])
    world.crash()
    queue = world.queue()
    taker = world.consumer(queue.channel("work"), 100)
    found = {each.message.body: each.attempts for each in taker.got}
    assert set(found) == {b"%d" % n for n in range(10) if n not in (1, 3)}
    assert found[b"0"] == found[b"2"] == 2
    assert found[b"9"] == 1
    assert queue.channel("work").counts["recovered"] >= 2


def test_numbers_are_never_used_twice() -> None:
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue))
    world.publish(queue, b"1", b"2")
    taker.finish_all()
    assert queue.items == 0
    world.crash()
    assert world.publish(world.queue(), b"3").points() == [(1, 3)]


def test_what_was_finished_does_not_come_back_after_a_crash() -> None:
    """(redis#7105, #5433)"""
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue), 100)
    world.publish(queue, *[b"%d" % n for n in range(50)])
    taker.finish(*[each for each in taker.got if each.message.seq % 3])
    for _ in range(3):
        world.crash()
        again = world.consumer(world.queue().channel("work"), 100)
        assert seqs(again.got) == [seq for seq in range(1, 51) if not seq % 3]


def test_a_publish_that_was_not_written_leaves_nothing_behind_and_the_rest_goes_on() -> None:
    world = World()
    queue = world.create()
    taker = world.consumer(world.channel(queue))
    world.publish(queue, b"good")
    finished = taker.got.pop()
    taker.channel.finish(taker.core, [(1, finished.message.seq)])
    world.fail_next = StoreFullError("no room")
    publish = world.publish(queue, b"bad")
    assert isinstance(publish.error, StoreFullError)
    assert taker.got == []
    world.publish(queue, b"after")
    assert taker.finish_all() == [b"after"]
    assert queue.items == 0
    world.crash()
    assert world.consumer(world.queue().channel("work")).got == []


def test_a_full_queue_takes_no_more_until_there_is_room() -> None:
    """(#302) A size cap with back-pressure."""
    world = World()
    queue = world.create(items_max=3)
    taker = world.consumer(world.channel(queue))
    world.publish(queue, b"1", b"2", b"3")
    with pytest.raises(QueueFullError, match="items_max"):
        world.publish(queue, b"4")
    taker.finish(taker.got[0])
    world.publish(queue, b"4")
    small = world.create("small", bytes_max=10)
    world.channel(small)
    world.publish(small, b"123456789")
    with pytest.raises(QueueFullError):
        world.publish(small, b"12")
    world.crash()
    with pytest.raises(QueueFullError):
        world.publish(world.queue("small"), b"12")


def test_old_messages_are_dropped_and_counted() -> None:
    """(#302) A time to live."""
    world = World()
    queue = world.create(ttl_s=60.0)
    channel = world.channel(queue)
    world.publish(queue, b"old")
    world.sleep(50.0)
    world.publish(queue, b"new")
    world.sleep(20.0)
    assert queue.sweep(world.wall_us) == []
    world.settle()
    assert queue.items == 1
    taker = world.consumer(channel)
    assert taker.bodies() == [b"new"]
    assert queue.counts["expired"] + channel.counts["expired"] == 1
    assert world.trace.states("work") == ["expired", "handed_out"]


def test_a_retried_publish_is_recognised_also_after_a_crash() -> None:
    world = World()
    queue = world.create()
    world.channel(queue)

    def publish(number: int, *bodies: bytes) -> PendingPublish:
        made = world.queue().publish(
            [NewMessage(body) for body in bodies],
            lambda _publish: None,
            wall_us=world.wall_us,
            publisher=(b"me", number),
        )
        world.settle()
        return made

    first = publish(1, b"a", b"b")
    assert publish(1, b"a", b"b").points() == first.points() == [(1, 1), (1, 2)]
    publish(3, b"c")
    world.crash()
    assert publish(3, b"c").points() == [(1, 3)]
    assert publish(4, b"d").points() == [(1, 4)]
    taker = world.consumer(world.queue().channel("work"), 100)
    assert taker.bodies() == [b"a", b"b", b"c", b"d"]


def test_pausing_loses_nothing_and_survives_a_restart() -> None:
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    taker = world.consumer(channel)
    queue.set_paused(True, "work")
    world.publish(queue, b"1")
    assert taker.got == []
    world.crash()
    queue = world.queue()
    taker = world.consumer(queue.channel("work"))
    assert taker.got == []
    queue.set_paused(False, "work")
    world.settle()
    assert taker.finish_all() == [b"1"]
    queue.set_paused(True)
    world.publish(queue, b"2")
    assert taker.got == []
    queue.set_paused(False)
    world.settle()
    assert taker.bodies() == [b"2"]


def test_emptying_and_deleting() -> None:
    world = World()
    queue = world.create()
    one, two = world.channel(queue, "one"), world.channel(queue, "two")
    taker = world.consumer(one, 2)
    world.publish(queue, b"1", b"2", b"3")
    assert one.skip_all() == 3
    world.settle()
    assert taker.finish(*taker.got) == [(1, 1), (1, 2)]
    assert two.depth == 3
    assert queue.empty() == 3
    world.settle()
    assert (queue.items, two.depth) == (0, 0)
    taker.got.clear()
    world.publish(queue, b"4")
    assert taker.bodies() == [b"4"]
    queue.delete_channel("one")
    world.settle()
    assert taker.closed == "the channel 'one' was deleted"
    with pytest.raises(ChannelNotFoundError, match="there are: two"):
        queue.channel("one")
    watcher = world.consumer(two)
    world.registry.delete(queue)
    world.settle()
    assert watcher.closed
    world.crash()
    with pytest.raises(QueueNotFoundError):
        world.registry.find("", "jobs")
    again = world.create()
    assert again.partition_ids != queue.partition_ids


def test_an_ephemeral_queue_lives_in_memory_and_drops_what_is_too_much() -> None:
    world = World()
    queue = world.create("fast#ephemeral", items_max=3)
    channel = world.channel(queue)
    world.publish(queue, *[b"%d" % n for n in range(5)])
    taker = world.consumer(channel)
    assert taker.finish_all() == [b"2", b"3", b"4"]
    assert queue.counts["dropped_overflow"] == 2
    assert world.store.load() == {}
    assert world.store.scan(1, 1, items_max=9, bytes_max=999) == []


def test_priority_goes_first_and_survives_a_crash() -> None:
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    for body, priority in ((b"a", 0), (b"b", 5), (b"c", 9), (b"d", 5)):
        world.publish(queue, body, priority=priority)
    taker = world.consumer(channel, 2)
    assert [each.message.body for each in taker.got] == [b"c", b"b"]
    world.crash()
    taker = world.consumer(world.queue().channel("work"), 10)
    assert [(each.message.body, each.attempts) for each in taker.got] == [(b"c", 2), (b"b", 2), (b"d", 1), (b"a", 1)]


def test_a_channel_gets_only_what_its_filter_lets_through() -> None:
    world = World()
    queue = world.create()
    red = world.channel(queue, "red", filter_text="tag in (red, pink) and header.size != 3")
    everything = world.channel(queue, "all")
    for tag, size in (("red", 1), ("blue", 1), ("pink", 3), ("pink", 4)):
        attributes = encode_canonical({"t": [tag], "h": {"size": size}})
        world.publish(queue, tag.encode() + b"%d" % size, attributes=attributes)
    taker = world.consumer(red)
    assert taker.finish_all() == [b"red1", b"pink4"]
    assert world.consumer(everything).finish_all() == [b"red1", b"blue1", b"pink3", b"pink4"]
    assert queue.items == 0
    world.crash()
    red = world.queue().channel("red")
    assert red.filter is not None
    assert red.filter.text == "tag in (red, pink) and header.size != 3"


@pytest.mark.parametrize(
    ("text", "tags", "headers", "verdict"),
    [
        ("tag = a", ["a"], {}, True),
        ("not tag = a", ["a"], {}, False),
        ('tag in (x, y) or header.kind ^= "or"', [], {"kind": "order"}, True),
        ('header.kind = "two words"', [], {"kind": "two words"}, True),
        ("header.on = true", [], {"on": True}, True),
        ("header.missing = 1", [], {}, False),
        ("header.missing != 1", [], {}, True),
    ],
)
def test_filters(text: str, tags: list[str], headers: dict[str, object], verdict: bool) -> None:
    assert Filter(text).matches(encode_canonical({"t": tags, "h": headers})) is verdict


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tag",
        "tag =",
        "tag in a",
        "tag in (a",
        "size = 3",
        "tag = a and",
        "tag=a and tag=b or tag=c",
        "tag = ;",
        "(" * 2_000,
    ],
)
def test_wrong_filters_say_where(text: str) -> None:
    with pytest.raises(ValueError, match="filter"):
        Filter(text)


def test_keys_go_to_their_partition_and_keep_their_order() -> None:
    world = World()
    queue = world.create(partitions=3)
    taker = world.consumer(world.channel(queue), 1_000)
    for n in range(60):
        world.publish(queue, b"%d" % n, key=f"k{n % 7}")
    by_key: dict[int, list[tuple[int, int]]] = {}
    for each in taker.got:
        n = int(each.message.body)
        by_key.setdefault(n % 7, []).append((each.partition, n))
    for found in by_key.values():
        assert len({partition for partition, _n in found}) == 1
        assert [n for _partition, n in found] == sorted(n for _partition, n in found)
    assert len({found[0][0] for found in by_key.values()}) == 3


def test_the_hash_and_the_ranges_are_what_the_specification_says() -> None:
    assert [logical_partition(key) for key in ("", "a", "order-42", "é")] == [
        logical_partition(key) for key in ("", "a", "order-42", "é")
    ]
    for count in (1, 2, 3, 5, 7, 64, 1_023, 1_024):
        found = ranges(count)
        assert [lp for each in found for lp in each] == list(range(1_024))
        assert max(map(len, found)) - min(map(len, found)) <= 1
    for count in (0, 1_025):
        with pytest.raises(ValueError, match="partitions"):
            ranges(count)


def test_a_large_backlog_is_read_in_pages_and_costs_no_memory() -> None:
    world = World(cache_bytes=100_000)
    queue = world.create()
    taker_channel = world.channel(queue)
    for start in range(0, 5_000, 100):
        world.publish(queue, *[b"%06d" % n + bytes(200) for n in range(start, start + 100)])
    assert world.registry.cache.bytes <= 100_000
    taker = world.consumer(taker_channel, 300)
    got: list[bytes] = []
    while len(got) < 5_000:
        batch = list(taker.got)
        assert batch, len(got)
        taker.got.clear()
        got += [each.message.body[:6] for each in batch]
        taker.finish(*batch)
        assert world.registry.cache.bytes <= 100_000 + 300 * 300
    assert got == [b"%06d" % n for n in range(5_000)]
    assert queue.items == 0


def test_done_messages_cost_a_range_and_not_a_row_each() -> None:
    """(persist-queue#77) Acknowledged messages leave, without anybody calling for it."""
    world = World()
    queue = world.create()
    channel = world.channel(queue)
    taker = world.consumer(channel, 1_000)
    world.publish(queue, *[b"x"] * 1_000)
    taker.finish(*taker.got[1:])
    record = world.store.load_partition(1)
    assert record.done[channel.id] == [(2, 1_000)]
    taker.finish(taker.got[0])
    record = world.store.load_partition(1)
    assert record.done[channel.id] == []
    assert (record.messages, record.trimmed, record.cursors[channel.id].ack_floor) == (0, 1_000, 1_000)


def test_bad_input_is_refused_before_anything_changes() -> None:
    world = World()
    queue = world.create(message_bytes_max=10, defer_max_s=100.0)
    for wrong, kind in (
        (NewMessage(bytes(11)), MessageTooLargeError),
        (NewMessage(b"", delay_s=101.0), ValueError),
        (NewMessage(b"", delay_s=-1.0), ValueError),
        (NewMessage(b"", delay_s=float("nan")), ValueError),
        (NewMessage(b"", priority=256), ValueError),
    ):
        with pytest.raises(kind):
            queue.publish([NewMessage(b"fine"), wrong], lambda _publish: None, wall_us=0)
    assert (queue.items, queue.logs[1].last_seq) == (0, 0)
    with pytest.raises(ValueError, match="nothing"):
        queue.publish([], lambda _publish: None, wall_us=0)
    for name in ("", "a b", "x" * 65, "a/b", "ü", "a#other", "#ephemeral"):
        with pytest.raises(ValueError, match="name"):
            check_name(name)
    with pytest.raises(QueueExistsError, match="message_bytes_max"):
        world.registry.create("", "jobs", QueueOptions())
    with pytest.raises(ValueError, match="there is no option 'speed'"):
        options_from({"speed": 3})
    with pytest.raises(ValueError, match="max_attempts is 'x': it must be a whole number"):
        options_from({"max_attempts": "x"})
    with pytest.raises(ValueError, match="msg_timeout_s"):
        QueueOptions(msg_timeout_s=1_000.0)
