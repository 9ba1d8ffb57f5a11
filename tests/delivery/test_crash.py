"""The sender, or the receiver, is killed with -9 again and again while messages flow.

Nothing that the sender accepted is lost. Nothing is handled twice when the sender is killed; when the receiver is, only
what was handled and not on disk yet (docs/spec/delivery.md, 3).

``DEP2P_KILLS=100 DEP2P_MESSAGES=100000`` makes it the long run of docs/howto/delivery.md.
"""

import itertools
import os
import random
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import trio

from dep2p import Node, Realm
from dep2p.protocols.messaging.incoming import Notification
from dep2p.storage.delivery_store import InboxRow, SqliteDeliveryStore
from tests.delivery.sender_process import TASKS as SENDER_TASKS

pytestmark = pytest.mark.real
KILLS = int(os.environ.get("DEP2P_KILLS", "4"))
MESSAGES = int(os.environ.get("DEP2P_MESSAGES", "4000"))
SECRET = "11" * 32
SKIPPED = 2 * SENDER_TASKS
"""Numbers that are left out behind a death of the sender: more than its tasks can have accepted untold."""


@pytest.mark.timeout(3_600)
async def test_a_sender_that_is_killed_loses_nothing_that_it_accepted(tmp_path: Path) -> None:
    handled: dict[int, int] = {}
    accepted: dict[int, None] = {}
    rng = random.Random(7)
    async with Node.open(Realm.from_psk(bytes.fromhex(SECRET), "crash"), listen=["/ip4/127.0.0.1/tcp/0"]) as node:

        @node.on_notify("numbers")
        async def take(notification: Notification) -> None:
            number = int(notification.body)
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
                [sys.executable, "-m", "tests.delivery.sender_process", *arguments],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.getcwd()},
            )
            is_done = await _read(process, accepted, kill_after)
            if is_done:
                break
            kills += 1
            # Numbers that may be accepted untold are not used again: so many more are sent.
            following = max(accepted, default=first - 1) + 1 + SKIPPED
            limit += following - first - sum(number >= first for number in accepted)
            first = following
    assert kills == KILLS
    assert len(accepted) >= MESSAGES
    assert not set(accepted) - set(handled), "an accepted message is lost"
    # What was accepted and not told yet when the sender died: at most one message of each of its tasks.
    unreported = set(handled) - set(accepted)
    assert len(unreported) <= SENDER_TASKS * kills, (
        f"{len(unreported)} messages were handled whose acceptance was not told"
    )
    twice = [number for number, times in handled.items() if times > 1]
    assert not twice, f"handled twice: {twice[:10]}"


async def _read(process: trio.Process, accepted: dict[int, None], kill_after: int | None) -> bool:
    """Read the lines of a process, until it is done or was killed after so many of them."""
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


# The receiver

TASKS = 300
"""So many messages are under way: more than one commit of the receiver takes in."""


class Receiver:
    """The receiver's lives, one after the other, and what each has left."""

    def __init__(self, directory: Path, node: Node) -> None:
        self.directory = directory / "receiver"
        self.file = directory / "handled"
        self.file.touch()
        self.life = 0
        self.records: list[InboxRow | None] = []
        """The sender's row on disk at the end of each life."""
        self._copies = directory / "copies"
        self._node = node
        self._realm_id = node.realm().realm_id
        self._process: trio.Process | None = None

    async def start(self) -> None:
        arguments = [str(self.directory), SECRET, self._node.listen_addrs()[0], str(self.file), str(self.life)]
        self._process = process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "tests.delivery.receiver_process", *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert process.stdout is not None
        with trio.fail_after(120):
            assert (await process.stdout.receive_some(64)).startswith(b"ready")

    async def kill(self) -> None:
        """Returns when what it had written to its connections was taken in, too."""
        process = self._process
        assert process is not None and process.stdout is not None
        process.kill()
        await process.wait()
        await process.stdout.aclose()
        delivery = self._node.delivery()
        with trio.fail_after(60):
            while delivery.stats().links_out:  # noqa: ASYNC110  (the end of a connection, not a time)
                await trio.sleep(0.001)
        self.records.append(await trio.to_thread.run_sync(self._record))
        self.life += 1

    def _record(self) -> InboxRow | None:
        """From a copy: opening the file itself would change it."""
        copy = self._copies / str(self.life)
        copy.mkdir(parents=True)
        for path in self.directory.glob("delivery.sqlite*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, copy)
        with closing(SqliteDeliveryStore(copy / "delivery.sqlite")) as store:
            return store.load(self._realm_id).inboxes.get(self._node.peer_id)

    def handled(self) -> dict[int, list[int]]:
        """In which lives the handler took each number."""
        found: dict[int, list[int]] = {}
        for line in self.file.read_text().splitlines():
            life, number = line.split()
            found.setdefault(int(number), []).append(int(life))
        return found


def _is_recorded(record: InboxRow | None, number: int) -> bool:
    if record is None:
        return False
    return number <= record.floor or any(low <= number <= high for low, high in record.done)


@pytest.mark.timeout(3_600)
async def test_a_receiver_that_is_killed_loses_nothing_and_repeats_only_what_was_not_on_disk(tmp_path: Path) -> None:
    rng = random.Random(11)
    numbers = iter(range(MESSAGES))
    window_numbers: dict[int, int] = {}
    acknowledged: dict[int, int] = {}
    """Message, and the life of the receiver in which the sender heard of it."""
    async with Node.open(Realm.from_psk(bytes.fromhex(SECRET), "crash"), listen=["/ip4/127.0.0.1/tcp/0"]) as node:
        receiver = Receiver(tmp_path, node)
        await receiver.start()
        [peer] = [member.peer for member in node.membership().members() if member.peer != node.peer_id]
        changed = trio.Event()

        async def send_some() -> None:
            nonlocal changed
            for number in numbers:
                receipt = await node.send(peer, "numbers", b"%d" % number, reliable=True)
                window_numbers[number] = receipt.number
                await receipt.wait()
                acknowledged[number] = receiver.life
                changed.set()
                changed = trio.Event()

        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(send_some)
            for kill in range(KILLS):
                left = MESSAGES - len(acknowledged)
                wanted = len(acknowledged) + rng.randrange(1, max(2, 2 * left // (KILLS - kill + 1)))
                while len(acknowledged) < min(wanted, MESSAGES):
                    with trio.move_on_after(30) as patience:
                        await changed.wait()
                    assert not patience.cancelled_caught, f"nothing is acknowledged: {node.delivery().outbox()[:3]}"
                await trio.sleep(rng.random() / 50)  # the moment, not a wait: else always just behind a commit
                heard = [window_numbers[number] for number in acknowledged]
                await receiver.kill()
                record = receiver.records[-1]
                assert all(_is_recorded(record, number) for number in heard), "acknowledged, and not on disk"
                by_window = {window: number for number, window in window_numbers.items()}
                handled = receiver.handled()
                unhandled = [n for window, n in by_window.items() if _is_recorded(record, window) and n not in handled]
                assert not unhandled, f"on disk as handled, and were not: {unhandled[:10]}"
                await receiver.start()
        assert len(acknowledged) == MESSAGES
        await receiver.kill()
    assert receiver.life == KILLS + 1
    handled = receiver.handled()
    assert not set(range(MESSAGES)) - set(handled), "acknowledged, and never handled"
    repeated = 0
    for number, lives in handled.items():
        for before, after in itertools.pairwise(lives):
            assert before < after, f"{number} was handled twice in one life of the receiver"
            known = [
                life for life in range(before, after) if _is_recorded(receiver.records[life], window_numbers[number])
            ]
            assert not known, f"{number} was on disk as handled when life {known[0]} ended, and was handled again"
            repeated += 1
        assert lives[0] <= acknowledged[number], f"{number} was acknowledged before it was handled"
        assert lives[-1] <= acknowledged[number], f"{number} was handled again after its acknowledgement"
    print(f"{KILLS} kills, {MESSAGES} messages, {repeated} handled once more: they were not on disk")
