"""A disk that has no room, or whose fsync fails: below SQLite, by a library in front of the C library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dep2p.storage.sqlite.store import SqliteStore
from tests.services import servers

pytestmark = pytest.mark.real

_ROOT = Path(__file__).parents[2]
_IN_FRONT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int is(const char *what, int fd) {
    char path[4096], link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    if (!strstr(path, "queues.sqlite")) return 0;
    snprintf(path, sizeof path, "%s/%s", getenv("DISK_TROUBLE"), what);
    return access(path, F_OK) == 0;
}
#define SYNC(name) \
    int name(int fd) { \
        if (is("fsync", fd)) { errno = EIO; return -1; } \
        return ((int (*)(int))dlsym(RTLD_NEXT, #name))(fd); \
    }
#define WRITE(name) \
    ssize_t name(int fd, const void *data, size_t size, off_t at) { \
        if (is("full", fd)) { errno = ENOSPC; return -1; } \
        return ((ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, #name))(fd, data, size, at); \
    }
SYNC(fsync)
SYNC(fdatasync)
WRITE(pwrite)
WRITE(pwrite64)
"""


def test_a_disk_that_is_full_or_ill_loses_nothing_acknowledged_and_gives_no_id_twice(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        servers.missing("no C compiler: apt-get install gcc libc6-dev")
    source, library = tmp_path / "front.c", tmp_path / "front.so"
    source.write_text(_IN_FRONT)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, capture_output=True)
    trouble = tmp_path / "trouble"
    trouble.mkdir()
    path = tmp_path / "queues.sqlite"
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.disk_worker", path, trouble],
        cwd=_ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "DISK_TROUBLE": str(trouble)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said == [
        "publish 1: 1 1",
        "publish 1: 1 1",
        "publish 2: 1 2",
        # It may be on the disk: told so, kept, and the same when it is asked for again.
        "publish 3: StoreUnknownError",
        "flush: StoreError",
        "publish 3: 1 3",
        "publish 4: 1 4",
        # It is certainly not: its number is not given again.
        "publish 5: StoreFullError",
        "publish 5: 1 6",
        "publish 6: 1 7",
        "got 1 2 3 4 5 6",
    ]
    store = SqliteStore(path)
    store.open()
    assert store.load_partition(1).messages == 0
    store.close()
