"""What the programs of documents need to run."""

import contextlib
import re
from collections.abc import Generator
from pathlib import Path

import trio

from dep2p import Realm
from dep2p.client import Client
from tests.daemon.processes import DaemonProcess


def wanted_lines(program: str) -> list[str]:
    """The comments behind ``print(…)``; `` | `` stands between texts of one line that runs more than once."""
    comments = re.findall(r"^.*\bprint\(.*\)(?:\)|)  # (.*)$", program, re.MULTILINE)
    return [line for comment in comments for line in comment.split(" | ")]


@contextlib.contextmanager
def daemon_in_a_realm(folder: Path) -> Generator[Path]:
    """A real daemon that is in the realm ``team``; its data directory."""
    daemon = DaemonProcess(folder)

    async def join() -> None:
        async with Client.open(data_dir=folder) as client:
            await client.join_realm(Realm.generate("team"))

    try:
        daemon.wait_ready()
        trio.run(join)
        yield folder
    finally:
        daemon.close()
