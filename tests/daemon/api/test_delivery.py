"""Reliable messages through the control API: two nodes in memory, one behind the API, the other one driven directly."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import trio

from dep2p.delivery.service import ReliableDelivery
from dep2p.errors import HandlerError
from dep2p.identity import Identity
from dep2p.node.node import Node
from dep2p.protocols.messaging.incoming import Notification
from dep2p.realm.credentials import Realm, RealmChoice
from dep2p.testing import MemoryNetwork
from dep2p.types import PeerId
from tests.daemon.api.harness import Served

AWAY = Identity.generate().peer_id


@dataclass
class Pair:
    """The node behind the API, and another one."""

    served: Served
    ours: Node
    other: Node

    def post(self, path: str, status: int, **body: object) -> dict[str, Any]:
        answer = self.served.http.post(f"/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
        return cast(dict[str, Any], answer.json())

    def send(self, status: int, **body: object) -> dict[str, Any]:
        whole = {"peer": self.other.peer_id, "name": "orders", "data": "hi", "encoding": "utf-8", **body}
        return self.post("deliveries", status, **whole)

    def waiting(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.served.http.get("/v1/outbox").json()["items"])


@pytest.fixture
def pair(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
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

            def in_team(realm: RealmChoice = None) -> ReliableDelivery:
                return ours.delivery(realm or "team")

            await ours.join_realm(Realm.from_psk(bytes(range(32)), "second"))
            monkeypatch.setattr(served.node, "realms", ours.realms)
            monkeypatch.setattr(served.node, "realm", ours.realm)
            monkeypatch.setattr(served.node, "delivery", in_team)
            nodes.extend((ours, other))
            stop.append(trio.Event())
            task_status.started()
            await stop[0].wait()

    served.call(served.control.nursery.start, run)
    try:
        yield Pair(served, *nodes)
    finally:
        served.do(stop[0].set)


def _handle(pair: Pair) -> list[bytes]:
    got: list[bytes] = []

    async def take(notification: Notification) -> None:
        if notification.body == b"bad":
            raise HandlerError("not this one")
        got.append(notification.body)

    def register() -> None:
        pair.other.on_notify("orders")(take)

    pair.served.do(register)
    return got


def test_a_message_is_taken_or_the_call_says_why_not(pair: Pair) -> None:
    got = _handle(pair)
    answer = pair.send(202, wait_s=10)
    assert answer["state"] == "acknowledged" and answer["id"] == f"{pair.other.peer_id}:1" and got == [b"hi"]
    refused = pair.send(502, data="bad", wait_s=10)
    assert refused["code"] == "D5401" and "not this one" in str(refused)
    assert pair.waiting() == [] and got == [b"hi"]


def test_what_waits_is_listed_and_dropped(pair: Pair) -> None:
    for name in ("one", "two", "three"):
        assert pair.send(202, peer=AWAY, name=name, wait_s=0)["state"] == "created", "0 is the default, and says so"
    items = pair.waiting()
    assert [(item["name"], item["peer"], item["size_bytes"] > 1) for item in items] == [
        ("one", AWAY, True),
        ("two", AWAY, True),
        ("three", AWAY, True),
    ]
    assert pair.post("outbox/drop", 200, id=f"{AWAY}:2") == {"dropped": 1}
    assert [item["name"] for item in pair.waiting()] == ["one", "three"]
    assert pair.post("outbox/drop", 200, id=f"{AWAY}:2") == {"dropped": 0}
    assert pair.post("outbox/flush", 200, wait_s=0.01) == {"left": 2}
    assert pair.post("outbox/drop", 200, peer=PeerId(pair.other.peer_id)) == {"dropped": 0}
    pair.post("outbox/drop", 400)
    pair.post("outbox/drop", 400, id=f"{AWAY}:1", all=True)
    assert pair.post("outbox/drop", 200, all=True) == {"dropped": 2}
    assert pair.waiting() == []


def test_states_are_reported_in_order_to_who_follows(pair: Pair) -> None:
    _handle(pair)
    with pair.served.http.stream("GET", "/v1/deliveries") as answer:
        sent = pair.send(202, wait_s=10)
        states: list[str] = []
        for line in answer.iter_lines():
            fields = json.loads(line)
            if fields.get("id") != sent["id"]:
                continue
            states.append(fields["state"])
            if states[-1] == "acknowledged":
                break
    assert states[:2] == ["created", "sending"] and states[-1] == "acknowledged"


def test_bad_input_is_refused_and_nothing_is_kept(pair: Pair) -> None:
    pair.send(400, peer="nobody")
    pair.send(400, when_full="perhaps")
    pair.send(400, wait_s=-1)
    pair.send(400, surprise=1)
    assert pair.waiting() == []


def test_a_reliable_publish_names_who_is_missing(pair: Pair) -> None:
    topic = "topics/news/messages"
    options: dict[str, object] = {"data": "x", "encoding": "utf-8", "reliable": True, "realm": "team"}
    options["critical_peers"] = [AWAY]
    answer = pair.post(topic, 202, **options)
    assert answer["acknowledged_by"] == [] and list(answer["missing"]) == [AWAY]
    assert [item["topic"] for item in pair.waiting()] == ["news"]
    pair.post(topic, 400, **{**options, "wait_for": "some"})
    for ttl_s in (0, -1, 31 * 86_400, "5"):
        pair.post(topic, 400, **{**options, "ttl_s": ttl_s})
    pair.post(topic, 400, data="x", encoding="utf-8", realm="team", ttl_s=5)
    assert pair.post(topic, 504, **{**options, "ttl_s": 0.1, "wait_s": 10})["code"] == "D5402"
    pair.post(topic, 400, **{**options, "critical_peers": ["nobody"]})
