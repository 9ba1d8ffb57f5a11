"""A live run of traces: daemons in one realm on this machine, mixed traffic, one of them stopped a while, one killed.

``python -m bench.tracing.live --minutes 10 --out DIR`` starts twenty daemons that trace, lets them publish, also
reliably, ask, send reliably, push in sessions and queue, SIGSTOPs one of them for a minute, kills another with SIGKILL,
and makes the report. Exit status 1 when the report does not name both, at the times at which it was done, or says the
same of a node to which nothing was done. Everything is on loopback. ``DIR`` gets the traces and the report, and must be
new.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from dep2p.client import Client, Lagged
from dep2p.errors import Dep2pError
from dep2p.realm.credentials import Realm
from dep2p.traces.salvage import salvage
from dep2p.types import PeerId

_DEP2P: Final = (sys.executable, "-m", "dep2p.cli.main")
_START_S: Final = 120.0
_CONFIRM_S: Final = 30.0
_AT_ONCE: Final = 4
"""Daemons that start at the same time."""
_SLACK_S: Final = 3.0
"""A node writes a snapshot or a reading at least so often before it is stopped; see `_environment`."""
_LATE_S: Final = 8.0
"""After SIGCONT a busy machine may need so long until the node's first event."""
_TOPICS: Final = ("news", "prices")


class Failed(Exception):
    """The run did not do what it should; the text says what."""


class Daemon:
    """A daemon in a directory of its own."""

    def __init__(self, root: Path, number: int, traces: Path) -> None:
        self.number = number
        self.directory = root / f"n{number}"
        self.directory.mkdir(mode=0o700)
        self.environment = _environment(self.directory, traces)
        self.peer = PeerId("")
        with (self.directory / "daemon.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*_DEP2P, "daemon", "--listen", "/ip4/127.0.0.1/tcp/0"], env=self.environment, stdout=log, stderr=log
            )

    def run(self, *words: str) -> str:
        """One command of the command line; its output. Raises `Failed`."""
        done = subprocess.run([*_DEP2P, *words], env=self.environment, capture_output=True, text=True, timeout=_START_S)
        if done.returncode != 0:
            raise Failed(f"node {self.number}: dep2p {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """End it in order, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _environment(directory: Path, traces: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEP2P_")}
    return kept | {
        "DEP2P_DATA_DIR": str(directory),
        "DEP2P_TRACE_ENABLED": "true",
        "DEP2P_TRACE_DIR": str(traces),
        "DEP2P_TRACE_RPCS": "true",
        "DEP2P_TRACE_SNAPSHOT_S": "2",  # so that a quiet node says something every two seconds
        "DEP2P_TRACE_CLOCK_S": "20",
        "NO_COLOR": "1",
    }


class Scene:
    """The faults of the run with their nodes and times (µs since the Unix epoch), and the counts of the traffic."""

    def __init__(self) -> None:
        self.stopped = self.killed = ""
        self.stop_us = self.continue_us = self.kill_us = 0
        self.counts: Counter[str] = Counter()
        self.over = trio.Event()


def _now_us() -> int:
    return time.time_ns() // 1000


async def _ready(client: Client) -> None:
    with trio.fail_after(_START_S):
        while True:
            try:
                await client.status()
                return
            except Dep2pError:
                await trio.sleep(0.2)


async def _all_up(client: Client, others: int) -> None:
    with trio.fail_after(_START_S):
        while True:
            if sum(member.state == "up" for member in await client.members("team")) >= others:
                return
            await trio.sleep(0.5)


async def live(root: Path, traces: Path, nodes: int, seconds: float, stop_s: float, seed: int) -> Scene:
    """Start, trace, hurt and end them. Raises `Failed` and ``trio.TooSlowError``."""
    scene = Scene()
    with ExitStack() as ends:
        async with AsyncExitStack() as stack:
            daemons: list[Daemon] = []
            clients: list[Client] = []
            for first in range(0, nodes, _AT_ONCE):
                started = [Daemon(root, number, traces) for number in range(first, min(nodes, first + _AT_ONCE))]
                for daemon in started:
                    ends.callback(daemon.close)
                    client = await stack.enter_async_context(Client.open(data_dir=daemon.directory))
                    await _ready(client)
                    daemon.peer = (await client.status()).peer_id
                    clients.append(client)
                daemons += started
            await trio.to_thread.run_sync(daemons[0].run, "realm", "new", "team")
            invite = await clients[0].invite("team")
            realm = Realm.from_invite(invite).realm
            for client in clients[1:]:
                await client.join_realm(realm)
            await _all_up(clients[0], nodes - 1)
            _say(f"{nodes} daemons are in one realm; traffic for {seconds:.0f} s")
            async with trio.open_nursery() as nursery:
                await Traffic(nursery, scene, daemons, clients, random.Random(seed)).start()
                await _hurt(scene, daemons[-3], daemons[-2], seconds, stop_s)
                scene.over.set()
                nursery.cancel_scope.cancel()
        _say("ending the daemons")
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.process.terminate()
    return scene


async def _hurt(scene: Scene, stopped: Daemon, killed: Daemon, seconds: float, stop_s: float) -> None:
    await trio.sleep(0.3 * seconds)
    scene.stopped, scene.stop_us = stopped.peer, _now_us()
    stopped.process.send_signal(signal.SIGSTOP)
    _say(f"SIGSTOP of node {stopped.number}")
    await trio.sleep(stop_s)
    scene.continue_us = _now_us()
    stopped.process.send_signal(signal.SIGCONT)
    _say(f"SIGCONT of node {stopped.number}")
    await trio.sleep(max(0.0, 0.7 * seconds - 0.3 * seconds - stop_s))
    scene.killed, scene.kill_us = killed.peer, _now_us()
    killed.process.kill()
    killed.process.wait()
    _say(f"SIGKILL of node {killed.number}")
    await trio.sleep(0.3 * seconds)


class Traffic:
    """Programs of the daemons that subscribe, ask, send, push and queue until the run is over."""

    def __init__(
        self, nursery: trio.Nursery, scene: Scene, daemons: list[Daemon], clients: list[Client], rng: random.Random
    ) -> None:
        self._nursery = nursery
        self._scene = scene
        self._peers = [daemon.peer for daemon in daemons]
        self._clients = clients
        self._rng = rng

    async def start(self) -> None:
        """Start all programs; returns when all of them listen."""
        clients = self._clients
        await clients[0].queues.of("team").create("jobs")
        for client in clients:
            for topic in _TOPICS:
                self._go("subscribe", partial(self._subscribe, client, topic))
            self._go("answer", partial(self._answer, client))
            self._go("listen", partial(self._listen, client))
        for client in clients[1:3]:
            self._go("consume", partial(self._consume, client))
        self._go("serve sessions", partial(self._serve, clients[0]))
        await trio.sleep(5)
        for client in [*clients[8:11], clients[-3]]:  # the one that is stopped, too
            self._go("session", partial(self._follow, client))
        for client in clients[:4]:
            for topic in _TOPICS:
                data = self._rng.randbytes(600)
                self._repeat(1.0, "published", partial(client.publish, topic, data, realm="team", on_no_peers="queue"))
        for client in clients[4:8]:
            self._repeat(2.0, "requests", partial(self._ask, client))
            self._repeat(2.0, "reliable messages", partial(self._send, client))
        self._repeat(1.0, "pushes", self._push)
        self._repeat(3.0, "reliable publishes", self._publish_reliably)
        for client in clients[2:4]:
            put = partial(client.queues.at(self._peers[0], realm="team").publish, "jobs", b"z" * 200, key="k")
            self._repeat(1.0, "jobs", put)

    def _go(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        self._nursery.start_soon(self._guarded, name, work)

    def _repeat(self, period_s: float, name: str, work: Callable[[], Awaitable[object]]) -> None:
        self._nursery.start_soon(self._every, period_s, name, work)

    async def _guarded(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Do some work until it succeeds. Calls to a stopped or killed node raise errors, which are counted."""
        counts = self._scene.counts
        while not self._scene.over.is_set():
            try:
                await work()
                return
            except (Dep2pError, trio.TooSlowError) as error:
                named = f"{name}: {getattr(error, 'code', '')} {type(error).__name__}"
                counts[named] += 1
                if counts[named] == 1:
                    _say(f"{named}: {error}")
                await trio.sleep(1)

    async def _every(self, period_s: float, name: str, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await trio.sleep(period_s * self._rng.uniform(0.7, 1.3))
            await self._guarded(name, partial(_bounded, work))
            self._scene.counts[name] += 1

    # Programs that wait for messages

    async def _subscribe(self, client: Client, topic: str) -> None:
        async with client.subscribe(topic, realm="team") as messages:
            async for message in messages:
                self._scene.counts["lagged" if isinstance(message, Lagged) else "deliveries"] += 1

    async def _answer(self, client: Client) -> None:
        async with client.reply("ask", realm="team") as requests:
            async for request in requests:
                await request.respond(request.body[::-1])
                self._scene.counts["answers"] += 1

    async def _listen(self, client: Client) -> None:
        async with client.listen("task", realm="team") as notifications:
            async for _ in notifications:
                self._scene.counts["reliable messages handled"] += 1

    async def _consume(self, client: Client) -> None:
        broker = self._peers[0]
        queues = client.queues.at(broker, realm="team")
        async with queues.consume("jobs", "work", max_in_flight=8) as jobs:
            async for job in jobs:
                await job.finish()
                self._scene.counts["jobs done"] += 1

    async def _serve(self, client: Client) -> None:
        async with client.sessions.accept("feed", realm="team") as sessions:
            async for _ in sessions:
                self._scene.counts["sessions opened"] += 1

    async def _follow(self, client: Client) -> None:
        async with client.sessions.open(self._peers[0], "feed", realm="team") as session:
            async for _ in session:
                self._scene.counts["pushes handled"] += 1

    # Work that is repeated

    def _other(self, client: Client) -> PeerId:
        own = self._peers[self._clients.index(client)]
        return self._rng.choice([peer for peer in self._peers if peer != own])

    async def _ask(self, client: Client) -> None:
        await client.request(self._other(client), "ask", b"x" * 200, realm="team", timeout_s=5)

    async def _send(self, client: Client) -> None:
        await client.send(self._other(client), "task", b"y" * 200, reliable=True, realm="team")

    async def _push(self) -> None:
        _, full = await self._clients[0].sessions.push_all("feed", b"w" * 200)
        self._scene.counts["sessions that were full"] += len(full)

    async def _publish_reliably(self) -> None:
        done = await self._clients[5].publish_reliably(
            "news", b"v" * 300, critical_peers=self._peers[6:8], realm="team"
        )
        with trio.move_on_after(_CONFIRM_S):
            await done.wait()
        self._scene.counts["reliable publishes confirmed"] += not done.missing


async def _bounded(work: Callable[[], Awaitable[object]]) -> None:
    with trio.fail_after(30):
        await work()


# What the report says -------------------------------------------------------------------------------------------------


def wrong(scene: Scene, findings: list[dict[str, Any]]) -> list[str]:
    """Findings that are wrong, and faults without a finding; empty when all is right."""
    found: list[str] = []
    silent = [item for item in findings if item["kind"] == "silent"]
    killed = [item for item in findings if item["kind"] == "killed"]
    found += [f"said of a node that went on: {item['text']}" for item in silent if item["subject"] != scene.stopped]
    found += [f"said of a node that went on: {item['text']}" for item in killed if item["subject"] != scene.killed]
    mine = [item for item in silent if item["subject"] == scene.stopped]
    if len(mine) != 1:
        found.append(f"the stopped node {scene.stopped} has {len(mine)} findings of silence instead of one")
    for item in mine:
        begun_s = (scene.stop_us - item["at_us"]) / 1e6
        ended_s = item["at_us"] / 1e6 + item["evidence"]["silent_s"] - scene.continue_us / 1e6
        if not -0.1 <= begun_s <= _SLACK_S or not -0.1 <= ended_s <= _LATE_S:
            found.append(f"silence began {begun_s:.1f} s before SIGSTOP, ended {ended_s:.1f} s after SIGCONT")
    mine = [item for item in killed if item["subject"] == scene.killed]
    if len(mine) != 1:
        found.append(f"the killed node {scene.killed} has {len(mine)} findings of its end instead of one")
    for item in mine:
        before_s = (scene.kill_us - item["at_us"]) / 1e6
        if not -0.1 <= before_s <= _SLACK_S:
            found.append(f"the last event was {before_s:.1f} s before the kill")
    return found


def main(arguments: list[str]) -> int:
    """0 when the report is right."""
    parser = argparse.ArgumentParser(prog="python -m bench.tracing.live", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a new directory for the traces and the report")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--stop-s", type=float, default=60.0, help="how long a node is stopped")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.nodes < 8:
        parser.error("--nodes: 8 at least")
    if given.minutes * 60 * 0.4 < given.stop_s:
        parser.error("--stop-s: at most 40 % of the minutes")
    given.out.mkdir(parents=True)
    traces, report = given.out.resolve() / "traces", given.out.resolve() / "report"
    with tempfile.TemporaryDirectory(prefix="dep2p-live-") as root:  # short: sockets are in it
        scene = trio.run(live, Path(root), traces, given.nodes, given.minutes * 60, given.stop_s, given.seed)
    left = salvage(traces)
    _say(f"{', '.join(f'{name} {count:,}' for name, count in sorted(scene.counts.items()))}")
    _say(f"{len(left.finished)} growing files of killed nodes completed, {left.cut_bytes} bytes cut off")
    subprocess.run(
        [*_DEP2P, "trace", "analyze", str(traces), "--out", str(report), "--title", f"{given.nodes} daemons, live"],
        check=True,
    )
    findings = json.loads((report / "findings.json").read_text())
    faults = wrong(scene, findings)
    for item in findings:
        if item["kind"] in ("silent", "killed"):
            print(item["text"])
    for fault in faults:
        print(f"wrong: {fault}", file=sys.stderr)
    if not faults:
        print("the report names the stopped and the killed node at the right times, and no other")
    return 1 if faults else 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S', time.gmtime())} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
