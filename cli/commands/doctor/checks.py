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
from typing import TYPE_CHECKING, Any, Final, Literal

from dep2p.cli.framework.command import Invocation
from dep2p.cli.framework.render import byte_count, printable, short_peer
from dep2p.errors import ConfigError, IdentityError, RealmFileError

if TYPE_CHECKING:
    from dep2p.client.client import Client

State = Literal["ok", "warn", "fail"]
_FREE_BYTES_FAIL: Final = 50_000_000
_FREE_BYTES_WARN: Final = 1_000_000_000
_CLOCK_OLDEST_S: Final = 1_767_225_600  # 2026-01-01: before dep2p existed, so the clock is wrong
_PING_PEERS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    state: State
    check: str
    text: str
    todo: str = ""

    def json(self) -> dict[str, str]:
        """The JSON object of this finding."""
        return {"check": self.check, "state": self.state, "detail": self.text, "try": self.todo}


Check = Callable[[Invocation], Sequence[Finding]]


def check_versions(run: Invocation) -> list[Finding]:
    """Python and dep2p."""
    from dep2p import __version__

    text = f"dep2p {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    supported = sys.version_info >= (3, 11)
    return [Finding("ok" if supported else "fail", "versions", text, "" if supported else "use Python 3.11 or later")]


def check_configuration(run: Invocation) -> list[Finding]:
    """The configuration file."""
    try:
        config = run.config()
    except ConfigError as error:
        return [Finding("fail", "configuration", str(error), "correct it, then: dep2p config check")]
    where = str(config.file) if config.file else "defaults and environment, no file"
    return [Finding("ok", "configuration", where)]


def check_data_directory(run: Invocation) -> list[Finding]:
    """Existence, owner and mode of the data directory."""
    path = _data_dir(run)
    if path is None:
        return []
    name = "data directory"
    if not path.exists():
        return [Finding("warn", name, f"{path} does not exist yet", "dep2p daemon makes it")]
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        return [Finding("fail", name, f"{path} is not a directory", "move it away, or choose another with --data-dir")]
    if status.st_uid != os.geteuid():
        return [
            Finding("fail", name, f"{path} belongs to another user", f"chown it, or run as that user: ls -ld {path}")
        ]
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        return [Finding("fail", name, f"{path} has mode {mode:04o}: others may enter", f"chmod 700 {path}")]
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return [Finding("fail", name, f"{path} cannot be written", f"chmod 700 {path}")]
    return [Finding("ok", name, f"{path}, mode {stat.S_IMODE(status.st_mode):04o}")]


def check_disk_space(run: Invocation) -> list[Finding]:
    """Free space where the data directory is or will be."""
    path = _data_dir(run)
    if path is None:
        return []
    while not path.exists() and path != path.parent:
        path = path.parent
    free = shutil.disk_usage(path).free
    state: State = "fail" if free < _FREE_BYTES_FAIL else "warn" if free < _FREE_BYTES_WARN else "ok"
    return [Finding(state, "disk space", f"{byte_count(free)} free", "" if state == "ok" else f"make room on {path}")]


def check_clock(run: Invocation) -> list[Finding]:
    """Whether the clock can be right: member records hold times."""
    now = time.time()
    if now < _CLOCK_OLDEST_S:
        shown = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now))
        return [
            Finding("fail", "clock", f"it says {shown} UTC", "set it, for example with NTP; member records hold times")
        ]
    return [Finding("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))]


def check_key_file(run: Invocation) -> list[Finding]:
    """The node's private key."""
    from dep2p.identity import Identity

    config = _config(run)
    if config is None:
        return []
    path: Path = config.key_file
    if not path.exists():
        return [Finding("warn", "key file", f"{path} does not exist yet", "dep2p id --new, or dep2p daemon makes it")]
    try:
        identity = Identity.load(path)
    except IdentityError as error:
        return [Finding("fail", "key file", str(error), f"ls -l {path}; restore it from a backup")]
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return [Finding("fail", "key file", f"{path} can be read by others (mode {mode:04o})", f"chmod 600 {path}")]
    return [Finding("ok", "key file", f"{short_peer(identity.peer_id)}, mode {mode:04o}")]


def check_realm_files(run: Invocation) -> list[Finding]:
    """Every realm file: readable, private, its name used once."""
    from dep2p.realm.credentials import Realm

    config = _config(run)
    if config is None:
        return []
    findings: list[Finding] = []
    names: list[str] = []
    for path in sorted(config.realms_dir.glob("*.realm")):
        try:
            realm = Realm.from_psk_file(path)
        except RealmFileError as error:
            findings.append(Finding("fail", "realm file", str(error), f"restore or remove {path}"))
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            findings.append(
                Finding("fail", "realm file", f"{path} can be read by others ({mode:04o})", f"chmod 600 {path}")
            )
        elif realm.name in names:
            findings.append(
                Finding(
                    "fail", "realm file", f"two realms are called {realm.name!r}", "leave one by its id: dep2p realm ls"
                )
            )
        else:
            findings.append(Finding("ok", "realm file", printable(realm.name)))
        names.append(realm.name)
    return findings or [
        Finding("warn", "realm file", "in no realm yet", "dep2p realm new NAME, or dep2p realm join INVITE")
    ]


def check_ports(run: Invocation) -> list[Finding]:
    """Whether the ports to listen on are free, when no daemon holds them."""
    config = _config(run)
    if config is None or config.socket_path.exists():
        return []  # a running daemon listens there: asked below
    findings: list[Finding] = []
    for addr in config.node.listen:
        place = _tcp_place(addr)
        if place is None:
            continue
        host, port = place
        problem = _cannot_bind(host, port)
        if problem is None:
            findings.append(Finding("ok", "port", f"{addr} is free"))
        else:
            findings.append(
                Finding("fail", "port", f"{addr}: {problem}", "another --listen, or find who has it: ss -ltnp")
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


def daemon_checks(run: Invocation) -> list[Finding]:
    """The running daemon: socket, version, health, peers, members."""
    from dep2p.client.client import DaemonUnreachableError

    where = run.socket or (None if (config := _config(run)) is None else config.socket_path)
    if where is None:
        return []
    findings: list[Finding] = []
    if where.exists() and not stat.S_ISSOCK(where.stat().st_mode):
        findings.append(Finding("fail", "socket", f"{where} is no socket", f"move it away: mv {where} {where}.old"))
    elif where.exists():
        mode = stat.S_IMODE(where.stat().st_mode)
        if mode & 0o077:
            findings.append(Finding("fail", "socket", f"{where} has mode {mode:04o}", f"chmod 600 {where}"))
        else:
            findings.append(Finding("ok", "socket", f"{where}, mode {mode:04o}"))
    try:
        return findings + run.with_client(_ask_daemon)
    except DaemonUnreachableError as error:
        state: State = "fail" if where.exists() else "warn"
        return [*findings, Finding(state, "daemon", error.detail, error.hint or "dep2p daemon")]


async def _ask_daemon(client: "Client") -> list[Finding]:
    from dep2p import __version__

    status = await client.status()
    findings: list[Finding] = []
    theirs = str(status.get("version", "?"))
    if theirs == __version__:
        findings.append(Finding("ok", "daemon", f"runs, version {theirs}"))
    else:
        findings.append(
            Finding("warn", "daemon", f"version {theirs}, this command {__version__}", "restart it: dep2p shutdown")
        )
    ready, reasons = await client.ready()
    if not ready:
        findings.append(Finding("fail", "ready", "; ".join(reasons) or "it takes no work", "look at its log"))
    findings += [
        Finding("fail", "daemon", printable(str(problem)), "dep2p status; its log says more")
        for problem in status.get("problems") or ()
    ]
    listening = [str(addr) for addr in status.get("listen") or ()]
    if listening:
        findings.append(Finding("ok", "listening", printable(", ".join(a.partition("/p2p/")[0] for a in listening))))
    else:
        findings.append(Finding("warn", "listening", "nowhere: others cannot dial this node", "set [node] listen"))
    own = str(status["peer_id"])
    for realm in await client.realms():
        findings += await _ask_members(client, realm, own)
    return findings


async def _ask_members(client: "Client", realm: dict[str, Any], own: str) -> list[Finding]:
    name = printable(str(realm["name"]))
    check = f"realm {name}"
    members = [m for m in await client.realm_members(str(realm["realm_id"])) if str(m["peer"]) != own]
    up = [m for m in members if m.get("state") == "up"]
    if not members:
        return [
            Finding(
                "warn", check, "no other member is known", f"give others an invite: dep2p realm invite {quote(name)}"
            )
        ]
    answered = 0
    for member in up[:_PING_PEERS_MAX]:
        try:
            (rtt_s,) = await client.peer_ping(str(member["peer"]), 1, 2.0)
        except Exception as error:  # each member is asked: one that fails is a finding, not the end
            return [Finding("warn", check, f"{short_peer(str(member['peer']))}: {error}", "dep2p peer ls")]
        answered += rtt_s is not None
    asked = len(up[:_PING_PEERS_MAX])
    text = f"{len(up)} of {len(members)} other members up, {answered} of {asked} answer pings"
    if not up or answered < asked:
        return [
            Finding(
                "warn", check, text, "check that they run, and that their addresses can be reached: dep2p realm members"
            )
        ]
    return [Finding("ok", check, text)]


def _config(run: Invocation) -> Any:
    try:
        return run.config()
    except ConfigError:
        return None  # check_configuration has told


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
