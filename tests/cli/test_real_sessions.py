"""Ordered sessions between real daemons, with a proxy between them that cuts the link; kill -9 of every program.

The link is cut for DEP2P_SESSION_CUT_S seconds (1 here; the acceptance run has 20):

    DEP2P_SESSION_CUT_S=20 .venv/bin/python -m pytest -q tests/cli/test_real_sessions.py
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import trio

from dep2p.testing import FaultProxy
from tests.cli.test_real_daemons import DEP2P, Person, see_each_other, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]

_CUT_S = float(os.environ.get("DEP2P_SESSION_CUT_S", "1"))


class ProxyThread:
    """A proxy in a thread of its own."""

    def __init__(self, proxy: FaultProxy, token: trio.lowlevel.TrioToken) -> None:
        self.proxy = proxy
        self._token = token

    def forward(self, port: int) -> int:
        return trio.from_thread.run(self.proxy.forward, "127.0.0.1", port, trio_token=self._token)

    def cut(self) -> None:
        trio.from_thread.run_sync(self.proxy.cut, trio_token=self._token)

    def resume(self) -> None:
        trio.from_thread.run_sync(self.proxy.resume, trio_token=self._token)


@contextmanager
def running_proxy() -> Generator[ProxyThread, None, None]:
    started: list[ProxyThread] = []
    ready = threading.Event()
    stops: list[trio.Event] = []

    async def main() -> None:
        async with FaultProxy.open() as proxy:
            started.append(ProxyThread(proxy, trio.lowlevel.current_trio_token()))
            stops.append(trio.Event())
            ready.set()
            await stops[0].wait()

    thread = threading.Thread(target=trio.run, args=(main,), name="proxy")
    thread.start()
    assert ready.wait(10)
    try:
        yield started[0]
    finally:
        trio.from_thread.run_sync(stops[0].set, trio_token=started[0]._token)  # pyright: ignore[reportPrivateUsage]
        thread.join()


@dataclass
class World:
    ann: Person
    bob: Person
    proxy: ProxyThread
    root: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Ann serves, Bob opens; every TCP connection between their daemons goes through the proxy."""
    root = tmp_path_factory.mktemp("sessions")
    routes = root / "routes"
    routes.write_text("")
    with ExitStack() as stack:
        proxy = stack.enter_context(running_proxy())
        ann, bob = (stack.enter_context(Person(root, name)) for name in ("ann", "bob"))
        for person in (ann, bob):
            person.environment |= {
                "DEP2P_TEST_ROUTES": str(routes),
                "PYTHONPATH": str(Path(__file__).parent / "via_proxy"),
            }
            person.start()
        lines = [f"{port} {proxy.forward(port)}" for port in (_port(ann), _port(bob))]
        routes.write_text("\n".join(lines) + "\n")
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", data=ann.run("realm", "invite", "team").stdout)
        see_each_other(ann, bob)
        assert proxy.proxy.counters["connections"] >= 1, "they have gone around the proxy"
        yield World(ann, bob, proxy, root)


def _port(person: Person) -> int:
    [addr, *_more] = person.json("status")["listen"]
    return int(addr.split("/tcp/")[1].split("/")[0])


class Serving:
    """`dep2p session serve` with its input in our hand."""

    def __init__(self, person: Person, name: str, *options: str) -> None:
        self.child = subprocess.Popen(
            [*DEP2P, "session", "serve", name, *options],
            env=person.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        person.children.append(self.child)
        assert _pipe(self.child.stderr).readline().startswith("serving")

    def push(self, lines: range) -> None:
        _pipe(self.child.stdin).write("".join(f"line {number}\n" for number in lines))
        _pipe(self.child.stdin).flush()

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait(30)
        _pipe(self.child.stdin).close()

    def finish(self) -> str:
        _out, err = self.child.communicate(timeout=60)
        assert self.child.returncode == 0, err
        return err


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def opened(person: Person, *words: str) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [*DEP2P, "session", "open", *words],
        env=person.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    person.children.append(child)
    return child


def read_lines(child: "subprocess.Popen[str]", lines: range) -> None:
    for number in lines:
        assert _pipe(child.stdout).readline() == f"line {number}\n"


def stats(person: Person, name: str) -> dict[str, Any]:
    """The counts of the latest session of that name."""
    found = [each for each in person.json("session", "stats")["sessions"] if each["name"] == name]
    return dict(sorted(found, key=lambda each: bool(each["is_over"]))[0]) if found else {}


def test_the_link_is_cut_in_the_middle_and_nothing_is_missing(world: World) -> None:
    serving = Serving(world.ann, "feed")
    reading = opened(world.bob, world.ann.peer_id, "feed")
    serving.push(range(200))
    read_lines(reading, range(200))
    world.proxy.cut()
    wait_for("the loss of the link", lambda: stats(world.ann, "feed").get("is_attached") is False)
    until = time.monotonic() + _CUT_S
    serving.push(range(200, 400))
    wait_for("the pushes into the gap", lambda: stats(world.ann, "feed").get("last_seq") == 400)
    away = world.ann.run("session", "ls").stdout
    assert "away" in away
    time.sleep(max(0.0, until - time.monotonic()))  # what the test is about, not a wait for something
    world.proxy.resume()
    read_lines(reading, range(200, 400))
    serving.push(range(400, 600))
    read_lines(reading, range(400, 600))
    for person in (world.ann, world.bob):
        found = stats(person, "feed")
        assert found["resumes"] >= 1, found
        assert found["is_attached"] is True
    assert stats(world.bob, "feed")["resets"] == 0
    assert "resumes" in world.bob.run("session", "stats").stdout
    assert "D5105" in world.bob.run("session", "stats", "nothing", expect=4).stderr
    assert "pushed 600 lines" in serving.finish()
    out, err = reading.communicate(timeout=30)
    assert (out, reading.returncode) == ("", 0), err
    metrics = world.bob.run("status", "--json").stdout
    assert json.loads(metrics)


def test_the_client_program_is_killed_and_goes_on_by_its_token(world: World) -> None:
    token = world.root / "place"
    serving = Serving(world.ann, "killed")
    reading = opened(world.bob, world.ann.peer_id, "killed", "--token-file", str(token))
    serving.push(range(100))
    read_lines(reading, range(100))
    wait_for("the place", token.exists)
    reading.send_signal(signal.SIGKILL)
    reading.wait(30)
    serving.push(range(100, 200))
    again = opened(world.bob, world.ann.peer_id, "killed", "--token-file", str(token))
    first = _pipe(again.stdout).readline()
    # At most the push that was being printed when the program died comes again.
    assert first in ("line 99\n", "line 100\n")
    read_lines(again, range(101 if first == "line 100\n" else 100, 200))
    assert "pushed 200 lines" in serving.finish()
    assert again.wait(30) == 0
    assert not token.exists()


def test_the_clients_daemon_is_killed_and_the_session_goes_on_after_its_restart(world: World) -> None:
    token = world.root / "daemon"
    serving = Serving(world.ann, "daemon")
    reading = opened(world.bob, world.ann.peer_id, "daemon", "--token-file", str(token), "--no-reconnect")
    serving.push(range(100))
    read_lines(reading, range(100))
    world.bob.kill(signal.SIGKILL)
    assert reading.wait(60) == 3
    serving.push(range(100, 200))
    world.bob.start()
    routes = world.root / "routes"
    port = _port(world.bob)
    routes.write_text(routes.read_text() + f"{port} {world.proxy.forward(port)}\n")
    see_each_other(world.bob, world.ann)
    again = opened(world.bob, world.ann.peer_id, "daemon", "--token-file", str(token))
    first = _pipe(again.stdout).readline()
    assert first in ("line 99\n", "line 100\n")
    read_lines(again, range(101 if first == "line 100\n" else 100, 200))
    assert "pushed 200 lines" in serving.finish()


def test_the_serving_program_is_killed_and_the_client_is_reported(world: World) -> None:
    serving = Serving(world.ann, "gone", "--answer", "pong")
    reading = opened(world.bob, world.ann.peer_id, "gone", "--ask", "ping")
    assert _pipe(reading.stdout).readline() == "pong\n"
    serving.push(range(3))
    read_lines(reading, range(3))
    serving.kill()
    _out, err = reading.communicate(timeout=60)
    assert reading.returncode == 1
    assert "went away" in err and "D5101" in err
