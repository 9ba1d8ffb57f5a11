"""Fixtures of the daemon's tests: a control API over a fake node, and real daemon processes."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.api.harness import Served, serving
from tests.daemon.processes import DaemonProcess


@pytest.fixture
def served() -> Iterator[Served]:
    """A control API over a fake node."""
    with serving() as started:
        yield started


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="dep2p-") as directory:
        yield Path(directory)


@pytest.fixture
def start() -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons; whatever happens, none outlives the test."""
    started: list[DaemonProcess] = []

    def begin(data_dir: Path, *arguments: str, env: dict[str, str] | None = None) -> DaemonProcess:
        daemon = DaemonProcess(data_dir, *arguments, env=env)
        started.append(daemon)
        return daemon

    yield begin
    for daemon in started:
        daemon.close()
