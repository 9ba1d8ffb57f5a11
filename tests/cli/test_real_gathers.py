"""Requests over a topic among real daemons: programs of several nodes answer the command line and the client."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from dep2p.client import Client, TopicMessage
from dep2p.error_codes import EXIT_TIMEOUT
from dep2p.errors import NoPeersSubscribedError
from tests.cli.test_real_daemons import Person, finish, see_each_other
from tests.cli.test_real_pubsub import subscribed

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]


async def _answering(
    person: Person, stock: bytes, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer every question in "inventory"; without stock by an error."""
    async with Client.open(data_dir=person.directory) as client, client.subscribe("inventory") as messages:
        task_status.started()
        async for message in messages:
            if not isinstance(message, TopicMessage) or not message.wants_answer:
                continue
            if stock:
                assert await message.reply(stock, headers={"unit": "box"}) in ("taken", "late", "duplicate")
                assert await message.reply(stock) in ("late", "duplicate")
            else:
                await message.fail("no\x1b[2J stock")


async def _ask(person: Person, *words: str, expect: int = 0) -> list[dict[str, object]]:
    ask = ("request", "--topic", "inventory", "screws", "--json", *words)
    done = await trio.to_thread.run_sync(lambda: person.run(*ask, expect=expect))
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_answers_come_from_programs_of_several_daemons_and_the_exit_status_says_whether_enough(tmp_path: Path) -> None:
    with ExitStack() as stack:
        ann, bob = (stack.enter_context(Person(tmp_path, name)) for name in ("ann", "bob"))
        for person in (ann, bob):
            person.start()
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", data=ann.run("realm", "invite", "team").stdout)
        see_each_other(ann, bob)

        async def main() -> None:
            with trio.fail_after(120):
                async with trio.open_nursery() as nursery, Client.open(data_dir=ann.directory) as client:
                    with pytest.raises(NoPeersSubscribedError):
                        async with client.gather("nothing", b"x"):
                            pass
                    for person, stock in ((ann, b""), (bob, b"12")):
                        await nursery.start(_answering, person, stock)
                    await trio.to_thread.run_sync(lambda: subscribed(ann, "inventory", bob))

                    *lines, last = await _ask(ann, "--quorum", "2", "--timeout", "3", expect=EXIT_TIMEOUT)
                    assert {each["peer"]: (each.get("text"), each.get("error")) for each in lines} == {
                        ann.peer_id: (None, "no\x1b[2J stock"),
                        bob.peer_id: ("12", None),
                    }
                    assert (last["answered"], last["failed"], last["has_quorum"]) == (1, 1, False)
                    *_, last = await _ask(ann, "--quorum", "1", "--timeout", "60")
                    assert (last["answered"], last["has_quorum"]) == (1, True)

                    async with client.gather("inventory", b"nuts", quorum=1, timeout_s=60.0) as gathered:
                        assert set(gathered.asked) == {ann.peer_id, bob.peer_id}
                        answers = [each async for each in gathered]
                        result = gathered.result()
                    assert (answers[-1].peer, answers[-1].body, answers[-1].headers) == (
                        bob.peer_id,
                        b"12",
                        {"unit": "box"},
                    )
                    assert result.answered == (bob.peer_id,) and result.has_quorum
                    nursery.cancel_scope.cancel()

        trio.run(main)
        answering = bob.background("reply", "--topic", "tools", "-c", 'printf "have %s" "$(cat)"', "--json", "-n", "1")
        subscribed(ann, "tools", bob)
        bob.run("publish", "tools", "a message that asks nothing", "--on-no-peers", "ok")
        ask = ("saws", "--quorum", "1", "--timeout")
        assert ann.run("request", "--topic", "tools", *ask, "60").stdout == "have saws\n"
        answered = json.loads(finish(answering)[0])
        assert (answered["peer"], answered["name"], answered["ok"]) == (ann.peer_id, "tools", True)
        assert (answered["request"]["text"], answered["answer"]["text"]) == ("saws", "have saws")

        failing = bob.background("reply", "--topic", "shed", "-c", "echo empty >&2; exit 1", "--group", "g", "-n", "1")
        subscribed(ann, "shed", bob)
        said = ann.run("request", "--topic", "shed", *ask, "5", "--json", expect=EXIT_TIMEOUT).stdout
        assert json.loads(said.splitlines()[0])["error"] == "the command ended with status 1: empty"
        finish(failing)
        reader = bob.background("subscribe", "parts", "--json", "-n", "1")
        subscribed(ann, "parts", bob)
        shown = ann.run("request", "--topic", "parts", "bolts", "--timeout", "1", expect=EXIT_TIMEOUT)
        assert "0 answered; no answer from" in shown.stderr and shown.stdout == ""
        assert json.loads(finish(reader)[0])["wants_answer"] is True
