"""A look at trace files before Spark reads them: which are cut, damaged, foreign or empty. Local files only."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zstandard

from dep2p.traces.files import parse_file_name, scan_frames
from dep2p.traces.schema import columns

_KNOWN: Final = frozenset(columns())
_PEEK_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class FileError:
    """``kind``: ``cut``, ``damaged``, ``foreign-name``, ``foreign-columns``, ``empty-file`` or ``unreadable``."""

    path: Path
    kind: str
    text: str


def file_errors(paths: Iterable[Path]) -> list[FileError]:
    """Find faults of these files. Reads the heads of their frames and the first events of each."""
    found: list[FileError] = []
    for path in paths:
        try:
            found += _of(path)
        except OSError as error:
            found.append(FileError(path, "unreadable", f"{path} cannot be read: {error.strerror or error}"))
    return found


def _of(path: Path) -> list[FileError]:
    found: list[FileError] = []
    if parse_file_name(path.name) is None:
        found.append(
            FileError(path, "foreign-name", f"{path} is not named <node>-<start>-<number>: its run is not known")
        )
    with path.open("rb") as file:
        frames = scan_frames(file)
        if not frames.whole and not frames.cut_bytes:
            return [*found, FileError(path, "empty-file", f"{path} is empty")]
        if frames.cut_bytes:
            text = f"{path} is cut: its last {frames.cut_bytes:,} bytes are no whole frame; {len(frames.whole)} are"
            found.append(FileError(path, "cut", text))
        if not frames.whole:
            return found
        start, end = frames.whole[0]
        file.seek(start)
        head = file.read(min(end - start, _PEEK_BYTES))
    try:
        text = zstandard.ZstdDecompressor().decompressobj().decompress(head).decode("utf-8", "replace")
    except zstandard.ZstdError as error:
        return [*found, FileError(path, "damaged", f"{path} is damaged in its first frame: {error}")]
    strange: dict[str, None] = {}
    for line in text.splitlines()[:50]:
        try:
            event: object = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            strange |= dict.fromkeys(name for name in event if name not in _KNOWN)  # pyright: ignore
    if strange:
        names = ", ".join(sorted(strange)[:6])
        found.append(
            FileError(path, "foreign-columns", f"{path} has fields that no event has, which are ignored: {names}")
        )
    return found
