"""The write-ahead log beside a queues' file. SQLite reads it up to the first frame that is not as it was written, and
takes the rest for a commit that a crash cut off. That is right for the last commit; for one that was followed by
another, which is only begun when the first is on disk, it would lose in silence what was acknowledged.

Format: https://www.sqlite.org/fileformat.html, "The Write-Ahead Log".
"""

import contextlib
import os
import shutil
import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct(">8I")
_FRAME: Final = struct.Struct(">6I")
_MAGIC_LITTLE: Final = 0x377F0682
_MAGIC_BIG: Final = 0x377F0683
_WORD: Final = 0xFFFFFFFF


def log_of(path: Path) -> Path:
    """Return the path of a file's log."""
    return path.with_name(path.name + "-wal")


def lost_commits(log: Path) -> bool:
    """Whether a frame of a commit that was on disk is damaged. Call it while no process writes."""
    try:
        content = log.read_bytes()
    except FileNotFoundError:
        return False
    if len(content) < _HEADER.size:
        return False
    magic, _version, page_bytes, _number, *salts, sum_0, sum_1 = _HEADER.unpack_from(content)
    if magic not in (_MAGIC_LITTLE, _MAGIC_BIG) or not 512 <= page_bytes <= 65_536:
        return len(content) > _HEADER.size  # no part of the log can be read
    order = "<" if magic == _MAGIC_LITTLE else ">"
    if _sum(content[:24], 0, 0, order) != (sum_0, sum_1):
        return len(content) > _HEADER.size
    size = _FRAME.size + page_bytes
    sums = sum_0, sum_1
    is_broken = is_after_commit = False
    for at in range(_HEADER.size, len(content) - size + 1, size):
        _page, commit, *frame_salts, sum_0, sum_1 = _FRAME.unpack_from(content, at)
        is_of_now = frame_salts == salts  # otherwise a frame from before the log was begun anew
        follows = is_of_now and _frame_sum(content[at : at + size], *sums, order) == (sum_0, sum_1)
        if follows and is_broken and is_after_commit:
            return True  # this commit began when the one before it was on disk
        is_broken = is_broken or not follows
        is_after_commit = is_of_now and bool(commit)
        sums = sum_0, sum_1
    return False


def _frame_sum(frame: bytes, sum_0: int, sum_1: int, order: str) -> tuple[int, int]:
    return _sum(frame[_FRAME.size :], *_sum(frame[:8], sum_0, sum_1, order), order)


def _sum(data: bytes, sum_0: int, sum_1: int, order: str) -> tuple[int, int]:
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for even, odd in zip(words[::2], words[1::2], strict=True):
        sum_0 = (sum_0 + even + sum_1) & _WORD
        sum_1 = (sum_1 + odd + sum_0) & _WORD
    return sum_0, sum_1


@contextmanager
def kept_log(path: Path) -> Generator[None, None, None]:
    """Inside, the file may be closed, which folds its log into it and removes it; afterwards that is there again."""
    log = log_of(path)
    kept = log.with_name(log.name + ".kept")
    is_kept = False
    with contextlib.suppress(OSError):
        kept.unlink(missing_ok=True)
        try:
            os.link(log, kept)
        except FileNotFoundError:
            pass
        except OSError:  # a file system without links
            shutil.copy2(log, kept)
        is_kept = kept.exists()
    try:
        yield
    finally:
        if is_kept:
            with contextlib.suppress(OSError):
                kept.replace(log)
