"""Messages in segments: whatever is written, trimmed or damaged, a store gives what a row for each message would."""

import shutil
import sqlite3
import zlib
from pathlib import Path
from random import Random

import pytest
import zstandard

from dep2p.protocols.queues.records import Cursor, CursorChange, MessageRow, PartitionRecord, StoreBatch
from dep2p.storage.sqlite.schema import SCHEMA_1, SCHEMA_2, SCHEMA_3, SCHEMA_VERSION
from dep2p.storage.sqlite.segments import SEGMENT_ITEMS
from dep2p.storage.sqlite.store import SqliteStore

ALL = {"items_max": 99_999, "bytes_max": 1 << 30}


def _row(partition: int, seq: int, body: bytes = b"") -> MessageRow:
    return MessageRow(partition, seq, b"meta %d" % seq, body or b"body %d of %d" % (seq, partition))


def _opened(path: Path, rows: list[MessageRow]) -> SqliteStore:
    store = SqliteStore(path)
    store.open()
    store.commit(StoreBatch(appends=rows, groups=[len(rows)]))
    return store


@pytest.mark.parametrize("seed", range(10))
def test_any_numbers_sizes_and_trims_read_as_they_were_written(seed: int, tmp_path: Path) -> None:
    """Holes, partitions that alternate, bodies of all sizes, trims in the middle of a segment; after a restart, too."""
    rng = Random(seed)
    store = SqliteStore(tmp_path / "queues.sqlite", sync="never")
    store.open()
    kept: dict[int, dict[int, MessageRow]] = {1: {}, 2: {}}
    last = {1: 0, 2: 0}
    trimmed = {1: 0, 2: 0}
    for _ in range(40):
        batch = StoreBatch()
        for _ in range(rng.choice([0, 1, 3, 64, 65, 200])):
            partition = rng.choice([1, 1, 1, 2])
            last[partition] += rng.choice([1, 1, 1, 1, 1, 1, 1, 3])
            body = rng.choice([b"", rng.randbytes(rng.choice([1, 900, 70_000])), b"again " * 2_000])
            row = MessageRow(partition, last[partition], rng.randbytes(rng.choice([0, 29, 300])) or b"m", body)
            kept[partition][row.seq] = row
            batch.appends.append(row)
        batch.groups = [len(batch.appends)]
        for partition in (1, 2):
            if rng.random() < 0.3 and last[partition]:
                trimmed[partition] = batch.trims[partition] = rng.randint(trimmed[partition], last[partition])
        store.commit(batch)
        if rng.random() < 0.3:
            store.close()
            store = SqliteStore(tmp_path / "queues.sqlite", sync="never")
            store.open()
        for partition in (1, 2):
            rows = [row for seq, row in kept[partition].items() if seq > trimmed[partition]]
            record = store.load_partition(partition)
            assert (record.last_seq, record.trimmed) == (last[partition], trimmed[partition])
            assert (record.messages, record.bytes) == (len(rows), sum(len(row.body) for row in rows))
            assert store.scan(partition, 0, **ALL) == rows
            start = rng.randint(0, last[partition] + 1)
            assert (
                store.scan(partition, start, items_max=70, bytes_max=1 << 30)
                == [row for row in rows if row.seq >= start][:70]
            )
            wanted = [rng.randint(0, last[partition] + 2) for _ in range(5)]
            assert store.get(partition, wanted) == [
                kept[partition][seq] for seq in sorted(wanted) if seq in kept[partition] and seq > trimmed[partition]
            ]
    while store.tidy_in_s() == 0.0:
        store.tidy()
    store.close()


def test_what_is_published_together_is_one_row_and_leaves_as_one(tmp_path: Path) -> None:
    store = _opened(tmp_path / "queues.sqlite", [_row(1, seq) for seq in range(1, SEGMENT_ITEMS + 2)])

    def rows() -> list[int]:
        with sqlite3.connect(tmp_path / "copy.sqlite") as copy:
            assert store._db is not None  # pyright: ignore[reportPrivateUsage]
            store._db.backup(copy)  # pyright: ignore[reportPrivateUsage]
            found = [items for (items,) in copy.execute("select items from segments order by id")]
        copy.close()
        return found

    assert rows() == [SEGMENT_ITEMS, 1]
    store.commit(StoreBatch(trims={1: SEGMENT_ITEMS - 1}))
    assert rows() == [SEGMENT_ITEMS, 1]
    assert store.scan(1, 1, **ALL)[0].seq == SEGMENT_ITEMS
    store.commit(StoreBatch(trims={1: SEGMENT_ITEMS}))
    assert rows() == [1]
    store.close()


@pytest.mark.parametrize("column", ["items", "bytes", "sum", "data"])
def test_a_segment_whose_numbers_are_damaged_is_reported_message_by_message(column: str, tmp_path: Path) -> None:
    """Which it holds cannot be known from it: all that may be in it are told, and none of the next one."""
    path = tmp_path / "queues.sqlite"
    store = _opened(path, [_row(1, seq) for seq in range(1, 10)])
    store.commit(StoreBatch(appends=[_row(1, seq) for seq in range(12, 15)], groups=[3]))
    store.close()
    with sqlite3.connect(path) as db:
        new = "zeroblob(length(data))" if column == "data" else "77" if column == "items" else f"{column} + 1"
        db.execute(f"update segments set {column} = {new} where id & 255 = 1")
    db.close()
    store.open()
    rows = store.scan(1, 1, **ALL)
    told = [row.seq for row in rows if not row.meta]
    assert told[:9] == list(range(1, 10))
    assert told[-1] <= 11
    assert [row for row in rows if row.meta] == [_row(1, seq) for seq in range(12, 15)]
    assert [row.meta for row in store.get(1, [5, 13])] == [b"", b"meta 13"]
    store.commit(StoreBatch(trims={1: 8}))  # the ninth is not done: nothing says that it is in there
    assert [row.seq for row in store.scan(1, 1, **ALL) if row.meta] == [12, 13, 14]
    assert store.scan(1, 1, **ALL)[0].seq == 9
    store.commit(StoreBatch(trims={1: 14}, cursors={(7, 1): CursorChange(Cursor(14, 14))}))
    store.commit(StoreBatch(appends=[_row(1, seq) for seq in range(15, 90)], groups=[75], trims={1: 80}))
    assert [row.seq for row in store.scan(1, 1, **ALL)] == list(range(81, 90))
    store.close()


def _third_version(path: Path, rows: list[tuple[int, int, int, bytes, bytes]]) -> None:
    with sqlite3.connect(path) as db:
        for script in (SCHEMA_1, SCHEMA_2, SCHEMA_3):
            db.executescript(script)
        db.execute("pragma user_version=3")
        db.executemany(
            "insert into messages values (?,?,?,?)",
            [(partition << 40 | seq, form, meta, body) for partition, seq, form, meta, body in rows],
        )
        for partition in {row[0]: None for row in rows}:
            last = max(row[1] for row in rows if row[0] == partition)
            total = zlib.crc32(repr((partition, last, 0)).encode())
            db.execute("insert into partitions values (?,?,0,?,0,?)", (partition, last, len(rows), total))
    db.close()


def _form(meta: bytes, body: bytes, *, compressed: bool = False) -> int:
    return zlib.crc32(body, zlib.crc32(meta)) << 2 | 2 | compressed


def test_the_messages_of_a_file_of_the_third_version_are_brought_over(tmp_path: Path) -> None:
    """With and without a checksum, compressed, with holes, in several partitions; one that is damaged stays so."""
    path = tmp_path / "queues.sqlite"
    body, long_body = b"body" * 9, b"long " * 3_000
    smaller = zstandard.ZstdCompressor().compress(long_body)
    rows = [(1, seq, _form(b"m", body), b"m", body) for seq in range(1, 200) if seq % 50]
    rows += [(2, 5, 0, b"unsummed", body), (2, 6, 1, b"unsummed", smaller)]
    rows += [(3, 9, _form(b"m", smaller, compressed=True), b"m", smaller), (3, 10, _form(b"m", body), b"m", b"changed")]
    _third_version(path, rows)
    for _ in range(2):
        store = SqliteStore(path)
        store.open()
        assert store.scan(1, 1, **ALL) == [MessageRow(1, seq, b"m", body) for seq in range(1, 200) if seq % 50]
        assert store.scan(2, 1, **ALL) == [
            MessageRow(2, 5, b"unsummed", body),
            MessageRow(2, 6, b"unsummed", long_body),
        ]
        assert store.scan(3, 1, **ALL) == [MessageRow(3, 9, b"m", long_body), MessageRow(3, 10, b"", b"")]
        assert store.load_partition(1).last_seq == 199
        store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("pragma user_version").fetchone() == (SCHEMA_VERSION,)
        assert db.execute("select count(*) from sqlite_master where name = 'messages'").fetchone() == (0,)
    db.close()


def test_a_file_is_brought_over_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends in the middle: the next one finds the old file, and does it."""
    path = tmp_path / "queues.sqlite"
    _third_version(path, [(1, seq, _form(b"m", b"x"), b"m", b"x") for seq in range(1, 300)])

    def ends(*_: object) -> None:
        raise RuntimeError("the power went")

    with monkeypatch.context() as patched:
        patched.setattr("dep2p.storage.sqlite.file.old_message", ends)
        with pytest.raises(RuntimeError, match="power"):
            SqliteStore(path).open()
    store = SqliteStore(path)
    store.open()
    assert [row.seq for row in store.scan(1, 1, **ALL)] == list(range(1, 300))
    store.close()


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_very_large_queue_is_removed_in_bounded_steps_also_over_a_restart(is_killed: bool, tmp_path: Path) -> None:
    """It was one statement: nothing else was written for as long as that took."""
    path = tmp_path / "queues.sqlite"
    store = SqliteStore(path, sync="never")
    store.open()
    for first in range(1, 20_001, 2_000):
        rows = [_row(1, seq) for seq in range(first, first + 2_000)]
        store.commit(StoreBatch(appends=[*rows, _row(2, first)], groups=[2_001]))
    store.commit(StoreBatch(cursors={(7, 1): CursorChange(Cursor(3, 5), [(9, 9)])}))
    store.commit(StoreBatch(partitions_removed=[1]))

    def left(of: SqliteStore) -> int:
        assert of._db is not None  # pyright: ignore[reportPrivateUsage]
        db = of._db  # pyright: ignore[reportPrivateUsage]
        return int(db.execute("select coalesce(sum(items), 0) from segments where id >> 40 = 1").fetchone()[0])

    before = left(store)
    assert before >= 15_000
    steps = 0
    while store.tidy_in_s() == 0.0:
        assert store.load_partition(1) == PartitionRecord()
        assert store.scan(1, 1, **ALL) == store.get(1, [1, 20_000]) == []
        store.tidy()
        assert before - left(store) <= 2_000
        before = left(store)
        steps += 1
        if steps == 5:
            if is_killed:
                for suffix in ("", "-wal"):
                    shutil.copy(f"{path}{suffix}", f"{tmp_path / 'copy.sqlite'}{suffix}")
            store.close()
            store = SqliteStore(tmp_path / "copy.sqlite" if is_killed else path, sync="never")
            store.open()
            store.commit(StoreBatch(appends=[_row(2, 30_000)], groups=[1]))
            before = left(store)
    assert left(store) == 0
    assert steps > 8
    assert store.load_partition(1) == PartitionRecord()
    store.commit(StoreBatch(appends=[_row(1, 1)], groups=[1]))
    assert store.scan(1, 1, **ALL) == [_row(1, 1)]
    assert len(store.scan(2, 1, **ALL)) == 11
    store.close()
