"""Services over real daemons: members that die under traffic, programs that share, and calls that are wrong."""

import json
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path

import pytest
import trio

from dep2p.client import Client
from dep2p.errors import ServiceNotFoundError
from dep2p.protocols.messaging.incoming import Request
from dep2p.realm.credentials import Realm
from tests.daemon.processes import DaemonProcess

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("services-real"), pytest.mark.timeout(180)]

REQUESTS = 2_000
AT_ONCE = 12
WORK_S = 0.03


@contextmanager
def daemons(count: int) -> Generator[list[DaemonProcess]]:
    """Daemons of one realm, each connected to all others."""
    realm = Realm.generate("team")
    with ExitStack() as stack:
        started: list[DaemonProcess] = []
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dep2p-")))  # short enough for sockets
        for number in range(count):
            started.append(DaemonProcess(root / str(number)))
            stack.callback(started[-1].close)
            started[-1].wait_ready()
        for daemon in started:
            daemon.post("/v1/realms", {"invite": realm.invite([])})
        for first, second in combinations(started, 2):
            first.post("/v1/peers", {"addr": second.get("/v1/status")["listen"][0]})
        yield started


class Worker:
    """A program that answers ``work`` over its daemon, until the daemon dies."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.answers = 0
        self.is_ended = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with Client.open(self.daemon.socket) as client:

                @client.on_request("work", group="workers", concurrency=64)
                async def work(request: Request) -> bytes:
                    await trio.sleep(WORK_S)
                    self.answers += 1
                    return request.body

                await client.handlers_ready()
                task_status.started()
                await trio.sleep_forever()
        except* Exception:
            assert self.daemon.process.poll() is not None, "a program ends only with its daemon"
        self.is_ended = True


def is_even(counts: list[int]) -> bool:
    """Whether each is within 20 % of an even share."""
    share = sum(counts) / len(counts)
    return all(abs(count - share) <= share / 5 for count in counts)


async def test_a_member_that_is_killed_under_traffic_fails_no_idempotent_request_and_the_load_is_even() -> None:
    with daemons(4) as (near, *far):
        workers = [Worker(daemon) for daemon in far]
        async with trio.open_nursery() as nursery, Client.open(near.socket) as client:
            for worker in workers:
                await nursery.start(worker.run)
            with trio.fail_after(60):
                while len((await client.offered_services()).get("work", ())) < 3:  # noqa: ASYNC110 - another process
                    await trio.sleep(0.05)
            numbers = iter(range(REQUESTS))
            answered = 0
            failed = list[str]()
            before = list[int]()

            async def ask() -> None:
                nonlocal answered, before
                for number in numbers:
                    try:
                        answer = await client.request_any("work", b"%d" % number, idempotent=True)
                        assert answer == b"%d" % number
                        answered += 1
                    except Exception as error:
                        failed.append(repr(error))
                    if number == REQUESTS // 2:
                        before = [worker.answers for worker in workers]
                        workers[0].daemon.send_signal(signal.SIGKILL)

            began = trio.current_time()
            async with trio.open_nursery() as askers:
                for _ in range(AT_ONCE):
                    askers.start_soon(ask)
            took_s = trio.current_time() - began
            after = [worker.answers - first for worker, first in zip(workers[1:], before[1:], strict=True)]
            print(
                f"{answered} answered, {len(failed)} failed, in {took_s:.1f} s ({answered / took_s:.0f} a second); "
                f"before the kill {before}, after it {after}"
            )
            assert (answered, failed) == (REQUESTS, [])
            assert is_even(before), before
            assert is_even(after), after
            nursery.cancel_scope.cancel()


@pytest.fixture(scope="module")
def alone() -> Iterator[DaemonProcess]:
    """A daemon in a realm of its own."""
    with daemons(1) as (daemon,):
        yield daemon


async def test_a_program_that_ends_leaves_its_requests_to_the_others_of_its_daemon(alone: DaemonProcess) -> None:
    taken = trio.Event()
    is_first_gone = False

    async def first(request: Request) -> bytes:
        taken.set()
        await trio.sleep_forever()
        raise AssertionError

    async def second(request: Request) -> bytes:
        if not is_first_gone:
            raise AssertionError("the programs take turns, and the first one has none")
        return request.body

    async with Client.open(alone.socket) as caller, Client.open(alone.socket) as late, trio.open_nursery() as nursery:
        with trio.fail_after(60):
            async with Client.open(alone.socket) as early:
                early.on_request("share", group="workers")(first)
                await early.handlers_ready()

                async def ask() -> None:
                    assert await caller.request_any("share", b"x", idempotent=True, timeout_s=40) == b"x"

                nursery.start_soon(ask)
                await taken.wait()
                late.on_request("share", group="workers")(second)
                await late.handlers_ready()
                is_first_gone = True


async def test_the_client_names_what_is_missing(alone: DaemonProcess) -> None:
    async with Client.open(alone.socket) as client:
        with pytest.raises(ServiceNotFoundError, match="offers 'nothing' with version '2'"):
            await client.request_any("nothing", b"", version="2", timeout_s=2)
        with pytest.raises(ServiceNotFoundError):
            await client.service_info("nothing")


WRONG_CALLS: list[tuple[str, str, dict[str, object] | None, str, str]] = [
    ("GET", "/v1/services?realm=nowhere", None, "D4003", "nowhere"),
    ("GET", "/v1/services?relam=team", None, "D1005", "realm"),
    ("GET", "/v1/services/x?relam=team", None, "D1005", "realm"),
    ("GET", "/v1/services/nothing", None, "D5017", "nothing"),
    ("POST", "/v1/services/x/requests", {"data": "eA==", "idempotant": True}, "D1005", "idempotent"),
    ("POST", "/v1/services/x/requests", {"data": "no base64!"}, "D1005", "data"),
    ("POST", "/v1/services/x/requests", {"data": "eA==", "timeout_s": -1}, "D1005", "timeout_s"),
    ("POST", "/v1/services/x/requests", {"data": "eA==", "group": 7}, "D1005", "group"),
    ("POST", "/v1/services/nothing/requests", {"data": "eA=="}, "D5017", "nothing"),
    ("POST", "/v1/replies", {"name": "x", "version": "1"}, "D1005", "group"),
    ("POST", "/v1/replies", {"name": "x", "group": "g" * 300}, "D1005", "group"),
    ("POST", "/v1/replies", {"name": "$dep2p/x", "group": "g"}, "D5012", "dep2p's own"),
    ("GET", "/v1/fields?relam=team", None, "D1005", "realm"),
    ("POST", "/v1/fields", {}, "D1005", "fields"),
    ("POST", "/v1/fields", {"fields": {"status": 1}}, "D1005", "fields"),
    ("POST", "/v1/fields", {"feilds": {"status": "x"}}, "D1005", "fields"),
]


@pytest.mark.parametrize(("method", "path", "body", "code", "says"), WRONG_CALLS)
def test_a_wrong_call_is_refused_by_name(
    alone: DaemonProcess, method: str, path: str, body: dict[str, object] | None, code: str, says: str
) -> None:
    with alone.http() as http:
        answer = http.request(method, path, json=body)
        problem = answer.json()
        assert answer.status_code >= 400 and problem["code"] == code, problem
        assert says in json.dumps(problem), problem
