"""Files on disk while they are sent and received: hashed as they pass, kept when cut off, never over another file."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.payloads import cannot_read
from dep2p.cli.framework.render import byte_count
from dep2p.protocols.messaging.file_transfer import DATA_ITEM_BYTES_MAX, FileOffer, FileVerdictCode

BATCH_ITEMS: Final = 8
"""Items read or written per hop to a thread: 2 MiB, so that the hop costs little beside the hashing."""
PARTS_MAX: Final = 1_000
"""Unfinished files in one directory: a sender cannot make any number of them."""
_HASH_CHUNK_BYTES: Final = 1 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Declined(Exception):
    """A refusal of a file; ``code`` and the text go to the sender."""

    def __init__(self, code: FileVerdictCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def _pack(path: Path) -> str:
    name = path.resolve().name or "all"
    return f"pack it into one: tar cf {shlex.quote(name + '.tar')} {shlex.quote(str(path))}"


class SourceFile:
    """A file being sent. Not thread-safe; every method may block on the disk."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`CliError` when the path is no readable regular file."""
        self.path = path
        try:
            # Without O_NONBLOCK the opening of a FIFO waits for a writer, and no signal ends that.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise cannot_read(path, error) from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise CliError(f"{path} is a directory, not a file", "D6006", tries=(_pack(path),))
            raise CliError(f"{path} is not a regular file", "D6006", tries=("write its content into a file first",))
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        self.size: int = status.st_size
        self.mtime_ns: int = max(0, status.st_mtime_ns)
        self._hash = hashlib.sha256()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()

    def seek_hashed(self, offset: int) -> bytes:
        """Hash the first ``offset`` bytes from the start, stay behind them, and return their SHA-256."""
        self._file.seek(0)
        self._hash = hashlib.sha256()
        left = offset
        while left:
            data = self._file.read(min(_HASH_CHUNK_BYTES, left))
            if not data:
                raise self._changed()
            self._hash.update(data)
            left -= len(data)
        return self._hash.digest()

    def read_batch(self, left: int) -> list[bytes]:
        """Read and hash the next items of together at most ``left`` bytes. Raises :class:`CliError` at an early end."""
        batch: list[bytes] = []
        while left and len(batch) < BATCH_ITEMS:
            data = self._file.read(min(DATA_ITEM_BYTES_MAX, left))
            if not data:
                raise self._changed()
            self._hash.update(data)
            batch.append(data)
            left -= len(data)
        return batch

    def digest(self) -> bytes:
        """The SHA-256 of everything up to where the file was read."""
        return self._hash.digest()

    def check_unchanged(self) -> None:
        """Raises :class:`CliError` when size or time of change differ from those at the start."""
        status = os.fstat(self._file.fileno())
        if status.st_size != self.size or max(0, status.st_mtime_ns) != self.mtime_ns:
            raise self._changed()

    def _changed(self) -> CliError:
        return CliError(f"{self.path} changed while it was sent", "D6008", tries=("send it again when it is complete",))


class PartialFile:
    """A file being received: a hidden part file and its state beside the path where it will appear.

    Opened by :meth:`open`; the part file is locked, so two transfers of one file cannot mix. Every method may block.
    """

    def __init__(self, directory: Path, peer: str, offer: FileOffer, descriptor: int, part: Path) -> None:
        self.target: Path = directory / offer.name
        self._directory = directory
        self._peer = peer
        self._offer = offer
        self._descriptor = descriptor
        self._part = part
        self._hash = hashlib.sha256()
        self._free_bytes_min = 0
        self.received: int = 0

    @classmethod
    def open(cls, directory: Path, peer: str, offer: FileOffer, *, force: bool, free_bytes_min: int = 0) -> Self:
        """Find or make the part file and hash its bytes; ``received`` then says how many there are.

        ``free_bytes_min``: what this file leaves free on the disk.

        Raises :class:`Declined` or ``OSError``.
        """
        if not force and os.path.lexists(directory / offer.name):
            raise Declined(FileVerdictCode.EXISTS, f"{offer.name} exists already")
        key = hashlib.sha256(f"{peer}\0{offer.name}\0{offer.size}".encode()).hexdigest()[:16]
        part = directory / f".dep2p-{key}.part"
        if not part.exists() and sum(1 for _ in directory.glob(".dep2p-*.part")) >= PARTS_MAX:
            raise Declined(FileVerdictCode.REFUSED, f"{PARTS_MAX} unfinished files are here already")
        while True:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise Declined(FileVerdictCode.BUSY, f"{offer.name} is being received already") from None
            if _same_file(descriptor, part):
                break
            os.close(descriptor)  # a transfer that ended just now has renamed the part file
        try:
            _check_own(descriptor, part)
        except BaseException:
            os.close(descriptor)
            raise
        partial = cls(directory, peer, offer, descriptor, part)
        partial._free_bytes_min = free_bytes_min
        try:
            partial._resume()
        except BaseException:
            partial.close()
            raise
        return partial

    def _resume(self) -> None:
        on_disk = os.fstat(self._descriptor).st_size
        if on_disk > self._offer.size:
            os.ftruncate(self._descriptor, 0)
            on_disk = 0
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        while self.received < on_disk:
            data = os.read(self._descriptor, min(_HASH_CHUNK_BYTES, on_disk - self.received))
            if not data:
                break
            self._hash.update(data)
            self.received += len(data)
        free = self._usable_bytes()
        if self._offer.size - self.received > free:
            raise Declined(
                FileVerdictCode.NO_SPACE,
                f"{byte_count(self._offer.size - self.received)} are missing and {byte_count(free)} are free",
            )
        state = {
            "peer": self._peer,
            "name": self._offer.name,
            "size_bytes": self._offer.size,
            "part": self._part.name,
            "started_s": int(time.time()),
        }
        text = json.dumps(state, ensure_ascii=False) + "\n"
        # In a directory that other users may write to, the name can be their link: it is replaced, never written to.
        self._state.unlink(missing_ok=True)
        descriptor = os.open(self._state, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    @property
    def _state(self) -> Path:
        return self._part.with_suffix(".json")

    def digest(self) -> bytes:
        """The SHA-256 of the bytes received so far."""
        return self._hash.digest()

    def restart(self) -> None:
        """Throw the received bytes away: the sender has another file."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash = hashlib.sha256()
        self.received = 0

    def _usable_bytes(self) -> int:
        """Free bytes of the disk less those that are to stay free."""
        return max(0, shutil.disk_usage(self._directory).free - self._free_bytes_min)

    def write(self, items: Sequence[bytes]) -> None:
        """Append and hash. Raises :class:`Declined` when the disk is full; written bytes stay usable."""
        if self._free_bytes_min and sum(map(len, items)) > self._usable_bytes():  # other files came, too
            raise Declined(
                FileVerdictCode.NO_SPACE,
                f"the disk is full but for {byte_count(self._free_bytes_min)} after {self.received} bytes",
            )
        for item in items:
            view = memoryview(item)
            while view:
                try:
                    count = os.write(self._descriptor, view)
                except OSError as error:
                    if error.errno in _FULL:
                        raise Declined(
                            FileVerdictCode.NO_SPACE, f"the disk is full after {self.received} bytes"
                        ) from None
                    raise
                self._hash.update(view[:count])
                self.received += count
                view = view[count:]

    def finish(self, *, force: bool) -> None:
        """Make the file durable and give it its name. Raises :class:`Declined` when another file took the name
        meanwhile."""
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(self._descriptor, 0o666 & ~mask)
        if self._offer.mtime_ns is not None:
            with contextlib.suppress(OSError, OverflowError):  # this file system cannot store that time
                os.utime(self._descriptor, ns=(time.time_ns(), self._offer.mtime_ns))
        os.fsync(self._descriptor)
        if force:
            os.replace(self._part, self.target)
        else:
            self._link()
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._state.unlink(missing_ok=True)

    def _link(self) -> None:
        try:
            os.link(self._part, self.target)
        except FileExistsError:
            raise Declined(FileVerdictCode.EXISTS, f"{self._offer.name} exists already") from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            # No hard links on this file system, hence no way to refuse an existing name in the same step.
            if os.path.lexists(self.target):
                raise Declined(FileVerdictCode.EXISTS, f"{self._offer.name} exists already") from None
            os.rename(self._part, self.target)
            return
        os.unlink(self._part)

    def close(self) -> None:
        """Close the part file, and remove an empty one. Safe to call twice."""
        if self._descriptor < 0:
            return
        if self.received == 0 and _same_file(self._descriptor, self._part):
            self._part.unlink(missing_ok=True)
            self._state.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


def already_there(directory: Path, offer: FileOffer) -> bool:
    """Whether a file is there that has the offer's name, and the content of its digest."""
    target = directory / offer.name
    if offer.sha256 is None or target.is_symlink() or not target.is_file() or target.stat().st_size != offer.size:
        return False
    with target.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest() == offer.sha256


def _check_own(descriptor: int, part: Path) -> None:
    """Raises :class:`Declined` for a part file that another user made, or that is another file under a second name."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        raise Declined(
            FileVerdictCode.REFUSED,
            f"{part.name} in the receiving directory is no part file of this program: its owner has to look at it",
        )


def _same_file(descriptor: int, path: Path) -> bool:
    ours = os.fstat(descriptor)
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
