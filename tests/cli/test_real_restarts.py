"""Programs and commands over restarts of their real daemon, under traffic: SIGKILL and SIGTERM in turn."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from dep2p.client import (
    Client,
    ClientQueueMessage,
    DaemonUnreachableError,
    FeedInterrupted,
    FeedResumed,
    IncomingRequest,
    Lagged,
    Notification,
)
from dep2p.errors import Dep2pError, NotInFlightError, SessionResetError
from dep2p.types import PeerId
from tests.cli.test_real_daemons import Person, finish, see_each_other, wait_for

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(600)]

RESTARTS = int(os.environ.get("DEP2P_TEST_RESTARTS", "2"))
"""Restarts of the test under traffic; the acceptance run has 10."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Person, Person]]:
    """Ann, whose daemon is restarted, and Bob, whose daemon goes on."""
    root = tmp_path_factory.mktemp("restarts")
    with ExitStack() as stack:
        ann, bob = (stack.enter_context(Person(root, name)) for name in ("ann", "bob"))
        ann.start()
        ann.listen = ann.json("status")["listen"][0].rpartition("/p2p/")[0]  # found again by those who knew it
        bob.start()
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", data=ann.run("realm", "invite", "team").stdout)
        see_each_other(ann, bob)
        ann.run("queue", "create", "jobs")
        yield ann, bob


def restart(ann: Person, number: int) -> None:
    ann.kill(number)
    ann.start()


# Each command


def _collect(child: "subprocess.Popen[str]", lines: list[str]) -> None:
    assert child.stdout is not None
    for line in iter(child.stdout.readline, ""):
        lines.append(line)


@dataclass(frozen=True)
class Waiting:
    """A command that waits, and what makes it print "entry NUMBER"."""

    words: tuple[str, ...]
    make: Callable[[Person, int], object]
    loses: bool


def _publish(ann: Person, number: int) -> None:
    ann.run("publish", "t", f"entry {number}")


def _request(ann: Person, number: int) -> None:
    assert ann.run("request", "self", "svc", f"entry {number}").stdout.strip() == f"entry {number}"


def _notify(ann: Person, number: int) -> None:
    ann.run("notify", "self", "news", f"entry {number}")


def _put(ann: Person, number: int) -> None:
    ann.run("queue", "put", "jobs", f"entry {number}")


COMMANDS = {
    "subscribe": Waiting(("subscribe", "t"), _publish, True),
    "listen": Waiting(("listen", "news"), _notify, True),
    "reply": Waiting(("reply", "svc", "--echo"), _request, False),
    "queue consume": Waiting(("queue", "consume", "jobs", "w"), _put, False),
    "queue consume --exec": Waiting(("queue", "consume", "jobs", "x", "--exec", "sh -c 'cat; echo'"), _put, False),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_goes_on_and_says_so(people: tuple[Person, Person], name: str) -> None:
    ann, _bob = people
    plan = COMMANDS[name]
    shown = plan.words if name.endswith("--exec") else (*plan.words, "--json")
    child = ann.background(*shown)
    lines: list[str] = []
    threading.Thread(target=_collect, args=(child, lines), daemon=True).start()

    def has(number: int) -> bool:
        return any(f"entry {number}" in line for line in lines)

    def has_resumed(times: int) -> bool:
        return sum('"resumed"' in line for line in lines) == times

    for number, kind in enumerate(SIGNALS):
        plan.make(ann, number)
        wait_for("its entry", partial(has, number))
        restart(ann, kind)
        if "--json" in shown:
            wait_for("its return", partial(has_resumed, number + 1))
    number = len(SIGNALS)
    plan.make(ann, number)
    if "--json" in shown:
        events = [json.loads(line) for line in lines if '"event": "' in line]
        assert [each["event"] for each in events] == ["interrupted", "resumed"] * len(SIGNALS)
        assert {each["loses"] for each in events if each["event"] == "resumed"} == {plan.loses}
    wait_for("the last entry", partial(has, number))
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130


def test_ctrl_c_ends_the_wait_and_no_reconnect_ends_at_once(people: tuple[Person, Person]) -> None:
    ann, _bob = people
    waiting = ann.background("subscribe", "t")
    ending = ann.background("subscribe", "t", "--no-reconnect")
    ann.kill(signal.SIGKILL)
    try:
        _out, err = finish(ending, 3)
        assert "D3001" in err
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("interrupted: ")
        waiting.send_signal(signal.SIGINT)
        finish(waiting, 130)
    finally:
        ann.start()


# Programs


@dataclass
class Seen:
    """What a program got, and the errors that it met."""

    topics: list[bytes] = field(default_factory=list[bytes])
    reliable: list[bytes] = field(default_factory=list[bytes])
    jobs: list[bytes] = field(default_factory=list[bytes])
    pushes: list[bytes] = field(default_factory=list[bytes])
    answered: int = 0
    interruptions: int = 0
    resumed: int = 0
    late: int = 0
    resets: int = 0

    def counts(self) -> tuple[int, ...]:
        """How many arrived of each kind."""
        return (len(self.topics), len(self.reliable), len(self.jobs), len(self.pushes), self.answered)


async def _subscribing(client: Client, seen: Seen) -> None:
    async with client.subscribe("t") as messages:
        async for message in messages:
            if isinstance(message, Lagged):
                seen.interruptions += isinstance(message, FeedInterrupted)
                seen.resumed += isinstance(message, FeedResumed)
            else:
                seen.topics.append(message.body)


async def _listening(client: Client, seen: Seen) -> None:
    async with client.listen("orders") as notifications:
        async for notification in notifications:
            if isinstance(notification, Notification):
                seen.reliable.append(notification.body)


async def _answering(client: Client, seen: Seen) -> None:
    async def one(request: IncomingRequest) -> None:
        try:
            await request.respond(request.body)
            seen.answered += 1
        except Dep2pError:
            seen.late += 1

    async with client.reply("svc") as requests, anyio.create_task_group() as tasks:
        async for request in requests:
            tasks.start_soon(one, request)


async def _consuming(client: Client, seen: Seen) -> None:
    async def finish_one(message: ClientQueueMessage) -> None:
        try:
            await message.finish(durable=True)
        except NotInFlightError:
            seen.late += 1

    async with client.queues.consume("jobs", "program", max_in_flight=8) as messages:
        async for message in messages:
            seen.jobs.append(message.body)
            await finish_one(message)


async def _following(client: Client, server: PeerId, seen: Seen) -> None:
    async with client.sessions.open(server, "feed") as session:
        while True:
            try:
                push = await session.receive()
            except SessionResetError:
                seen.resets += 1
                continue
            if push is None:
                return
            seen.pushes.append(push.body)


class Traffic:
    """Everything that Bob and Ann's own programs send to a program of Ann's daemon, until `over`."""

    def __init__(self, people: tuple[Person, Person], mark: bytes) -> None:
        self.ann, self.bob = people
        self.seen = Seen()
        self.sent: list[bytes] = []
        self.published: list[bytes] = []
        self.unsure: list[bytes] = []
        self.pushed: list[bytes] = []
        self.is_over = False
        self._mark = mark
        self._serving = anyio.Event()
        self._has_pushed = anyio.Event()

    @property
    def is_there(self) -> bool:
        """Whether the program has all that was acknowledged."""
        seen = self.seen
        return (
            set(self.sent) <= set(seen.reliable)
            and set(self.published) <= set(seen.jobs)
            and self.pushed == seen.pushes
        )

    async def put(self, client: Client) -> None:
        for number in itertools.count():
            job = b"%s job %d" % (self._mark, number)
            try:
                await client.queues.publish("jobs", job)
                self.published.append(job)
            except Dep2pError as error:
                if not isinstance(error, DaemonUnreachableError) or error.was_sent:
                    self.unsure.append(job)
            if self.is_over:
                return
            await anyio.sleep(0.02)

    async def send(self, client: Client) -> None:
        for number in itertools.count():
            order = b"%s order %d" % (self._mark, number)
            await client.send(PeerId(self.ann.peer_id), "orders", order, reliable=True)
            self.sent.append(order)
            if self.is_over:
                return
            await anyio.sleep(0.02)

    async def push(self, client: Client) -> None:
        async with client.sessions.accept("feed") as sessions:
            self._serving.set()
            session = await anext(sessions)
            for number in itertools.count():
                push = b"%s push %d" % (self._mark, number)
                await session.push(push)
                self.pushed.append(push)
                if self.is_over:
                    break
                await anyio.sleep(0.02)
            self._has_pushed.set()
            await session.wait_closed()

    async def call(self, client: Client) -> None:
        """Make plain calls, which may fail while the daemon is away."""
        while not self.is_over:
            with contextlib.suppress(Dep2pError):
                await client.publish("t", b"x")
                await client.request(PeerId(self.ann.peer_id), "svc", b"?", timeout_s=2)
            await anyio.sleep(0.05)

    async def go_on(self) -> None:
        """Wait until ten more of each kind have arrived."""
        enough = [count + 10 for count in self.seen.counts()]
        with anyio.fail_after(60):
            while any(count < least for count, least in zip(self.seen.counts(), enough, strict=True)):  # noqa: ASYNC110
                await anyio.sleep(0.05)

    async def run(self) -> None:
        async with (
            Client.open(self.ann.directory / "control.sock") as mine,
            Client.open(self.bob.directory / "control.sock") as theirs,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self.push, theirs)
            for program in (_subscribing, _listening, _answering, _consuming):
                tasks.start_soon(program, mine, self.seen)
            await self._serving.wait()
            tasks.start_soon(_following, mine, PeerId(self.bob.peer_id), self.seen)
            for traffic in (self.put, self.call):
                tasks.start_soon(traffic, mine)
            tasks.start_soon(self.send, theirs)
            await self.go_on()
            for number in range(RESTARTS):
                await anyio.to_thread.run_sync(restart, self.ann, SIGNALS[number % 2])
                await self.go_on()
            self.is_over = True
            await self._has_pushed.wait()  # a push in hand may have arrived before it is noted
            with anyio.move_on_after(120):
                while not self.is_there:  # noqa: ASYNC110 - five tasks change it
                    await anyio.sleep(0.2)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_nothing_reliable_is_lost_over_restarts_under_traffic(people: tuple[Person, Person], backend: str) -> None:
    mark = backend.encode()
    traffic = Traffic(people, mark)
    anyio.run(traffic.run, backend=backend)
    seen = traffic.seen
    assert min(map(len, (traffic.sent, traffic.published, traffic.pushed))) > 20
    assert not set(traffic.sent) - set(seen.reliable), "a reliable message is lost"
    assert not set(traffic.published) - set(seen.jobs), "a job that was acknowledged is lost"
    assert {job for job in seen.jobs if job.startswith(mark)} <= {*traffic.published, *traffic.unsure}
    assert seen.pushes == traffic.pushed, "pushes come in order, each once"
    assert seen.resets == 0
    assert seen.interruptions == seen.resumed == RESTARTS
    assert seen.answered and seen.topics
    print(
        f"{backend}: {RESTARTS} restarts; {len(traffic.sent)} reliable messages, {len(seen.reliable)} received; "
        f"{len(traffic.published)} jobs, {len(seen.jobs)} received; "
        f"{len(traffic.pushed)} pushes, {seen.late} late results"
    )


# A program on another machine, and its handles of topics


async def _over_restarts(ann: Person, address: dict[str, str]) -> None:
    far = Client.open(tcp=address["addr"], token=address["token"], fingerprint=address["fingerprint"])
    near = Client.open(ann.directory / "control.sock")
    async with far as author, near as reader, await author.join("chat") as topic, await author.join("held"):
        async with topic.subscribe() as own, reader.subscribe("chat") as messages:
            for number in SIGNALS:
                await anyio.to_thread.run_sync(restart, ann, number)
                for feed in (own, messages):
                    while not isinstance(await anext(feed), FeedResumed):
                        pass
                while not {"chat", "held"} <= {one.topic for one in await reader.topics()}:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
                sent = await topic.publish(b"after %d" % number)
                assert sent.local_subscriptions == 1, "its own subscription does not hear it"
                message = await anext(messages)
                assert not isinstance(message, Lagged) and message.body == b"after %d" % number
                assert topic.is_joined


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_program_over_tls_and_its_topic_handles_go_on(tmp_path: Path, backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        tls = f"127.0.0.1:{probe.getsockname()[1]}"
    with Person(tmp_path, "ann") as ann:
        (ann.directory / "config.toml").write_text(f'[control]\ntls = "{tls}"\n')

        async def main() -> None:
            with anyio.fail_after(120):
                await _over_restarts(ann, ann.json("token", "show"))

        ann.start()
        ann.run("realm", "new", "team")
        anyio.run(main, backend=backend)
