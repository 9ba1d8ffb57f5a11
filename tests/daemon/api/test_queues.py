"""Queues through the control API, over a real engine: publish, consume, settle, filters, and what is refused."""

import base64
import json
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
import trio

from dep2p.client import Client
from dep2p.identity import Identity
from tests.daemon.api.harness import Served

CHANNEL = "/v1/queues/jobs/channels/c"
CONSUME = f"{CHANNEL}/consume"


@pytest.fixture
def queues(served: Served) -> Served:
    engine = served.node.queues.engine
    served.call(served.control.nursery.start, engine.run)
    answer = served.http.post("/v1/queues", json={"name": "jobs"})
    assert answer.status_code == 201, answer.text
    return served


def _post(served: Served, path: str, **body: object) -> dict[str, Any]:
    answer = served.http.post(path, json=body)
    assert answer.status_code < 300, answer.text
    return cast(dict[str, Any], answer.json())


def _put(served: Served, *messages: dict[str, object]) -> None:
    for message in messages:
        _post(served, "/v1/queues/jobs/messages", **message)


def _lines(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    assert answer.status_code == 200
    for line in answer.iter_lines():
        fields = cast(dict[str, Any], json.loads(line))
        if fields.get("encoding") == "base64":
            fields["body"] = base64.b64decode(fields["body"]).decode()
        yield fields


def _result(message: dict[str, Any], do: str, **more: object) -> dict[str, object]:
    return {"id": message["id"], "do": do, **more}


def test_a_message_is_published_taken_and_settled(queues: Served) -> None:
    _put(queues, {"body": "one", "encoding": "utf-8"}, {"body": "two", "encoding": "utf-8", "key": "k", "tags": ["a"]})
    with queues.http.stream("POST", CONSUME, params={"max_in_flight": "2"}) as answer:
        lines = _lines(answer)
        results = f"/v1/queue-consumers/{next(lines)['consumer']}/results"
        one, two = next(lines), next(lines)
        assert [one["body"], two["body"], two["key"], two["tags"], one["attempts"]] == ["one", "two", "k", ["a"], 1]
        wanted = [_result(one, "finish"), _result(two, "requeue", reason="later")]
        assert _post(queues, results, results=wanted, durable=True)["refused"] == {}
        again = next(lines)
        assert (again["id"], again["attempts"]) == (two["id"], 2)
        late = _post(queues, results, results=[_result(one, "finish")])
        assert late["refused"][one["id"]]["code"] == "D5206"
        assert _post(queues, results, results=[_result(again, "touch")])["timeouts_s"][two["id"]] > 0
        _post(queues, results, results=[_result(again, "reject", reason="bad")], durable=True)
    dead = queues.http.get(f"{CHANNEL}/dead-letters").json()["dead_letters"]
    assert [(each["message_id"], each["reasons"]) for each in dead] == [(two["id"], ["later", "bad"])]


def test_a_consumer_that_hangs_up_gives_back_what_it_held(queues: Served) -> None:
    _put(queues, {"body": "x", "encoding": "utf-8"})
    for attempts in (1, 2):
        with queues.http.stream("POST", CONSUME) as answer:
            lines = _lines(answer)
            consumer = next(lines)["consumer"]
            assert next(lines)["attempts"] == attempts
    queues.wait_until(lambda: len(queues.control.queue_consumers) == 0, "no consumer is connected")
    gone = queues.http.post(
        f"/v1/queue-consumers/{consumer}/results", json={"results": [{"id": "0" * 16, "do": "finish"}]}
    )
    assert gone.json()["code"] == "D5208"


def test_a_consumer_that_takes_no_more_gives_back_without_an_attempt(queues: Served) -> None:
    for number in range(3):
        _put(queues, {"body": str(number), "encoding": "utf-8"})
    with queues.http.stream("POST", CONSUME, params={"max_in_flight": "3"}) as answer:
        lines = _lines(answer)
        results = f"/v1/queue-consumers/{next(lines)['consumer']}/results"
        taken = [next(lines) for _ in range(3)]
        released = [_result(each, "release") for each in reversed(taken)]
        assert _post(queues, results, results=released, max_in_flight=0)["refused"] == {}
        assert queues.http.get("/v1/queues/jobs").json()["channels"][0]["in_flight"] == 0
        assert _post(queues, results, max_in_flight=1) == {"refused": {}, "timeouts_s": {}}
        again = next(lines)
        assert (again["id"], again["attempts"]) == (taken[0]["id"], 1)


def test_a_consumer_that_asks_for_losses_learns_of_a_partition_that_it_hands_over(queues: Served) -> None:
    _post(queues, "/v1/queues/jobs/expand", partitions=2)
    params = {"exclusive": "1", "losses": "1"}
    with queues.http.stream("POST", CONSUME, params=params) as first:
        lines = _lines(first)
        next(lines)
        locks = f"{CHANNEL}/locks"
        while len(queues.http.get(locks).json()["locks"]) < 2:  # it has both partitions
            pass
        with queues.http.stream("POST", CONSUME, params=params) as second:
            next(_lines(second))
            loss = next(lines)
    assert loss["loss"] == "revoked" and loss["partition"] in (1, 2)


def test_a_publish_with_a_number_is_taken_once(queues: Served) -> None:
    path = "/v1/queues/jobs/publishes"
    batch = [{"body": "a", "encoding": "utf-8", "key": "k"}, {"body": "b", "encoding": "utf-8", "tags": ["t"]}]
    first = _post(queues, path, messages=batch, publisher="0f" * 16, number=1)
    assert _post(queues, path, messages=batch, publisher="0f" * 16, number=1) == first
    assert len(first["ids"]) == 2
    _post(queues, path, messages=batch, publisher="0f" * 16, number=3)
    _post(queues, path, messages=batch, timeout_s=1)
    assert queues.http.get("/v1/queues/jobs").json()["messages"] == 6
    assert _post(queues, "/v1/queues/jobs/destinations", keys=["k", ""]) == {"destinations": ["", ""]}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"publisher": "0f" * 16}, "number"),
        ({"number": 1}, "number"),
        ({"publisher": "xx", "number": 1}, "publisher"),
        ({"publisher": "0f" * 16, "number": 0}, "number"),
        ({"destination": "1 a b"}, "destination"),
        ({"keys": ["k"]}, "keys"),
    ],
)
def test_a_malformed_publish_with_a_number_is_refused(queues: Served, fields: dict[str, object], wrong: str) -> None:
    body = {"messages": [{"body": "a", "encoding": "utf-8"}], **fields}
    answer = queues.http.post("/v1/queues/jobs/publishes", json=body).json()
    assert answer["code"] == "D1005" and wrong in answer["detail"]
    assert queues.http.get("/v1/queues/jobs").json()["messages"] == 0


def test_filters(queues: Served) -> None:
    _put(queues, {"body": "r", "encoding": "utf-8", "tags": ["red"]}, {"body": "b", "encoding": "utf-8", "tags": ["b"]})
    with queues.http.stream("POST", CONSUME, params={"filter": "tag = b", "max_in_flight": "2"}) as answer:
        lines = _lines(answer)
        next(lines)
        assert next(lines)["body"] == "b"
    other = queues.http.post(CONSUME, params={"filter": "tag = red"})
    assert other.json()["code"] == "D5204" and "take another channel" in other.json()["detail"]
    malformed = queues.http.post(CONSUME, params={"filter": "tagged = b"})
    assert malformed.json()["code"] == "D1005" and "expected tag or header.NAME" in malformed.json()["detail"]


def test_bytes_behind_a_closing_call_are_no_error(queues: Served) -> None:
    """An error would have the client publish again."""
    body = b'{"body":"x","encoding":"utf-8"}'
    head = b"POST /v1/queues/jobs/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    answer = queues.raw(head % len(body) + body + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 201 ") and answer.count(b"HTTP/1.1") == 1
    assert queues.http.get("/v1/queues/jobs").json()["messages"] == 1


def test_messages_are_received_and_acknowledged_by_calls(queues: Served) -> None:
    _put(queues, {"body": "one", "encoding": "utf-8", "key": "k"}, {"body": "two", "encoding": "utf-8"})
    got = _post(queues, f"{CHANNEL}/receive", count=5, invisible_s=100)["messages"]
    assert [base64.b64decode(each["body"]) for each in got] == [b"one", b"two"]
    assert (got[0]["key"], got[0]["attempts"]) == ("k", 1)
    handles = [each["handle"] for each in got]
    assert _post(queues, f"{CHANNEL}/invisible", handle=handles[1], invisible_s=0) == {"invisible_s": 0.0}
    assert _post(queues, f"{CHANNEL}/ack", handles=handles) == {"refused": [handles[1]]}
    (again,) = _post(queues, f"{CHANNEL}/receive")["messages"]
    assert (again["id"], again["attempts"]) == (got[1]["id"], 2)
    assert _post(queues, f"{CHANNEL}/receive", wait_s=0.1)["messages"] == []


@pytest.mark.parametrize(
    ("call", "body", "code"),
    [
        ("receive", {"count": 33}, "D1005"),
        ("receive", {"wait_s": 21}, "D1005"),
        ("receive", {"colour": "red"}, "D1005"),
        ("ack", {"handles": ["x"]}, "D1005"),
        ("invisible", {"handle": "0000010000000001-9"}, "D5206"),
        ("invisible", {"handle": "x"}, "D1005"),
    ],
)
def test_a_malformed_call_about_received_messages_is_refused(
    queues: Served, call: str, body: dict[str, object], code: str
) -> None:
    _put(queues, {"body": "one", "encoding": "utf-8"})
    _post(queues, f"{CHANNEL}/receive", count=1)
    answer = queues.http.post(f"{CHANNEL}/{call}", json=body)
    assert answer.status_code >= 400
    assert answer.json()["code"] == code, answer.text


def test_a_queue_is_expanded_and_looked_at(queues: Served) -> None:
    made = queues.http.post("/v1/queues", json={"name": "orders", "options": {"partitions": 2, "order": "strict"}})
    assert made.status_code == 201, made.text
    found = _post(queues, "/v1/queues/orders/expand", partitions=4)
    assert (len(found["added"]), found["version"]) == (2, 2)
    table = queues.http.get("/v1/queues/orders/route").json()
    assert [table["routes"][0]["low"], table["routes"][-1]["high"]] == [0, 1024]
    assert len({route["partition"] for route in table["routes"]}) == 4
    channel = "/v1/queues/orders/channels/billing"
    with queues.http.stream("POST", f"{channel}/consume", params={"exclusive": "1"}) as answer:
        lines = _lines(answer)
        next(lines)
        _post(queues, "/v1/queues/orders/messages", body="x", encoding="utf-8", key="k")
        assert next(lines)["body"] == "x"
        (consumer,) = queues.http.get(f"{channel}/consumers").json()["consumers"]
        assert len(consumer["partitions"]) == 4
        locks = queues.http.get(f"{channel}/locks").json()
        assert locks["exclusive"] is True
        assert {lock["consumer"] for lock in locks["locks"]} == {consumer["consumer"]}
    refused = queues.http.post("/v1/queues/orders/expand", json={"partitions": 1})
    assert refused.json()["code"] == "D1005"
    assert queues.http.post(f"{channel}/consume", params={"exclusive": "2"}).json()["code"] == "D1005"


def test_several_members_that_share_a_store_are_named_with_commas(queues: Served) -> None:
    peers = [str(Identity.generate().peer_id) for _ in range(17)]
    answer = queues.http.get("/v1/queues/jobs", params={"peer": ",".join(peers[:2])})
    assert answer.json()["detail"] == f"no address of {peers[0]} or {peers[1]} is known"
    for wrong, code in ((f"{peers[0]},", "D4004"), (f"{peers[0]},bob", "D4004"), (",".join(peers), "D1005")):
        answer = queues.http.get("/v1/queues/jobs", params={"peer": wrong})
        assert answer.json()["code"] == code, answer.text


async def _misspelt_calls(client: Client) -> None:
    with pytest.raises(TypeError, match="relm"):
        await client.queues.empty_all("jobs", relm="team")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="order_key"):
        await client.queues.publish("jobs", b"x", order_key="k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="channel"):
        await client.queues.empty("jobs")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_a_misspelt_option_of_the_client_is_refused(queues: Served) -> None:
    async def run() -> None:
        async with Client.open(queues.socket) as client:
            message_id = await client.queues.publish(
                "jobs", b"x", key="k", tags=["a"], delay_s=0.0, headers={"h": b"\0"}
            )
            await _misspelt_calls(client)
            (message,) = await client.queues.peek("jobs")
            assert (message.id, message.body, message.key, message.headers) == (message_id, b"x", "k", {"h": b"\0"})

    trio.run(run)


def test_a_loop_over_a_count_of_messages_ends_and_its_messages_can_be_settled(queues: Served) -> None:
    bodies: list[dict[str, object]] = [{"body": str(number), "encoding": "utf-8"} for number in range(5)]
    _put(queues, *bodies)

    async def run() -> list[bytes]:
        async with Client.open(queues.socket) as client:
            with trio.fail_after(10):
                async with client.queues.consume("jobs", "c", max_in_flight=4, count=3) as consumer:
                    taken = [message async for message in consumer]
                    for message in taken:
                        await message.finish(durable=True)
                async with client.queues.consume("jobs", "c", count=2) as consumer:
                    async for message in consumer:  # each is finished before the next one comes
                        await message.finish()
                        taken.append(message)
            return [message.body for message in taken]

    assert sorted(trio.run(run)) == [b"0", b"1", b"2", b"3", b"4"]  # the fourth was the first consumer's for a moment
