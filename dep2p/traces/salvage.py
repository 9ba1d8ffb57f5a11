"""Files that a killed writer left under names that begin with a dot: salvage makes their whole frames visible."""

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

from dep2p.traces.files import SUFFIX, parse_file_name, scan_frames


@dataclass(slots=True)
class Salvage:
    """The result. ``busy``: files that a live node is writing; they were left alone."""

    finished: list[Path] = field(default_factory=list[Path])
    emptied: list[Path] = field(default_factory=list[Path])
    """Files without a whole frame, which were removed."""
    cut_bytes: int = 0
    """The bytes of frames that were not whole."""
    busy: int = 0


def salvage(directory: Path, node: str | None = None) -> Salvage:
    """Finish the growing files of dead writers below a directory, of one node or of all.

    The writer of a node holds a lock on its growing file, which the kernel frees when it dies. Raises ``OSError``.
    """
    done = Salvage()
    for hidden in sorted(directory.rglob(f".*{SUFFIX}")):
        name = parse_file_name(hidden.name[1:])
        if name is not None and (node is None or name.node == node):
            _salvage_one(hidden, done)
    return done


def _salvage_one(hidden: Path, done: Salvage) -> None:
    try:
        file = hidden.open("r+b")
    except FileNotFoundError:
        return  # its writer has completed the file meanwhile
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            done.busy += 1
            return
        frames = scan_frames(file)
        if frames.cut_bytes:
            done.cut_bytes += frames.cut_bytes
            file.truncate(frames.whole[-1][1] if frames.whole else 0)
        if not frames.whole:
            hidden.unlink(missing_ok=True)
            done.emptied.append(hidden)
            return
        os.fsync(file.fileno())
        whole = hidden.with_name(hidden.name[1:])
        os.replace(hidden, whole)
        done.finished.append(whole)
