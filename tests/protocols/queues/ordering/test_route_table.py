"""Route tables: every key has one place, expansion moves what it must, and the barrier keeps the order of a key."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.names import logical_partition
from dep2p.protocols.queues.ordering.route_table import Barrier, Route, RouteTable


def test_hash_vectors() -> None:
    # From b2sum -l 64 of the key: the first 16 hexadecimal digits, modulo 1,024.
    assert [logical_partition(key) for key in ("", "a", "order-42", "é")] == [692, 559, 499, 303]


@given(st.integers(1, 1_024))
def test_any_number_of_partitions_covers_everything_once(count: int) -> None:
    table = RouteTable.first(range(1, count + 1))
    assert [table.of(n).partition for n in range(1_024)] == sorted(table.of(n).partition for n in range(1_024))
    assert {table.of(n).partition: None for n in range(1_024)} == dict.fromkeys(range(1, count + 1))


def test_two_to_four_moves_half_and_what_stays_has_no_barrier() -> None:
    old = RouteTable.first([1, 2])
    new = old.expanded([3, 4], {1: 10, 2: 20})
    moved = [n for n in range(1_024) if old.of(n).partition != new.of(n).partition]
    assert (len(moved), new.version) == (512, 2)
    assert new.routes == (
        Route(0, 256, 1),
        Route(256, 512, 3, (Barrier(1, 10),)),
        Route(512, 768, 2),
        Route(768, 1_024, 4, (Barrier(2, 20),)),
    )
    ack_floors = {1: 10, 2: 19}
    assert new.of(300).is_readable(3, ack_floors.__getitem__)
    assert not new.of(800).is_readable(4, ack_floors.__getitem__)
    assert [route.after for route in new.settled([ack_floors.__getitem__]).routes] == [(), (), (), (Barrier(2, 20),)]


def test_a_second_expansion_waits_for_the_first_too() -> None:
    table = RouteTable.first([1]).expanded([2], {1: 5}).expanded([3, 4], {1: 9, 2: 7})
    assert table.of(1_000) == Route(768, 1_024, 4, (Barrier(1, 5), Barrier(2, 7)))


@pytest.mark.parametrize("has_barrier", [True, False])
def test_the_barrier_keeps_the_order_of_each_key_and_without_it_the_order_is_lost(has_barrier: bool) -> None:
    lost = sum(not _is_in_order(seed, has_barrier) for seed in range(300))
    assert (lost == 0) is has_barrier


def _is_in_order(seed: int, has_barrier: bool) -> bool:
    """Publishing, two expansions in the middle, and a channel that reads its partitions in any order."""
    rng = random.Random(seed)
    table = RouteTable.first([1, 2])
    logs: dict[int, list[tuple[str, int]]] = {1: [], 2: []}
    ack_floors = dict.fromkeys(logs, 0)
    sent: dict[str, int] = {}
    seen: dict[str, int] = {}
    for step in range(400):
        if step in (100, 200):
            added = [len(logs) + 1, len(logs) + 2]
            table = table.expanded(added, {partition: len(log) for partition, log in logs.items()})
            logs.update({partition: [] for partition in added})
            ack_floors.update(dict.fromkeys(added, 0))
        if step < 300:
            key = f"k{rng.randrange(40)}"
            sent[key] = sent.get(key, 0) + 1
            logs[table.of(logical_partition(key)).partition].append((key, sent[key]))
        partition = rng.choice(list(logs))
        if ack_floors[partition] == len(logs[partition]):
            continue
        key, number = logs[partition][ack_floors[partition]]
        route = table.of(logical_partition(key))
        if has_barrier and not route.is_readable(partition, ack_floors.__getitem__):
            continue
        if number != seen.get(key, 0) + 1:
            return False
        seen[key] = number
        ack_floors[partition] += 1
    return True


def test_a_table_is_the_same_after_the_store_and_damage_is_refused() -> None:
    table = RouteTable.first([1, 2, 3]).expanded([9], {1: 4, 2: 5, 3: 6})
    again = RouteTable.from_value(table.to_value())
    assert (again.version, again.routes) == (table.version, table.routes)
    none: list[object] = []
    all_of: list[list[object]] = [[0, 1_024, 1, none]]
    wrongs: list[object] = [
        None,
        3,
        [],
        [1, none],
        [0, all_of],
        [1, [[0, 1_023, 1, none]]],
        [1, [[0, 1_024, "1", none]]],
    ]
    for wrong in wrongs:
        with pytest.raises(ProtocolError, match="route table"):
            RouteTable.from_value(wrong)
    with pytest.raises(ValueError, match="already"):
        table.expanded([9], {})
    with pytest.raises(ValueError, match="logical partition"):
        table.of(1_024)
