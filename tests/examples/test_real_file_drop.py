"""examples/file_drop.py over restarts of both programs and both daemons in the middle of a file."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples.programs import RESTARTS, SIGNALS, Program, Team, unexpected, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("examples-real"), pytest.mark.timeout(900)]

FILE_BYTES = 100_000_000


def test_a_file_arrives_whole_though_every_part_of_its_way_restarts(team: Team, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"

    def received_bytes() -> int:
        return sum(part.stat().st_size for part in inbox.glob(".*.part"))

    def wait_for_more() -> None:
        """Wait until the transfer has gone on, and is not at its end."""
        before = received_bytes()
        wait_for("more of the file", lambda: received_bytes() > before or any(inbox.glob("video*")))
        assert not any(inbox.glob("video*")), "the file is whole already: make it larger"

    with ExitStack() as stack:
        receiver = Program(team.bob, "file_drop", "receive", inbox, ready="receiving")
        stack.callback(receiver.close)
        cuts = 0
        for number in range(RESTARTS):
            kind = SIGNALS[number % 2]
            path = tmp_path / f"video{number}.mkv"
            path.write_bytes(os.urandom(1_000_000) * (FILE_BYTES // 1_000_000))
            sender = Program(team.ann, "file_drop", "send", team.bob.peer_id, path)
            stack.callback(sender.close)
            wait_for_more()
            with sender.paused():
                (team.ann, team.bob)[number % 2].restart(kind)
            wait_for_more()
            with sender.paused():
                receiver.restart(kind)
            wait_for_more()
            sender.end(kind)
            kept_bytes = received_bytes()
            assert 0 < kept_bytes < FILE_BYTES
            cuts += len(sender.said("cut off")) + 1
            again = Program(team.ann, "file_drop", "send", team.bob.peer_id, path)
            stack.callback(again.close)
            assert again.wait() == 0, again.errors
            assert (inbox / path.name).read_bytes() == path.read_bytes()
            assert not received_bytes()
            for program in (sender, again):
                assert not unexpected(program.errors)
            path.unlink()
            (inbox / path.name).unlink()
        assert not unexpected(receiver.errors)
        print(f"file_drop: {3 * RESTARTS} restarts; {RESTARTS} files of {FILE_BYTES // 10**6} MB whole, {cuts} cuts")
