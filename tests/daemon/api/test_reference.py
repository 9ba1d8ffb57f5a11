"""The reference pages and the systemd unit say what is so."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dep2p.config.loader import load_config
from dep2p.config.reference import reference_markdown
from dep2p.daemon.api.routes import messages as routes_messages
from dep2p.daemon.api.routes import peers as routes_peers
from dep2p.daemon.api.routes import process as routes_process
from dep2p.daemon.api.routes import queues as routes_queues
from dep2p.daemon.api.routes import realms as routes_realms
from dep2p.daemon.api.routes import services as routes_services
from dep2p.daemon.api.routes import sessions as routes_sessions
from dep2p.daemon.api.routes import streams as routes_streams
from dep2p.daemon.api.routes import topics as routes_topics
from dep2p.error_codes import ERRORS, error_info, find
from dep2p.limits import Limits
from dep2p.protocols.queues.options import QueueOptions
from tests.daemon.api.harness import Served

ROOT = Path(__file__).resolve().parents[3]


def test_the_configuration_page_is_made_from_the_code() -> None:
    page = (ROOT / "docs/reference/config.md").read_text()
    assert page == reference_markdown(), "python -m dep2p.config.reference > docs/reference/config.md"


def test_every_metric_is_documented_and_every_documented_one_is_there(served: Served) -> None:
    served.http.get("/v1/status")
    with served.http.stream("GET", "/v1/events"), served.http.stream("GET", "/v1/topics/chat/messages"):
        served.do(served.control.counts.update, ["lagged_events"])
        served.do(served.control.node.queues.ownership.engine.registry.create, "", "jobs", QueueOptions())
        text = served.http.get("/metrics").text
    there = {name: kind for name, kind in re.findall(r"^# TYPE (dep2p_\w+) (\w+)$", text, re.M)}
    page = (ROOT / "docs/reference/metrics.md").read_text()
    rows = re.findall(r"^\| `(dep2p_\w+)` \| (\w+) \| ([^|]*)\|", page, re.M)
    assert {name: kind for name, kind, _ in rows} == there
    for name, _, labels in rows:
        samples = re.findall(rf"^{name}(?:_count)?\{{([^}}]*)\}}", text, re.M)
        documented = re.findall(r"`(\w+)`", labels)
        assert samples or not documented, f"{name} has no sample to compare"
        for sample in samples:
            assert sorted(re.findall(r'(\w+)="', sample)) == sorted(documented)
        assert re.fullmatch(r"dep2p_[a-z_]+?(_total)?", name)


def test_labels_cannot_be_invented_by_clients(served: Served) -> None:
    for number in range(50):
        served.http.request("BREW", f"/coffee/{number}")
        served.http.get(f"/v1/realms/{number}/members")
    routes = {route for _, route, _ in served.control.requests}
    assert routes <= {"none", "/v1/realms/{realm}/members"}
    assert {method for method, _, _ in served.control.requests} == {"GET", "other"}


def test_every_route_is_documented() -> None:
    page = (ROOT / "docs/reference/control-api.md").read_text()
    for module in (
        routes_process,
        routes_peers,
        routes_realms,
        routes_messages,
        routes_streams,
        routes_topics,
        routes_services,
        routes_sessions,
        routes_queues,
    ):
        for route in module.ROUTES:
            assert f"`{route.name}`" in page, f"{route.name} is not in docs/reference/control-api.md"
    for code in re.findall(r"\bD\d{4}\b", page):
        assert code in ERRORS


def test_the_table_of_codes() -> None:
    for code, info in ERRORS.items():
        assert re.fullmatch(r"D[1-9]\d{3}", code)
        assert info.title[0].islower() and not info.title.endswith("."), code
        for text in (info.explanation, info.what_to_try):
            assert text.endswith(".") and text[0].isupper(), code
        assert 400 <= info.http_status < 600
        assert info.exit_code in range(1, 7)
    assert error_info("d3001") is error_info("3001") is ERRORS["D3001"]
    assert find("D0000") is None


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = lambda optionstr: optionstr  # type: ignore[method-assign]  # units' keys have capitals
    parser.read(ROOT / "packaging/dep2p.service")
    return parser


def test_the_unit_has_what_the_daemon_counts_on() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["DynamicUser"] == "yes"
    assert service["StateDirectory"] == service["RuntimeDirectory"] == "dep2p"
    assert service["StateDirectoryMode"] == service["RuntimeDirectoryMode"] == "0700"
    assert service["Restart"] == "on-failure"
    assert float(service["TimeoutStopSec"]) > 2 * Limits().drain_timeout_s + 10
    assert int(service["LimitNOFILE"]) == 65_536
    # What a second daemon and a wrong configuration exit with: no restart would help.
    codes = {ERRORS["D3002"].exit_code, ERRORS["D1003"].exit_code}
    assert set(map(int, service["RestartPreventExitStatus"].split())) == codes
    assert service["SuccessExitStatus"] == "143"
    for key in (
        "NoNewPrivileges",
        "PrivateTmp",
        "PrivateDevices",
        "ProtectHome",
        "ProtectKernelModules",
        "LockPersonality",
    ):
        assert service[key] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""


def test_the_units_command_line_is_one_that_the_daemon_takes() -> None:
    words = unit()["Service"]["ExecStart"].split()
    assert words[1:4] == ["--data-dir", "/var/lib/dep2p", "daemon"]
    flags = {"node.data_dir": "/var/lib/dep2p", **dict([words[words.index("--set") + 1].split("=", 1)])}
    assert str(load_config(flags=flags).socket_path).startswith("/run/dep2p/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    # The program is not installed where the tests run, and that is not the unit's fault.
    text = (ROOT / "packaging/dep2p.service").read_text()
    there = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", text, flags=re.M)
    copy = tmp_path / "dep2p.service"
    copy.write_text(there)
    copy.chmod(0o644)  # whatever the umask is: systemd warns of a file that all may write
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "dep2p.service" not in done.stderr, done.stderr
