"""Upkeep of a queues' file when nothing is to be written: fsync by interval, space given back."""

import sqlite3
from pathlib import Path

import pytest
import trio

from dep2p.errors import StoreError
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.records import MessageRow, StoreBatch
from dep2p.queues.broker.engine import QueueEngine
from dep2p.storage.queue_commit import QueueCommit
from dep2p.storage.sqlite import store as sqlite
from dep2p.storage.sqlite.store import SqliteStore
from tests.queues.nodes import running_engine


def _row(seq: int, size: int = 10) -> MessageRow:
    return MessageRow(1, seq, b"m", bytes(size))


def test_an_interval_ends_with_an_fsync_although_nothing_more_is_written(tmp_path: Path) -> None:
    """The last commits before a pause were on the disk when the system thought so."""

    class Told(SqliteStore):
        def tidy(self) -> None:
            before = self.statistics().fsyncs
            super().tidy()
            if self.statistics().fsyncs > before:  # not when it looked at the free space
                trio.from_thread.run_sync(tidied.set)

    tidied = trio.Event()
    store = Told(tmp_path / "queues.sqlite", sync="interval")

    async def main() -> None:
        async with running_engine(store) as engine:
            await engine.create_queue("", "jobs")  # synced: the first for a long time
            await engine.publish("", "jobs", [NewMessage(b"x")])
            before = store.statistics().fsyncs
            with trio.fail_after(30):
                await tidied.wait()
            assert store.statistics().fsyncs == before + 1
            assert store.tidy_in_s() is None or store.tidy_in_s() != 0.0

    trio.run(main)


def test_the_file_gives_space_back_when_a_backlog_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept the size of its worst day forever."""
    monkeypatch.setattr(sqlite, "_SPACE_S", 0.0)
    store = SqliteStore(tmp_path / "queues.sqlite", compress_bytes_min=0)
    store.open()
    for first in range(1, 401, 40):
        store.commit(StoreBatch(appends=[_row(seq, 131_072) for seq in range(first, first + 40)], groups=[40]))
    full = store.statistics().bytes_on_disk
    store.commit(StoreBatch(trims={1: 400}))
    steps = 0
    while store.tidy_in_s() == 0.0:
        store.tidy()
        steps += 1
    store.close()
    assert full > 50_000_000
    assert store.path.stat().st_size < 20_000_000
    assert steps > 10  # bounded ones


def test_a_file_with_little_to_give_back_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_SPACE_S", 0.0)
    store = SqliteStore(tmp_path / "queues.sqlite")
    store.open()
    store.commit(StoreBatch(appends=[_row(seq, 3_000) for seq in range(1, 1_000)], groups=[999]))
    store.commit(StoreBatch(trims={1: 999}))
    size = store.path.stat().st_size
    while store.tidy_in_s() == 0.0:
        store.tidy()
    assert store.path.stat().st_size >= size
    store.close()


def test_what_waits_is_done_beside_the_engine_and_an_error_of_it_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    class Ill(SqliteStore):
        def tidy_in_s(self) -> float | None:
            return 0.0 if len(tries) < 1 else None

        def tidy(self) -> None:
            tries.append(1)
            raise StoreError("the disk is ill")

    async def main() -> None:
        async with running_engine(Ill(tmp_path / "queues.sqlite")) as engine:
            await engine.create_queue("", "jobs")
            with trio.fail_after(30):
                assert await engine.publish("", "jobs", [NewMessage(b"x")]) == [(1, 1)]
                while not _failed(engine):  # noqa: ASYNC110  (nobody tells of it)
                    await trio.sleep(0.01)
            assert _failed(engine) == 1
        assert "the disk is ill" in caplog.text

    trio.run(main)


def _failed(engine: QueueEngine) -> int:
    commits: QueueCommit = engine.commits
    return commits.counters["tidies_failed"]


def test_a_file_that_sqlite_cannot_shrink_is_not_asked_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was made without incremental vacuum."""
    monkeypatch.setattr(sqlite, "_SPACE_S", 0.0)
    path = tmp_path / "queues.sqlite"
    store = SqliteStore(path, compress_bytes_min=0)
    store.open()
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("pragma journal_mode=delete")
        db.execute("pragma auto_vacuum=none")
        db.execute("vacuum")
    db.close()
    store.open()
    for first in range(1, 401, 40):
        store.commit(StoreBatch(appends=[_row(seq, 131_072) for seq in range(first, first + 40)], groups=[40]))
    store.commit(StoreBatch(trims={1: 400}))
    for _ in range(100):
        if store.tidy_in_s() != 0.0:
            break
        store.tidy()
    assert store.tidy_in_s() is None
    store.close()
