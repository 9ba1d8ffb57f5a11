"""The file of the queues: made whole or not at all, checked before it is written to, migrated."""

import contextlib
import functools
import os
import sqlite3
from pathlib import Path
from typing import Final

from dep2p.errors import StoreError, StoreFullError, StoreLockedError, StoreUnknownError
from dep2p.storage.sqlite.schema import MIGRATIONS, SCHEMA_VERSION, row_sum
from dep2p.storage.sqlite.segments import INSERT, SEQ_BITS, SEQ_MASK, old_message, segment_ids, segments_of
from dep2p.storage.sqlite.wal import kept_log, log_of, lost_commits

PAGE_BYTES: Final = 8_192
_CHECKPOINT_PAGES: Final = 512
"""Pages of the log that are folded into the file at once: 4 MiB. Larger steps save nothing, and make some commits wait
for 30 ms."""
_QUICK_CHECK_BYTES_MAX: Final = 67_108_864
"""Bytes of a file that is checked as a whole when it is opened, which takes 1 ms for each MiB."""
_SUMS_FROM: Final = 3
"""The version since which rows have checksums."""
_SEGMENTS_FROM: Final = 4
"""The version since which messages are in segments."""


def open_file(path: Path, *, is_synced: bool) -> sqlite3.Connection:
    """Create or migrate a file, lock and check it. Raises StoreError, StoreLockedError."""
    db: sqlite3.Connection | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        _check(path)
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.5)
        _prepare(db, path, is_synced=is_synced)
    except BaseException as error:
        raised: BaseException = error
        if isinstance(error, sqlite3.Error):
            raised = explain(path, error)
        elif isinstance(error, OSError):
            raised = StoreError(f"cannot open the queues' file {path}: {error}. Check path and rights")
        if db is not None:
            with contextlib.nullcontext() if isinstance(raised, StoreLockedError) else kept_log(path):
                db.close()
        if raised is error:
            raise
        raise raised from error
    return db


def _make(path: Path) -> None:
    """Make a new file, complete in its place: an empty file there was damaged later."""
    log = log_of(path)
    if log.exists() and log.stat().st_size:
        raise StoreError(
            f"{log} is there, and the queues' file {path} is not: it may hold messages that were acknowledged. Bring "
            "the file back beside it; with both moved away, queues begin empty"
        )
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        db = sqlite3.connect(new, isolation_level=None)
        try:
            db.execute(f"pragma page_size={PAGE_BYTES}")
            db.execute("pragma auto_vacuum=incremental")
            db.execute("begin immediate")
            _migrate(db, 0)
            db.execute("commit")
        finally:
            db.close()
        with contextlib.suppress(FileExistsError):  # another process was faster: its file is used
            _bring(new, path)
    finally:
        new.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _bring(new: Path, path: Path) -> None:
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if not path.exists():
            new.rename(path)


def _check(path: Path) -> None:
    """Find errors that SQLite would not report, or not so clearly."""
    if not os.access(path, os.R_OK | os.W_OK) or not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreError(
            f"cannot write the queues' file {path}: this user may not write it or make files beside it. Check the "
            "rights of both, and whether the disk is mounted read-only"
        )
    if path.stat().st_size == 0:
        raise damaged(path, "it is empty, which a queues' file never is")


def _prepare(db: sqlite3.Connection, path: Path, *, is_synced: bool) -> None:
    db.execute("pragma locking_mode=exclusive")
    db.execute("pragma cell_size_check=on")
    db.execute("pragma journal_mode=wal")
    db.execute(f"pragma synchronous={'full' if is_synced else 'normal'}")
    db.execute(f"pragma wal_autocheckpoint={_CHECKPOINT_PAGES}")
    db.execute("pragma cache_size=-16384")
    db.execute("begin immediate")  # takes the lock, for as long as the file is open
    try:
        version = int(db.execute("pragma user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"the queues' file {path} was written by a newer dep2p (schema {version}, this one knows "
                f"{SCHEMA_VERSION}): start that version again, or move the file away to begin with empty queues"
            )
        if version < 1:
            raise damaged(path, "it has no queues' tables: it was emptied, or is another program's")
        _check_pages(db, path)  # check before any write
        if is_synced and lost_commits(log_of(path)):
            raise damaged(path, f"its log {log_of(path).name} lacks commits in its middle")
        _migrate(db, version)
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("rollback")
        raise
    db.execute("commit")


def _check_pages(db: sqlite3.Connection, path: Path) -> None:
    if path.stat().st_size <= _QUICK_CHECK_BYTES_MAX:
        found = str(db.execute("pragma quick_check(1)").fetchone()[0])
        if found != "ok":
            raise damaged(path, found)


def _migrate(db: sqlite3.Connection, version: int) -> None:
    for script in MIGRATIONS[version:]:
        for statement in script.split(";"):
            if statement.strip():
                db.execute(statement)
    if 0 < version < _SUMS_FROM:
        _sum_rows(db)
    if version < _SEGMENTS_FROM:
        _pack_messages(db)
    db.execute(f"pragma user_version={SCHEMA_VERSION}")


def _sum_rows(db: sqlite3.Connection) -> None:
    """Add checksums to the small rows that have none yet; messages are many, and stay without."""
    for table, numbers, blobs in (
        ("definitions", (), ("key", "value")),
        ("partitions", ("partition", "last_seq", "trimmed"), ()),
        ("cursors", ("channel", "partition", "floor", "handed_out"), ()),
        ("done", ("channel", "partition", "low", "high"), ()),
        ("states", ("channel", "partition", "seq", "attempts", "due_us"), ("history",)),
        ("dead", ("channel", "id", "partition", "seq", "died_us", "attempts"), ("meta", "body", "history")),
    ):
        db.create_function("row_sum", -1, functools.partial(_row_sum, len(numbers)))
        db.execute(f"update {table} set sum = row_sum({', '.join([*numbers, *blobs])})")


def _pack_messages(db: sqlite3.Connection) -> None:
    """Pack the messages into segments, once for a file; a million messages take some seconds. Memory holds one
    segment."""
    for (partition,) in db.execute(f"select distinct id >> {SEQ_BITS} from messages").fetchall():
        with contextlib.closing(
            db.execute(
                "select id, form, meta, body from messages where id between ? and ? order by id",
                segment_ids(partition, 0, SEQ_MASK),
            )
        ) as old:
            db.executemany(INSERT, segments_of(partition, (old_message(*row) for row in old)))
    db.execute("drop table messages")


def _row_sum(count: int, *fields: object) -> int:
    return row_sum(fields[:count], *fields[count:])


def damaged(path: Path, detail: str) -> StoreError:
    """Return the error of a file that cannot be trusted."""
    return StoreError(
        f"the queues' file {path} is damaged ({detail}): nothing was changed. Stop here, copy it, and bring back a "
        "backup, or read what can be read with `sqlite3 FILE .recover`; moved away, queues begin empty"
    )


UNWRITABLE: Final = (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
"""Errors of a value that SQLite cannot hold."""


def explain(path: Path, error: sqlite3.Error, *, is_commit: bool = False) -> StoreError:
    """Return an error of SQLite in words, with the next step. ``is_commit``: it came from a write."""
    name = str(getattr(error, "sqlite_errorname", ""))
    if name.startswith("SQLITE_FULL") or "disk is full" in str(error):
        return StoreFullError(
            f"no room for the queues' file {path}: publishes are refused, acknowledgements still work. Free some space"
        )
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreLockedError(
            f"the queues' file {path} is in use by another process: stop the daemon of that directory first"
        )
    if is_commit and name == "SQLITE_IOERR_FSYNC":
        return StoreUnknownError(
            f"the queues' file {path}: {error}: whether this is on the disk is not known, it is written again. Check "
            "the disk"
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return damaged(path, str(error))
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StoreError(f"cannot write the queues' file {path}: {error}. Check the rights of its directory")
    if name.startswith("SQLITE_CONSTRAINT") or isinstance(error, UNWRITABLE):
        refused = StoreError(f"the queues' file {path} does not take this: {error}")
        refused.is_about_batch = True
        return refused
    return StoreError(f"the queues' file {path}: {error}. Check the disk")
