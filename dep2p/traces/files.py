"""Trace files: NDJSON in zstd frames, one frame for some hundreds of events, under a name that says which node wrote
them.

``<dir>/date=YYYY-MM-DD/hour=HH/<node>-<start_ns>-<number>.ndjson.zst``. ``start_ns`` is when the run of the node began,
``number`` counts its files from 0. While a file grows, its name begins with a dot. A file that is cut keeps all frames
before the cut. Specification: ``docs/spec/trace.md``.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import zstandard

from dep2p.outside_text import file_name
from dep2p.traces.schema import TraceEvent

SUFFIX: Final = ".ndjson.zst"
FRAME_EVENTS: Final = 512
"""Events in a frame, by default: 256 cost 12 % more bytes than 1024, and a crash loses at most one frame."""
ZSTD_LEVEL: Final = 3

_NAME: Final = re.compile(r"(?P<node>.+)-(?P<start>\d{1,20})-(?P<number>\d{1,10})\.ndjson\.zst")
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE: Final = b"\x2a\x4d\x18"
_FRAME_BYTES_MAX: Final = 256 << 20
"""Bytes of one unpacked frame at most. Foreign files may be one single frame."""
_encoder: Final = msgspec.json.Encoder()


class FileName(NamedTuple):
    """The fields in the name of a trace file."""

    node: str
    start_ns: int
    number: int

    def __str__(self) -> str:
        return f"{self.node}-{self.start_ns}-{self.number:06d}{SUFFIX}"

    @property
    def on_disk(self) -> str:
        """The name to write. A node's id from a foreign trace that is no plain word becomes a digest."""
        return str(self._replace(node=file_name(self.node)))


def parse_file_name(name: str) -> FileName | None:
    """Parse a file's name; None when it is no trace file's."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return FileName(found["node"], int(found["start"]), int(found["number"]))


def partition_of(t_us: int) -> str:
    """Return ``date=YYYY-MM-DD/hour=HH`` (UTC) of a time in µs since the epoch."""
    at = datetime.fromtimestamp(t_us / 1e6, UTC)
    return f"date={at:%Y-%m-%d}/hour={at:%H}"


def encode_frame(events: Sequence[TraceEvent], compressor: zstandard.ZstdCompressor) -> bytes:
    """Encode a whole zstd frame with one JSON object a line."""
    return compressor.compress(_encoder.encode_lines(events))


class GrowingFile:
    """A trace file while it grows: frames are appended, `finish` makes it visible. Its methods raise ``OSError``."""

    def __init__(self, directory: Path, name: FileName, first_t_us: int) -> None:
        self.path: Path = directory / partition_of(first_t_us) / name.on_disk
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.size_bytes: int = 0
        self.events: int = 0
        self._hidden = self.path.with_name("." + self.path.name)
        self._hidden.unlink(missing_ok=True)

    def append(self, events: Sequence[TraceEvent], compressor: zstandard.ZstdCompressor) -> None:
        """Add a frame. The file is open only meanwhile, so that a thousand of them cost no descriptors."""
        frame = encode_frame(events, compressor)
        with self._hidden.open("ab") as file:
            file.write(frame)
        self.size_bytes += len(frame)
        self.events += len(events)

    def finish(self, *, sync: bool = True) -> Path:
        """Give the file its name; with ``sync`` after its bytes are on the disk."""
        if sync:
            with self._hidden.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(self._hidden, self.path)
        return self.path

    def abandon(self) -> None:
        """Remove the file."""
        self._hidden.unlink(missing_ok=True)


# Reading --------------------------------------------------------------------------------------------------------------


class Frames(NamedTuple):
    """The whole frames of a file as (start, end). ``cut_bytes`` follow them and are no frame."""

    whole: list[tuple[int, int]]
    cut_bytes: int


def scan_frames(file: BinaryIO) -> Frames:
    """Find the zstd frames (RFC 8878) of a file without unpacking them."""
    size = file.seek(0, os.SEEK_END)
    whole: list[tuple[int, int]] = []
    at = 0
    while at < size:
        end = _frame_end(file, at, size)
        if end is None:
            break
        whole.append((at, end))
        at = end
    return Frames(whole, size - at)


def _frame_end(file: BinaryIO, start: int, size: int) -> int | None:
    file.seek(start)
    head = file.read(18)
    if len(head) >= 8 and head[1:4] == _SKIPPABLE and head[0] >> 4 == 5:
        end = start + 8 + int.from_bytes(head[4:8], "little")
        return end if end <= size else None
    if head[:4] != _MAGIC or len(head) < 5:
        return None
    descriptor = head[4]
    single = descriptor >> 5 & 1
    content_size_bytes = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    at = start + 5 + (1 - single) + dictionary_bytes + content_size_bytes
    last = False
    while not last:
        file.seek(at)
        block = file.read(3)
        if len(block) < 3:
            return None
        header = int.from_bytes(block, "little")
        last = bool(header & 1)
        kind = header >> 1 & 3
        if kind == 3:
            return None
        at += 3 + (1 if kind == 1 else header >> 3)
        if at > size:
            return None
    at += 4 if descriptor >> 2 & 1 else 0
    return at if at <= size else None


@dataclass(slots=True)
class ReadProblems:
    """Problems of one file, in words; none of them stopped the reading."""

    cut_bytes: int = 0
    bad_frames: int = 0
    bad_lines: int = 0
    first_bad_line: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.cut_bytes or self.bad_frames or self.bad_lines)


def read_events(path: Path, problems: ReadProblems | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a file as JSON objects, in its order: the reference reader, plain and slow.

    A cut end, a damaged frame or a line that is no object is skipped and noted in ``problems``. Files without zstd
    (``.ndjson``, ``.json``) are read too. Raises ``OSError``.
    """
    problems = ReadProblems() if problems is None else problems
    with path.open("rb") as file:
        for block in _blocks(file, problems):
            for line in block.splitlines():
                if not line.strip():
                    continue
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    event = None
                if isinstance(event, dict):
                    yield event
                else:
                    problems.bad_lines += 1
                    problems.first_bad_line = problems.first_bad_line or line[:200].decode("utf-8", "replace")


def _blocks(file: BinaryIO, problems: ReadProblems) -> Iterator[bytes]:
    if file.read(1) == b"{":
        file.seek(0)
        yield file.read()
        return
    frames = scan_frames(file)
    problems.cut_bytes += frames.cut_bytes
    for start, end in frames.whole:
        file.seek(start)
        data = file.read(end - start)
        if data[1:4] == _SKIPPABLE:
            continue
        try:
            reader = zstandard.ZstdDecompressor(max_window_size=_FRAME_BYTES_MAX).stream_reader(data)
            yield reader.read(_FRAME_BYTES_MAX)
        except zstandard.ZstdError:
            problems.bad_frames += 1


def trace_files(places: Iterable[Path]) -> list[Path]:
    """List all trace files in these directories (and those given themselves), sorted; hidden names are left out.

    Raises ``FileNotFoundError`` when a place does not exist.
    """
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            found += [
                path
                for path in place.rglob("*" + SUFFIX)
                if path.is_file() and not any(part[0] in "._" for part in path.relative_to(place).parts)
            ]
        elif place.exists():
            found.append(place)
        else:
            raise FileNotFoundError(f"no such trace file or directory: {place}")
    return sorted(dict.fromkeys(found))
