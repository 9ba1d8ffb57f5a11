"""The checks of ``dep2p doctor``; each returns findings and changes nothing."""

import os
import platform
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final, Literal

from dep2p.cli.framework.command import Invocation
from dep2p.cli.framework.render import address, byte_count, left_of, short_peer
from dep2p.errors import ConfigError, IdentityError, RealmFileError, RequestTimeoutError
from dep2p.outside_text import printable

if TYPE_CHECKING:
    from dep2p.client import Client
    from dep2p.config.loader import Config
    from dep2p.control_api.replies import RealmSummary

State = Literal["ok", "warn", "fail"]
_FREE_BYTES_FAIL: Final = 50_000_000
_FREE_BYTES_WARN: Final = 1_000_000_000
_CLOCK_OLDEST_S: Final = 1_767_225_600  # 2026-01-01: before dep2p existed, so the clock is wrong
_PING_PEERS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one check."""

    state: State
    check: str
    text: str
    todo: str = ""

    def json(self) -> dict[str, str]:
        """The JSON object of this finding."""
        return {"check": self.check, "state": self.state, "detail": self.text, "try": self.todo}


Check = Callable[[Invocation], Sequence[CheckResult]]


def check_versions(run: Invocation) -> list[CheckResult]:
    """Python and dep2p."""
    from dep2p import __version__

    text = f"dep2p {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    supported = sys.version_info >= (3, 11)
    return [
        CheckResult("ok" if supported else "fail", "versions", text, "" if supported else "use Python 3.11 or later")
    ]


def check_configuration(run: Invocation) -> list[CheckResult]:
    """The configuration file."""
    try:
        target = run.target()
    except ConfigError as error:
        return [CheckResult("fail", "configuration", str(error), "correct it, then: dep2p config check")]
    config = target.config
    if config is None:
        return [CheckResult("ok", "configuration", f"the node at {target.tcp} is on another machine, {target.origin}")]
    where = str(config.file) if config.file else "defaults and environment, no file"
    return [CheckResult("ok", "configuration", where)]


def check_data_directory(run: Invocation) -> list[CheckResult]:
    """Existence, owner and mode of the data directory."""
    path = _data_dir(run)
    if path is None:
        return []
    name = "data directory"
    if not path.exists():
        return [CheckResult("warn", name, f"{path} does not exist yet", "dep2p daemon makes it")]
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        return [
            CheckResult("fail", name, f"{path} is not a directory", "move it away, or choose another with --data-dir")
        ]
    if status.st_uid != os.geteuid():
        return [
            CheckResult(
                "fail", name, f"{path} belongs to another user", f"chown it, or run as that user: ls -ld {path}"
            )
        ]
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        return [CheckResult("fail", name, f"{path} has mode {mode:04o}: others may enter", f"chmod 700 {path}")]
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return [CheckResult("fail", name, f"{path} cannot be written", f"chmod 700 {path}")]
    return [CheckResult("ok", name, f"{path}, mode {stat.S_IMODE(status.st_mode):04o}")]


def check_disk_space(run: Invocation) -> list[CheckResult]:
    """Free space where the data directory is or will be."""
    path = _data_dir(run)
    if path is None:
        return []
    while not path.exists() and path != path.parent:
        path = path.parent
    free = shutil.disk_usage(path).free
    state: State = "fail" if free < _FREE_BYTES_FAIL else "warn" if free < _FREE_BYTES_WARN else "ok"
    return [
        CheckResult(state, "disk space", f"{byte_count(free)} free", "" if state == "ok" else f"make room on {path}")
    ]


def check_clock(run: Invocation) -> list[CheckResult]:
    """Whether the clock can be right: member records hold times."""
    now = time.time()
    if now < _CLOCK_OLDEST_S:
        shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
        return [
            CheckResult(
                "fail", "clock", f"it says {shown} UTC", "set it, for example with NTP; member records hold times"
            )
        ]
    return [CheckResult("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))]


def check_key_file(run: Invocation) -> list[CheckResult]:
    """The node's private key."""
    from dep2p.identity import Identity

    config = _config(run)
    if config is None:
        return []
    path: Path = config.key_file
    if not path.exists():
        return [
            CheckResult("warn", "key file", f"{path} does not exist yet", "dep2p id --new, or dep2p daemon makes it")
        ]
    try:
        identity = Identity.load(path)
    except IdentityError as error:
        return [CheckResult("fail", "key file", str(error), f"ls -l {path}; restore it from a backup")]
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return [CheckResult("fail", "key file", f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {path}")]
    return [CheckResult("ok", "key file", f"{short_peer(identity.peer_id)}, mode {mode:04o}")]


def check_realm_files(run: Invocation) -> list[CheckResult]:
    """Every realm file: readable, private, its name used once."""
    from dep2p.realm.credentials import Realm

    config = _config(run)
    if config is None:
        return []
    findings: list[CheckResult] = []
    names: list[str] = []
    for path in sorted(config.realms_dir.glob("*.realm")):
        try:
            realm = Realm.from_psk_file(path)
        except RealmFileError as error:
            findings.append(CheckResult("fail", "realm file", str(error), f"restore or remove {path}"))
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            findings.append(
                CheckResult("fail", "realm file", f"{path} can be read by others ({mode:04o})", f"chmod 600 {path}")
            )
        elif realm.name in names:
            findings.append(
                CheckResult(
                    "fail", "realm file", f"two realms are called {realm.name!r}", "leave one by its id: dep2p realm ls"
                )
            )
        else:
            findings.append(CheckResult("ok", "realm file", printable(realm.name)))
        names.append(realm.name)
    return findings or [
        CheckResult("warn", "realm file", "in no realm yet", "dep2p realm new NAME, or dep2p realm join")
    ]


def check_ports(run: Invocation) -> list[CheckResult]:
    """Whether the ports to listen on are free, when no daemon holds them."""
    config = _config(run)
    if config is None or config.socket_path.exists():
        return []  # a running daemon listens there: asked below
    findings: list[CheckResult] = []
    for addr in config.node.listen:
        place = _tcp_place(addr)
        if place is None:
            continue
        host, port = place
        problem = _cannot_bind(host, port)
        if problem is None:
            findings.append(CheckResult("ok", "port", f"{addr} is free"))
        else:
            findings.append(
                CheckResult("fail", "port", f"{addr}: {problem}", "another --listen, or find who has it: ss -ltnp")
            )
    return findings


def _tcp_place(addr: str) -> tuple[str, int] | None:
    parts = addr.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp" or not parts[4].isdecimal():
        return None
    return parts[2], int(parts[4])


def _cannot_bind(host: str, port: int) -> str | None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None


def daemon_checks(run: Invocation) -> list[CheckResult]:
    """The running daemon: socket, version, health, peers, members."""
    from dep2p.client import DaemonUnreachableError

    try:
        where = run.target().socket
    except ConfigError:
        return []  # check_configuration reports it
    findings: list[CheckResult] = []
    if where is None:
        try:
            return run.with_client(_ask_daemon)
        except DaemonUnreachableError as error:
            return [CheckResult("fail", "daemon", error.detail, error.hint or "is it up, and the way to it open?")]
    if where.exists() and not stat.S_ISSOCK(where.stat().st_mode):
        findings.append(CheckResult("fail", "socket", f"{where} is no socket", f"move it away: mv {where} {where}.old"))
    elif where.exists():
        mode = stat.S_IMODE(where.stat().st_mode)
        if mode & 0o077:
            findings.append(CheckResult("fail", "socket", f"{where} has mode {mode:04o}", f"chmod 600 {where}"))
        else:
            findings.append(CheckResult("ok", "socket", f"{where}, mode {mode:04o}"))
    try:
        return findings + run.with_client(_ask_daemon)
    except DaemonUnreachableError as error:
        state: State = "fail" if where.exists() else "warn"
        return [*findings, CheckResult(state, "daemon", error.detail, error.hint or "dep2p daemon")]


async def _ask_daemon(client: "Client") -> list[CheckResult]:
    from dep2p import __version__

    status = await client.status()
    findings: list[CheckResult] = []
    theirs = status.version
    if theirs == __version__:
        findings.append(CheckResult("ok", "daemon", f"runs, version {theirs}"))
    else:
        findings.append(
            CheckResult("warn", "daemon", f"version {theirs}, this command {__version__}", "restart it: dep2p shutdown")
        )
    ready, reasons = await client.ready()
    if not ready:
        findings.append(CheckResult("fail", "ready", "; ".join(reasons) or "it takes no work", "look at its log"))
    findings += [
        CheckResult("fail", "daemon", printable(problem), "dep2p status; its log says more")
        for problem in status.problems
    ]
    if status.listen:
        findings.append(CheckResult("ok", "listening", printable(", ".join(map(address, status.listen)))))
    else:
        findings.append(CheckResult("warn", "listening", "nowhere: others cannot dial this node", "set [node] listen"))
    findings += [
        CheckResult(
            "warn",
            "limited relay",
            f"{short_peer(each.peer)} is reached over relay {short_peer(each.circuit.relay)} only, which has "
            f"{left_of(each.circuit.data_left_bytes, each.circuit.time_left_s)}: no pub/sub goes over it",
            'give one of the two an address that others can dial, or let a member relay: [node] relay = "server"',
        )
        for each in status.limited
    ]
    for realm in await client.realms():
        findings += await _ask_members(client, realm, status.peer_id)
    return findings


async def _ask_members(client: "Client", realm: "RealmSummary", own: str) -> list[CheckResult]:
    name = printable(realm.name)
    check = f"realm {name}"
    refused = [
        CheckResult("warn", check, printable(problem), "wait for the next try; the log of that peer says more")
        for problem in realm.problems
    ]
    return [*await _ask_each_member(client, realm, own, is_refused=bool(refused)), *refused]


async def _ask_each_member(client: "Client", realm: "RealmSummary", own: str, *, is_refused: bool) -> list[CheckResult]:
    name = printable(realm.name)
    check = f"realm {name}"
    members = [member for member in await client.members(realm.realm_id) if member.peer != own]
    if not members and is_refused:
        return []  # the refusals say why
    up = [member for member in members if member.state == "up"]
    if not members:
        return [
            CheckResult(
                "warn", check, "no other member is known", f"give others an invite: dep2p realm invite {quote(name)}"
            )
        ]
    answered = 0
    for member in up[:_PING_PEERS_MAX]:
        try:
            await client.ping(member.peer, timeout_s=2.0)
        except RequestTimeoutError:
            continue
        except Exception as error:  # a member that fails is a finding, and does not end the check
            return [CheckResult("warn", check, f"{short_peer(member.peer)}: {error}", "dep2p peer ls")]
        answered += 1
    asked = len(up[:_PING_PEERS_MAX])
    text = f"{len(up)} of {len(members)} other members up, {answered} of {asked} answer pings"
    if not up or answered < asked:
        return [
            CheckResult(
                "warn", check, text, "check that they run, and that their addresses can be reached: dep2p realm members"
            )
        ]
    return [CheckResult("ok", check, text)]


def _config(run: Invocation) -> "Config | None":
    try:
        return run.target().config
    except ConfigError:
        return None  # check_configuration reports it


def _data_dir(run: Invocation) -> Path | None:
    config = _config(run)
    return None if config is None else config.data_dir


LOCAL_CHECKS: Final[tuple[Check, ...]] = (
    check_versions,
    check_clock,
    check_configuration,
    check_data_directory,
    check_disk_space,
    check_key_file,
    check_realm_files,
    check_ports,
)
