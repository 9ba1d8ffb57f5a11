"""Queues' files that were damaged, emptied, or may not be written: told by name with what to do, not taken for well."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from dep2p.errors import StoreError
from dep2p.protocols.queues.records import (
    Cursor,
    CursorChange,
    DeadLetterRow,
    MessageRow,
    PartitionRecord,
    StateRow,
    StoreBatch,
)
from dep2p.storage.sqlite.store import SqliteStore

SEEDS = int(os.environ.get("DEP2P_SEEDS", "60"))
PAGE_BYTES = 8_192


def _batches(rng: Random) -> list[StoreBatch]:
    """Work as a queue does it: messages of all sizes, cursors, what is done and failed, dead letters."""
    made: list[StoreBatch] = []
    for number in range(40):
        first = 1 + number * 4
        bodies = [rng.randbytes(rng.choice([10, 500, 3_000])), b"same " * 2_000, b"", rng.randbytes(12_000)]
        batch = StoreBatch(
            definitions={f"queue//q{number % 9}": b"%d" % number * 40},
            appends=[MessageRow(1, first + n, b"m%d" % n * 9, body) for n, body in enumerate(bodies)],
            groups=[4],
            dead_added=[DeadLetterRow(7, number + 1, 1, first, number, 5, b"m" * 30, rng.randbytes(700), b"why")],
        )
        ack_floor = max(0, first - 60)
        states = [StateRow(7, 1, first + 1, 2, 0, b"reason" * 5)]
        batch.cursors[(7, 1)] = CursorChange(Cursor(ack_floor, first), [(first, first), (first + 2, first + 2)], states)
        if number % 10 == 9:
            batch.trims[1] = max(1, ack_floor - 1)
        made.append(batch)
    return made


class Seen:
    """All that a store gives."""

    def __init__(self, store: SqliteStore) -> None:
        self.definitions = store.load()
        self.record: PartitionRecord = store.load_partition(1)
        self.rows = {row.seq: row for row in store.scan(1, 1, items_max=9_999, bytes_max=1 << 30)}
        self.letters = {row.id: row for row in store.scan_dead_letters(7, 0, items_max=9_999)}

    def lacks(self, other: "Seen") -> list[str]:
        """List the entries of the other that this one neither has nor reports as damaged."""
        wrong = [] if self.definitions == other.definitions else ["definitions"]
        # Items and bytes are what a queue measures itself by, not what it holds.
        if replace(self.record, messages=0, bytes=0) != replace(other.record, messages=0, bytes=0):
            wrong.append("record")
        for seq, row in other.rows.items():
            mine = self.rows.get(seq)
            if mine != row and (mine is None or mine.meta):
                wrong.append(f"message {seq}")
        for number, letter in other.letters.items():
            mine_too = self.letters.get(number)
            if mine_too != letter and (mine_too is None or mine_too.meta):
                wrong.append(f"dead letter {number}")
        return wrong


def _written(folder: Path, rng: Random, *, is_closed: bool) -> tuple[Path, Seen]:
    """A file with content, and what is in it; as a kill -9 leaves it, or closed."""
    folder.mkdir()
    store = SqliteStore(folder / "live.sqlite")
    store.open()
    for batch in [*_batches(rng), *[StoreBatch(definitions={f"queue//{n}": b"small"}) for n in range(12)]]:
        store.commit(batch)
    seen = Seen(store)
    if is_closed:
        store.close()
    path = folder / "queues.sqlite"
    for suffix in ("", "-wal"):
        if (folder / f"live.sqlite{suffix}").exists():
            shutil.copy(folder / f"live.sqlite{suffix}", f"{path}{suffix}")
    store.close()
    return path, seen


def _cut(content: bytearray, rng: Random) -> None:
    del content[rng.choice([rng.randrange(len(content)), PAGE_BYTES * rng.randrange(len(content) // PAGE_BYTES)]) :]


def _overwrite(content: bytearray, rng: Random) -> None:
    size = rng.choice([1, 4, 64, 512, 5_000, PAGE_BYTES])
    at = rng.randrange(max(1, len(content) - size))
    content[at : at + size] = rng.choice([rng.randbytes(size), bytes(size)])[: len(content) - at]


@pytest.mark.parametrize("harm", [_cut, _overwrite])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
def test_a_damaged_file_is_reported_or_everything_acknowledged_is_there(
    harm: Callable[[bytearray, Random], None], is_closed: bool, tmp_path: Path
) -> None:
    """Never: opened, and something of it silently gone or changed. Also found: a number that is given again."""
    path, before = _written(tmp_path / "made", Random(1), is_closed=is_closed)
    told = whole = 0
    for seed in range(SEEDS):
        rng = Random(seed)
        folder = tmp_path / f"s{seed}"
        shutil.copytree(path.parent, folder)
        tried = folder / path.name
        content = bytearray(tried.read_bytes())
        harm(content, rng)
        tried.write_bytes(content)
        store = SqliteStore(tried)
        try:
            store.open()
            after = Seen(store)
        except StoreError as error:
            assert str(tried) in str(error)
            assert "backup" in str(error) or "Check" in str(error)
            told += 1
        else:
            assert after.lacks(before) == [], f"seed {seed}"
            whole += 1
        finally:
            store.close()
        shutil.rmtree(folder)
    assert told
    assert told + whole == SEEDS


def test_a_changed_byte_of_a_body_costs_that_message_and_no_other(tmp_path: Path) -> None:
    """SQLite itself does not notice: the body came out changed. Of a compressed one, no message could be read again,
    and nothing trimmed."""
    path = tmp_path / "queues.sqlite"
    store = SqliteStore(path)
    store.open()
    bodies = [b"plain " * 20, b"compressed " * 2_000, b"well"]
    store.commit(StoreBatch(appends=[MessageRow(1, n, b"meta", body) for n, body in enumerate(bodies, 1)], groups=[3]))
    letters = [DeadLetterRow(7, n, 1, n, 0, 5, b"m" * 30, b"letter", b"") for n in (1, 2)]
    store.commit(StoreBatch(dead_added=letters))
    store.close()
    with sqlite3.connect(path) as db:
        ((data,),) = db.execute("select data from segments").fetchall()
        at = len(data) - len(b"metawell") - 5  # in the second message
        changed = data.replace(b"plain", b"Plain", 1)
        changed = changed[:at] + bytes([changed[at] ^ 1]) + changed[at + 1 :]
        db.execute("update segments set data = ?", (changed,))
        db.execute("update dead set body = x'00' where id = 1")
    db.close()
    store.open()
    rows = store.scan(1, 1, items_max=9, bytes_max=1 << 20)
    assert [(row.seq, row.meta, row.body) for row in rows] == [(1, b"", b""), (2, b"", b""), (3, b"meta", b"well")]
    assert store.get(1, [1, 3]) == [rows[0], rows[2]]
    assert [(letter.id, bool(letter.meta)) for letter in store.scan_dead_letters(7, 0, items_max=9)] == [
        (1, False),
        (2, True),
    ]
    store.commit(StoreBatch(trims={1: 2}))
    assert store.load_partition(1).messages == 1
    store.close()


@pytest.mark.parametrize("table", ["definitions", "partitions", "cursors", "done", "states"])
def test_a_changed_number_of_a_small_record_is_reported(table: str, tmp_path: Path) -> None:
    """An ack floor, a last number: a changed one would lose messages, or give an id twice."""
    path, _seen = _written(tmp_path / "made", Random(1), is_closed=True)
    column = {"definitions": "value", "partitions": "last_seq", "cursors": "floor", "done": "high"}.get(
        table, "attempts"
    )
    with sqlite3.connect(path) as db:
        db.execute(f"update {table} set {column} = {'x' if table == 'definitions' else ''}'77'")
    db.close()
    store = SqliteStore(path)
    with pytest.raises(StoreError, match=rf"{path} is damaged.*backup"):
        store.open()
        store.load()
        store.load_partition(1)
    store.close()


def test_a_log_that_is_damaged_in_its_middle_is_reported(tmp_path: Path) -> None:
    """SQLite stops at the first frame that is not as it was: all later commits were gone without a word."""
    path, before = _written(tmp_path / "made", Random(1), is_closed=False)
    log = path.with_name(path.name + "-wal")
    whole = log.read_bytes()
    salts, ends = whole[16:24], [32]
    for at in range(32, len(whole), 24 + PAGE_BYTES):
        if whole[at + 8 : at + 16] == salts and any(whole[at + 4 : at + 8]):
            ends.append(at + 24 + PAGE_BYTES)
    told = 0
    for seed in range(SEEDS):
        rng = Random(seed)
        content = bytearray(whole[: ends[-1]])
        _overwrite(content, rng)
        content += whole[ends[-1] :]
        log.write_bytes(content)
        main = path.read_bytes()
        store = SqliteStore(path)
        try:
            store.open()
        except StoreError as error:
            assert str(path) in str(error)
            assert "backup" in str(error)
            assert log.read_bytes() == content  # for who brings back what can be brought back
            told += 1
            with pytest.raises(StoreError):  # and not only once
                SqliteStore(path).open()
        else:
            # Nothing was hit, or the last commit, which may be one that a crash cut off; or all that tells that the
            # one before it was another.
            assert content[: ends[-2] - 24 - PAGE_BYTES] == whole[: ends[-2] - 24 - PAGE_BYTES]
            assert Seen(store).lacks(before) == [] or content[: ends[-1]] != whole[: ends[-1]]
            store.close()
        path.write_bytes(main)
        log.write_bytes(whole)
    assert len(ends) > 8
    assert told > SEEDS // 2


def test_a_log_whose_last_commit_was_cut_off_is_taken(tmp_path: Path) -> None:
    path, _before = _written(tmp_path / "made", Random(1), is_closed=False)
    log = path.with_name(path.name + "-wal")
    whole = log.read_bytes()
    for cut_bytes in range(1, 3 * PAGE_BYTES, 1_111):
        main = path.read_bytes()
        log.write_bytes(whole[:-cut_bytes])
        store = SqliteStore(path)
        store.open()
        assert len(Seen(store).rows) > 10
        store.close()
        path.write_bytes(main)


def test_an_emptied_file_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """A file of no bytes was opened as queues that hold nothing."""
    path, _seen = _written(tmp_path / "made", Random(1), is_closed=True)
    path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"is damaged \(it is empty.*backup"):
            SqliteStore(path).open()
    assert path.read_bytes() == b""


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "queues.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("create table accounts(id)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="no queues' tables"):
        SqliteStore(path).open()
    assert path.read_bytes()[100:] == before[100:]
    path.write_text("a letter to my aunt, of more than a hundred bytes, so that it could be the header of a file " * 2)
    with pytest.raises(StoreError, match="damaged"):
        SqliteStore(path).open()
    assert path.read_text().startswith("a letter")


def test_a_log_without_its_file_is_not_thrown_away(tmp_path: Path) -> None:
    path, _seen = _written(tmp_path / "made", Random(1), is_closed=False)
    log = path.with_name(path.name + "-wal")
    path.unlink()
    with pytest.raises(StoreError, match=r"-wal is there.*Bring the file back"):
        SqliteStore(path).open()
    assert log.stat().st_size > 0
    assert not path.exists()


@pytest.mark.parametrize("what", ["folder", "folder with a file", "file"])
def test_what_may_not_be_written_is_reported(what: str, tmp_path: Path) -> None:
    """In a process that is not root, which may write anywhere."""
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "queues.sqlite"
    if what != "folder":
        store = SqliteStore(path)
        store.open()
        store.close()
    if what == "file":
        path.chmod(0o444)
    folder.chmod(0o555 if what != "file" else 0o777)
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.getuid() and above != Path("/tmp") and above != Path("/"):
            above.chmod(stat.S_IMODE(above.stat().st_mode) | 0o055)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing was raised"
        try:
            if os.getuid() == 0:
                os.setuid(65_534)
            SqliteStore(path).open()
        except StoreError as error:
            text = str(error)
        except BaseException as error:
            text = repr(error)
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as said_by_child:
        said = said_by_child.read()
    os.waitpid(child, 0)
    folder.chmod(0o700)
    assert str(path) in said
    assert "rights" in said
    assert [each.name for each in folder.iterdir()] == ([] if what == "folder" else ["queues.sqlite"])
