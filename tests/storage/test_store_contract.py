"""The contract of every queue store: one suite for all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dep2p.errors import StoreError, StoreLockedError
from dep2p.protocols.queues.records import Cursor, CursorChange, DeadLetterRow, MessageRow, StateRow, StoreBatch
from dep2p.storage.memory import MemoryStore
from dep2p.storage.queue_store import QueueStore
from tests.services.servers import Server
from tests.storage.conftest import ALL, DURABLE, Stores, fresh_place

in_all = pytest.mark.parametrize("stores", ALL, indirect=True)
in_durable = pytest.mark.parametrize("stores", DURABLE, indirect=True)


@pytest.fixture
def store(stores: Stores) -> QueueStore:
    return stores.opened()


def _rows(partition: int, first: int, count: int, body: bytes = b"body") -> list[MessageRow]:
    return [MessageRow(partition, seq, b"meta%d" % seq, body + b"%d" % seq) for seq in range(first, first + count)]


def _all(store: QueueStore, partition: int) -> list[MessageRow]:
    return store.scan(partition, 1, items_max=10_000, bytes_max=1 << 30)


@in_all
def test_an_empty_store(store: QueueStore) -> None:
    assert store.load() == {}
    record = store.load_partition(7)
    assert (record.last_seq, record.trimmed, record.messages, record.bytes) == (0, 0, 0, 0)
    assert _all(store, 7) == store.get(7, [1]) == []
    assert store.scan_dead_letters(1, 0, items_max=9) == []
    store.commit(StoreBatch())


@in_all
def test_messages_come_back_as_they_were(store: QueueStore) -> None:
    rows = [*_rows(1, 1, 5), *_rows(2, 1, 2, b"x" * 10_000)]
    store.commit(StoreBatch(appends=rows, groups=[5, 2]))
    assert _all(store, 1) == rows[:5]
    assert _all(store, 2) == rows[5:]
    assert store.scan(1, 3, items_max=2, bytes_max=1_000) == rows[2:4]
    assert store.scan(2, 1, items_max=9, bytes_max=1) == rows[5:6]  # one at least, however large
    assert store.get(1, [5, 99, 2]) == [rows[1], rows[4]]
    record = store.load_partition(1)
    assert (record.last_seq, record.messages, record.bytes) == (5, 5, 25)


@in_all
def test_a_batch_is_written_whole_or_not_at_all(store: QueueStore) -> None:
    store.commit(StoreBatch(appends=_rows(1, 1, 3), groups=[3]))
    bad = StoreBatch(
        definitions={"queue/a": b"1"},
        appends=[*_rows(1, 4, 1), *_rows(1, 2, 1)],
        groups=[1, 1],
        dead_added=[DeadLetterRow(1, 1, 1, 1, 0, 1, b"m", b"b", b"h")],
    )
    for attempt in (store.check, store.commit):
        with pytest.raises(StoreError) as raised:
            attempt(bad)
        assert raised.value.is_about_batch
    assert store.load() == {}
    assert [row.seq for row in _all(store, 1)] == [1, 2, 3]
    assert store.scan_dead_letters(1, 0, items_max=9) == []
    store.check(StoreBatch(appends=_rows(1, 4, 1), groups=[1]))
    assert [row.seq for row in _all(store, 1)] == [1, 2, 3]


@in_all
def test_definitions_are_set_and_removed(store: QueueStore) -> None:
    store.commit(StoreBatch(definitions={"b": b"2", "a": b"1"}))
    store.commit(StoreBatch(definitions={"b": None, "c": b"3", "a": b"4"}))
    assert store.load() == {"a": b"4", "c": b"3"}


@in_all
def test_what_the_ack_floor_has_passed_is_forgotten(store: QueueStore) -> None:
    states = [StateRow(7, 1, seq, 2, 0, b"why") for seq in (2, 9)]
    store.commit(StoreBatch(cursors={(7, 1): CursorChange(Cursor(0, 9), [(3, 5), (7, 7)], states)}))
    record = store.load_partition(1)
    assert record.cursors == {7: Cursor(0, 9)}
    assert record.done == {7: [(3, 5), (7, 7)]}
    assert record.states == {7: states}
    store.commit(StoreBatch(cursors={(7, 1): CursorChange(Cursor(0, 9), [(6, 6)], [], [2])}))
    record = store.load_partition(1)
    assert record.done == {7: [(3, 7)]}
    assert record.states == {7: states[1:]}
    store.commit(StoreBatch(cursors={(7, 1): CursorChange(Cursor(8, 12))}))
    record = store.load_partition(1)
    assert (record.cursors[7], record.done[7], record.states[7]) == (Cursor(8, 12), [], states[1:])


@in_all
def test_numbers_are_remembered_when_their_messages_are_gone(store: QueueStore) -> None:
    store.commit(StoreBatch(appends=_rows(1, 1, 10), groups=[10]))
    store.commit(StoreBatch(trims={1: 10}))
    store.commit(StoreBatch())
    record = store.load_partition(1)
    assert (record.last_seq, record.trimmed, record.messages, record.bytes) == (10, 10, 0, 0)
    assert _all(store, 1) == []


@in_all
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_number_is_taken_once_and_numbers_rise(stores: Stores, is_reopened: bool) -> None:
    """SQLite and PostgreSQL took the number of a message again that had been trimmed."""
    store = stores.opened()
    store.commit(StoreBatch(appends=_rows(1, 1, 10), groups=[10]))
    store.commit(StoreBatch(trims={1: 7, 2: 5}))
    if is_reopened:
        store.close()
        store = stores.opened()
    for rows in (
        _rows(1, 10, 1),
        _rows(1, 3, 1),
        [*_rows(1, 11, 1), *_rows(1, 11, 1)],
        [*_rows(1, 12, 1), *_rows(1, 11, 1)],
        [*_rows(1, 11, 1), *_rows(2, 5, 1)],
        _rows(3, 0, 1),
    ):
        for attempt in (store.check, store.commit):
            with pytest.raises(StoreError) as raised:
                attempt(StoreBatch(appends=rows, groups=[1] * len(rows)))
            assert raised.value.is_about_batch
    store.commit(StoreBatch(appends=[*_rows(1, 20, 1), *_rows(2, 6, 1)], groups=[2]))  # some may be left out
    assert [row.seq for row in _all(store, 1)] == [8, 9, 10, 20]
    assert store.load_partition(2).last_seq == 6


@in_all
def test_large_trims_take_several_commits_and_are_seen_at_once(stores: Stores) -> None:
    """On servers one commit removed them all, however many: everything else waited for it."""
    store = stores.opened()
    for first in range(1, 12_001, 2_000):
        store.commit(StoreBatch(appends=_rows(1, first, 2_000) + _rows(2, first, 2_000), groups=[4_000]))
    store.commit(StoreBatch(trims={1: 11_500, 2: 300}))
    is_gradual = store.tidy_in_s() == 0.0
    assert is_gradual or stores.kind == "memory"

    def expect(store: QueueStore) -> None:
        assert [row.seq for row in store.scan(1, 1, items_max=2, bytes_max=99)] == [11_501, 11_502]
        assert store.get(1, [1, 11_500, 11_501]) == _rows(1, 11_501, 1)
        assert [row.seq for row in store.scan(2, 1, items_max=1, bytes_max=99)] == [301]
        for partition, trimmed in ((1, 11_500), (2, 300)):
            record = store.load_partition(partition)
            size = sum(len(row.body) for row in _rows(partition, trimmed + 1, 12_000 - trimmed))
            assert (record.last_seq, record.trimmed, record.messages, record.bytes) == (
                12_000,
                trimmed,
                12_000 - trimmed,
                size,
            )

    if stores.kind != "redis":  # which finishes a trim before it loads a partition
        expect(store)
    else:
        assert [row.seq for row in store.scan(1, 1, items_max=1, bytes_max=99)] == [11_501]
    store.close()
    store = stores.opened()
    assert (store.tidy_in_s() == 0.0) is is_gradual or stores.kind == "redis"
    expect(store)
    store.commit(StoreBatch(trims={1: 11_600}))
    for _ in range(20):
        if store.tidy_in_s() != 0.0:
            break
        store.tidy()
    assert store.tidy_in_s() != 0.0
    assert store.load_partition(1).messages == 400
    store.commit(StoreBatch(partitions_removed=[1]))
    assert store.load_partition(1).messages == store.load_partition(1).last_seq == 0


@in_durable
def test_a_removed_partition_is_not_trimmed_further(stores: Stores) -> None:
    store = stores.opened()
    for first in (1, 5_001):
        store.commit(StoreBatch(appends=_rows(1, first, 5_000), groups=[5_000]))
    store.commit(StoreBatch(trims={1: 10_000}))
    store.commit(StoreBatch(partitions_removed=[1]))
    for _ in range(20):
        if store.tidy_in_s() != 0.0:
            break
        store.tidy()
    assert store.load_partition(1).trimmed == 0
    store.commit(StoreBatch(appends=_rows(1, 1, 1), groups=[1]))
    assert [row.seq for row in _all(store, 1)] == [1]


@in_durable
def test_two_owners_are_refused(stores: Stores) -> None:
    first = stores.opened()
    first.commit(StoreBatch(appends=_rows(1, 1, 1), groups=[1]))
    for _ in range(2):
        with pytest.raises(StoreLockedError, match="another process"):
            stores.opened()
    first.commit(StoreBatch(appends=_rows(1, 2, 1), groups=[1]))
    first.close()
    assert stores.opened().load_partition(1).last_seq == 2


@in_all
def test_dead_letters(store: QueueStore) -> None:
    letters = [DeadLetterRow(3, n, 1, n, 1_000 + n, 5, b"m", b"body%d" % n, b"h") for n in range(1, 6)]
    store.commit(StoreBatch(dead_added=letters))
    store.commit(StoreBatch(dead_removed=[(3, 2), (3, 99), (4, 1)]))
    assert store.scan_dead_letters(3, 0, items_max=2) == [letters[0], letters[2]]
    assert store.scan_dead_letters(3, 3, items_max=9) == letters[3:]
    assert store.count_dead_letters(3) == 4
    store.commit(StoreBatch(cursors={(3, 1): CursorChange(Cursor())}, dead_removed=[(3, n) for n in range(1, 6)]))
    assert store.load_partition(1).last_dead_id == {3: 5}
    store.commit(StoreBatch(channels_removed=[3]))
    store.commit(StoreBatch(cursors={(3, 1): CursorChange(Cursor())}))
    assert store.load_partition(1).last_dead_id == {3: 0}


@in_durable  # the reference keeps each number
def test_what_is_done_in_wide_ranges_costs_no_more_than_the_ranges(store: QueueStore) -> None:
    """Redis made a set of all the numbers in them."""
    wide = [(10, 1_000_000_000), (2_000_000_000, 3_000_000_000_000)]
    store.commit(StoreBatch(cursors={(7, 1): CursorChange(Cursor(0, 9), wide)}))
    store.commit(StoreBatch(cursors={(7, 1): CursorChange(Cursor(0, 9), [(1_000_000_001, 1_999_999_999), (5, 6)])}))
    store.commit(StoreBatch(cursors={(7, 1): CursorChange(Cursor(0, 9), [(5, 8)])}))
    assert store.load_partition(1).done == {7: [(5, 8), (10, 3_000_000_000_000)]}


@in_all
def test_removed_partitions_and_channels_leave_nothing(store: QueueStore) -> None:
    store.commit(
        StoreBatch(
            appends=[*_rows(1, 1, 2), *_rows(2, 1, 2)],
            groups=[4],
            cursors={(5, 1): CursorChange(Cursor(), [(2, 2)]), (5, 2): CursorChange(Cursor())},
            dead_added=[DeadLetterRow(5, 1, 1, 1, 0, 1, b"", b"", b"")],
        )
    )
    store.commit(StoreBatch(partitions_removed=[1]))
    assert _all(store, 1) == []
    assert store.load_partition(1).cursors == {}
    assert len(_all(store, 2)) == 2
    store.commit(StoreBatch(channels_removed=[5]))
    assert store.load_partition(2).cursors == {}
    assert store.scan_dead_letters(5, 0, items_max=9) == []


_batches = st.lists(
    st.fixed_dictionaries(
        {
            "appends": st.lists(st.tuples(st.integers(1, 2), st.binary(max_size=5_000)), max_size=4),
            "done": st.lists(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 30)), max_size=4),
            "trim": st.none() | st.tuples(st.integers(1, 2), st.integers(0, 12)),
            "define": st.dictionaries(st.sampled_from("abc"), st.none() | st.binary(max_size=9), max_size=2),
        }
    ),
    max_size=12,
)


@pytest.mark.parametrize("kind", DURABLE)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=_batches)
def test_any_sequence_of_batches_gives_what_the_reference_gives_also_reopened(
    plan: list[dict[str, object]], kind: str, tmp_path: Path, running_servers: Callable[[str], Server]
) -> None:
    make = fresh_place(kind, tmp_path, running_servers)
    reference, tried = MemoryStore(), make()
    tried.open()
    last: dict[int, int] = {}
    ack_floors: dict[tuple[int, int], int] = {}
    for step in plan:
        batch = StoreBatch(definitions=dict(step["define"]))  # type: ignore[call-overload]  # pyright: ignore
        for partition, body in cast("list[tuple[int, bytes]]", step["appends"]):
            seq = last[partition] = last.get(partition, 0) + 1
            batch.appends.append(MessageRow(partition, seq, b"m", body))
        batch.groups = [1] * len(batch.appends)
        for channel, partition, seq in cast("list[tuple[int, int, int]]", step["done"]):
            ack_floor = ack_floors.get((channel, partition), 0)
            if seq <= ack_floor:
                continue
            if seq % 5 == 0:
                ack_floor = ack_floors[(channel, partition)] = seq
            change = batch.cursors.setdefault((channel, partition), CursorChange(Cursor(ack_floor, seq)))
            change.cursor = Cursor(ack_floor, seq)
            change.done_added = [each for each in change.done_added if each[0] > ack_floor]
            if seq > ack_floor and (seq, seq) not in change.done_added:
                change.done_added.append((seq, seq))
        if step["trim"] is not None:
            trim = cast("tuple[int, int]", step["trim"])
            batch.trims[trim[0]] = min(trim[1], last.get(trim[0], 0))
        reference.commit(batch)
        tried.commit(batch)
    for _ in range(2):
        assert tried.load() == reference.load()
        for partition in (1, 2):
            assert tried.load_partition(partition) == reference.load_partition(partition)
            assert _all(tried, partition) == _all(reference, partition)
        tried.close()
        tried = make()
        tried.open()
    tried.close()
