"""The environment of a run: the machine, the versions, and the load of other processes meanwhile."""

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("libp2p", "trio", "cryptography", "noiseprotocol", "pynacl", "cbor2", "zstandard")
_ROOT = Path(__file__).parents[2]
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, object]:
    """Return the environment block of the contract."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the short hash of HEAD, "+" behind it when tracked files differ from it; "" outside a checkout."""
    try:
        head = _git("rev-parse", "--short", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def process_cpu_s(pid: int) -> float:
    """User and system seconds that a live process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def family_cpu_s() -> float:
    """User and system seconds of this process and all below it, those that ended and were waited for included."""
    return sum(family().values())


def family() -> dict[int, float]:
    """Return this process and all below it, each with its seconds and those of its children that it waited for."""
    parents: dict[int, int] = {}
    used_s: dict[int, float] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                parents[int(place.name)] = int(fields[1])
                used_s[int(place.name)] = sum(map(int, fields[11:15])) / _TICKS_PER_S
    return {pid: used_s.get(pid, 0.0) for pid in _below(os.getpid(), parents)}


class FamilyMeter:
    """The use of processes below this one, also of those that no process waits for: PySpark's daemon ignores the end
    of its workers, and their time is added to no other process.
    """

    def __init__(self) -> None:
        self._before = {pid: own_s for pid, (_, own_s) in _processes().items()}
        self._used_s: dict[int, float] = {}

    def look(self) -> None:
        """Read the processor time of all processes. Call it often: time that a process uses after the last look before
        its end is not seen."""
        known = _processes()
        for pid in _below(os.getpid(), {pid: parent for pid, (parent, _) in known.items()}) - {os.getpid()}:
            used_s = known[pid][1] - self._before.get(pid, 0.0)
            self._used_s[pid] = max(used_s, self._used_s.get(pid, 0.0))

    @property
    def used_s(self) -> float:
        """User and system seconds of all these processes since this meter was made."""
        return sum(self._used_s.values())


def _processes() -> dict[int, tuple[int, float]]:
    """Return all processes, each with its parent and own seconds."""
    found: dict[int, tuple[int, float]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                found[int(place.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return found


def _below(pid: int, parents: dict[int, int]) -> set[int]:
    """Return the process and all below it."""
    found = {pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def process_rss_kb(pid: int) -> float:
    """Resident memory of a live process, KB of 1,000 bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1.024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Rss line")


def machine_cpu_s() -> float:
    """Seconds that the cores were busy since boot, time stolen by the hypervisor included."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    machine_s: float
    ours_s: float


class LoadMeter:
    """Cores kept busy by processes that are not the benchmark's, while rounds were measured."""

    def __init__(self) -> None:
        self._other_core_s = 0.0
        self._elapsed_s = 0.0
        self._begin = _Reading(0.0, 0.0, 0.0)

    def begin(self, pids: Sequence[int]) -> None:
        """Begin a round; ``pids`` are the benchmark's own processes and live until :meth:`end`."""
        self._begin = self._read(pids)

    def end(self, pids: Sequence[int]) -> None:
        """End the round."""
        now = self._read(pids)
        begin = self._begin
        self.add(now.at_s - begin.at_s, now.machine_s - begin.machine_s, now.ours_s - begin.ours_s)

    def add(self, elapsed_s: float, machine_s: float, ours_s: float) -> None:
        """Add a round in which the cores were busy for ``machine_s`` in all, and for ``ours_s`` of it for the
        benchmark."""
        self._elapsed_s += elapsed_s
        self._other_core_s += max(0.0, machine_s - ours_s)

    def _read(self, pids: Sequence[int]) -> _Reading:
        ours_s = sum(process_cpu_s(pid) for pid in (os.getpid(), *pids))
        return _Reading(time.monotonic(), machine_cpu_s(), ours_s)

    @property
    def other_cores(self) -> float:
        """The mean number of cores that others kept busy; 0.0 when nothing was measured."""
        return round(self._other_core_s / self._elapsed_s, 2) if self._elapsed_s else 0.0
