"""Sessions through the control API: two nodes in memory, one behind the API, the other one driven directly."""

import base64
import json
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import httpx
import pytest
import trio

from dep2p.daemon.bounds import ControlBounds
from dep2p.identity import Identity
from dep2p.node.node import Node
from dep2p.realm.credentials import Realm
from dep2p.sessions.service import OpenSession, Session
from dep2p.testing import MemoryNetwork
from tests.daemon.api.harness import Served, serving


@dataclass
class Pair:
    """The node behind the API, and another one."""

    served: Served
    ours: Node
    other: Node

    def post(self, path: str, status: int = 200, **body: object) -> dict[str, Any]:
        answer = self.served.http.post(f"/v1/sessions{path}", json=body)
        assert answer.status_code == status, answer.text
        return cast(dict[str, Any], answer.json())

    def get(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.served.http.get("/v1/sessions").json()["sessions"])

    def code(self, answer: httpx.Response) -> str:
        return str(answer.json()["code"])


@pytest.fixture
def pair(served: Served) -> Iterator[Pair]:
    with pair_behind(served) as started:
        yield started


@contextmanager
def pair_behind(served: Served) -> Generator[Pair, None, None]:
    """Two nodes, one of them with its sessions behind the API."""
    nodes: list[Node] = []
    stop: list[trio.Event] = []

    async def run(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        network = MemoryNetwork(latency_s=0.0)
        realm = Realm.from_psk(bytes(32), "team")
        identities = [Identity.generate() for _ in range(2)]
        hosts = [network.host(identity) for identity in identities]
        async with (
            Node.open(realm, identity=identities[0], host=hosts[0]) as ours,
            Node.open(realm, identity=identities[1], host=hosts[1]) as other,
        ):
            ours.remember(other.peer_id, hosts[1].listen_addrs())
            other.remember(ours.peer_id, hosts[0].listen_addrs())
            nodes.extend((ours, other))
            served.node.sessions = ours.sessions
            stop.append(trio.Event())
            task_status.started()
            await stop[0].wait()

    served.call(served.control.nursery.start, run)
    try:
        yield Pair(served, *nodes)
    finally:
        served.do(stop[0].set)


def text(fields: dict[str, Any]) -> bytes:
    return base64.b64decode(fields["data"])


async def count(session: Session) -> None:
    for number in range(5):
        await session.push(b"%d" % number)
    async for request in session:
        await request.before(b"before")
        await request.respond(b"to " + request.body)


def test_opening_taking_asking_and_leaving(pair: Pair) -> None:
    pair.served.do(lambda: pair.other.sessions.serve("feed", count))
    opened = pair.post("", 201, peer=pair.other.peer_id, name="feed", data="hi", encoding="utf-8")
    path = f"/{opened['id']}"
    first = pair.post(f"{path}/take", items_max=3)
    assert [(push["seq"], text(push)) for push in first["pushes"]] == [(1, b"0"), (2, b"1"), (3, b"2")]
    # The answer may have been lost: what is not said to be handled is given again.
    again = pair.post(f"{path}/take", after=1, items_max=10)
    assert [push["seq"] for push in again["pushes"]] == [2, 3]
    rest = pair.post(f"{path}/take", after=3, items_max=10)
    assert [push["seq"] for push in rest["pushes"]] == [4, 5]
    assert text(pair.post(f"{path}/requests", data="x", encoding="utf-8")) == b"to x"
    [before] = pair.post(f"{path}/take", after=5)["pushes"]
    assert (before["place"], before["request_id"], text(before)) == ("before", 1, b"before")
    empty = pair.post(f"{path}/take", after=6, wait_s=0.01)
    assert empty["pushes"] == [] and empty["ended"] is False
    [stats] = pair.get()
    assert stats["role"] == "client" and stats["handled_seq"] >= 6
    left = pair.served.http.delete(f"/v1/sessions{path}", params={"keep": "1"}).json()
    assert left["token"].startswith("dps1_")
    assert pair.code(pair.served.http.post(f"/v1/sessions{path}/take", json={})) == "D5105"
    resumed = pair.post("", 201, peer=pair.other.peer_id, name="feed", token=left["token"])
    assert resumed["id"] == opened["id"]
    assert pair.post(f"{path}/take", wait_s=0.01)["pushes"] == []


def test_what_was_given_and_not_handled_comes_again_to_the_next_program(pair: Pair) -> None:
    pair.served.do(lambda: pair.other.sessions.serve("feed", count))
    opened = pair.post("", 201, peer=pair.other.peer_id, name="feed")
    path = f"/{opened['id']}"
    given = pair.post(f"{path}/take", items_max=2)
    assert [push["seq"] for push in given["pushes"]] == [1, 2]
    # Another program opens with the token of the beginning: the first one never said that it handled them.
    assert pair.post("", 201, peer=pair.other.peer_id, name="feed", token=opened["token"])["id"] == opened["id"]
    again = pair.post(f"{path}/take", items_max=10)
    assert [push["seq"] for push in again["pushes"]] == [1, 2, 3, 4, 5]
    assert "reset" not in again


def test_the_end_and_a_reset_are_reported(pair: Pair) -> None:
    async def short(session: Session) -> None:
        await session.push(b"only")

    pair.served.do(lambda: pair.other.sessions.serve("short", short))
    opened = pair.post("", 201, peer=pair.other.peer_id, name="short")
    path = f"/{opened['id']}"
    assert [push["seq"] for push in pair.post(f"{path}/take")["pushes"]] == [1]
    assert pair.post(f"{path}/take", after=1)["ended"] is True
    # The session is gone at the server: its token leads to a reset.
    pair.served.wait_until(lambda: not pair.other.sessions.served(), "the session's end")
    again = pair.post("", 201, peer=pair.other.peer_id, name="short", token=opened["token"])
    answer = pair.post(f"/{again['id']}/take")
    assert answer["reset"]["next_seq"] == 1 and "does not have this session" in answer["reset"]["detail"]
    assert [push["seq"] for push in pair.post(f"/{again['id']}/take")["pushes"]] == [1]


def lines(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        yield json.loads(line)


def test_serving_pushing_binding_and_answering(pair: Pair) -> None:
    served = pair.served

    async def start() -> OpenSession:
        return await pair.other.sessions.start(pair.ours.peer_id, "prices", b"hello")

    async def ask(session: OpenSession, answers: list[bytes]) -> None:
        answers.append(await session.request(b"?"))

    async def take(session: OpenSession, number: int) -> list[bytes]:
        return [push.body for push in [await session.receive() for _ in range(number)] if push is not None]

    with served.http.stream("GET", "/v1/sessions", params={"serve": "prices"}) as response:
        events = lines(response)
        session = served.call(start)
        opened = next(events)
        assert (opened["event"], opened["peer"], text(opened)) == ("opened", pair.other.peer_id, b"hello")
        assert opened["session"] == session.id
        taken = served.http.get("/v1/sessions", params={"serve": "prices"})
        assert pair.code(taken) == "D5012"
        assert pair.post("/pushes", 202, name="prices", data="all", encoding="utf-8") == {"pushed": 1, "full": []}
        assert pair.post(f"/{session.id}/pushes", 202, data="one", encoding="utf-8") == {"seq": 2}
        bound = {"data": "after", "encoding": "utf-8", "request_id": 1, "place": "after"}
        assert pair.post(f"/{session.id}/pushes", 202, **bound) == {"request_id": 1}
        answers: list[bytes] = []
        served.do(served.control.nursery.start_soon, ask, session, answers)
        request = next(events)
        assert (request["event"], request["request_id"], text(request)) == ("request", 1, b"?")
        assert request["deadline_ms"] > 1_000
        pair.post(f"/{session.id}/responses", request_id=1, data="yes", encoding="utf-8")
        served.wait_until(lambda: answers == [b"yes"], "the answer")
        late = served.http.post(f"/v1/sessions/{session.id}/responses", json={"request_id": 1, "data": ""})
        assert pair.code(late) == "D5107"
        assert served.call(take, session, 3) == [b"all", b"one", b"after"]
        pair.post(f"/{session.id}/end")
        assert served.call(session.receive) is None
        closed = next(events)
        assert (closed["event"], closed["session"]) == ("closed", session.id)
        served.wait_until(lambda: not pair.ours.sessions.served(), "the end of the session's task")
        assert pair.code(served.http.post(f"/v1/sessions/{session.id}/end")) == "D5105"


def test_a_program_that_serves_and_goes_away_ends_its_sessions(pair: Pair) -> None:
    served = pair.served

    async def start() -> OpenSession:
        return await pair.other.sessions.start(pair.ours.peer_id, "prices")

    with served.http.stream("GET", "/v1/sessions", params={"serve": "prices"}) as response:
        session = served.call(start)
        assert next(lines(response))["event"] == "opened"

    async def failure() -> str:
        try:
            await session.receive()
        except Exception as error:
            return str(error)
        return ""

    assert "went away" in served.call(failure)
    with served.http.stream("GET", "/v1/sessions", params={"serve": "prices"}) as response:
        assert response.status_code == 200  # the name is free again


def test_a_session_whose_program_does_not_come_is_left_for_its_token() -> None:
    with serving(ControlBounds(stream_unattached_timeout_s=0.1)) as served, pair_behind(served) as pair:
        served.do(lambda: pair.other.sessions.serve("feed", count))
        opened = pair.post("", 201, peer=pair.other.peer_id, name="feed")
        given = pair.post(f"/{opened['id']}/take", items_max=2)
        served.wait_until(lambda: not pair.ours.sessions.opened(), "the session is left")
        assert [each.is_attached for each in pair.other.sessions.served()] == [False]
        again = pair.post("", 201, peer=pair.other.peer_id, name="feed", token=opened["token"])
        taken = pair.post(f"/{again['id']}/take", items_max=2)
        assert [push["seq"] for push in taken["pushes"]] == [push["seq"] for push in given["pushes"]] == [1, 2]


def test_only_one_call_takes_and_a_program_with_the_token_takes_over(pair: Pair) -> None:
    served = pair.served

    async def quiet(session: Session) -> None:
        await session.wait_closed()

    served.do(lambda: pair.other.sessions.serve("quiet", quiet))
    opened = pair.post("", 201, peer=pair.other.peer_id, name="quiet")
    path = f"/v1/sessions/{opened['id']}/take"
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(served.http.post, path, json={"wait_s": 8})
        served.wait_until(lambda: served.control.sessions.is_taking(opened["id"]), "the first call waits")
        assert pair.code(served.http.post(path, json={})) == "D5012"
        pair.post("", 201, peer=pair.other.peer_id, name="quiet", token=opened["token"])
        assert pair.code(first.result(5)) == "D5012"


def test_a_push_to_all_names_those_that_are_full(pair: Pair) -> None:
    served = pair.served

    async def start() -> OpenSession:
        return await pair.other.sessions.start(pair.ours.peer_id, "prices")

    with served.http.stream("GET", "/v1/sessions", params={"serve": "prices"}) as response:
        events = lines(response)
        session = served.call(start)
        assert next(events)["event"] == "opened"
        pushed = 0
        while not (answer := pair.post("/pushes", 202, name="prices", data="x" * 900_000, encoding="utf-8"))["full"]:
            pushed += answer["pushed"]
        assert (pushed, answer) == (9, {"pushed": 0, "full": [session.id]})


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("", {"name": "x"}, "D1005"),
        ("", {"peer": "nonsense", "name": "x"}, "D4004"),
        ("/00/take", {"after": -1}, "D1005"),
        ("/00/take", {"items_max": 0}, "D1005"),
        ("/00/take", {"wait_s": 1e9}, "D1005"),
        ("/00/take", {"before": 1}, "D1005"),
        ("/00/take", {}, "D5105"),
        ("/00/requests", {"data": "!"}, "D1005"),
        ("/00/requests", {}, "D5105"),
        ("/00/pushes", {}, "D1005"),
        ("/00/pushes", {"data": "", "place": "between"}, "D1005"),
        ("/00/pushes", {"data": ""}, "D5105"),
        ("/pushes", {"data": ""}, "D1005"),
        ("/00/responses", {"data": ""}, "D1005"),
        ("/00/responses", {"request_id": 1}, "D5105"),
        ("/00/end", {}, "D5105"),
    ],
)
def test_bad_calls(pair: Pair, path: str, body: dict[str, object], code: str) -> None:
    answer = pair.served.http.post(f"/v1/sessions{path}", json=body)
    assert pair.code(answer) == code, answer.text


def test_bad_tokens(pair: Pair) -> None:
    peer = pair.other.peer_id
    for token in ("x", "dps1_", "dps1_AAAA"):
        answer = pair.served.http.post("/v1/sessions", json={"peer": peer, "name": "x", "token": token})
        assert (answer.status_code, pair.code(answer)) == (400, "D5106")
    unserved = pair.served.http.post("/v1/sessions", json={"peer": peer, "name": "x"})
    assert pair.code(unserved) == "D5003"
