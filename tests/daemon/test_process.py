"""The daemon as a process: start, stop, signals, kill -9, and each fault that keeps it from starting."""

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from dep2p.client import Client, ClientStream
from dep2p.identity import Identity
from dep2p.realm.credentials import Realm
from tests.daemon.api.test_routes import DATA
from tests.daemon.processes import DaemonProcess, NotifySocket

pytestmark = pytest.mark.real
Start = Callable[..., DaemonProcess]


def test_start_serve_and_stop(data_dir: Path, start: Start) -> None:
    daemon = start(data_dir).wait_ready()
    status = daemon.get("/v1/status")
    assert status["pid"] == daemon.pid
    assert (data_dir / "daemon.lock").read_text().split() == [str(daemon.pid)]
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((data_dir / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((data_dir / "node.key").stat().st_mode) == 0o600
    assert daemon.end() == 0
    log = daemon.stderr()
    assert "ready" in log and "drained" in log and "stopped" in log
    assert "error" not in log.lower()
    assert not (data_dir / "control.sock").exists()


def test_the_garbage_collector_is_tuned_when_all_modules_are_loaded(data_dir: Path) -> None:
    """Modules that load later are walked in each full collection: 60 ms in which no request is answered."""
    script = """
import os, signal, sys
from dep2p.daemon import process
from dep2p.daemon.__main__ import main
tuned = process.tune_gc
def tune_gc():
    tuned()
    print("libp2p" in sys.modules, len(__import__("gc").get_objects()) < 5_000, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
process.tune_gc = tune_gc
sys.exit(main(sys.argv[1:]))
"""
    arguments = ["--data-dir", str(data_dir), "--listen", "/ip4/127.0.0.1/tcp/0"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert done.returncode == 0


def test_shutdown_by_the_api(data_dir: Path, start: Start) -> None:
    daemon = start(data_dir).wait_ready()
    assert daemon.post("/v1/shutdown") == {"state": "stopping"}
    assert daemon.process.wait(20) == 0


def test_kill_9_and_restart_keeps_identity_and_realms(data_dir: Path, start: Start) -> None:
    realm = Realm.generate("team")
    first = start(data_dir).wait_ready()
    first.post("/v1/realms", {"invite": realm.invite([])})
    peer_id = first.get("/v1/status")["peer_id"]
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    assert (data_dir / "control.sock").exists(), "a stale socket and lock are left behind"
    second = start(data_dir).wait_ready()
    status = second.get("/v1/status")
    assert status["peer_id"] == peer_id
    assert [each["realm_id"] for each in status["realms"]] == [realm.realm_id]
    assert second.end() == 0


def two_members(tmp: Path, start: Start) -> tuple[DaemonProcess, DaemonProcess]:
    realm = Realm.generate("team")
    ann, bob = start(tmp / "a").wait_ready(), start(tmp / "b").wait_ready()
    for daemon in (ann, bob):
        daemon.post("/v1/realms", {"invite": realm.invite([])})
    joined = ann.post("/v1/peers", {"addr": bob.get("/v1/status")["listen"][0]})
    assert joined["realms"] == ["team"], joined
    return ann, bob


def test_sigterm_finishes_what_is_in_flight_and_refuses_the_rest(data_dir: Path, start: Start) -> None:
    ann, bob = two_members(data_dir, start)
    answers: list[Any] = []
    with bob.http() as client, client.stream("POST", "/v1/replies", json={"name": "slow"}) as requests:
        body = {"peer": bob.get("/v1/status")["peer_id"], "name": "slow", **DATA}
        asking = threading.Thread(target=lambda: answers.append(ann.post("/v1/requests", body)))
        asking.start()
        lines = requests.iter_lines()  # kept: dropping it would close the answer
        request = json.loads(next(lines))
        ann.send_signal(signal.SIGTERM)
        while ann.get("/readyz")["ready"]:
            pass
        assert ann.post("/v1/requests", body)["code"] == "D3006"
        assert bob.post(f"/v1/replies/{request['id']}", DATA) == {"accepted": True}
    asking.join(10)
    assert answers[0].get("data") == DATA["data"], answers
    assert ann.process.wait(20) == 0


def test_a_second_signal_stops_at_once(data_dir: Path, start: Start) -> None:
    ann, bob = two_members(data_dir, start)
    with bob.http() as client, client.stream("POST", "/v1/replies", json={"name": "never"}) as requests:
        body = {"peer": bob.get("/v1/status")["peer_id"], "name": "never", **DATA}
        answers: list[Any] = []

        def ask() -> None:
            with pytest.raises(http.client.RemoteDisconnected):
                answers.append(ann.post("/v1/requests", body))

        asking = threading.Thread(target=ask)
        asking.start()
        lines = requests.iter_lines()
        next(lines)
        ann.send_signal(signal.SIGTERM)
        while ann.get("/readyz")["ready"]:
            pass
        assert ann.end(signal.SIGTERM, 8) == 128 + signal.SIGTERM
        asking.join(5)
    assert "second signal" in ann.stderr()


def test_two_daemons_in_one_directory(data_dir: Path, start: Start) -> None:
    first = start(data_dir).wait_ready()
    second = start(data_dir)
    assert second.process.wait(20) == 6
    assert f"pid {first.pid}" in (text := second.stderr())
    assert "D3002" in text and "try:" in text
    assert first.get("/readyz")["ready"], "the first one is as before"


def test_a_port_that_is_in_use(data_dir: Path, start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        daemon = start(data_dir, "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        assert daemon.process.wait(20) == 1
    assert "D3003" in (text := daemon.stderr())
    assert str(port) in text


def test_an_unreadable_key(data_dir: Path, start: Start) -> None:
    (data_dir / "node.key").write_text("this is no key\n")
    daemon = start(data_dir)
    assert daemon.process.wait(20) == 1
    assert "D2001" in (text := daemon.stderr())
    assert "node.key" in text
    assert (data_dir / "node.key").read_text() == "this is no key\n", "it is never overwritten"


def test_a_config_typo(data_dir: Path, start: Start) -> None:
    (data_dir / "config.toml").write_text("[limits]\nconections_max = 3\n")
    daemon = start(data_dir)
    assert daemon.process.wait(20) == 2
    text = daemon.stderr()
    assert "D1002" in text and 'did you mean "connections_max"?' in text and str(data_dir / "config.toml") in text


def test_a_directory_that_others_may_enter(data_dir: Path, start: Start) -> None:
    (data_dir / "other.txt").touch()
    data_dir.chmod(0o755)
    daemon = start(data_dir)
    assert daemon.process.wait(20) == 1
    assert "D3004" in (text := daemon.stderr())
    assert "chmod 700" in text
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o755


def test_a_damaged_realm_file_stops_no_other_realm(data_dir: Path, start: Start) -> None:
    realm = Realm.generate("good")
    (data_dir / "realms").mkdir()
    realm.save(data_dir / "realms" / "good.realm")
    (data_dir / "realms" / "bad.realm").write_text("{")
    status = start(data_dir).wait_ready().get("/v1/status")
    assert [each["name"] for each in status["realms"]] == ["good"]
    assert "bad.realm" in status["problems"][0]


def test_a_full_disk_at_the_start(data_dir: Path, start: Start) -> None:
    full_disk_daemon = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "sys.argv = ['daemon', '--data-dir', sys.argv[1], '--listen', '/ip4/127.0.0.1/tcp/0']\n"
        "runpy.run_module('dep2p.daemon', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", full_disk_daemon, str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "D3004" in done.stderr and "File too large" in done.stderr


def test_a_disk_that_fills_up_later_ends_nothing(data_dir: Path, start: Start) -> None:
    """A limit on file sizes stands for the full disk: writes fail with an error, as they do there."""
    daemon = start(data_dir, "--set", f"log.file={data_dir}/log", "--set", "log.level=debug").wait_ready()
    limit = "import resource, sys; resource.prlimit(int(sys.argv[1]), resource.RLIMIT_FSIZE, (1, 1))"
    subprocess.run([sys.executable, "-c", limit, str(daemon.pid)], check=True)
    for _ in range(50):
        assert daemon.get("/readyz")["ready"]
    refused = daemon.post("/v1/realms", {"invite": Realm.generate("team").invite([])})
    assert refused["code"] == "D2002" and "cannot write" in refused["detail"]
    with daemon.http() as client:
        metrics = client.get("/metrics").text
    dropped = next(line for line in metrics.splitlines() if line.startswith("dep2p_log_lines_dropped_total"))
    assert float(dropped.split()[1]) > 0
    assert daemon.end() == 0


def test_a_log_file_moved_away_is_made_anew(data_dir: Path, start: Start) -> None:
    log = data_dir / "log"
    daemon = start(data_dir, "--set", f"log.file={log}", "--set", "log.format=json").wait_ready()
    log.rename(data_dir / "log.1")
    assert daemon.end() == 0
    old = [json.loads(line) for line in (data_dir / "log.1").read_text().splitlines()]
    new = [json.loads(line) for line in log.read_text().splitlines()]
    ready = next(entry for entry in old if entry["event"] == "ready")
    assert ready["pid"] == daemon.pid and ready["level"] == "info" and ready["listen"]
    assert new[-1]["event"] == "stopped"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_the_service_manager_is_reported(data_dir: Path, start: Start) -> None:
    notify = NotifySocket(data_dir / "notify")
    try:
        (data_dir / "node").mkdir(mode=0o700)
        daemon = start(data_dir / "node", env={"NOTIFY_SOCKET": str(data_dir / "notify")})
        assert notify.next()["READY"] == "1"
        daemon.send_signal(signal.SIGTERM)
        assert notify.next()["STOPPING"] == "1"
        assert daemon.process.wait(20) == 0
    finally:
        notify.close()


def test_tcp_with_a_token_file(data_dir: Path, start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    daemon = start(data_dir, "--set", f"control.tcp=127.0.0.1:{port}").wait_ready()
    token = (data_dir / "control.token").read_text().strip()
    assert stat.S_IMODE((data_dir / "control.token").stat().st_mode) == 0o600
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/v1/status").status_code == 401
        assert client.get("/v1/status", headers={"authorization": f"Bearer {token}"}).status_code == 200
    assert daemon.end() == 0


def test_a_key_file_elsewhere_is_used(data_dir: Path, start: Start) -> None:
    identity = Identity.generate()
    identity.save(data_dir / "elsewhere.key")
    daemon = start(data_dir / "node", "--set", f"node.key_file={data_dir}/elsewhere.key").wait_ready()
    assert daemon.get("/v1/status")["peer_id"] == identity.peer_id


def test_open_files_are_raised_to_the_hard_limit(data_dir: Path, start: Start) -> None:
    daemon = start(data_dir).wait_ready()
    limits = Path(f"/proc/{daemon.pid}/limits").read_text()
    soft, hard = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert int(soft) >= min(int(hard), 65_536)
    assert os.getpid() != daemon.pid


def test_megabytes_through_two_daemons_arrive_intact(data_dir: Path, start: Start) -> None:
    ann, bob = two_members(data_dir, start)
    content = os.urandom(24 * 1024 * 1024)
    peer = bob.get("/v1/status")["peer_id"]

    async def main() -> tuple[bytes, bytes]:
        async with Client.open(ann.socket) as a, Client.open(bob.socket) as b:
            echoed, received = bytearray(), bytearray()
            async with b.accept("file") as incoming, trio.open_nursery() as nursery:

                async def echo() -> None:
                    async with await anext(incoming) as stream:
                        async for item in stream:
                            received.extend(item)
                            await stream.send(item)

                async def send(stream: ClientStream) -> None:
                    for at in range(0, len(content), 262_144):
                        await stream.send(content[at : at + 262_144])
                    await stream.send_eof()

                nursery.start_soon(echo)
                async with a.stream(peer, "file") as stream:
                    nursery.start_soon(send, stream)
                    async for item in stream:
                        echoed.extend(item)
            return bytes(echoed), bytes(received)

    echoed, received = trio.run(main)
    assert received == content
    assert echoed == content


def test_a_whole_stream_arrives_though_its_sender_leaves_at_once(data_dir: Path, start: Start) -> None:
    ann, bob = two_members(data_dir, start)
    peer = bob.get("/v1/status")["peer_id"]

    async def main() -> int:
        async with Client.open(ann.socket) as a, Client.open(bob.socket) as b, b.accept("file") as incoming:
            async with a.stream(peer, "file") as stream:
                for _ in range(40):
                    await stream.send(bytes(100_000))
            async with await anext(incoming) as arriving:
                return sum([len(item) async for item in arriving])

    for _ in range(3):
        assert trio.run(main) == 4_000_000
