"""Publish/subscribe, as a control client without the library sees it."""

import base64
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dep2p.control_api.encoding import encode_item
from dep2p.daemon.bounds import ControlBounds
from dep2p.gossipsub.topic_types import OnNoPeers
from dep2p.protocols.realm.statement import TopicGroup
from tests.daemon.api.fake_node import ANN, BOB
from tests.daemon.api.fake_pubsub import FakePubSub
from tests.daemon.api.harness import Served, serving
from tests.daemon.api.test_subscriptions import framed, lines

MESSAGES = "/v1/topics/chat/messages"
ITEMS = {"content-type": "application/octet-stream"}


def problem(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code >= 400 and answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert found["status"] == answer.status_code
    return found


def text(data: str) -> dict[str, str]:
    return {"data": data, "encoding": "utf-8"}


def published(served: Served) -> list[tuple[str, bytes, OnNoPeers]]:
    return served.node.pubsub().published


def test_a_message_is_published_and_the_answer_says_who_took_it(served: Served) -> None:
    answer = served.http.post(MESSAGES, json=text("hi"))
    assert answer.status_code == 202
    assert answer.json() == {
        "id": "0001",
        "sent_to": [ANN, BOB],
        "queued": False,
        "dropped": [],
        "local_subscriptions": 0,
        "seqno": None,
    }
    assert published(served) == [("chat", b"hi", "error")]


def test_a_topic_may_have_any_name_that_the_network_takes(served: Served) -> None:
    body = b'{"data":"aGk="}'
    for written, name in (("a%2Fb%20%C3%A9", "a/b é"), ("x%2Fmessages", "x/messages"), ("..", ".."), ("%25", "%")):
        head = f"POST /v1/topics/{written}/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        assert b" 202 " in served.raw(head.encode() + b"connection: close\r\n\r\n" + body)
        assert published(served)[-1] == (name, b"hi", "error")
    assert served.http.get("/v1/topics/x%2Fmessages").json()["topic"] == "x/messages"
    for wrong in ("a/b", "%FF", "x" * 1_025):
        assert served.http.post(f"/v1/topics/{wrong}/messages", json=text("hi")).status_code in (400, 404)


def test_what_cannot_be_published_is_refused_with_its_code(served: Served) -> None:
    large = base64.b64encode(bytes(1_048_577)).decode()
    assert problem(served.http.post("/v1/topics/empty/messages", json=text("hi")))["code"] == "D5013"
    assert problem(served.http.post(MESSAGES, json={"data": large}))["code"] == "D5004"
    limited = problem(served.http.post(MESSAGES, json=text("too much")))
    assert (limited["code"], limited["retry_after_ms"]) == ("D5005", 250)
    assert problem(served.http.post(MESSAGES, json=text("hi") | {"on_no_peers": "wait"}))["field"] == "on_no_peers"
    assert problem(served.http.post(MESSAGES, json=text("hi") | {"realm": "nowhere"}))["code"] == "D4003"
    assert problem(served.http.post(MESSAGES, json=text("hi") | {"public": True}))["code"] == "D4003"
    assert problem(served.http.post(MESSAGES, json=text("x") | {"public": True, "realm": "team"}))["field"] == "public"
    assert published(served) == []


def test_without_peers_a_message_waits_or_goes_to_no_one_when_it_is_reported_to(served: Served) -> None:
    queued = served.http.post("/v1/topics/empty/messages", json=text("hi") | {"on_no_peers": "queue"}).json()
    gone = served.http.post("/v1/topics/empty/messages", json=text("hi") | {"on_no_peers": "ok"}).json()
    assert (queued["queued"], queued["sent_to"], gone["queued"], gone["sent_to"]) == (True, [], False, [])


def test_a_body_of_items_is_published_in_order(served: Served) -> None:
    items = [b"%d" % number for number in range(2_000)] + [b""]
    body = framed(*items)

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), 777):
            yield body[start : start + 777]

    answer = served.http.post(MESSAGES, content=pieces(), headers=ITEMS)
    assert answer.status_code == 202
    sizes = sum(map(len, items))
    assert answer.json() == {
        "messages": 2_001,
        "bytes": sizes,
        "queued": 0,
        "dropped": 0,
        "peers": 2,
        "local_subscriptions": 0,
    }
    assert [data for _, data, _ in published(served)] == items


def test_a_body_of_json_lines_is_published_in_order(served: Served) -> None:
    body = "\n".join(json.dumps(text(f"é{number}")) for number in range(50))
    url = "/v1/topics/empty/messages?on_no_peers=queue&realm=team"
    answer = served.http.post(url, content=body.encode(), headers={"content-type": "application/x-ndjson"}).json()
    assert (answer["messages"], answer["queued"], answer["peers"]) == (50, 50, 0)
    assert [data.decode() for _, data, _ in published(served)] == [f"é{number}" for number in range(50)]


def test_a_body_that_fails_says_how_far_it_came(served: Served) -> None:
    failed = problem(served.http.post(MESSAGES, content=framed(b"one", b"too much", b"two"), headers=ITEMS))
    assert (failed["code"], failed["published"]) == ("D5005", 1)
    assert "1 messages before it were published" in failed["detail"]
    for content, code in (
        (framed(b"one")[:-1], "D6003"),
        (framed(bytes(1_048_577)), "D5004"),
        (b"\xff\xff\xff\xff", "D6001"),
    ):
        assert problem(served.http.post(MESSAGES, content=content, headers=ITEMS))["code"] == code
    for line in (b"{", b"[]", b'{"data":"?"}', b'{"data":"","colour":1}'):
        kind = {"content-type": "application/x-ndjson"}
        assert problem(served.http.post(MESSAGES, content=line, headers=kind))["code"] == "D1005"


def test_a_body_is_held_back_while_the_node_cannot_publish(served: Served) -> None:
    def hold() -> FakePubSub:
        pubsub = served.node.pubsub()
        pubsub.let_go = type(pubsub.let_go)()
        return pubsub

    pubsub = served.do(hold)
    made = 0

    def pieces() -> Iterator[bytes]:
        nonlocal made
        for _ in range(64):
            made += 1
            if made == 60:
                served.do(pubsub.let_go.set)
            yield framed(bytes(262_144))

    # 15 MB are far more than the kernel's buffers and the daemon's inbox: without the node the body does not pass.
    answers: list[int] = []
    thread = threading.Thread(
        target=lambda: answers.append(served.http.post(MESSAGES, content=pieces(), headers=ITEMS).json()["messages"])
    )
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and made < 60
    served.do(pubsub.let_go.set)
    thread.join(10)
    assert answers == [64]


def test_a_client_that_dies_in_the_middle_leaves_what_it_published_and_nothing_else(served: Served) -> None:
    head = f"POST {MESSAGES} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n"
    head += f"content-type: {ITEMS['content-type']}\r\n\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(served.socket))
        client.sendall(head.encode() + framed(b"one", b"two") + b"\x00\x00\x00\x05thr")
        served.wait_until(lambda: len(published(served)) == 2, "what came whole is published")
        assert served.control.lifecycle.in_flight == 1
    served.wait_until(lambda: served.control.lifecycle.in_flight == 0, "the call is over")
    assert [data for _, data, _ in published(served)] == [b"one", b"two"]


@pytest.mark.parametrize("part", [(b"\x00\x00\x00\x05thr", "octet-stream"), (b'{"data":', "x-ndjson")])
def test_the_rest_of_a_message_has_a_time_limit_but_the_next_one_has_none(part: tuple[bytes, str]) -> None:
    with serving(ControlBounds(body_timeout_s=0.3)) as served:

        def pieces() -> Iterator[bytes]:
            threading.Event().wait(0.6)
            yield part[0]
            threading.Event().wait(1)

        headers = {"content-type": f"application/{part[1]}"}
        assert problem(served.http.post(MESSAGES, content=pieces(), headers=headers))["code"] == "D1009"


def test_messages_reach_every_reader(served: Served) -> None:
    pubsub = served.node.pubsub()
    with lines(served, "GET", MESSAGES) as one, lines(served, "GET", f"{MESSAGES}?realm=team&buffer=5") as two:
        served.do(pubsub.deliver, b"\xff\x00", 7)
        for reader in (one, two):
            assert next(reader) == {
                "topic": "chat",
                "sender": ANN,
                "seqno": 7,
                "id": "0007",
                "received_from": BOB,
                "received_at_s": 1_700_000_000.5,
                "data": "/wA=",
                "encoding": "base64",
            }
        assert served.http.get("/v1/status").json()["subscriptions"]["topics"] == 2
    served.wait_until(lambda: not pubsub.subscriptions, "the subscriptions end with their readers")


def test_headers_come_in_and_go_out(served: Served) -> None:
    pubsub = served.node.pubsub()
    headers = {"trace": "42", "raw": {"data": "/w==", "encoding": "base64"}, "many": ["a", 3, True]}
    plain = {"trace": "42", "raw": b"\xff", "many": ["a", 3, True]}
    assert served.http.post(MESSAGES, json={"data": "eA==", "headers": headers}).status_code == 202
    lines_in = b'{"data": "eA=="}\n{"data": "eQ==", "headers": {"own": 1}}\n'
    kind = {"content-type": "application/x-ndjson"}
    params = {"headers": json.dumps(headers)}
    assert served.http.post(MESSAGES, content=lines_in, headers=kind, params=params).status_code == 202
    items = {"content-type": "application/octet-stream"}
    content = encode_item(b"1") + encode_item(b"2")
    assert served.http.post(MESSAGES, content=content, headers=items, params=params).status_code == 202
    assert pubsub.published_headers == [plain, plain, {"own": 1}, plain, plain]
    with lines(served, "GET", MESSAGES) as reader:
        served.do(pubsub.deliver, b"x", 1, "chat", plain)
        line = next(reader)
        assert (line["headers"], line["received_at_s"]) == (headers, 1_700_000_000.5)


@pytest.mark.parametrize(
    "headers", [{"a": 1.5}, {"a": None}, {"a": {"b": 1}}, {"a": [["b"]]}, {"a": "x" * 20_000}, {"": 1}, "text", [1]]
)
def test_headers_that_are_not_allowed_name_their_field(served: Served, headers: object) -> None:
    answer = served.http.post(MESSAGES, json={"data": "eA==", "headers": headers})
    assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (400, "D1005", "headers")
    assert served.node.pubsub().published == []


def test_a_pattern_is_read_and_says_when_more_topics_match(served: Served) -> None:
    pubsub = served.node.pubsub()
    with lines(served, "GET", "/v1/topics/sensors.%3E/messages") as reader:
        served.do(pubsub.deliver, b"x", 1, "sensors.hall")
        assert next(reader)["topic"] == "sensors.hall"
        for subscription in list(pubsub.subscriptions):
            served.do(subscription.put_topics_full, 7, 128)
        assert next(reader) == {"topics_not_joined": 7, "topics_max": 128}


@pytest.mark.parametrize("topic", ["a.*", "%3E", "a.%3E", "a.%3E.b"])
def test_nothing_is_published_to_a_pattern(served: Served, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages"
    for answer in (
        served.http.post(path, json=text("x")),
        served.http.post(path, content=encode_item(b"x"), headers=ITEMS),
        served.http.post(path, json=text("x") | {"reliable": True}),
    ):
        assert (answer.status_code, problem(answer)["code"], problem(answer)["field"]) == (400, "D1005", "topic")
    assert not published(served)


def test_a_malformed_pattern_is_refused_to_readers(served: Served) -> None:
    answer = served.http.get("/v1/topics/a.%3E.b/messages")
    assert "must be the last token" in problem(answer)["detail"]


def flood(pubsub: FakePubSub) -> None:
    for number in range(200):
        pubsub.deliver(b"x" * 20_000, number)


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_a_slow_reader_learns_what_it_missed(served: Served, policy: str) -> None:
    pubsub = served.node.pubsub()
    with lines(served, "GET", f"{MESSAGES}?buffer=10&on_full={policy}") as reader:
        served.do(flood, pubsub)  # in one step: nobody reads meanwhile
        first = next(reader)
        if policy == "drop_oldest":
            assert first == {"lagged": 190}
            assert [next(reader)["seqno"] for _ in range(10)] == list(range(190, 200))
        else:
            assert [first["seqno"], *(next(reader)["seqno"] for _ in range(9))] == list(range(10))
            assert next(reader) == {"lagged": 190}
        assert served.control.counts["lagged_topics"] == 190


def test_a_reader_that_pauses_the_peers_misses_nothing(served: Served) -> None:
    pubsub = served.node.pubsub()
    with lines(served, "GET", f"{MESSAGES}?buffer=10&on_full=pause") as reader:
        served.do(flood, pubsub)
        assert [next(reader)["seqno"] for _ in range(200)] == list(range(200))
        served.wait_until(lambda: not pubsub.held, "the peers are let go")


def test_readers_hear_why_it_ended(served: Served) -> None:
    with lines(served, "GET", MESSAGES) as reader:
        assert served.http.delete("/v1/realms/team").status_code == 200
        assert next(reader)["error"]["code"] == "D4003"
        assert list(reader) == []


def test_readers_hear_of_the_daemons_end(served: Served) -> None:
    with lines(served, "GET", MESSAGES) as reader:
        served.do(served.node.pubsub().deliver, b"last", 1)
        served.do(served.control.subscriptions.end_all)
        assert next(reader)["seqno"] == 1
        assert next(reader)["error"]["code"] == "D3006"


def test_a_reader_in_a_group_is_one_of_the_node_s_readers(served: Served) -> None:
    pubsub = served.node.pubsub()
    with lines(served, "GET", f"{MESSAGES}?group=workers"):
        assert [reader.group for reader in pubsub.subscriptions] == [TopicGroup("chat", "workers")]


def test_readers_that_cannot_be_served_get_a_proper_answer(served: Served) -> None:
    for query, code in (
        ("realm=nowhere", "D4003"),
        ("public=1", "D4003"),
        ("public=2", "D1005"),
        ("buffer=0", "D1005"),
        ("buffer=65537", "D1005"),
        ("on_full=explode", "D1005"),
        ("group=", "D1005"),
        (f"group={'x' * 65}", "D1005"),
        ("group=workers&public=1", "D1005"),
        ("color=red", "D1005"),
    ):
        assert problem(served.http.get(f"{MESSAGES}?{query}"))["code"] == code
    served.node.topics_max = 0
    assert problem(served.http.get(MESSAGES))["code"] == "D5014"
    assert served.control.subscriptions.by_kind() == {}


def test_a_topic_that_no_one_reads_any_more_is_left_after_a_grace() -> None:
    with serving(ControlBounds(topic_idle_timeout_s=0.5)) as served:
        pubsub = served.node.pubsub()
        for _ in range(3):
            with lines(served, "GET", MESSAGES):
                pass
        table = served.control.topics
        served.wait_until(lambda: table.parked_count == pubsub.handles["chat"] == 1, "one handle is kept for all")
        served.wait_until(lambda: not pubsub.handles["chat"], "it is left")
        assert table.parked_count == 0


def test_topics_in_their_grace_make_space_for_others(served: Served) -> None:
    served.node.topics_max = 1
    with lines(served, "GET", MESSAGES):
        pass
    served.wait_until(lambda: served.control.topics.parked_count == 1, "it is kept")
    with lines(served, "GET", "/v1/topics/other/messages"):
        topics = served.http.get("/v1/topics").json()["topics"]
        assert [each["topic"] for each in topics] == ["other"]


def test_topics_are_listed_with_who_is_in_them(served: Served) -> None:
    realm_id = served.node.realm("team").realm_id
    with lines(served, "GET", MESSAGES):
        assert served.http.get("/v1/topics").json()["topics"] == [
            {
                "topic": "chat",
                "realm": "team",
                "realm_id": realm_id,
                "peers": 2,
                "mesh": 1,
                "subscriptions": 1,
                "buffered_items": 0,
                "by_pattern": False,
            }
        ]
        assert served.http.get("/v1/topics/chat").json() == {
            "topic": "chat",
            "realm_id": realm_id,
            "joined": True,
            "peers": [ANN, BOB],
            "mesh": [ANN],
            "scores": {ANN: 1.25},
        }
    assert served.http.get("/v1/topics/others").json()["joined"] is False
    assert problem(served.http.get("/v1/topics/empty"))["code"] == "D5010"


def test_a_draining_daemon_publishes_nothing_new(served: Served) -> None:
    served.http.post("/v1/drain")
    assert problem(served.http.post(MESSAGES, json=text("hi")))["code"] == "D3006"
    assert problem(served.http.post(MESSAGES, content=framed(b"hi"), headers=ITEMS))["code"] == "D3006"
