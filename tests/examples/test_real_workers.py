"""examples/workers.py over restarts of the producer, the workers and their daemons."""

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.examples.programs import RESTARTS, SIGNALS, Program, Team, Typist, unexpected, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("examples-real"), pytest.mark.timeout(900)]

ORDERS = 7


def step(number: int) -> tuple[str, str]:
    """The order and the step of a line."""
    return f"order{number % ORDERS}", f"step {number // ORDERS}"


def test_every_step_is_done_in_its_order_while_workers_and_daemons_restart(team: Team, tmp_path: Path) -> None:
    database = tmp_path / "done.db"

    def done() -> list[tuple[str, str]]:
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute("select item, step from done order by rowid").fetchall()

    with ExitStack() as stack:
        producer = Program(team.ann, "workers", "produce")
        stack.callback(producer.close)
        typist = Typist(producer, lambda number: " ".join(step(number)), lambda number: "put " + " ".join(step(number)))
        typist.wait_for_answers()
        workers = [
            Program(team.ann, "workers", "work", database, ready="working"),
            Program(team.bob, "workers", "work", database, "--broker", team.ann.peer_id, ready="working"),
        ]
        for worker in workers:
            stack.callback(worker.close)
        for number in range(RESTARTS):
            kind = SIGNALS[number % 2]
            typist.wait_for_answers()
            (team.ann, team.bob)[number % 2].restart(kind)
            typist.wait_for_answers()
            producer.restart(kind)
            workers[number % 2].restart(kind)
        typist.wait_for_answers()
        put = [step(number) for number in typist.finish()]
        wait_for("all steps", lambda: set(put) <= set(done()))
        for order in {order for order, _ in put}:
            steps = [step for found, step in done() if found == order]
            assert steps == [f"step {number}" for number in range(len(steps))], "in order, none left out"
        for program in (producer, *workers):
            assert not unexpected(program.errors)
        print(f"workers: {3 * RESTARTS} restarts; {len(put)} steps put, none lost, all in order")
