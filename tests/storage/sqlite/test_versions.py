"""Files of other versions: an older one is brought up to date with all it holds, a newer one is left as it is."""

import sqlite3
from pathlib import Path

import pytest

from dep2p.errors import StoreError
from dep2p.protocols.queues.records import Cursor, StateRow, StoreBatch
from dep2p.storage.sqlite.schema import SCHEMA_1, SCHEMA_VERSION
from dep2p.storage.sqlite.store import SqliteStore


def _first_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA_1)
        db.execute("pragma user_version=1")
        db.execute("insert into definitions values ('queue', x'01')")
        db.execute("insert into messages values (?, 0, x'02', x'03')", (1 << 40 | 5,))
        db.execute("insert into partitions values (1, 5, 4, 1, 1)")
        db.execute("insert into cursors values (7, 1, 4, 5)")
        db.execute("insert into done values (7, 1, 6, 8)")
        db.execute("insert into states values (7, 1, 9, 2, 0, x'776879')")
        db.execute("insert into dead values (7, 9, 1, 4, 0, 5, x'04', x'05', x'06')")
    db.close()


def test_a_file_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "queues.sqlite"
    _first_version(path)
    for _ in range(2):  # the second time there is nothing to do
        store = SqliteStore(path)
        store.open()
        assert store.load() == {"queue": b"\x01"}
        assert [(row.seq, row.meta, row.body) for row in store.scan(1, 1, items_max=9, bytes_max=99)] == [
            (5, b"\x02", b"\x03")
        ]
        letters = store.scan_dead_letters(7, 0, items_max=9)
        assert [(row.id, row.meta, row.body) for row in letters] == [(9, b"\x04", b"\x05")]
        record = store.load_partition(1)
        assert (record.last_seq, record.trimmed, record.cursors) == (5, 4, {7: Cursor(4, 5)})
        assert (record.done, record.states) == ({7: [(6, 8)]}, {7: [StateRow(7, 1, 9, 2, 0, b"why")]})
        store.commit(StoreBatch())
        store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("pragma user_version").fetchone() == (SCHEMA_VERSION,)
        for table in ("definitions", "partitions", "cursors", "done", "states", "dead"):
            assert db.execute(f"select count(*) from {table} where sum is null").fetchone() == (0,)
        assert db.execute("select id from last_dead where channel = 7").fetchone() == (9,)
    db.close()


def test_a_file_of_a_newer_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "queues.sqlite"
    store = SqliteStore(path)
    store.open()
    store.close()
    with sqlite3.connect(path) as db:
        db.execute(f"pragma user_version={SCHEMA_VERSION + 1}")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="newer dep2p"):
        SqliteStore(path).open()
    assert path.read_bytes()[100:] == before[100:]
