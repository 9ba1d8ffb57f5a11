"""One daemon for each data directory: the directory itself, and a lock that dies with its process."""

import fcntl
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dep2p.daemon.problems import Problem

_OURS = ("daemon.lock", "node.key", "config.toml", "realms", "members", "peers.sqlite", "control.token", "control.key")


def prepare_data_dir(path: Path) -> None:
    """Make the directory with mode 0700, or check that it is this user's alone.

    Raises :class:`Problem` D3004.
    """
    try:
        path.mkdir(parents=True, mode=0o700)
        return
    except FileExistsError:
        if not path.is_dir():
            raise Problem("D3004", f"{path} is not a directory") from None
    except OSError as error:
        raise Problem("D3004", f"cannot make the data directory {path}: {error.strerror or error}") from None
    try:
        found = path.stat()
        names = sorted(os.listdir(path))
    except OSError as error:
        raise Problem("D3004", f"cannot use the data directory {path}: {error.strerror or error}") from None
    if found.st_uid != os.geteuid():
        raise Problem("D3004", f"the data directory {path} belongs to another user (uid {found.st_uid})")
    if stat.S_IMODE(found.st_mode) & 0o077 == 0:
        return
    if names and not any(name in _OURS for name in names):
        # It holds other files: closing it is not ours to do.
        mode = stat.S_IMODE(found.st_mode)
        raise Problem("D3004", f"others may enter {path} (mode {mode:04o}): chmod 700 it, or choose another directory")
    try:
        path.chmod(0o700)
    except OSError as error:
        raise Problem("D3004", f"cannot close {path} to others: {error.strerror or error}") from None


@contextmanager
def hold_lock(path: Path) -> Generator[None, None, None]:
    """Hold the lock of a data directory. The kernel frees it when the process ends, however it ends.

    Raises :class:`Problem` D3002 with the holder's process id, D3004 when the file cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Problem("D3004", f"cannot open the lock {path}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").split()
            pid = holder[0] if holder else "unknown"
            raise Problem("D3002", f"a daemon with pid {pid} runs on {path.parent}") from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            raise Problem("D3004", f"cannot write the lock {path}: {error.strerror or error}") from None
        yield
        # The file stays: removing it would let two daemons hold locks on two files of one name.
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
