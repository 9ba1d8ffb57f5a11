"""Notifies, events, requests to answer and streams, as a control client without the library sees them."""

import base64
import json
import struct
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from dep2p.daemon.api.resources.feeds import NotifyFeed
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.problems import Problem
from dep2p.errors import HandlerError
from dep2p.host.interface import PeerConnected, PeerDisconnected
from dep2p.messaging.handlers import HandlerAwayError
from dep2p.realm.interface import MemberEvent
from tests.daemon.api.fake_node import ANN, BOB, FakeConnection, FakeNode, FakeStream, Message
from tests.daemon.api.harness import Served, serving
from tests.daemon.api.test_routes import problem


@contextmanager
def lines(served: Served, method: str, url: str, **options: Any) -> Generator[Iterator[dict[str, Any]], None, None]:
    with served.http.stream(method, url, **options) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "application/x-ndjson"
        yield (json.loads(line) for line in answer.iter_lines() if line)


def framed(*items: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(item)) + item for item in items)


def test_notifies_reach_every_listener(served: Served) -> None:
    with lines(served, "GET", "/v1/notifies?name=seen") as one, lines(served, "GET", "/v1/notifies?name=seen") as two:
        handler = served.node.messaging().notifies["seen"]
        served.call(handler, Message("seen", b"42", BOB, {"h": b"\x00"}))
        for reader in (one, two):
            line = next(reader)
            assert line["peer"] == BOB and base64.b64decode(line["data"]) == b"42"
            assert line["headers"] == {"h": {"data": "AA==", "encoding": "base64"}}
    served.wait_until(lambda: not served.node.messaging().notifies, "the handler is gone with its last listener")


def test_a_slow_reader_learns_what_it_missed_and_costs_bounded_memory() -> None:
    bounds = ControlBounds(subscription_items_max=10, subscription_bytes_max=100_000)
    with serving(bounds) as served, lines(served, "GET", "/v1/notifies?name=flood") as reader:
        handler = served.node.messaging().notifies["flood"]
        payload = b"x" * 20_000  # 27 kB a line: three fit, and the kernel's buffers take some more

        async def flood() -> None:
            for _ in range(200):
                await handler(Message("flood", payload))
                await trio.lowlevel.checkpoint()

        served.call(flood)
        served.call(handler, Message("flood", b"last"))
        lagged = received = 0
        for line in reader:
            lagged += line.get("lagged", 0)
            received += "data" in line
            if line.get("data") == base64.b64encode(b"last").decode():
                break
        assert lagged > 100
        assert lagged + received == 201
        assert served.control.counts["lagged_notifies"] == lagged


def test_events_of_peers_and_members(served: Served) -> None:
    with lines(served, "GET", "/v1/events") as every, lines(served, "GET", "/v1/events?types=member_up") as members:

        def happen() -> None:
            connection = FakeConnection(ANN, 1)
            served.node.tell(PeerConnected(connection))
            served.node.tell(MemberEvent("up", ANN))
            served.node.tell(PeerDisconnected(connection, True, "it left"))

        served.do(happen)
        kinds = [next(every) for _ in range(3)]
        assert [line["kind"] for line in kinds] == ["peer_connected", "member_up", "peer_disconnected"]
        assert [line["id"] for line in kinds] == [1, 2, 3]
        assert kinds[2]["reason"] == "it left" and kinds[2]["last"] is True
        assert next(members) | {"time_s": 0} == {
            "id": 2,
            "kind": "member_up",
            "time_s": 0,
            "peer": ANN,
            "realm": "team",
            "realm_id": served.node.realm("team").realm_id,
            "state": "up",
            "fields": {"status": "at lunch\x1b[2J"},
            "services": [{"name": "resize", "group": "workers", "version": "1.2", "schema": ""}],
        }


def test_a_reply_reaches_the_caller(served: Served) -> None:
    with lines(served, "POST", "/v1/replies", json={"name": "greet"}) as requests:
        handler = served.node.messaging().requests["greet"]
        answers: list[object] = []

        async def ask(data: bytes) -> None:
            try:
                answers.append(await handler(Message("greet", data, deadline_s=trio.current_time() + 5)))
            except HandlerError as error:
                answers.append(str(error))

        for reply, expected in (({"data": "aGk=", "encoding": "base64"}, b"hi"), ({"error": "not today"}, "not today")):
            served.do(served.control.nursery.start_soon, ask, b"ann")
            line = next(requests)
            assert base64.b64decode(line["data"]) == b"ann"
            assert 0 < line["deadline_ms"] <= 5000
            assert served.http.post(f"/v1/replies/{line['id']}", json=reply).status_code == 202
            problem(served.http.post(f"/v1/replies/{line['id']}", json=reply), 404, "D5011")
            served.wait_until(lambda expected=expected: expected in answers, "answered")  # type: ignore[misc]
        problem(served.http.post("/v1/replies", json={"name": "greet"}), 409, "D5012")

        served.do(served.control.nursery.start_soon, ask, b"left alone")
        next(requests)
    served.wait_until(lambda: "the program that answers went away" in answers, "failed when its answerer left")
    served.wait_until(lambda: not served.node.messaging().requests, "unregistered")
    problem(served.http.post("/v1/replies/ffff", json={"data": ""}), 404, "D5011")


def test_requests_beyond_the_queue_are_refused_and_none_is_dropped_in_silence() -> None:
    with serving(ControlBounds(subscription_items_max=1, subscription_bytes_max=1)) as served:
        with lines(served, "POST", "/v1/replies", json={"name": "greet"}):
            handler = served.node.messaging().requests["greet"]
            with pytest.raises(HandlerError, match="too slow"):
                served.call(handler, Message("greet", b"x"))


def test_subscriptions_are_bounded() -> None:
    with serving(ControlBounds(subscriptions_max=2)) as served:
        with lines(served, "GET", "/v1/events"), lines(served, "GET", "/v1/notifies?name=a"):
            problem(served.http.get("/v1/notifies?name=b"), 503, "D3008")
            assert "b" not in served.node.messaging().notifies
        served.wait_until(lambda: not served.control.subscriptions.by_kind(), "both are gone")
        with lines(served, "GET", "/v1/events"):
            pass


def test_subscriptions_end_with_a_reason_when_the_daemon_stops(served: Served) -> None:
    with lines(served, "GET", "/v1/events") as events:
        served.do(served.control.subscriptions.end_all)
        assert [line["error"]["code"] for line in events] == ["D3006"]


def open_stream(served: Served, name: str = "echo") -> str:
    answer = served.http.post("/v1/streams", json={"peer": ANN, "name": name})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def test_a_stream_carries_items_both_ways(served: Served) -> None:
    stream_id = open_stream(served)
    items = [b"", b"one", b"x" * 300_000, b"last"]
    with served.http.stream("GET", f"/v1/streams/{stream_id}/items") as received:
        sent = served.http.post(f"/v1/streams/{stream_id}/items?eof=1", content=framed(*items))
        assert sent.json() == {"items": 4, "bytes": 300_007}
        assert received.read() == framed(*items)
    served.wait_until(lambda: len(served.control.streams) == 0, "the stream is done")
    problem(served.http.delete(f"/v1/streams/{stream_id}"), 404, "D6002")


def test_the_sender_waits_for_the_peer(served: Served) -> None:
    stream_id = open_stream(served, "nobody-reads")
    far = served.node.opened[-1]
    produced = 0

    def body() -> Iterator[bytes]:
        nonlocal produced
        for _ in range(10_000):
            produced += 1
            yield framed(b"x" * 10_000)

    with pytest.raises(httpx.WriteTimeout):
        served.http.post(f"/v1/streams/{stream_id}/items", content=body(), timeout=0.5)
    assert produced < 400, "the client was held back long before its 10,000 items"
    served.wait_until(lambda: far.was_reset, "the client went away in the middle: reset")


def test_a_peers_reset_arrives_as_a_problem(served: Served) -> None:
    stream_id = open_stream(served, "x")
    far = served.node.opened[-1]
    with served.http.stream("GET", f"/v1/streams/{stream_id}/items") as received:
        served.call(far.from_far.send, b"one")
        served.call(far.from_far.send, b"!reset")
        body = received.read()
    start = framed(b"one") + b"\xff\xff\xff\xff"
    assert body.startswith(start)
    assert json.loads(body[len(start) + 4 :])["code"] == "D6001"
    problem(served.http.post(f"/v1/streams/{stream_id}/items", content=framed(b"x")), 404, "D6002")


def test_a_reader_that_leaves_resets_the_stream(served: Served) -> None:
    stream_id = open_stream(served, "x")
    far = served.node.opened[-1]
    with served.http.stream("GET", f"/v1/streams/{stream_id}/items"):
        pass
    served.wait_until(lambda: far.was_reset, "what was on its way is lost, so the peer is told")


def test_what_was_sent_up_to_its_end_arrives_though_the_client_leaves(served: Served) -> None:
    stream_id = open_stream(served, "x")
    far = served.node.opened[-1]
    assert served.http.post(f"/v1/streams/{stream_id}/items?eof=1", content=framed(b"whole")).status_code == 200
    assert served.http.delete(f"/v1/streams/{stream_id}").status_code == 200
    served.wait_until(lambda: len(served.control.streams) == 0, "it is over")
    assert not far.was_reset
    assert served.call(far.sent.receive) == b"whole"


def test_wrong_stream_bodies(served: Served) -> None:
    far: list[FakeStream] = served.node.opened
    cut = served.http.post(f"/v1/streams/{open_stream(served)}/items", content=framed(b"abc")[:-1])
    problem(cut, 400, "D6003")
    large = served.http.post(f"/v1/streams/{open_stream(served)}/items", content=b"\x7f\xff\xff\xff")
    problem(large, 413, "D6004")
    aborted = served.http.post(f"/v1/streams/{open_stream(served)}/items", content=b"\xff\xff\xff\xff")
    problem(aborted, 410, "D6001")
    served.wait_until(lambda: all(stream.was_reset for stream in far), "all are reset")
    problem(served.http.post(f"/v1/streams/{open_stream(served)}/items?eof=2"), 400, "D1005")
    problem(served.http.get("/v1/streams/nothing/items"), 404, "D6002")
    problem(served.http.post("/v1/streams", json={"peer": ANN, "name": "handler"}), 502, "D5002")


def test_one_reader_and_one_end_for_each_direction(served: Served) -> None:
    stream_id = open_stream(served, "x")
    with served.http.stream("GET", f"/v1/streams/{stream_id}/items"):
        problem(served.http.get(f"/v1/streams/{stream_id}/items"), 409, "D6005")
        assert served.http.post(f"/v1/streams/{stream_id}/items?eof=1").json() == {"items": 0, "bytes": 0}
        problem(served.http.post(f"/v1/streams/{stream_id}/items"), 409, "D6005")


def test_streams_that_members_open(served: Served) -> None:
    with lines(served, "GET", "/v1/streams?accept=sync") as incoming:
        problem(served.http.get("/v1/streams?accept=sync"), 409, "D5012")
        handler = served.node.messaging().streams["sync"]
        stream = served.do(lambda: FakeStream("sync", b"first", BOB))
        served.do(served.control.nursery.start_soon, handler, stream)
        line = next(incoming)
        assert (line["peer"], base64.b64decode(line["data"])) == (BOB, b"first")
        served.do(served.control.nursery.start_soon, stream.echo)
        sent = served.http.post(f"/v1/streams/{line['id']}/items?eof=1", content=framed(b"hello"))
        assert sent.status_code == 200
        assert served.http.get(f"/v1/streams/{line['id']}/items").content == framed(b"hello")
    served.wait_until(lambda: len(served.control.streams) == 0, "done")
    served.wait_until(lambda: not served.node.messaging().streams, "unregistered")


def test_streams_are_bounded() -> None:
    with serving(ControlBounds(streams_max=2)) as served:
        first = open_stream(served)
        open_stream(served)
        problem(served.http.post("/v1/streams", json={"peer": ANN, "name": "echo"}), 503, "D3008")
        assert served.http.delete(f"/v1/streams/{first}").json()["closed"] is True
        served.wait_until(lambda: len(served.control.streams) == 1, "room again")
        open_stream(served)


def test_a_stream_that_no_one_attends_is_reset() -> None:
    with serving(ControlBounds(stream_unattached_timeout_s=0.1)) as served:
        open_stream(served)
        served.wait_until(lambda: served.node.opened[0].was_reset or len(served.control.streams) == 0, "reset")
        assert served.control.counts["streams_reset_unattached"] == 1


async def test_the_oldest_lines_go_and_the_count_comes_first() -> None:
    lagged: list[None] = []
    queue = LineQueue(3, 100, lambda: lagged.append(None))
    for number in range(5):
        queue.put(b"%d\n" % number)
    assert await queue.take() == b'{"lagged":2}\n2\n3\n4\n'
    assert len(lagged) == 2 and queue.queued_bytes == 0
    queue.put(b"y" * 60)
    queue.put(b"z" * 60)
    assert queue.queued_bytes == 60
    queue.close(b"end")
    queue.put(b"too late")
    assert await queue.take() == b'{"lagged":1}\n' + b"z" * 60 + b"end"
    assert await queue.take() == b""


def test_one_peer_cannot_take_the_places_of_the_others() -> None:
    with serving(ControlBounds(streams_max=8)) as served, lines(served, "GET", "/v1/streams?accept=chat") as incoming:
        handler = served.node.messaging().streams["chat"]
        refused: list[str] = []

        async def opens(stream: FakeStream) -> None:
            try:
                await handler(stream)
            except HandlerError as error:
                refused.append(str(error))

        for _ in range(8):
            served.do(served.control.nursery.start_soon, opens, FakeStream("chat", peer=BOB))
        served.wait_until(lambda: len(refused) == 6, "refused beyond its share")
        served.do(served.control.nursery.start_soon, opens, FakeStream("chat", peer=ANN))
        assert [next(incoming)["peer"] for _ in range(3)] == [BOB, BOB, ANN]
        open_stream(served)
        first = next(iter(served.do(lambda: list(served.control.streams._entries))))  # pyright: ignore[reportPrivateUsage]
        assert served.http.delete(f"/v1/streams/{first}").json()["closed"] is True
        served.wait_until(lambda: len(served.control.streams) == 3, "gone")
        served.do(served.control.nursery.start_soon, opens, FakeStream("chat", peer=BOB))
        assert next(incoming)["peer"] == BOB


def test_a_reliable_message_is_taken_when_a_program_has_it_in_its_socket(served: Served) -> None:
    taken: list[bytes] = []

    async def deliver(body: bytes) -> None:
        try:
            await served.node.messaging().notifies["orders"](Message("orders", body, is_reliable=True))
            taken.append(body)
        except HandlerAwayError:
            taken.append(b"not " + body)

    def start(body: bytes) -> None:
        served.do(served.control.nursery.start_soon, deliver, body)

    with lines(served, "GET", "/v1/notifies?name=orders") as orders:
        start(b"one")
        assert base64.b64decode(next(orders)["data"]) == b"one"
        served.wait_until(lambda: taken == [b"one"], "taken when it was read")
    for number in range(20):  # a program that hangs up as soon as it has its message has taken it
        with lines(served, "GET", "/v1/notifies?name=orders") as orders:
            start(b"%d" % number)
            next(orders)
        served.wait_until(lambda number=number: len(taken) == number + 2, "it is decided")  # type: ignore[misc]
    assert taken == [b"one", *(b"%d" % number for number in range(20))]


class Deliveries:
    """Reliable messages to the daemon's handler, and how each ended."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.ends: dict[str, str] = {}

    def start(self, text: str) -> None:
        self.served.do(self.served.control.nursery.start_soon, self._deliver, text)

    async def _deliver(self, text: str) -> None:
        message = Message("orders", text.encode(), is_reliable=True)
        try:
            await self.served.node.messaging().notifies["orders"](message)
            self.ends[text] = "taken"
        except HandlerAwayError:
            self.ends[text] = "away"
        except HandlerError as error:
            self.ends[text] = str(error)

    def wait(self, text: str, end: str) -> None:
        self.served.wait_until(lambda: self.ends.get(text) == end, f"{text} is {end}")


CONFIRMING = "/v1/notifies?name=orders&confirm=1"


def test_a_reliable_message_is_taken_when_a_program_that_confirms_says_so(served: Served) -> None:
    deliveries = Deliveries(served)
    with lines(served, "GET", CONFIRMING) as orders, lines(served, "GET", "/v1/notifies?name=orders") as copies:
        deliveries.start("one")
        line = next(orders)
        assert base64.b64decode(line["data"]) == b"one" and "id" not in next(copies)
        assert served.do(lambda: served.control.notifies.unconfirmed_count) == 1 and not deliveries.ends
        path = f"/v1/notifies/{line['id']}"
        assert served.http.post(path, json={}).status_code == 202
        deliveries.wait("one", "taken")
        problem(served.http.post(path, json={}), 404, "D5011")
        assert served.do(lambda: served.control.notifies.unconfirmed_count) == 0
        deliveries.start("two")
        rejected = served.http.post(f"/v1/notifies/{next(orders)['id']}", json={"error": "no room"})
        assert rejected.status_code == 202
        deliveries.wait("two", "no room")
        served.call(served.node.messaging().notifies["orders"], Message("orders", b"not reliable"))
        assert "id" not in next(orders)


def test_a_message_that_a_program_had_in_hand_when_it_went_is_the_next_ones(served: Served) -> None:
    deliveries = Deliveries(served)
    with lines(served, "GET", "/v1/notifies?name=orders&confirm=0") as before:
        with lines(served, "GET", CONFIRMING) as second:
            del second
        deliveries.start("plain")
        next(before)
    deliveries.wait("plain", "taken")
    with ExitStack() as hanging:
        first = hanging.enter_context(lines(served, "GET", CONFIRMING))
        with lines(served, "GET", CONFIRMING) as second:
            deliveries.start("one")
            assert "id" in next(first) and "id" not in next(second)
            hanging.close()
            line = next(second)
            assert base64.b64decode(line["data"]) == b"one"
            assert served.http.post(f"/v1/notifies/{line['id']}", json={}).status_code == 202
            deliveries.wait("one", "taken")
            deliveries.start("two")
            next(second)
    deliveries.wait("two", "away")


@pytest.mark.parametrize("body", [{"error": 7}, {"error": "x" * 1_025}, {"eror": "x"}, []])
def test_a_wrong_confirmation_is_refused_and_the_message_stays(served: Served, body: object) -> None:
    deliveries = Deliveries(served)
    problem(served.http.get("/v1/notifies?name=orders&confirm=yes"), 400, "D1005")
    with lines(served, "GET", CONFIRMING) as orders:
        deliveries.start("one")
        path = f"/v1/notifies/{next(orders)['id']}"
        problem(served.http.post(path, json=body), 400, "D1005")
        assert not deliveries.ends
        assert served.http.post(path, json={"error": None}).status_code == 202
        deliveries.wait("one", "taken")


async def test_a_program_that_never_confirms_is_named_and_then_loses_its_subscription(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    node = FakeNode()
    feed = NotifyFeed(node, SubscriptionRegistry(ControlBounds(), Counter()), ControlBounds())
    hung, _end_hung = feed.subscribe("orders", None, confirms=True)
    ends: list[str] = []

    async def deliver() -> None:
        try:
            await node.messaging().notifies["orders"](Message("orders", b"x", is_reliable=True))
            ends.append("taken")
        except HandlerAwayError:
            ends.append("away")

    async def given(queue: LineQueue) -> dict[str, Any]:
        line = json.loads(await queue.take())
        queue.written()
        return dict(line)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver)
        first = await given(hung)
        await trio.sleep(31)
        assert "has had a reliable message 'orders' in hand for 30 s" in caplog.text and not hung.is_closed
        next_one, _end_next = feed.subscribe("orders", None, confirms=True)
        await trio.sleep(270)
        assert hung.is_closed and json.loads(await hung.take())["error"]["code"] == "D5001" and not ends
        with pytest.raises(Problem):
            feed.confirm(first["id"], None)
        second = await given(next_one)
        assert second["data"] == first["data"] and feed.unconfirmed_count == 1
        feed.confirm(second["id"], None)
        await trio.testing.wait_all_tasks_blocked()
        assert ends == ["taken"] and feed.unconfirmed_count == 0
        nursery.start_soon(deliver)
        await given(next_one)
        await trio.sleep(301)
    assert ends == ["taken", "away"], "its sender keeps it"


def test_a_reliable_message_that_meets_a_closing_subscription_waits_and_holds_nothing_up(served: Served) -> None:
    ends: list[str] = []

    async def deliver() -> None:
        try:
            await served.node.messaging().notifies["orders"](Message("orders", b"late", is_reliable=True))
        except HandlerAwayError:
            ends.append("away")

    with lines(served, "GET", "/v1/notifies?name=orders"):

        def close_and_deliver() -> None:
            served.control.subscriptions.end_all()  # the reader's own task ends later than this step
            served.control.nursery.start_soon(deliver)

        served.do(close_and_deliver)
        served.wait_until(lambda: ends == ["away"], "its sender keeps it")
        assert served.http.get("/v1/status").status_code == 200, "the daemon's loop goes on"


def queue_of(items_max: int) -> LineQueue:
    return LineQueue(items_max, 1_000, lambda: None)


async def test_a_delivered_line_ends_when_it_is_written_or_its_reader_is_gone(autojump_clock: object) -> None:
    queue = queue_of(8)
    ends: dict[bytes, bool] = {}

    async def deliver(line: bytes) -> None:
        ends[line] = await queue.deliver(line)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver, b"1\n")
        nursery.start_soon(deliver, b"2\n")
        await trio.testing.wait_all_tasks_blocked()
        assert sorted((await queue.take()).splitlines()) == [b"1", b"2"]
        await trio.testing.wait_all_tasks_blocked()
        assert ends == {}, "they may still be on their way"
        queue.written()
        await trio.testing.wait_all_tasks_blocked()
        assert ends == {b"1\n": True, b"2\n": True}
        nursery.start_soon(deliver, b"3\n")
        await trio.testing.wait_all_tasks_blocked()
        assert await queue.take() == b"3\n", "its write has not ended"
        nursery.start_soon(deliver, b"4\n")
        await trio.testing.wait_all_tasks_blocked()
        queue.end()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert (ends[b"3\n"], ends[b"4\n"]) == (False, False)
    assert not await queue.deliver(b"5\n")


async def test_a_delivered_line_waits_for_room_and_comes_again_when_it_was_pushed_out(
    autojump_clock: object,
) -> None:
    queue = queue_of(1)
    done: list[bytes] = []

    async def deliver(line: bytes) -> None:
        assert await queue.deliver(line)
        done.append(line)

    async with trio.open_nursery() as nursery:
        queue.put(b"notify\n")
        nursery.start_soon(deliver, b"1\n")
        await trio.testing.wait_all_tasks_blocked()
        assert await queue.take() == b"notify\n", "the delivered line drops no other"
        await trio.testing.wait_all_tasks_blocked()
        queue.put(b"newer\n")  # there is no room: it takes the place of the other
        await trio.testing.wait_all_tasks_blocked()
        assert await queue.take() == b"newer\n"
        await trio.testing.wait_all_tasks_blocked()
        assert await queue.take() == b"1\n"
        queue.written()
        await trio.testing.wait_all_tasks_blocked()
        assert done == [b"1\n"]
        nursery.cancel_scope.cancel()


def test_a_daemon_that_stops_takes_no_new_subscriptions(served: Served) -> None:
    served.do(served.control.subscriptions.end_all)
    problem(served.http.get("/v1/notifies?name=a"), 503, "D3006")
