"""examples/web.py over restarts of the web app and its daemon."""

import socket
import threading
from contextlib import ExitStack
from functools import partial

import anyio
import httpx
import pytest

from dep2p.client import Client
from tests.examples.programs import RESTARTS, SIGNALS, Member, Program, Team, unexpected, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("examples-real"), pytest.mark.timeout(900)]


class Visitor:
    """A browser that posts numbered notes, and posts one again until it is stored."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.stored = 0
        self.refused = 0
        self.unreached = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._is_over.is_set():
                try:
                    answer = http.post("/notes", json={"text": f"note {self.stored}"})
                except httpx.TransportError:
                    self.unreached += 1
                    continue
                if answer.status_code == 503:
                    assert answer.headers["retry-after"] == "1"
                    self.refused += 1
                else:
                    assert answer.status_code == 201, answer.text
                    self.stored += 1

    def wait_for_more(self) -> None:
        """Wait until further notes are stored."""
        aim = self.stored + 10
        wait_for("further notes", lambda: self.stored >= aim or not self._thread.is_alive())
        assert self._thread.is_alive(), "the visitor's thread has failed"

    def finish(self) -> None:
        """Post no more."""
        self._is_over.set()
        self._thread.join(60)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def notes(member: Member) -> list[str]:
    """All notes that the daemon has."""
    async with Client.open(member.daemon.socket) as client, client.queues.export("notes") as stored:
        return [each.body.decode() async for each in stored]


def test_every_note_that_a_browser_saw_stored_is_there_after_restarts(team: Team) -> None:
    port = free_port()
    with ExitStack() as stack:
        web = Program(team.eve, "web", str(port))
        stack.callback(web.close)
        visitor = Visitor(f"http://127.0.0.1:{port}")
        stack.callback(visitor.finish)
        for number in range(RESTARTS):
            visitor.wait_for_more()
            team.eve.restart(SIGNALS[number % 2])
            visitor.wait_for_more()
            web.restart(SIGNALS[number % 2])
        visitor.wait_for_more()
        listed = httpx.get(f"http://127.0.0.1:{port}/notes", params={"count": 3}).json()
        assert listed[0]["text"] == "note 0" and len(listed) == 3
        assert team.bob.peer_id in httpx.get(f"http://127.0.0.1:{port}/members").json()
        visitor.finish()
        there = anyio.run(partial(notes, team.eve))
        assert {f"note {number}" for number in range(visitor.stored)} <= set(there)
        assert not unexpected(web.errors)
        print(
            f"web: {2 * RESTARTS} restarts; {visitor.stored} notes stored, none lost, {len(there)} there; "
            f"{visitor.refused} answers 503"
        )
