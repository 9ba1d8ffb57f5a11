"""examples/sensors.py over restarts of the sensors, their daemons and the collector with its node."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.examples.programs import RESTARTS, SIGNALS, Program, Team, unexpected, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("examples-real"), pytest.mark.timeout(900)]


def test_readings_of_every_sensor_come_again_after_each_restart(team: Team, tmp_path: Path) -> None:
    invite = tmp_path / "invite.txt"
    invite.write_text(team.realm.invite([team.ann.addr, team.bob.addr, team.eve.addr]))
    with ExitStack() as stack:
        sensors = [Program(team.ann, "sensors", "sensor", "hall"), Program(team.bob, "sensors", "sensor", "attic")]
        collector = Program(None, "sensors", "collect", invite, tmp_path / "collector")
        for program in (*sensors, collector):
            stack.callback(program.close)
        has_both: list[int] = []

        def wait_for_both() -> None:
            """Wait for a line that was printed from now on."""
            before = len(collector.lines)

            def find() -> bool:
                return any("attic " in line and "hall " in line for line in collector.lines[before:])

            wait_for("readings of both places", find)
            has_both.append(len(collector.lines) - before)

        for number in range(RESTARTS):
            kind = SIGNALS[number % 2]
            wait_for_both()
            (team.ann, team.bob)[number % 2].restart(kind)
            wait_for_both()
            sensors[number % 2].restart(kind)
            collector.restart(kind)
        wait_for_both()
        for program in (*sensors, collector):
            assert not unexpected(program.errors)
        print(f"sensors: {3 * RESTARTS} restarts; both are on the board within {has_both} s")
