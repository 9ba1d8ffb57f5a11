"""Identity, realms, configuration and doctor on a data directory without a daemon."""

import base64
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dep2p.cli.commands.realm.files import realm_file_name
from dep2p.control_api.replies import RealmSummary
from dep2p.errors import NotInRealmError, RequestTimeoutError
from dep2p.realm.credentials import Realm
from dep2p.types import RealmId


def test_id_from_the_key_file(cli: Callable[..., Any], home: Path) -> None:
    done = cli("id")
    assert done.code == 4 and "D2001" in done.err and "dep2p id --new" in done.err
    made = cli("id", "--new")
    assert made.code == 0 and made.out.startswith("12D3KooW")
    assert stat.S_IMODE((home / "node.key").stat().st_mode) == 0o600
    assert cli("id").out == made.out
    assert cli("id", "--json").json == {
        "peer_id": made.out.strip(), "addrs": [], "daemon": False, "key_file": str(home / "node.key"),
    }  # fmt: skip
    again = cli("id", "--new")
    assert again.code == 1 and "never overwritten" in again.err and cli("id").out == made.out


def test_id_from_the_daemon(cli: Callable[..., Any], fake: Any) -> None:
    status = fake.answers["status"]
    assert cli("id").out == f"{status['peer_id']}\n{status['listen'][0]}\n"
    assert cli("id", "--json").json == {"peer_id": status["peer_id"], "addrs": status["listen"], "daemon": True}


def test_realm_new_show_leave(cli: Callable[..., Any], home: Path) -> None:
    made = cli("realm", "new", "team")
    assert made.code == 0 and made.out.startswith("made realm team (") and "no daemon is running" in made.err
    path = home / "realms" / "team.realm"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = base64.b64encode(Realm.from_psk_file(path).psk).decode()
    for words in (["show"], ["show", "team"], ["show", "--json"], ["ls"], ["ls", "--json"]):
        shown = cli("realm", *words)
        assert shown.code == 0 and secret not in shown.out + shown.err
    assert secret in cli("realm", "show", "team", "--secret").out
    assert cli("realm", "show", "--secret", "--json").json["psk"] == secret
    again = cli("realm", "new", "team")
    assert again.code == 6 and "D2003" in again.err and Realm.from_psk_file(path).psk == base64.b64decode(secret)
    realm_id = cli("realm", "show", "--json").json["realm_id"]
    left = cli("realm", "leave", realm_id[:8])
    assert left.code == 0 and "members were not notified" in left.err and not path.exists()
    gone = cli("realm", "leave", "team")
    assert gone.code == 4 and "D4003" in gone.err


def test_realm_join_from_argument_stdin_file_and_realm_file(
    cli: Callable[..., Any], home: Path, tmp_path: Path
) -> None:
    realm = Realm.generate("team")
    invite = realm.invite(["/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"])
    (tmp_path / "invite.txt").write_text(f"  {invite[:40]}\n{invite[40:]}\n")
    realm.save(tmp_path / "copy.realm")
    for words, stdin in (
        ([invite], None),
        (["-"], invite.encode() + b"\n"),
        ([], invite.encode()),
        (["--file", str(tmp_path / "invite.txt")], None),
        (["--file", str(tmp_path / "copy.realm")], None),
    ):
        done = cli("realm", "join", *words, "--json", stdin=stdin)
        assert done.code == 0, done.err
        assert done.json == {
            "name": "team", "realm_id": realm.realm_id, "file": str(home / "realms/team.realm"), "daemon": False,
        }  # fmt: skip
    assert [path.name for path in (home / "realms").iterdir()] == ["team.realm"]
    other = cli("realm", "join", Realm.generate("team").invite())
    assert other.code == 6 and "another realm is called 'team'" in other.err


@pytest.mark.parametrize("text", ["", "nonsense", "dep2p-invite-v1:AAAA", "x" * 70_000, "{}", '{"format": 1}'])
def test_a_broken_invite_is_reported(cli: Callable[..., Any], home: Path, text: str) -> None:
    done = cli("realm", "join", "-", stdin=text.encode())
    assert done.code == 1 and "code:  D2002" in done.err and not (home / "realms").exists()


def test_a_passphrase_gives_the_same_realm_elsewhere(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "words").write_text("correct horse battery staple\n")
    ids = [
        cli(*dirs, "realm", *words, "--json", stdin=b"correct horse battery staple\n").json["realm_id"]
        for dirs, words in (
            (("--data-dir", str(tmp_path / "a")), ("new", "team", "--passphrase-file", str(tmp_path / "words"))),
            (("--data-dir", str(tmp_path / "b")), ("new", "team", "--passphrase")),
            (("--data-dir", str(tmp_path / "c")), ("join", "--passphrase", "--realm-name", "team")),
        )
    ]
    assert len(set(ids)) == 1
    short = cli("realm", "new", "x", "--passphrase", stdin=b"short\n")
    assert short.code != 0 and "at least 12 characters" in short.err
    assert cli("realm", "join", "--passphrase", stdin=b"correct horse battery staple\n").code == 2


def test_a_running_daemon_is_reported_at_once(cli: Callable[..., Any], fake: Any, home: Path) -> None:
    joined = RealmSummary(name="team", realm_id=RealmId("3f" * 32), members_known=0, members_up=0)
    fake.answers |= {"join_realm": joined, "leave_realm": None}
    done = cli("realm", "new", "team", "--json")
    assert done.json["daemon"] is True
    ((verb, (realm, addrs)),) = fake.calls
    assert (verb, realm, addrs) == ("join_realm", Realm.from_psk_file(home / "realms" / "team.realm"), [])
    assert cli("realm", "leave", "team", "--json").json == {"realm": "team", "left": True, "daemon": True}
    assert not (home / "realms" / "team.realm").exists()
    fake.answers["leave_realm"] = NotInRealmError("this node is not in a realm 'x'")
    assert cli("realm", "leave", "x").code == 4


def test_join_says_which_bootstrap_peer_is_down_while_no_member_is_up(cli: Callable[..., Any], fake: Any) -> None:
    joined = RealmSummary(name="team", realm_id=RealmId("3f" * 32), members_known=0, members_up=0)
    down = "the bootstrap peer 12D3 cannot be reached: connection refused; it is tried again"
    fake.answers |= {"join_realm": joined, "status": fake.answers["status"] | {"problems": [down]}}
    words = b"correct horse battery staple\n"
    done = cli("realm", "join", "--passphrase", "--realm-name", "team", stdin=words)
    assert done.code == 0
    assert down in done.err and "dep2p status" in done.err
    fake.answers["join_realm"] = joined.__class__(name="x", realm_id=joined.realm_id, members_known=1, members_up=1)
    assert down not in cli("realm", "join", "--passphrase", "--realm-name", "x", stdin=words).err


@pytest.mark.parametrize("name", ["team", "a.b-c_1", "../../etc/x", "équipe", "two words", ".hidden", "x" * 64, "a/b"])
def test_realm_files_are_named_as_the_daemon_names_them(name: str, tmp_path: Path) -> None:
    from dep2p.daemon.realm_files import RealmFiles

    assert RealmFiles(tmp_path).path_of(name) == tmp_path / realm_file_name(name)
    assert (tmp_path / realm_file_name(name)).parent == tmp_path


def test_config_show_origin_check_path_example(
    cli: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 'level = "info"  # default' in cli("config", "show", "--origin").out
    monkeypatch.setenv("DEP2P_LOG_LEVEL", "debug")
    assert 'level = "debug"  # environment DEP2P_LOG_LEVEL' in cli("config", "show", "--origin").out
    shown = cli("config", "show", "--json", "--origin").json
    assert shown["config"]["log"]["level"] == "debug" and shown["origins"]["log.level"] == "environment DEP2P_LOG_LEVEL"
    path = cli("config", "path")
    assert path.out == f"{home}/config.toml\n" and "does not exist" in path.err
    assert cli("config", "check").out.startswith("ok: no configuration file")
    home.mkdir()
    example = cli("config", "example")
    (home / "config.toml").write_bytes(example.out_bytes)
    assert cli("config", "check").out == f"ok: {home}/config.toml\n"
    assert cli("config", "path", "--json").json == {"path": f"{home}/config.toml", "exists": True}
    (home / "config.toml").write_text("[limits]\npeers_known_maxx = 3\n")
    for words in (["config", "check"], ["config", "show"], ["status"], ["daemon"]):
        done = cli(*words)
        assert done.code == 2 and "peers_known_max" in done.err and "D1002" in done.err
    assert cli("config", "check", "--json").problem["code"] == "D1002"


def test_doctor_on_a_fresh_machine_warns_and_passes(cli: Callable[..., Any], home: Path) -> None:
    done = cli("--json", "doctor")
    checks = {check["check"]: check for check in done.json["checks"]}
    assert done.json["ok"] is (done.code == 0)
    assert checks["key file"]["state"] == "warn" and "dep2p id --new" in checks["key file"]["try"]
    assert checks["daemon"]["state"] == "warn" and checks["configuration"]["state"] == "ok"
    assert not home.exists()


def test_doctor_finds_what_is_wrong(cli: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("id", "--new")
    cli("realm", "new", "team")
    os.chmod(home, 0o755)
    os.chmod(home / "node.key", 0o644)
    (home / "realms" / "bad.realm").write_text("{")
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    done = cli("doctor", "--json")
    failed = {check["check"]: check for check in done.json["checks"] if check["state"] == "fail"}
    assert done.code == 1 and set(failed) >= {"data directory", "key file", "realm file", "clock"}
    assert failed["data directory"]["try"] == f"chmod 700 {home}"
    assert all(check["try"] for check in failed.values())
    text = cli("doctor")
    assert text.code == 1 and "fail  data directory" in text.out and "→ chmod 700" in text.out and "failed" in text.err


def test_doctor_with_a_broken_configuration_still_checks_the_rest(cli: Callable[..., Any], home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text("[nodee]\n")
    done = cli("doctor", "--json")
    checks = {check["check"]: check["state"] for check in done.json["checks"]}
    assert done.code == 1 and checks["configuration"] == "fail" and checks["versions"] == "ok"


def test_doctor_says_which_port_is_taken(cli: Callable[..., Any], home: Path) -> None:
    import socket

    home.mkdir(mode=0o700)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        addr = f"/ip4/127.0.0.1/tcp/{holder.getsockname()[1]}"
        (home / "config.toml").write_text(f'[node]\nlisten = ["{addr}"]\n')
        done = cli("doctor", "--json")
    (port,) = [check for check in done.json["checks"] if check["check"] == "port"]
    assert port["state"] == "fail" and addr in port["detail"] and "in use" in port["detail"]


def test_doctor_with_a_daemon(cli: Callable[..., Any], fake: Any) -> None:
    fake.answers["ping"] = 0.001
    checks = {check["check"]: check for check in cli("doctor", "--json").json["checks"]}
    assert checks["daemon"]["state"] == "ok" and checks["listening"]["detail"] == "/ip4/127.0.0.1/tcp/4001"
    assert checks["realm team"] == {
        "check": "realm team", "state": "ok", "detail": "1 of 2 other members up, 1 of 1 answer pings", "try": "",
    }  # fmt: skip
    fake.answers |= {"ping": RequestTimeoutError("no answer"), "ready": (False, ["draining"])}
    fake.answers["status"] |= {"version": "9.9.9", "listen": []}
    done = cli("doctor", "--json")
    states = {check["check"]: check["state"] for check in done.json["checks"]}
    assert done.code == 1
    assert (states["daemon"], states["ready"], states["listening"], states["realm team"]) == (
        "warn", "fail", "warn", "warn",
    )  # fmt: skip


def test_status_and_doctor_say_why_a_realm_has_no_members(cli: Callable[..., Any], fake: Any) -> None:
    problem = "no realm handshake with 12D3KooWx: the peer takes no handshakes; it is tried again in 40 s"
    for name in ("status", "realms"):
        realms = fake.answers[name]["realms"] if name == "status" else fake.answers[name]
        realms[0]["problems"] = [problem]
    fake.answers["members"] = []
    assert f"Problem   realm team: {problem}" in cli("status").out
    checks = [check for check in cli("doctor", "--json").json["checks"] if check["check"] == "realm team"]
    assert [(check["state"], check["detail"]) for check in checks] == [("warn", problem)]


@pytest.mark.parametrize("words", [["realm", "new", ""], ["realm", "new", "x" * 65], ["realm", "new", " x"]])
def test_an_unusable_realm_name_is_wrong_use_and_no_bug(cli: Callable[..., Any], words: list[str]) -> None:
    done = cli(*words)
    assert done.code == 2 and "D2005" in done.err and "is no realm name" in done.err


def test_a_short_passphrase_is_wrong_use(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "words").write_text("short\n")
    done = cli("realm", "new", "x", "--passphrase-file", str(tmp_path / "words"))
    assert done.code == 2 and "D2005" in done.err


def test_joining_again_says_so(cli: Callable[..., Any]) -> None:
    invite = Realm.generate("two words").invite([])
    assert cli("realm", "join", invite).out.startswith("joined realm two words (")
    assert cli("realm", "join", invite).out.startswith("in this realm already: two words (")


def test_realm_ls_names_files_that_cannot_be_used(cli: Callable[..., Any], home: Path) -> None:
    assert cli("realm", "new", "fine").code == 0
    (home / "realms" / "bad.realm").write_text("{")
    done = cli("realm", "ls")
    assert "fine" in done.out and "bad.realm" in done.err and "dep2p doctor" in done.err


def test_doctor_reports_a_file_in_the_place_of_the_socket(cli: Callable[..., Any], home: Path) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    (home / "control.sock").write_text("")
    done = cli("doctor")
    assert done.code == 1 and "control.sock is no socket" in done.out and "chmod 600" not in done.out
