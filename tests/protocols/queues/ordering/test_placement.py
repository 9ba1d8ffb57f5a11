"""Distributed queues without any I/O: candidates, shards' ranges, names, what an expansion changes, and what is
kept."""

from itertools import pairwise

import pytest

from dep2p.encoding.shapes import list_of
from dep2p.errors import PartitionMovedError, ProtocolError, QueueIsDistributedError
from dep2p.identity import Identity
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.ordering.placement import (
    Placement,
    Served,
    ShardLocation,
    is_shard_of,
    narrowed_by,
    nodes_for,
    ranges_of,
    readable,
    shard_name,
)
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.queues.registry.registry import QueueRegistry
from dep2p.protocols.wire.cbor import encode_canonical
from dep2p.storage.memory import MemoryStore

PLACES = {
    1: ShardLocation("A", "q.1"),
    2: ShardLocation("B", "q.2"),
    3: ShardLocation("A", "q.3"),
    4: ShardLocation("C", "q.4"),
}


def placement(order: str) -> Placement:
    return Placement(RouteTable.first([1, 2, 3, 4]), PLACES, order)


def test_a_key_has_one_place_in_strict_order_and_the_others_behind_it_in_best_effort() -> None:
    strict, loose = placement("strict"), placement("best_effort")
    for number in range(100):
        key = f"k{number}"
        own = strict.partition_of(key)
        assert strict.candidates(key, 7, lambda _node: True) == [own]
        assert loose.candidates(key, 7, lambda _node: False)[0] == own
        found = loose.candidates(key, 7, lambda node: node == "A")
        assert sorted(found) == [1, 2, 3, 4]
        assert [PLACES[each].node == "A" for each in found] == [False, False, True, True]
        assert loose.is_off_partition(key, own) is False
        assert loose.is_off_partition(key, own % 4 + 1)


def test_messages_without_a_key_take_turns_among_the_nodes_that_are_up() -> None:
    for each in (placement("strict"), placement("best_effort")):
        assert [each.candidates("", turn, lambda _node: False)[0] for turn in range(5)] == [1, 2, 3, 4, 1]
        assert {each.candidates("", turn, lambda node: node == "A")[0] for turn in range(8)} == {2, 4}
        assert each.is_off_partition("", 1) is False


def test_a_shard_refuses_what_it_has_given_up_in_both_orders() -> None:
    shard = Served(256, 512, 256, 512).narrowed(256, 384)
    for is_strict in (True, False):
        assert shard.takes(256, is_strict=is_strict)
        assert not shard.takes(384, is_strict=is_strict)
        assert shard.takes(0, is_strict=is_strict) is not is_strict
    for low, high in ((0, 384), (256, 512), (384, 384), (300, 290)):
        with pytest.raises(ValueError, match="only gets less"):
            shard.narrowed(low, high)


@pytest.mark.parametrize("steps", [(1,), (3,), (1, 1, 2), (2, 5)])
def test_an_expansion_narrows_and_begins_ranges_and_leaves_no_gap(steps: tuple[int, ...]) -> None:
    routes, next_id = RouteTable.first([1, 2]), 3
    for count in steps:
        before = ranges_of(routes)
        added = list(range(next_id, next_id + count))
        next_id += count
        changed, origin = narrowed_by(routes, added)
        routes = routes.expanded(added, dict.fromkeys(before, 10))
        after = ranges_of(routes)
        assert {**before, **changed} == after
        assert set(origin) == set(added)
        spans = sorted(after.values())
        assert spans[0][0] == 0
        assert spans[-1][1] == 1024
        assert all(one[1] == two[0] for one, two in pairwise(spans))
        for partition in before:
            if partition in changed:  # only less
                assert before[partition][0] == changed[partition][0]
                assert before[partition][1] > changed[partition][1]


def test_a_partition_is_readable_when_every_barrier_before_it_is_passed() -> None:
    routes = RouteTable.first([1]).expanded([2], {1: 9}).expanded([3, 4], {1: 12, 2: 5})
    assert readable(routes, lambda _partition: 0) == (1,)
    assert readable(routes, lambda partition: {1: 9}.get(partition, 0)) == (1, 2)
    assert readable(routes, lambda partition: {1: 12, 2: 0}.get(partition, 0)) == (1, 2, 3)
    assert readable(routes, lambda partition: {1: 12, 2: 5}.get(partition, 0)) == (1, 2, 3, 4)


def test_a_placement_travels_and_a_broken_one_is_refused() -> None:
    value = placement("strict").to_value()
    again = Placement.from_value(value)
    assert again.to_value() == value
    assert again.is_strict
    broken: list[dict[str, object]] = [
        {},
        {**value, "places": list_of(value["places"])[:-1]},
        {**value, "places": [[1, 2, 3]]},
        {**value, "table": [1, []]},
        {**value, "places": 7},
    ]
    for each in broken:
        with pytest.raises(ProtocolError):
            Placement.from_value(each)


def test_names_of_shares() -> None:
    assert shard_name("orders", 12, "12D3KooWabcdefgh") == "orders.12.abcdefgh"
    for name in ("x" * 41, "a#ephemeral", "no spaces"):
        with pytest.raises(ValueError, match="name"):
            shard_name(name, 1, "12D3KooWabcdefgh")
    assert nodes_for(5, ["A", "B"]) == ["A", "B", "A", "B", "A"]


def _restarted(registry: QueueRegistry, store: MemoryStore) -> QueueRegistry:
    store.commit(registry.take_changes())
    again = QueueRegistry()
    again.restore(store.load())
    return again


def _message(key: str) -> NewMessage:
    return NewMessage(b"x", encode_canonical({"k": key}), key)


def test_controller_and_shard_are_kept_over_a_restart_in_the_middle_of_an_expansion() -> None:
    store = MemoryStore()
    registry = QueueRegistry()
    controller = registry.create("realm", "q", QueueOptions(partitions=2, order="strict"))
    controller.set_locations({each: ShardLocation("A", f"q.{each}") for each in controller.partition_ids})
    controller.create_channel("c", exclusive=True)
    [added] = registry.new_partition_ids(1)
    controller.plan_expansion({added: ShardLocation("B", f"q.{added}")})
    registry = _restarted(registry, store)
    controller = registry.find("realm", "q")
    registry.load(controller, {})
    assert (controller.pending_expansion, len(controller.locations)) == ({added: ShardLocation("B", f"q.{added}")}, 2)
    assert controller.complete_expansion({controller.partition_ids[0]: 5}) == [added]
    channel = controller.channels["c"]
    assert isinstance(channel, ExclusiveChannel)
    registry = _restarted(registry, store)
    controller = registry.find("realm", "q")
    registry.load(controller, {})
    channel = controller.channels["c"]
    assert isinstance(channel, ExclusiveChannel)
    # Behind its barrier: no consumer may be given it, also not because of the restart.
    assert channel.group.coordinator.partitions == controller.open_partitions
    assert added not in controller.open_partitions
    assert (controller.pending_expansion, len(controller.locations), controller.routes.version) == ({}, 3, 2)
    controller.passed({"c": lambda partition: 4})
    assert added not in channel.group.coordinator.partitions
    controller.passed({"c": lambda partition: 5})
    assert added in channel.group.coordinator.partitions
    assert not controller.routes.has_barriers
    with pytest.raises(QueueIsDistributedError):
        controller.publish([_message("k")], lambda _publish: None, wall_us=1)
    with pytest.raises(QueueIsDistributedError):
        controller.expand(1)


def test_a_narrowed_shard_says_its_last_number_and_takes_nothing_of_what_moved() -> None:
    store = MemoryStore()
    registry = QueueRegistry()
    shard = registry.create("realm", "q.1", QueueOptions(order="strict"))
    assert shard.serve(0, 1024) == 0
    moved = next(f"k{n}" for n in range(100) if logical_partition(f"k{n}") >= 512)
    stays = next(f"k{n}" for n in range(100) if logical_partition(f"k{n}") < 512)
    shard.publish([_message(moved)], lambda _publish: None, wall_us=1, publisher=(b"p" * 16, 1))
    assert shard.serve(0, 512) == 1
    assert shard.serve(0, 512) == 1  # again: the same
    with pytest.raises(PartitionMovedError):
        shard.publish([_message(stays), _message(moved)], lambda _publish: None, wall_us=1)
    assert shard.items == 1
    # What was taken before and comes again is known, not refused: its answer was lost.
    again = shard.publish([_message(moved)], lambda _publish: None, wall_us=1, publisher=(b"p" * 16, 1))
    assert again.error is None
    shard.publish([_message(stays), _message("")], lambda _publish: None, wall_us=1)
    with pytest.raises(ValueError, match="only gets less"):
        shard.serve(0, 1024)
    with pytest.raises(QueueIsDistributedError):
        shard.expand(1)
    registry = _restarted(registry, store)
    assert registry.find("realm", "q.1").serves == Served(0, 512, 0, 1024)
    with pytest.raises(ValueError, match="cannot be a shard"):
        registry.create("realm", "two", QueueOptions(partitions=2)).serve(0, 512)
    with pytest.raises(ValueError, match="in use"):
        registry.find("realm", "q.1").set_locations({})


def test_only_the_shards_of_that_queue_of_that_controller_are_a_table_of_another_node() -> None:
    controller, node = Identity.generate().peer_id, Identity.generate().peer_id
    routes = RouteTable.first([1, 2])
    good = {each: ShardLocation(node, shard_name("q", each, controller)) for each in (1, 2)}
    assert Placement.of_controller(Placement(routes, good, "strict").to_value(), "q", controller).locations == good
    for bad in (
        ShardLocation(node, "private"),
        ShardLocation(node, "q"),
        ShardLocation(node, shard_name("other", 1, controller)),
        ShardLocation(node, shard_name("q", 2, controller)),
        ShardLocation(node, shard_name("q", 1, node)),
        ShardLocation("nobody", shard_name("q", 1, controller)),
        ShardLocation("1" * 1_000_000, shard_name("q", 1, controller)),
        ShardLocation("", shard_name("q", 1, controller)),
    ):
        with pytest.raises(ProtocolError):
            Placement.of_controller(Placement(routes, {**good, 1: bad}, "strict").to_value(), "q", controller)
    value = Placement(routes, good, "strict").to_value()
    wrongs: list[dict[str, object]] = [
        {"places": [*list_of(value["places"]), list_of(value["places"])[0]]},
        {"places": [*list_of(value["places"]), [3, node, shard_name("q", 3, controller)]]},
        {"places": list_of(value["places"])[:1]},
        {"order": "none"},
        {"order": []},
        {"table": [2, [[0, 1, 1, []], [1, 2, 2, []], [2, 1024, 1, []]]]},
    ]
    for wrong in wrongs:
        with pytest.raises(ProtocolError):
            Placement.of_controller({**value, **wrong}, "q", controller)


def test_a_shards_name_tells_whose_it_is() -> None:
    controller, other = Identity.generate().peer_id, Identity.generate().peer_id
    assert is_shard_of(shard_name("a.b", 12, controller), controller)
    assert not is_shard_of(shard_name("a.b", 12, controller), other)
    assert not any(
        is_shard_of(each, controller)
        for each in ("a", controller[-8:], f"a.{controller[-8:]}", f"a.b.{controller[-8:]}")
    )
