"""examples/chat.py over restarts of both programs and both daemons."""

from contextlib import ExitStack

import pytest

from tests.examples.programs import RESTARTS, SIGNALS, Program, Team, Typist, unexpected, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("examples-real"), pytest.mark.timeout(900)]


def test_each_message_is_shown_to_a_member_who_comes_and_goes(team: Team) -> None:
    """Bob leaves when he has read all, since chat.py says that what a killed
    program has in hand is lost."""
    with ExitStack() as stack:
        bob = Program(team.bob, "chat", "bob", ready="you are bob")
        stack.callback(bob.close)
        ann = Program(team.ann, "chat", "ann", ready="you are ann")
        stack.callback(ann.close)
        typist = Typist(ann, lambda number: f"bob: message {number}", lambda number: f"sent bob: message {number}")

        def unread() -> set[str]:
            read = {line.rstrip("\n").partition(": ")[2] for line in list(bob.lines)}
            return {f"message {number}" for number in typist.answered} - read

        for number in range(RESTARTS):
            kind = SIGNALS[number % 2]
            typist.wait_for_answers()
            (team.ann, team.bob)[number % 2].restart(kind)
            typist.wait_for_answers()
            ann.restart(kind)
            typist.wait_for_answers()
            with typist.paused():
                wait_for("bob to read all", lambda: not unread())
                bob.end(kind)
            typist.wait_for_answers()
            assert unread(), "messages for a member who is away"
            bob.start()
        typist.wait_for_answers()
        sent = typist.finish()
        wait_for("bob to read all", lambda: not unread())
        shown = [line for line in bob.lines if "message " in line]
        for program in (ann, bob):
            assert not unexpected(program.errors)
        print(f"chat: {3 * RESTARTS} restarts; {len(sent)} messages, none lost, {len(shown)} shown")
