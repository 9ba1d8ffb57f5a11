"""The sender is killed with -9 again and again while it sends: nothing that it accepted is lost, or handled twice.

``DEP2P_KILLS=100 DEP2P_MESSAGES=100000`` makes it the long run of docs/howto/delivery.md.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from dep2p import Node, Realm
from dep2p.io.registry import Notice

pytestmark = pytest.mark.real
KILLS = int(os.environ.get("DEP2P_KILLS", "4"))
MESSAGES = int(os.environ.get("DEP2P_MESSAGES", "4000"))
SECRET = "11" * 32


@pytest.mark.timeout(3_600)
async def test_a_sender_that_is_killed_loses_nothing_that_it_accepted(tmp_path: Path) -> None:
    handled: dict[int, int] = {}
    accepted: dict[int, None] = {}
    rng = random.Random(7)
    async with Node.open(Realm.from_psk(bytes.fromhex(SECRET), "crash"), listen=["/ip4/127.0.0.1/tcp/0"]) as node:

        @node.on_notify("numbers")
        async def take(notice: Notice) -> None:
            number = int(notice.data)
            handled[number] = handled.get(number, 0) + 1

        del take
        first = kills = 0
        limit = MESSAGES
        while True:
            last_life = kills >= KILLS
            share = limit - first if last_life else max(1, (limit - first) // (KILLS - kills + 1))
            count = limit - first
            kill_after = None if last_life else rng.randrange(1, max(2, 2 * share))
            arguments = [str(tmp_path), SECRET, node.listen_addrs()[0], str(first), str(count)]
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "tests.io.delivery_process", *arguments],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.getcwd()},
            )
            is_done = await _read(process, accepted, kill_after)
            if is_done:
                break
            kills += 1
            # Numbers that may be accepted untold are not used again: so many more are sent.
            following = max(accepted, default=first - 1) + 1 + 64
            limit += following - first - sum(number >= first for number in accepted)
            first = following
    assert kills == KILLS
    assert len(accepted) >= MESSAGES
    assert not set(accepted) - set(handled), "an accepted message is lost"
    twice = [number for number, times in handled.items() if times > 1]
    assert not twice, f"handled twice: {twice[:10]}"


async def _read(process: trio.Process, accepted: dict[int, None], kill_after: int | None) -> bool:
    """What the process says, until it is done or was killed after so many lines."""
    assert process.stdout is not None
    seen = 0
    rest = b""
    while data := await process.stdout.receive_some(65_536):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line == b"done":
                await process.wait()
                return True
            accepted[int(line)] = None
            seen += 1
        if kill_after is not None and seen >= kill_after:
            process.kill()
            kill_after = None
    await process.wait()
    return False
