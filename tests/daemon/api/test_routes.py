"""Each route of the control API: what it answers, and which problem it gives for what is wrong."""

import base64
import json
import stat
import threading
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from dep2p.daemon.api.routes.peers import limited_peers
from dep2p.error_codes import ERRORS
from dep2p.host.interface import CircuitUse
from dep2p.realm.credentials import Realm
from tests.daemon.api.fake_node import ADDR, ANN, BOB, FAILURES, ME, STRANGER, FakeConnection
from tests.daemon.api.harness import TOKEN, Served, serving

DATA = {"data": base64.b64encode(b"abc").decode(), "encoding": "base64"}


def problem(answer: Any, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["code"] == code, body
    assert body["status"] == status
    assert body["type"] == f"urn:dep2p:error:{code}"
    assert body["title"] == ERRORS[code].title
    assert body["detail"] and body["try"]
    return body


def test_health_and_readiness(served: Served) -> None:
    assert served.http.get("/healthz").json() == {"status": "ok", "state": "running", "listening": True}
    assert served.http.get("/readyz").json() == {"ready": True, "reasons": []}


def test_status_has_what_people_look_for(served: Served) -> None:
    served.http.post("/v1/peers", json={"addr": ADDR})
    status = served.http.get("/v1/status").json()
    assert status["peer_id"] == ME
    assert status["peers"] == 1
    assert status["connections"] == {"inbound": 0, "outbound": 1}
    assert [realm["name"] for realm in status["realms"]] == ["team"]
    assert status["state"] == "running"
    assert status["listen"] and status["pid"] and status["version"]
    assert (status["queues"]["shared"], status["queues"]["role"]) == (False, "owner")


def test_peers_and_status_say_which_relay_a_peer_is_reached_through_and_what_is_left_of_it(served: Served) -> None:
    for peer in (ANN, BOB):
        served.http.post("/v1/peers", json={"peer": peer})
    limited, wide = served.node.host.open[ANN], served.node.host.open[BOB]
    limited.is_limited, limited.circuit = True, CircuitUse(ME, True, data_left_bytes=1_000, time_left_s=12.345)
    wide.circuit = CircuitUse(ME, False)
    circuit = {"relay": ME, "limited": True, "data_left_bytes": 1_000, "time_left_s": 12.3}
    peers = served.http.get("/v1/peers").json()["peers"]
    shown = {peer["peer"]: peer["connections"][0]["circuit"] for peer in peers}
    assert shown == {
        ANN: circuit,
        BOB: {"relay": ME, "limited": False, "data_left_bytes": None, "time_left_s": None},
    }
    served.node.unreached = ("the bootstrap peer ann cannot be reached: no route",)
    assert served.http.get("/v1/status").json()["problems"] == ["the bootstrap peer ann cannot be reached: no route"]
    assert served.http.get("/v1/status").json()["limited"] == [{"peer": ANN, "circuit": circuit}]


async def test_a_peer_with_a_direct_connection_too_is_not_reached_over_its_limited_relay_only() -> None:
    direct, relayed, newer = (FakeConnection(ANN, number) for number in range(3))
    for connection, left in ((relayed, 1), (newer, 2)):
        connection.is_limited, connection.circuit = True, CircuitUse(BOB, True, data_left_bytes=left)
    assert limited_peers([direct, relayed]) == limited_peers([relayed, direct]) == limited_peers([direct]) == []
    relayed.is_superseded = True
    (found,) = limited_peers([newer, relayed])
    assert found.circuit.data_left_bytes == 2, "of the connection in use"


def test_configuration_has_origins(served: Served) -> None:
    answer = served.http.get("/v1/config").json()
    assert answer["origins"]["node.data_dir"] == "flag"
    assert answer["origins"]["node.listen"] == "default"
    assert answer["values"]["limits"]["drain_timeout_s"] == 2.0


def test_limits_of_node_and_api(served: Served) -> None:
    answer = served.http.get("/v1/limits").json()
    assert answer["node"]["message_bytes_max"] == 1_048_576
    assert answer["control"]["connections_max"] == 256


def test_the_socket_is_for_its_owner_alone(served: Served) -> None:
    assert stat.S_IMODE(served.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(served.socket.parent.stat().st_mode) == 0o700


def test_peers_connect_list_ping_disconnect(served: Served) -> None:
    joined = served.http.post("/v1/peers", json={"addr": ADDR, "timeout_s": 3}).json()
    assert joined == {"peer": ANN, "addr": ADDR, "direction": "outbound", "realms": ["team"]}
    assert served.http.post("/v1/peers", json={"peer": BOB}).status_code == 200
    peers = served.http.get("/v1/peers").json()["peers"]
    assert [(peer["peer"], peer["realms"]) for peer in peers] == [(ANN, ["team"]), (BOB, [])]
    assert peers[0]["connections"][0]["rtt_ms"] == 12.5
    assert peers[0]["connections"][0]["circuit"] is None
    assert served.http.post(f"/v1/peers/{ANN}/ping", json={"count": 3}).json() == {
        "peer": ANN,
        "rtts_ms": [2.0, 2.0, 2.0],
        "lost": 0,
    }
    assert served.http.post(f"/v1/peers/{BOB}/ping").json()["lost"] == 1
    assert served.http.delete(f"/v1/peers/{ANN}").json()["disconnected"] is True
    problem(served.http.delete(f"/v1/peers/{ANN}"), 404, "D4005")


def test_peers_wrong_input(served: Served) -> None:
    problem(served.http.post("/v1/peers", json={}), 400, "D1005")
    problem(served.http.post("/v1/peers", json={"addr": ADDR, "peer": ANN}), 400, "D1005")
    problem(served.http.post("/v1/peers", json={"peer": "nobody"}), 400, "D4004")
    problem(served.http.post("/v1/peers", json={"addr": "nowhere"}), 400, "D4004")
    problem(served.http.post("/v1/peers", json={"peer": STRANGER}), 404, "D4001")
    problem(served.http.post(f"/v1/peers/{STRANGER}/ping"), 404, "D4001")
    problem(served.http.post(f"/v1/peers/{ANN}/ping", json={"count": 0}), 400, "D1005")


def test_realms_join_list_members_invite_leave(served: Served) -> None:
    realm = Realm.generate("second one")
    answer = served.http.post("/v1/realms", json={"invite": realm.invite([ADDR])})
    assert answer.status_code == 201
    assert answer.json()["name"] == "second one"
    assert served.http.post("/v1/realms", json={"invite": realm.invite([])}).status_code == 200, "joining is idempotent"
    files = list(served.config.realms_dir.iterdir())
    assert [Realm.from_psk_file(file) for file in files] == [realm]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)

    text = base64.b64encode(Realm.generate("third").to_file_bytes()).decode()
    assert served.http.post("/v1/realms", json={"realm": text}).status_code == 201
    assert [each["name"] for each in served.http.get("/v1/realms").json()["realms"]] == ["team", "second one", "third"]

    members = served.http.get("/v1/realms/team/members").json()["members"]
    assert [(member["peer"], member["state"]) for member in members][1] == (ANN, "up")
    invite = served.http.post("/v1/realms/second one/invite", json={"addrs": [ADDR]}).json()["invite"]
    assert Realm.from_invite(invite).realm == realm
    assert Realm.from_invite(invite).addrs == (ADDR,)

    assert served.http.delete(f"/v1/realms/{realm.realm_id}").json()["left"] == "second one"
    assert len(list(served.config.realms_dir.iterdir())) == 1
    problem(served.http.delete(f"/v1/realms/{realm.realm_id}"), 404, "D4003")


def test_realms_wrong_input(served: Served) -> None:
    problem(served.http.post("/v1/realms", json={"invite": "dep2p-invite-v1:nonsense"}), 400, "D2002")
    problem(served.http.post("/v1/realms", json={"realm": "%%%"}), 400, "D1005")
    problem(served.http.post("/v1/realms", json={"realm": base64.b64encode(b"{}").decode()}), 400, "D2002")
    problem(served.http.post("/v1/realms", json={"invite": Realm.generate("team").invite([])}), 409, "D2003")
    problem(served.http.get("/v1/realms/nowhere/members"), 404, "D4003")


def test_a_realm_name_cannot_leave_the_directory(served: Served) -> None:
    served.http.post("/v1/realms", json={"invite": Realm.generate("../../evil").invite([])})
    assert [path.parent for path in served.config.data_dir.rglob("*.realm")] == [served.config.realms_dir]


def test_too_many_realms() -> None:
    with serving(settings={"limits.realms_max": 1}) as served:
        answer = served.http.post("/v1/realms", json={"invite": Realm.generate("one more").invite([])})
        problem(answer, 409, "D2004")


def test_request_and_its_answer(served: Served) -> None:
    answer = served.http.post("/v1/requests", json={"peer": ANN, "name": "greet", "timeout_s": 2, **DATA})
    body = answer.json()
    assert base64.b64decode(body["data"]) == b"cba"
    assert body["peer"] == ANN and body["elapsed_ms"] >= 0
    text = served.http.post("/v1/requests", json={"peer": ANN, "name": "x", "data": "häl", "encoding": "utf-8"})
    assert base64.b64decode(text.json()["data"]) == "häl".encode()[::-1]


def test_request_headers_reach_the_node(served: Served) -> None:
    headers = {"a": 1, "b": "x", "c": {"data": "AAE=", "encoding": "base64"}, "d": [True, "y"]}
    answer = served.http.post("/v1/requests", json={"peer": ANN, "name": "headers", "headers": headers, **DATA})
    assert (
        base64.b64decode(answer.json()["data"]) == b"[('a', 1), ('b', 'x'), ('c', b'\\x00\\x01'), ('d', [True, 'y'])]"
    )


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("timeout", 504, "D5001"),
        ("handler", 502, "D5002"),
        ("no-handler", 404, "D5003"),
        ("too-large", 413, "D5004"),
        ("rate", 429, "D5005"),
        ("overloaded", 503, "D5006"),
        ("protocol", 502, "D5007"),
        ("remote", 502, "D5008"),
        ("closed", 410, "D6001"),
    ],
)
def test_each_failure_of_a_request_has_its_code(served: Served, name: str, status: int, code: str) -> None:
    body = problem(served.http.post("/v1/requests", json={"peer": ANN, "name": name, **DATA}), status, code)
    assert body["detail"] == str(FAILURES[name])
    if name == "rate":
        assert body["retry_after_ms"] == 250


def test_peers_that_cannot_be_asked(served: Served) -> None:
    problem(served.http.post("/v1/requests", json={"peer": STRANGER, "name": "x", **DATA}), 403, "D4002")
    problem(served.http.post("/v1/requests", json={"peer": ME, "name": "x", **DATA}), 404, "D4001")
    wrong_realm = {"peer": ANN, "name": "x", "realm": "other", **DATA}
    problem(served.http.post("/v1/requests", json=wrong_realm), 404, "D4003")


def test_an_unforeseen_error_is_an_internal_one_without_details(served: Served) -> None:
    body = problem(served.http.post("/v1/requests", json={"peer": ANN, "name": "bug", **DATA}), 500, "D9001")
    assert "secret" not in json.dumps(body)


def test_broadcast_has_a_result_for_each_member_that_is_up(served: Served) -> None:
    asked = {"peer": "*", "name": "x", "idempotent": True, **DATA}
    results = served.http.post("/v1/requests", json=asked).json()["results"]
    assert served.node.messaging().broadcast_idempotent == [True]
    assert [result["peer"] for result in results] == [ANN, BOB]
    assert base64.b64decode(results[0]["data"]) == b"cba"
    assert results[1]["error"]["code"] == "D5001"
    told = served.http.post("/v1/notifies", json={"peer": "*", "name": "x", **DATA})
    assert told.status_code == 202
    assert told.json()["results"][1]["error"]["code"] == "D5006"


def test_notify(served: Served) -> None:
    assert served.http.post("/v1/notifies", json={"peer": ANN, "name": "seen", **DATA}).status_code == 202
    assert served.node.messaging().notified == [(ANN, "seen", b"abc", None)]


@pytest.mark.parametrize(
    "change",
    [
        {"peer": 1},
        {"name": ""},
        {"name": "x" * 256},
        {"name": "a\nb"},
        {"name": "\ud800"},
        {"name": None},
        {"data": "%"},
        {"data": 3},
        {"encoding": "rot13"},
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": True},
        {"timeout_s": 1e9},
        {"timeout_s": 10**400},
        {"idempotent": "yes"},
        {"headers": []},
        {"headers": {"a": {"b": 1}}},
        {"headers": {"a": 1.5}},
        {"headers": {"a": 2**70}},
        {"headers": {"a": [[1]]}},
        {"headers": {"\ud800": 1}},
        {"realm": 5},
        {"tiemout_s": 3},
    ],
)
def test_wrong_fields_are_named(served: Served, change: dict[str, Any]) -> None:
    content = json.dumps({"peer": ANN, "name": "x", **DATA, **change})  # ASCII: httpx itself refuses lone surrogates
    body = problem(served.http.post("/v1/requests", content=content), 400, "D1005")
    assert body["field"] in (*change, "data")
    if "tiemout_s" in change:
        assert 'did you mean "timeout_s"?' in body["detail"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"3", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b"9" * 5_000])
def test_bodies_that_are_no_json_objects(served: Served, body: bytes) -> None:
    problem(served.http.post("/v1/requests", content=body), 400, "D1005")


def test_unknown_paths_methods_and_parameters(served: Served) -> None:
    problem(served.http.get("/v2/status"), 404, "D1006")
    problem(served.http.get("/v1/status/"), 404, "D1006")
    answer = served.http.put("/v1/status")
    problem(answer, 405, "D1006")
    assert "GET" in answer.headers["allow"]
    problem(served.http.get("/v1/events?type=x"), 400, "D1005")
    problem(served.http.get("/v1/events?types=peer_conected"), 400, "D1005")
    problem(served.http.get("/v1/notifies?name=a&name=b"), 400, "D1005")
    problem(served.http.get("/v1/notifies"), 400, "D1005")


def test_tcp_needs_the_token(served: Served) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{served.tcp_port}") as http:
        answer = http.get("/v1/status")
        problem(answer, 401, "D1008")
        assert answer.headers["www-authenticate"] == "Bearer"
        problem(http.get("/v1/status", headers={"authorization": "Bearer wrong"}), 401, "D1008")
        twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")]
        problem(http.get("/v1/status", headers=twice), 401, "D1008")
        assert http.get("/v1/status", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "dep2p"])
def test_tcp_refuses_a_host_that_is_not_this_machine(served: Served, host: str) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{served.tcp_port}") as http:
        headers = {"authorization": f"Bearer {TOKEN}", "host": host}
        problem(http.get("/v1/status", headers=headers), 403, "D1010")
        absolute = {"target": f"http://{host}/v1/status".encode()}
        headers = {"authorization": f"Bearer {TOKEN}"}
        problem(http.get("/v1/status", headers=headers, extensions=absolute), 403, "D1010")
        for name in ("localhost", "LOCALHOST:1", "[::1]:1", "127.0.0.2"):
            assert http.get("/v1/status", headers={**headers, "host": name}).status_code == 200
    assert served.http.get("/v1/status", headers={"host": host}).status_code == 200  # by the Unix socket


def test_draining_finishes_work_and_takes_no_new(served: Served) -> None:
    results: dict[str, Any] = {}

    def post(path: str, body: dict[str, Any]) -> None:
        results[path] = served.http.post(path, json=body)

    asking = threading.Thread(target=post, args=("/v1/requests", {"peer": ANN, "name": "slow", **DATA}))
    asking.start()
    served.call(served.node.hanging.wait)
    draining = threading.Thread(target=post, args=("/v1/drain", {}))
    draining.start()
    served.wait_until(lambda: served.control.lifecycle.state == "draining", "draining")
    assert served.http.get("/readyz").json() == {"ready": False, "reasons": ["the daemon is draining"]}
    assert served.http.get("/healthz").status_code == 200
    problem(served.http.post("/v1/requests", json={"peer": ANN, "name": "x", **DATA}), 503, "D3006")
    problem(served.http.post("/v1/replies", json={"name": "x"}), 503, "D3006")
    problem(served.http.get("/v1/streams?accept=x"), 503, "D3006")
    served.do(served.node.let_go.set)
    asking.join(5)
    draining.join(5)
    assert results["/v1/requests"].status_code == 200
    assert results["/v1/drain"].json() == {"state": "draining", "in_flight": 0}
    assert served.node.drained == 1


def test_shutdown_is_a_wish(served: Served) -> None:
    assert served.http.post("/v1/shutdown").status_code == 202
    assert served.control.lifecycle.stop_requested.is_set()


def test_a_realm_whose_name_holds_slashes_and_percent_signs_can_be_addressed(served: Served) -> None:
    realm = Realm.generate("a/../b %2F c")
    assert served.http.post("/v1/realms", json={"invite": realm.invite([])}).status_code == 201
    path = "/v1/realms/" + quote(realm.name, safe="")
    assert served.http.get(f"{path}/members").json()["realm"] == realm.name
    assert served.http.delete(path).json()["left"] == realm.name


def test_an_address_that_no_one_could_dial_is_not_put_into_an_invite(served: Served) -> None:
    answer = served.http.post("/v1/realms/team/invite", json={"addrs": [ADDR, "example.org:4001"]})
    assert "example.org:4001" in problem(answer, 400, "D1005")["detail"]
