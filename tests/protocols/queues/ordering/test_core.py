"""Exclusive channels, part by part: assignment, locks and their epochs, the consumer's lease, and the lines of keys."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import LockLostError, ProtocolError, StoreError
from dep2p.protocols.queues.consumer import ChannelDelivery, ConsumerWindow
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel, ExclusiveChannelConsumer
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.ordering.assignment import Strategy, assign_partitions
from dep2p.protocols.queues.ordering.consumer_group import Freed, Granted, Group, Lease, SendLease
from dep2p.protocols.queues.ordering.group_member import Beat, Lost, MemberCore, MemberState, Revoked, Unlock
from dep2p.protocols.queues.ordering.key_queues import KeyQueues, key_of
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import StoreBatch
from dep2p.protocols.wire.cbor import encode_canonical
from tests.protocols.queues.world import World

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16

# Assignment


@given(st.integers(0, 20), st.lists(st.integers(0, 255), unique=True, max_size=9), st.randoms(use_true_random=False))
def test_every_partition_has_one_consumer_and_as_few_as_possible_move(count: int, names: list[int], rng: Any) -> None:
    partitions = list(range(1, count + 1))
    members = [bytes((name,)) * 16 for name in names]
    before: dict[bytes, list[int]] = {}
    for partition in partitions:
        owner = rng.choice([*members, b"gone"])
        before.setdefault(owner, []).append(partition)
    found = assign_partitions(Strategy.EXCLUSIVE, partitions, members, before)
    assert list(found) == members
    if not members:
        return
    assert sorted(each for owned in found.values() for each in owned) == partitions
    sizes = [len(owned) for owned in found.values()]
    assert max(sizes) - min(sizes) <= 1
    again = assign_partitions(Strategy.EXCLUSIVE, partitions, members, found)
    assert again == found  # nothing moves when nothing has changed
    moved = sum(1 for member in members for each in before.get(member, ()) if each not in found[member])
    # Only what is above a fair share is given away.
    share, extra = divmod(count, len(members))
    above = sorted((len(before.get(member, ())) for member in members), reverse=True)
    assert moved == sum(max(0, had - share - (at < extra)) for at, had in enumerate(above))


def test_surplus_consumers_have_an_empty_entry_and_shared_ones_all() -> None:
    assert assign_partitions(Strategy.EXCLUSIVE, [1, 2], [A, B, C], {}) == {A: (1,), B: (2,), C: ()}
    assert assign_partitions(Strategy.SHARED, [1, 2], [A, B, C], {}) == dict.fromkeys((A, B, C), (1, 2))


def test_one_that_joins_takes_only_its_shard_and_one_that_leaves_moves_nothing_else() -> None:
    first = assign_partitions(Strategy.EXCLUSIVE, [1, 2, 3, 4, 5, 6], [A, B], {})
    second = assign_partitions(Strategy.EXCLUSIVE, [1, 2, 3, 4, 5, 6], [A, B, C], first)
    assert all(each in first[member] for member in (A, B) for each in second[member])
    third = assign_partitions(Strategy.EXCLUSIVE, [1, 2, 3, 4, 5, 6], [A, B], second)
    assert all(each in third[member] for member in (A, B) for each in second[member])


# Broker's side


class Broker:
    """A group, and what it says."""

    def __init__(self, partitions: tuple[int, ...] = (1, 2)) -> None:
        self.group = Group(partitions, 30.0)
        self.notified: dict[bytes, Lease] = {}
        self.freed: list[tuple[int, int]] = []

    def beat(self, member: bytes, now: float, held: dict[int, int] | None = None, beat: int = 1) -> None:
        seen = self.notified[member].serial if member in self.notified else 0
        self.group.heartbeat(member, "someone", beat, seen, held or {}, now, 0)
        self.perform()

    def perform(self) -> None:
        group = self.group
        while group.effects:
            effects, group.effects = group.effects, []
            for effect in effects:
                if isinstance(effect, Granted):
                    group.activated(effect.lock)
                elif isinstance(effect, SendLease):
                    self.notified[effect.member] = effect.lease
                else:
                    assert isinstance(effect, Freed)
                    self.freed.append(effect.lock[:2])

    def join(self, member: bytes, now: float = 0.0) -> None:
        """With a second heartbeat that asks for what it was told of."""
        self.beat(member, now)
        self.beat(member, now, {each: 0 for each, _epoch in self.notified[member].assigned})

    def at(self, now: float) -> None:
        self.group.on_deadline(now, 0)
        self.perform()


def test_a_partition_is_given_when_its_holder_has_released_it() -> None:
    broker = Broker()
    broker.join(A)
    assert dict(broker.notified[A].assigned) == {1: 1, 2: 1}
    broker.join(B)
    assert (dict(broker.notified[A].assigned), dict(broker.notified[B].assigned)) == ({1: 1}, {2: 0})
    broker.group.unlock(B, 2, 1, 0)  # not its own
    broker.group.unlock(A, 2, 7, 0)  # not that epoch
    broker.perform()
    assert dict(broker.notified[B].assigned) == {2: 0}
    broker.group.unlock(A, 2, 1, 0)
    broker.perform()
    assert dict(broker.notified[B].assigned) == {2: 2}


def test_one_that_is_not_heard_of_loses_its_partitions_after_its_lease_and_no_sooner() -> None:
    broker = Broker()
    broker.join(A)
    broker.join(B, 1.0)
    broker.beat(B, 29.0, {2: 0})
    broker.at(30.0)
    assert broker.freed == []
    assert broker.group.next_deadline() == pytest.approx(30.3)
    broker.at(30.4)
    assert sorted(broker.freed) == [(1, 1), (2, 1)]
    assert dict(broker.notified[B].assigned) == {1: 0, 2: 2}
    broker.beat(B, 31.0, {1: 0, 2: 2})
    assert dict(broker.notified[B].assigned) == {1: 2, 2: 2}
    assert not broker.group.locks.is_current(1, 1)


def test_a_broker_that_starts_again_waits_for_those_that_may_still_work_and_gives_no_epoch_twice() -> None:
    broker = Broker()
    broker.join(A)
    again = Broker()
    again.group.restore(_stored(broker.group))
    assert again.group.next_deadline() == float("-inf")
    again.at(5.0)
    again.join(B, 6.0)
    assert dict(again.notified[B].assigned) == {2: 0}  # A is taken for alive
    again.at(35.5)
    assert dict(again.notified[B].assigned)[2] == 2
    with pytest.raises(ProtocolError, match="no group"):
        Broker().group.restore([1, [[2]], [], []])


def test_the_epoch_of_a_free_partition_survives_a_restart() -> None:
    broker = Broker((1,))
    broker.join(A)
    broker.group.leave(A, 0)
    broker.perform()
    again = Broker((1,))
    again.group.restore(_stored(broker.group))
    again.join(B)
    assert dict(again.notified[B].assigned) == {1: 2}


def test_a_grant_that_is_not_stored_is_told_to_nobody() -> None:
    group = Group((1,), 30.0)
    group.heartbeat(A, "", 1, 0, {}, 0.0, 0)
    group.heartbeat(A, "", 2, 1, {1: 0}, 0.0, 0)
    leases = [effect.lease for effect in group.effects if isinstance(effect, SendLease)]
    assert [dict(lease.assigned) for lease in leases] == [{1: 0}, {1: 0}]
    (granted,) = [effect.lock for effect in group.effects if isinstance(effect, Granted)]
    group.effects.clear()
    assert group.activated(granted)
    assert not group.activated(granted)
    (notified,) = group.effects
    assert isinstance(notified, SendLease)
    assert (notified.lease.beat, dict(notified.lease.assigned)) == (0, {1: 1})


def test_a_lock_whose_release_was_lost_on_the_way_is_free_with_the_next_heartbeat() -> None:
    broker = Broker()
    broker.join(A)
    broker.join(B)
    broker.group.attached(A)  # a new link: UNLOCK of 2 went with the old one
    broker.notified.pop(A)
    broker.beat(A, 1.0, {1: 1})
    assert dict(broker.notified[B].assigned) == {2: 2}


def _stored(group: Group) -> object:
    from dep2p.protocols.wire.cbor import decode_bounded

    return decode_bounded(encode_canonical(group.to_value()), "a group", depth_max=8, entries_max=1_000)


# The consumer's side


def _lease(beat: int, assigned: dict[int, int], serial: int = 1) -> Lease:
    return Lease(beat, 30.0, serial, 1, tuple(assigned.items()))


def test_a_lease_counts_from_when_the_heartbeat_was_sent() -> None:
    core = MemberCore()
    beat = core.beat(100.0)
    core.on_lease(_lease(beat.beat, {1: 0}), 125.0)
    core.on_lease(_lease(0, {1: 1}), 126.0)
    assert (core.lease_end, core.epoch_of(1, 129.9), core.epoch_of(1, 130.0)) == (130.0, 1, 0)
    assert core.next_deadline() == 130.0
    core.on_deadline(130.0)
    assert core.effects == [Beat(), Lost(1, 1), Beat()]
    assert core.holds[1].state is MemberState.WANTED


def test_an_answer_that_comes_after_its_lease_gives_nothing() -> None:
    core = MemberCore()
    beat = core.beat(100.0)
    core.on_lease(_lease(beat.beat, {1: 1}), 131.0)
    assert core.epoch_of(1, 131.0) == 0
    assert core.holds[1].state is MemberState.WANTED


def test_handing_over_waits_for_what_is_in_work() -> None:
    core = MemberCore()
    beat = core.beat(0.0)
    core.on_lease(_lease(beat.beat, {1: 1, 2: 1}), 0.1)
    core.opened(1, 1)
    core.opened(1, 1)
    core.effects.clear()
    core.on_lease(_lease(0, {2: 1}), 1.0)
    assert core.effects == [Revoked(1)]
    assert core.epoch_of(1, 1.0) == 0
    core.closed(1, 1)
    assert core.effects == [Revoked(1)]
    core.closed(1, 1)
    assert core.effects == [Revoked(1), Unlock(1, 1)]
    assert list(core.holds) == [2]
    core.on_lease(_lease(0, {1: 1, 2: 1}), 1.1)  # said before it heard of the release
    assert core.holds[1].state is MemberState.WANTED


def test_what_runs_under_a_lost_lock_ends_before_the_partition_is_wanted_again() -> None:
    core = MemberCore()
    beat = core.beat(0.0)
    core.on_lease(_lease(beat.beat, {1: 1}), 0.1)
    core.opened(1, 1)
    core.on_deadline(30.0)
    assert core.holds[1].state is MemberState.ENDING
    assert core.beat(31.0).held == ()
    core.closed(1, 1)
    assert core.beat(31.0).held == ((1, 0),)


def test_after_a_lost_link_results_count_and_the_lock_is_taken_anew_when_nothing_is_in_work() -> None:
    core = MemberCore()
    beat = core.beat(0.0)
    core.on_lease(_lease(beat.beat, {1: 3, 2: 4}), 0.1)
    core.opened(1, 3)
    core.link_lost()
    assert dict(core.beat(1.0).held) == {1: 3, 2: 0}
    assert core.epoch_of(1, 1.0) == 0  # nothing more of the old lock
    core.closed(1, 3)
    assert dict(core.beat(1.0).held) == {1: 0, 2: 0}


# Lines


def test_of_a_key_only_the_head_is_ready() -> None:
    key_queues = KeyQueues()
    joined = [key_queues.join(seq, key) for seq, key in ((1, "a"), (2, "b"), (3, "a"), (4, "a"))]
    assert joined == [True, True, False, False]
    assert (key_queues.waiting, key_queues.keys) == (2, 2)
    assert [key_queues.leave(1), key_queues.leave(3), key_queues.leave(4), key_queues.leave(4)] == [3, 4, 0, 0]
    assert (key_queues.waiting, key_queues.keys) == (0, 1)


def test_the_key_is_read_from_the_attributes_and_damage_is_no_key() -> None:
    assert key_of(encode_canonical({"k": "order-7", "t": ["x"]})) == "order-7"
    assert [key_of(each) for each in (b"", b"\xff", encode_canonical([1]), encode_canonical({"k": 7}))] == [""] * 4


# The channel


class Member:
    """A consumer of a `World`'s exclusive channel that holds what it is given and says nothing by itself."""

    def __init__(self, world: World, channel: ExclusiveChannel, name: bytes, max_in_flight: int = 10) -> None:
        self.world = world
        self.channel = channel
        self.got: list[ChannelDelivery] = []
        self.lease: Lease | None = None
        self.core = ExclusiveChannelConsumer(
            f"{name[:1]!r} {world.now}",
            name,
            ConsumerWindow(max_in_flight, 1 << 30, 60.0),
            on_deliver=self.got.extend,
            on_closed=lambda _reason: None,
            on_lease=self._on_lease,
        )
        channel.attach(self.core)
        self.beat()
        self.beat()

    def _on_lease(self, lease: Lease) -> None:
        self.lease = lease

    def beat(self, **held: int) -> None:
        lease = self.lease
        wanted = {} if lease is None else dict(lease.assigned)
        self.channel.heartbeat(self.core, 1, 0 if lease is None else lease.serial, wanted, self.world.now)
        self.world.settle()

    def bodies(self) -> list[bytes]:
        return [each.message.body for each in self.got]

    def take(self) -> list[ChannelDelivery]:
        got, self.got[:] = list(self.got), []
        return got

    def finish(self, delivery: ChannelDelivery) -> list[tuple[int, int]]:
        refused: list[tuple[int, int]] = self._settle(
            delivery, lambda consumer, key: self.channel.finish(consumer, [key])
        )
        return refused

    def requeue(self, delivery: ChannelDelivery, delay_s: float = 0.0) -> None:
        now = self.world.now
        self._settle(delivery, lambda consumer, key: self.channel.requeue(consumer, key, delay_s, "failed", now))

    def _settle(
        self, delivery: ChannelDelivery, what: Callable[[ExclusiveChannelConsumer, tuple[int, int]], Any]
    ) -> Any:
        consumer = self.channel.holder(delivery.partition, delivery.epoch)
        found = what(consumer, (delivery.partition, delivery.message.seq))
        self.world.settle()
        return found


def _ordered(partitions: int = 1, **options: object) -> tuple[World, Queue, ExclusiveChannel]:
    world = World()
    queue = world.create("jobs", partitions=partitions, **{"order": "strict", **options})
    channel = world.channel(queue, exclusive=True)
    assert isinstance(channel, ExclusiveChannel)
    return world, queue, channel


def _put(world: World, queue: Queue, *texts: str) -> None:
    """`key number` each."""
    messages = [NewMessage(text.encode(), encode_canonical({"k": text.split()[0]}), text.split()[0]) for text in texts]
    queue.publish(messages, lambda _publish: None, wall_us=world.wall_us)
    world.settle()


def test_one_message_of_a_key_is_in_flight_and_other_keys_go_on() -> None:
    """(alibaba/rocketmq#23) A key that fails blocks itself alone."""
    world, queue, channel = _ordered()
    taker = Member(world, channel, A)
    _put(world, queue, "a 1", "a 2", "b 1", "a 3", "b 2")
    assert taker.bodies() == [b"a 1", b"b 1"]
    a, b = taker.take()
    taker.requeue(a)  # it fails
    taker.finish(b)
    assert taker.bodies() == [b"b 2"]
    taker.take()
    world.sleep(0.2)
    a_again = taker.take()
    assert [(each.message.body, each.attempts) for each in a_again] == [(b"a 1", 2)]
    taker.finish(a_again[0])
    assert taker.bodies() == [b"a 2"]


def test_strict_a_failing_message_is_tried_with_growing_pauses_and_buried_before_the_next() -> None:
    world, queue, channel = _ordered(max_attempts=3)
    taker = Member(world, channel, A)
    _put(world, queue, "a 1", "a 2")
    pauses: list[float] = []
    for _ in range(2):
        (delivery,) = taker.take()
        taker.requeue(delivery)
        start = world.now
        while not taker.got:
            world.sleep(0.05)
        pauses.append(round(world.now - start, 2))
    assert pauses == pytest.approx([0.1, 0.2], abs=0.06)
    (delivery,) = taker.take()
    taker.requeue(delivery)
    assert taker.bodies() == [b"a 2"]
    assert channel.dead_items == 1


def test_best_effort_a_failing_message_comes_later_and_is_counted() -> None:
    world, queue, channel = _ordered(order="best_effort")
    taker = Member(world, channel, A)
    _put(world, queue, "a 1", "a 2")
    (delivery,) = taker.take()
    taker.requeue(delivery, 5.0)
    assert taker.bodies() == [b"a 2"]
    world.sleep(5.1)
    assert taker.bodies() == [b"a 2", b"a 1"]
    assert channel.counts["left_key_queue"] == 1


@pytest.mark.parametrize("order", ["strict", "best_effort"])
def test_a_message_that_is_not_settled_in_time_comes_first_again_or_later(order: str) -> None:
    world, queue, channel = _ordered(order=order, lease_s=600.0)
    taker = Member(world, channel, A)
    _put(world, queue, "a 1", "a 2")
    taker.take()
    world.sleep(61.0)
    assert taker.bodies() == ([b"a 1"] if order == "strict" else [b"a 2", b"a 1"])


def test_results_of_a_lock_that_is_over_are_refused_and_change_nothing() -> None:
    world, queue, channel = _ordered()
    old = Member(world, channel, A)
    _put(world, queue, "a 1", "a 2")
    (delivery,) = old.take()
    world.sleep(31.0)
    new = Member(world, channel, B)
    assert [(each.message.body, each.attempts, each.epoch) for each in new.got] == [(b"a 1", 2, 2)]
    with pytest.raises(LockLostError, match="epoch 1"):
        old.finish(delivery)
    assert new.bodies() == [b"a 1"]
    new.finish(new.take()[0])
    assert new.bodies() == [b"a 2"]


def test_what_a_leaving_consumer_never_saw_was_not_tried() -> None:
    world, queue, channel = _ordered()
    old = Member(world, channel, A)
    new = Member(world, channel, B)
    _put(world, queue, "a 1", "b 1")
    assert (old.bodies(), new.bodies()) == ([b"a 1", b"b 1"], [])
    a, _b = old.got
    channel.release(channel.holder(1, a.epoch), (1, a.message.seq))
    channel.leave(old.core, world.now)
    new.beat()
    new.beat()
    assert sorted((each.message.body, each.attempts) for each in new.got) == [(b"a 1", 1), (b"b 1", 2)]


def test_a_lost_link_gives_nothing_to_others_before_the_lease_is_over() -> None:
    """Its process may live and work on, cut off."""
    world, queue, channel = _ordered()
    old = Member(world, channel, A)
    _put(world, queue, "a 1")
    new = Member(world, channel, B)
    channel.detach(old.core, world.now)
    world.sleep(29.0)
    new.beat()
    assert new.got == []
    world.sleep(2.0)
    new.beat()
    new.beat()
    assert new.bodies() == [b"a 1"]


def test_who_comes_back_within_its_lease_may_settle_what_it_has_and_gets_the_rest_again() -> None:
    world, queue, channel = _ordered()
    before = Member(world, channel, A)
    _put(world, queue, "a 1", "b 1", "a 2")
    a, _b = before.got
    channel.detach(before.core, world.now)
    after = Member.__new__(Member)
    after.__dict__.update(before.__dict__)
    after.got = []
    after.core = ExclusiveChannelConsumer(
        "again",
        A,
        ConsumerWindow(10, 1 << 30, 60.0),
        on_deliver=after.got.extend,
        on_closed=lambda _reason: None,
        on_lease=lambda _lease: None,
    )
    channel.attach(after.core)
    assert after.finish(a) == []
    assert after.got == []  # not under the old epoch
    channel.heartbeat(after.core, 1, 0, {1: 0}, world.now)
    world.settle()
    assert [(each.message.body, each.attempts, each.epoch) for each in after.got] == [(b"b 1", 2, 2), (b"a 2", 1, 2)]


def test_expansion_gives_no_message_of_a_moved_key_before_the_older_ones_are_done() -> None:
    """(alibaba/rocketmq#401)"""
    world, queue, channel = _ordered()
    taker = Member(world, channel, A, max_in_flight=100)
    keys = [f"k{n}" for n in range(20)]
    _put(world, queue, *[f"{key} 1" for key in keys])
    queue.expand(1)
    world.settle()
    assert (queue.partition_ids, queue.options.partitions, queue.routes.version) == ((1, 2), 2, 2)
    taker.beat()
    taker.beat()
    _put(world, queue, *[f"{key} 2" for key in keys])
    first = taker.take()
    assert [each.message.body for each in first] == [f"{key} 1".encode() for key in keys]
    for each in first[:-1]:
        taker.finish(each)
    assert {each.partition for each in taker.got} == {1}
    taker.finish(first[-1])
    assert {each.partition for each in taker.got} == {1, 2}
    assert len(taker.got) == len(keys)
    for each in taker.take():
        taker.finish(each)
    assert not queue.routes.has_barriers


@pytest.mark.parametrize("end", ["fails", "crash"])
@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("kept", [0, 1])
def test_moved_keys_do_not_wait_for_what_was_published_beside_an_expansion_and_not_written(
    kept: int, lost: int, end: str
) -> None:
    """Its numbers stood in front of the barrier, and nobody ever had them done."""
    world, queue, channel = _ordered()
    if kept:
        _put(world, queue, *[f"a {n}" for n in range(kept)])
    if lost:
        world.publish(queue, *[b"lost"] * lost, settle=False)
        batch = world.registry.take_changes()
        queue.expand(1)
        if end == "fails":
            world.registry.failed(batch, StoreError("no room"))
        else:  # the definitions were written, those publishes were not
            world.store.commit(
                StoreBatch(definitions={**batch.definitions, **world.registry.take_changes().definitions})
            )
            world.crash()
            queue = world.queue()
            found = queue.channels["work"]
            assert isinstance(found, ExclusiveChannel)
            channel = found
    else:
        queue.expand(1)
    world.settle()
    taker = Member(world, channel, A, max_in_flight=100)
    for _ in range(2):
        taker.beat()
    moved = next(key for key in map(str, range(100)) if queue.routes.of(logical_partition(key)).partition == 2)
    _put(world, queue, f"{moved} 1")
    bodies: list[bytes] = []
    for _ in range(2):
        for each in taker.take():
            bodies.append(each.message.body)
            taker.finish(each)
        taker.beat()
    assert bodies == [*[b"a %d" % n for n in range(kept)], f"{moved} 1".encode()]
    assert not queue.routes.has_barriers


def test_routes_channels_and_locks_are_there_after_a_crash() -> None:
    world, queue, channel = _ordered(partitions=2)
    taker = Member(world, channel, A)
    queue.expand(2)
    world.settle()
    assert taker.lease is not None
    world.crash()
    again = world.queue()
    assert (again.routes.routes, again.partition_ids) == (queue.routes.routes, queue.partition_ids)
    found = again.channels["work"]
    assert isinstance(found, ExclusiveChannel)
    other = Member(world, found, B)
    assert other.lease is not None
    assert [epoch for _partition, epoch in other.lease.assigned] == [1, 1]  # the new ones; 1 and 2 are A's still
    assert again.options.order == "strict"


def test_what_has_a_key_in_a_strict_queue_has_no_delay_and_no_priority() -> None:
    world, queue, _channel = _ordered()
    for wrong in (NewMessage(b"x", b"", "k", 1), NewMessage(b"x", b"", "k", 0, 2.0)):
        with pytest.raises(ValueError, match="order of keys"):
            queue.publish([wrong], lambda _publish: None, wall_us=world.wall_us)
    queue.publish([NewMessage(b"x", b"", "", 1, 2.0)], lambda _publish: None, wall_us=world.wall_us)


def test_a_line_that_leaves_the_log_or_is_emptied_blocks_nobody() -> None:
    world, queue, channel = _ordered(ttl_s=100.0)
    taker = Member(world, channel, A, max_in_flight=1)
    _put(world, queue, "a 1", "a 2")
    world.sleep(101.0)
    queue.sweep(world.wall_us)
    world.settle()
    taker.take()
    taker.beat()
    taker.beat()
    _put(world, queue, "a 3")
    assert taker.bodies() == [b"a 3"]
    queue.empty()
    world.settle()
    _put(world, queue, "a 4")
    assert taker.bodies() == [b"a 3", b"a 4"]


def test_an_exclusive_channel_is_not_ephemeral_and_a_queue_is_made_again_with_its_first_partitions() -> None:
    world, queue, _channel = _ordered(partitions=2)
    with pytest.raises(ValueError, match="exclusive"):
        queue.create_channel("x#ephemeral", exclusive=True)
    queue.expand(1)
    world.settle()
    assert world.create(partitions=2, order="strict") is queue
    with pytest.raises(ValueError, match="partitions"):
        queue.expand(1_024)
