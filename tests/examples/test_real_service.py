"""examples/service.py over restarts of its workers, its caller and their daemons."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples.programs import RESTARTS, SIGNALS, Program, Team, Typist, unexpected

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("examples-real"), pytest.mark.timeout(900)]


def test_every_picture_is_made_smaller_while_workers_and_daemons_restart(team: Team, tmp_path: Path) -> None:
    def path(number: int) -> Path:
        return tmp_path / f"{number}.pgm"

    def line(number: int) -> str:
        pixels = bytes([number % 256, 32, number // 256, 10, 7, 7, 7, 7])  # bytes that look like space, too
        path(number).write_bytes(b"P5 4 2 255\n" + pixels)
        return str(path(number))

    with ExitStack() as stack:
        workers = [Program(member, "service", "offer", ready="offering") for member in (team.bob, team.eve)]
        caller = Program(team.ann, "service", "shrink")
        for program in (caller, *workers):
            stack.callback(program.close)
        typist = Typist(caller, line, lambda number: str(path(number).with_suffix(".small.pgm")))
        for number in range(RESTARTS):
            kind = SIGNALS[number % 2]
            typist.wait_for_answers()
            (team.ann, team.bob)[number % 2].restart(kind)
            typist.wait_for_answers()
            workers[number % 2].restart(kind)
            caller.restart(kind)
        typist.wait_for_answers()
        asked = typist.finish()
        for number in asked:
            small = path(number).with_suffix(".small.pgm").read_bytes()
            assert small == b"P5\n2 1\n255\n" + bytes([number % 256, number // 256])
        for program in (caller, *workers):
            assert not unexpected(program.errors)
        print(f"service: {3 * RESTARTS} restarts; {len(asked)} pictures, none lost")
