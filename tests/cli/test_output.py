"""Golden text and JSON fields of what the commands print."""

from collections.abc import Callable
from typing import Any

import pytest

from dep2p.errors import HandlerError, RequestTimeoutError
from dep2p.realm.credentials import Realm

ANN = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"
BOB = "12D3KooWLbtq3zyR1sr5LJrvc5rVBsqXLSRPVG3tMQ8g4PPcNaM8"


def test_status_text(cli: Callable[..., Any], fake: Any) -> None:
    done = cli("status")
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "Node      12D3KooW…Hown   up 2h 14m   dep2p 0.1.0\n"
        "Listen    /ip4/127.0.0.1/tcp/4001\n"
        "Peers     1 (1 out, 0 in)      Realms  1      Streams  0\n"
        "\n"
        "REALM  ID         OTHERS  UP\n"
        "team   3f3f3f3f…       3   2\n"
    ).replace("Hown", fake.answers["status"]["peer_id"][-4:])


def test_status_says_who_keeps_queues_that_several_nodes_share(cli: Callable[..., Any], fake: Any) -> None:
    queues: dict[str, Any] = {
        "shared": True,
        "role": "owner",
        "owner": ANN,
        "term": 3,
        "nodes": [ANN, BOB],
        "problem": "",
    }
    fake.answers["status"] = {**fake.answers["status"], "queues": queues}
    assert f"\nQueues    this node keeps them (term 3); standing by: 12D3KooW…{BOB[-4:]}\n" in cli("status").out
    fake.answers["status"] = {**fake.answers["status"], "queues": {**queues, "role": "standby", "owner": BOB}}
    assert f"\nQueues    standing by: 12D3KooW…{BOB[-4:]} keeps them (term 3)\n" in cli("status").out
    nobody = {**queues, "role": "standby", "owner": "", "problem": "the server is away"}
    fake.answers["status"] = {**fake.answers["status"], "queues": nobody}
    assert "\nQueues    no node keeps them just now\nProblem   the server is away\n" in cli("status").out
    fake.answers["status"] = {**fake.answers["status"], "queues": {"shared": False, "role": "owner"}}
    assert "Queues" not in cli("status").out


def test_status_shows_what_strangers_hold_and_that_the_loop_was_blocked(cli: Callable[..., Any], fake: Any) -> None:
    counts = {
        "host_connections_unproven": 3,
        "host_memory_bytes": 3 * 1_048_576,
        "host_memory_bytes_unproven": 2_048,
        "host_resources_ended_connection": 2,
        "host_resources_ended_address_block": 1,
        "host_mux_control_rate_exceeded": 4,
        "host_loop_delay_max_ms": 250,
    }
    fake.answers["status"] = {**fake.answers["status"], "counters": counts}
    shown = cli("status").out
    assert (
        "\nUnproven  3 connections hold 2.0 KiB of 3.0 MiB; ended: 3 for memory or number, 4 for their rate\n" in shown
    )
    assert "\nLoop      blocked for up to 250 ms in the last minute\n" in shown
    counts.update({name: 0 for name in counts} | {"host_loop_delay_max_ms": 99})
    shown = cli("status").out
    assert "Unproven" not in shown
    assert "Loop" not in shown


def test_status_shows_what_a_relay_serves_and_refuses(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["status"]["counters"] = {
        "host_relay_reservations_held": 65,
        "host_relay_reservations_held_members": 3,
        "host_relay_circuits_held": 4,
        "host_relay_circuits_held_members": 1,
        "host_relay_refused_reservations_max": 17,
        "host_relay_refused_reservations_rate": 3,
        "host_relay_refused_circuits_rate": 2,
    }
    shown = cli("status").out
    said = "Relay     serves 65 reservations (3 of members) and 4 circuits (1 of members); refused: 20 and 2\n"
    assert said in shown


@pytest.mark.parametrize(
    ("held", "failed", "said"),
    [
        (1, 0, "reservations of this node at 1 relay\n"),
        (0, 0, "reservations of this node at 0 relays\n"),
        (0, 7, "no relay gives this node a reservation; 7 tries failed: see the log\n"),
    ],
)
def test_status_says_whether_relays_give_this_node_reservations(
    cli: Callable[..., Any], fake: Any, held: int, failed: int, said: str
) -> None:
    fake.answers["status"]["counters"] = {
        "host_relay_reserved_held": held,
        "host_relay_reservation_failed": failed,
    }
    assert f"Relay     {said}" in cli("status").out


def test_status_json_is_what_the_daemon_says(cli: Callable[..., Any], fake: Any) -> None:
    assert cli("status", "--json").json == fake.answers["status"]


def test_status_watch_ends_after_count(cli: Callable[..., Any], fake: Any) -> None:
    done = cli("status", "--watch", "--interval", "0.1", "--count", "2", "--json")
    assert done.code == 0 and len(done.lines) == 2


def test_status_waits_for_a_daemon_that_starts(cli: Callable[..., Any], fake: Any) -> None:
    from dep2p.client import DaemonUnreachableError

    ready = fake.answers["status"]
    tries = iter([DaemonUnreachableError("no one"), DaemonUnreachableError("no one")])

    def starting() -> Any:
        error = next(tries, None)
        if error is not None:
            raise error
        return ready

    fake.answers["status"] = starting
    assert cli("status", "--wait", "20", "--json").json == ready
    fake.answers["status"] = DaemonUnreachableError("no one")
    assert cli("status", "--wait", "0.2").code == 3


def test_status_of_a_lonely_node_says_what_to_do(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["status"] |= {
        "realms": [],
        "listen": [],
        "state": "draining",
        "problems": ["a realm is not joined: x"],
    }
    out = cli("status").out
    assert (
        "draining" in out
        and "nowhere: this node only dials" in out
        and "Problem   a realm is not joined" in out
        and "dep2p realm join" in out
    )


def test_peer_ls(cli: Callable[..., Any], fake: Any) -> None:
    assert cli("peer", "ls").out == (
        "PEER           DIRECTION  ADDRESS                  PATH    RTT      AGE    REALMS\n"
        "12D3KooW…RMuD  outbound   /ip4/127.0.0.1/tcp/4002  direct  1.25 ms  1m 1s  team\n"
    )
    assert cli("peer", "ls", "--full").out.splitlines()[1].startswith(ANN)
    assert cli("peer", "ls", "--json").json == {"peers": fake.answers["peers"]}
    fake.answers["peers"] = []
    done = cli("peer", "ls")
    assert done.code == 0 and done.out == "" and "not connected to any peer" in done.err


LIMITED = {"relay": BOB, "limited": True, "data_left_bytes": 129_024, "time_left_s": 100.4}


@pytest.mark.parametrize(
    ("circuit", "path"),
    [
        (LIMITED, "limited relay 12D3KooW…NaM8: 126.0 KiB and 1m 40s left"),
        (LIMITED | {"data_left_bytes": None}, "limited relay 12D3KooW…NaM8: 1m 40s left"),
        (LIMITED | {"limited": False}, "relay 12D3KooW…NaM8 "),
    ],
)
def test_peer_ls_says_which_relay_a_connection_uses_and_what_is_left_of_it(
    cli: Callable[..., Any], fake: Any, circuit: dict[str, object], path: str
) -> None:
    (connection,) = fake.answers["peers"][0]["connections"]
    connection |= {"addr": f"/ip4/192.0.2.1/tcp/4001/p2p/{BOB}/p2p-circuit", "circuit": circuit}
    shown = cli("peer", "ls").out
    assert f"outbound   /ip4/192.0.2.1/tcp/4001  {path}" in shown
    assert cli("peer", "ls", "--json").json == {"peers": fake.answers["peers"]}


def test_status_and_doctor_name_peers_that_are_reached_over_a_limited_relay(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["status"]["limited"] = [{"peer": ANN, "circuit": LIMITED}]
    said = "Limited   12D3KooW…RMuD over relay 12D3KooW…NaM8: 126.0 KiB and 1m 40s left; no pub/sub\n"
    assert said in cli("status").out
    checks = [check for check in cli("doctor", "--json").json["checks"] if check["check"] == "limited relay"]
    assert [check["state"] for check in checks] == ["warn"]
    assert "12D3KooW…RMuD is reached over relay 12D3KooW…NaM8 only, which has 126.0 KiB" in checks[0]["detail"]
    assert "relay" in checks[0]["try"]
    fake.answers["status"]["limited"] = []
    assert "Limited" not in cli("status").out
    assert not [check for check in cli("doctor", "--json").json["checks"] if check["check"] == "limited relay"]


def test_a_relayed_address_is_not_shown_as_an_address_of_the_node(cli: Callable[..., Any], fake: Any) -> None:
    addr = f"/ip4/192.0.2.1/tcp/4001/p2p/{BOB}/p2p-circuit/p2p/{ANN}"
    fake.answers["status"]["listen"] = [addr]
    fake.answers["members"][1]["addrs"] = [addr]
    text = "/ip4/192.0.2.1/tcp/4001 through relay 12D3KooW…NaM8"
    assert f"Listen    {text}\n" in cli("status").out
    assert text in cli("realm", "members").out
    assert text in cli("doctor").out


def test_peer_connect_ping_disconnect(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers |= {
        "connect": {"peer": ANN, "addr": "/ip4/127.0.0.1/tcp/4002", "direction": "outbound", "realms": ["team"]},
        "ping": 0.0015,
        "disconnect": True,
    }
    addr = f"/ip4/127.0.0.1/tcp/4002/p2p/{ANN}"
    assert cli("peer", "connect", addr).out == f"connected to {ANN} at /ip4/127.0.0.1/tcp/4002, member of team\n"
    assert fake.calls[-1] == ("connect", (addr, 10.0))
    done = cli("peer", "ping", "RMuD", "-n", "2")
    assert done.out == (
        "12D3KooW…RMuD seq=1 time=1.50 ms\n12D3KooW…RMuD seq=2 time=1.50 ms\n"
        "2 of 2 answered, min/median/max 1.50/1.50/1.50 ms\n"
    )
    assert cli("peer", "ping", "RMuD", "-n", "1", "--json").json == {
        "peer": ANN, "sent": 1, "answered": 1, "rtts_ms": [1.5],
    }  # fmt: skip
    fake.answers["ping"] = RequestTimeoutError("no answer")
    done = cli("peer", "ping", ANN, "-n", "1")
    assert done.code == 5 and "no answer in 5 s" in done.out
    done = cli("peer", "disconnect", "12D3KooW…RMuD")
    assert done.code == 0 and done.out == "" and fake.calls[-1] == ("disconnect", (ANN,))


def test_realm_ls_members_invite(cli: Callable[..., Any], fake: Any) -> None:
    assert cli("realm", "ls").out == "REALM  ID         OTHERS  UP\nteam   3f3f3f3f…       3   2\n"
    done = cli("realm", "members")
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0][:3] == ["PEER", "STATE", "RECORD"]
    assert [row[1] for row in rows[1:]] == ["self", "up", "down"]
    assert cli("realm", "members", "team", "--json").json["realm"] == "team"
    fake.answers["invite"] = line = Realm.generate("team").invite([f"/ip4/198.51.100.1/tcp/4001/p2p/{ANN}"])
    done = cli("realm", "invite", "team", "--addr", "/ip4/192.0.2.1/tcp/4001")
    assert done.out == f"{line}\n" and "password" in done.err
    assert fake.calls[-1] == ("invite", ("team", ["/ip4/192.0.2.1/tcp/4001"]))
    fake.answers["realms"] = []
    done = cli("realm", "invite")
    assert done.code == 4 and "the node is in no realm" in done.err
    fake.answers["realms"] = [{"name": "a", "realm_id": "1"}, {"name": "b", "realm_id": "2"}]
    done = cli("realm", "members")
    assert done.code == 4 and "cause: a, b" in done.err


PUBLIC, HOME, LOOPBACK = (f"/ip4/{ip}/tcp/4001/p2p/{ANN}" for ip in ("198.51.100.1", "192.168.1.7", "127.0.0.1"))


@pytest.mark.parametrize(
    ("addrs", "reach", "says"),
    [
        ((PUBLIC, HOME), "anywhere", "198.51.100.1/tcp/4001  from anywhere"),
        ((HOME, LOOPBACK), "network", "it works in this network only. If your router forwards a port"),
        ((LOOPBACK,), "machine", "it works on this machine only: start the node with --listen"),
        ((), "nowhere", "it names no address that others can dial"),
        ((f"{PUBLIC}/p2p-circuit/p2p/{BOB}",), "anywhere", "through relay"),
    ],
)
def test_an_invite_says_from_where_it_works(
    cli: Callable[..., Any], fake: Any, addrs: tuple[str, ...], reach: str, says: str
) -> None:
    fake.answers["invite"] = line = Realm.generate("team").invite(addrs)
    done = cli("realm", "invite", "team")
    assert done.out == f"{line}\n" and says in done.err
    assert ("it works in" in done.err or "it works on" in done.err or "no address" in done.err) == (reach != "anywhere")
    shown = cli("realm", "invite", "team", "--json").json
    assert (shown["reach"], [each["addr"] for each in shown["addrs"]]) == (reach, list(addrs))


def test_request_prints_the_answer_and_json_fields(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["request"] = b"hello ann"
    done = cli("request", "RMuD", "greet", "ann", "--timeout", "5", "--idempotent", "-H", "lang=en", "--realm", "team")
    assert (done.code, done.out, done.err) == (0, "hello ann\n", "")
    options = {"realm": "team", "timeout_s": 5.0, "idempotent": True, "headers": {"lang": "en"}}
    assert fake.calls[-1] == ("request", (ANN, "greet", b"ann", options))
    assert cli("request", ANN, "greet", "--json").json == {
        "peer": ANN, "name": "greet", "data": "aGVsbG8gYW5u", "encoding": "base64", "text": "hello ann",
    }  # fmt: skip
    assert cli("request", ANN, "greet", "--raw").out_bytes == b"hello ann"


def test_a_binary_answer_passes_unchanged_into_a_pipe_and_has_no_text_in_json(
    cli: Callable[..., Any], fake: Any
) -> None:
    fake.answers["request"] = b"\xff\x00\n"
    assert cli("request", ANN, "x").out_bytes == b"\xff\x00\n"
    assert cli("request", ANN, "x", "--json").json == {
        "peer": ANN, "name": "x", "data": "/wAK", "encoding": "base64",
    }  # fmt: skip


def test_the_payload_comes_from_argument_file_or_stdin(cli: Callable[..., Any], fake: Any, tmp_path: Any) -> None:
    def echo(_peer: str, _name: str, data: bytes, _options: Any) -> bytes:
        return data

    fake.answers["request"] = echo
    (tmp_path / "in.bin").write_bytes(b"\x00\x01")
    assert cli("request", ANN, "x", "--raw", "--file", str(tmp_path / "in.bin")).out_bytes == b"\x00\x01"
    assert cli("request", ANN, "x", "-", "--raw", stdin=b"piped\n").out_bytes == b"piped\n"
    assert cli("request", ANN, "x", "--raw").out_bytes == b""
    assert cli("request", ANN, "x", "--raw", "--", "-x").out_bytes == b"-x"
    done = cli("request", ANN, "x", "data", "--file", str(tmp_path / "in.bin"))
    assert done.code == 2 and "exclude each other" in done.err
    done = cli("request", ANN, "x", "--file", str(tmp_path / "no"))
    assert done.code == 4 and "D6006" in done.err
    done = cli("request", ANN, "x", "-H", "nonsense")
    assert done.code == 2 and "KEY=VALUE" in done.err


def test_request_all_has_a_line_per_peer_and_exit_1_when_one_failed(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["broadcast_request"] = {ANN: b"1.0\n", BOB: RequestTimeoutError("no answer in 5 s")}
    done = cli("request", "--all", "version", "--timeout", "5")
    assert done.code == 1
    assert done.out == (
        "PEER           RESULT  ANSWER\n12D3KooW…RMuD  ok      1.0\n12D3KooW…NaM8  failed  no answer in 5 s (D5001)\n"
    )
    result = cli("request", "--all", "version", "--json").json
    assert (result["ok"], result["failed"]) == (1, 1)
    assert result["results"][0] == {"peer": ANN, "ok": True, "data": "MS4wCg==", "encoding": "base64", "text": "1.0\n"}
    assert result["results"][1]["error"]["code"] == "D5001"
    fake.answers["broadcast_request"] = {}
    done = cli("request", "--all", "version")
    assert done.code == 4 and "no other member is up" in done.err


def test_notify_one_and_all(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["notify"] = None
    done = cli("notify", "NaM8", "news", "hi")
    assert (done.code, done.out, done.err) == (0, "", "sent 2 B to 12D3KooW…NaM8\n")
    assert fake.calls[-1] == ("notify", (BOB, "news", b"hi", {"realm": None, "headers": None}))
    assert cli("notify", BOB, "news", "hi", "--json").json == {"peer": BOB, "name": "news", "sent_bytes": 2}
    assert cli("--quiet", "notify", BOB, "news", "hi").err == ""
    fake.answers["broadcast_notify"] = {ANN: None, BOB: HandlerError("no")}
    done = cli("notify", "--all", "news", "hi")
    assert done.code == 1 and "12D3KooW…RMuD  ok\n" in done.out and "D5002" in done.out


def test_listen_text_json_raw_nul(cli: Callable[..., Any], fake: Any, notifications: list[Any]) -> None:
    fake.incoming = notifications
    done = cli("listen", "news")
    assert done.out_bytes == b"lunch is ready\n\xff\x00"
    assert done.err == (
        "waiting for notifies 'news'; Ctrl-C ends\n"
        "[#1] news from 12D3KooW…RMuD  14 B  kind=food\n"
        "lagged: 17 notifies were dropped, because this reader was too slow\n"
        "[#2] news from 12D3KooW…NaM8  2 B\n"
    )
    lines = cli("listen", "news", "--json").lines
    assert lines[0] == {
        "peer": ANN, "name": "news", "data": "bHVuY2ggaXMgcmVhZHk=", "encoding": "base64", "text": "lunch is ready",
        "headers": {"kind": "food"}, "received_at_s": 0.0,
    }  # fmt: skip
    assert lines[1] == {"lagged": 17}
    assert cli("listen", "news", "--raw").out_bytes == b"lunch is ready\xff\x00"
    assert cli("listen", "news", "-0").out_bytes == b"lunch is ready\0\xff\x00\0"
    assert cli("listen", "news", "--count", "1", "--raw").out_bytes == b"lunch is ready"
    assert cli("listen", "news", "--raw", "-0").code == 2


def test_events_are_one_object_per_line(cli: Callable[..., Any], fake: Any) -> None:
    from dep2p.client import Event, Lagged

    fake.incoming = [Event(7, "member_up", 1_800_000_000.5, {"peer": ANN, "realm": "team"}), Lagged(2)]
    lines = cli("events", "--type", "member_up").lines
    assert lines[0] == {
        "id": 7, "kind": "member_up", "time": "2027-01-15T08:00:00.500+00:00", "time_s": 1_800_000_000.5,
        "peer": ANN, "realm": "team",
    }  # fmt: skip
    assert lines[1] == {"lagged": 2} and fake.calls[-1] == ("events", (["member_up"],))


def test_shutdown(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["shutdown"] = None
    assert cli("shutdown").code == 0 and cli("shutdown", "--json").json == {"shutdown": "started"}


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\rb", "\u202e"])
def test_what_others_send_cannot_steer_the_terminal(cli: Callable[..., Any], fake: Any, hostile: str) -> None:
    fake.answers["realms"] = [{"name": f"x{hostile}", "realm_id": "ab", "members_known": 1, "members_up": 1}]
    fake.answers["status"]["realms"] = fake.answers["realms"]
    fake.answers["broadcast_request"] = {ANN: hostile.encode()}
    for words in (("realm", "ls"), ("status",), ("request", "--all", "x")):
        assert hostile not in cli(*words).out


@pytest.mark.parametrize("peers", ["", ",", f"{ANN},", f",{ANN}", f"{ANN},,{BOB}"])
def test_an_empty_name_of_a_peer_is_no_one_however_few_are_known(cli: Callable[..., Any], peers: str) -> None:
    done = cli("queue", "info", "jobs", "--peer", peers)
    assert done.code == 2 and "is empty before or behind a comma" in done.err and "D4004" in done.err
