"""[trace]: the events that the daemon records for `dep2p trace analyze`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from dep2p.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """[trace]: the events that the daemon records for `dep2p trace analyze`: docs/howto/traces.md."""

    enabled: bool = False
    """Trace from the start on. `dep2p trace start` and `dep2p trace stop` do it while the daemon runs."""
    dir: str = "auto"
    """Directory of the files; it is made, and several nodes may share it. "auto" is <data_dir>/trace."""
    rpcs: bool = False
    """Whether each RPC of pub/sub that comes or goes has an event, not only dropped ones: twice the cost and more.
    Without them, reports say nothing about IWANT, IDONTWANT and the cost of control messages."""
    sample: float = 1.0
    """The share of messages whose events are written, above 0 to 1: of pub/sub, reliable delivery and queues, by a hash
    of their ids, so that all nodes with the same share write the same messages. All else is written whole."""
    roll_bytes: int = 67_108_864
    """Bytes from which on a file is complete, so that readers see it."""
    roll_s: float = 900.0
    """Seconds after which a file is complete. A file is also complete when the trace stops."""
    disk_bytes_max: int = 4_294_967_296
    """Bytes of all trace files of this node in the directory at most: the oldest are removed. At least twice
    roll_bytes."""
    age_max_s: float = 0.0
    """Seconds after which complete files are removed, too; 0 keeps them."""
    snapshot_s: float = 5.0
    """Seconds between two snapshots of meshes, scores, queues and round trips; 0 takes none. Reports take a node that
    wrote nothing for over ten seconds as stopped: keep it well below that."""
    clock_s: float = 60.0
    """Seconds between two readings of the clocks of the connected members, by which reports correct the times of nodes;
    0 takes none."""


def _check_range(least: float, text: str, value: object, where: str) -> None:
    if not least <= float(str(value)) <= 1e15:
        raise ConfigError(f"{where}: {value} is out of range: it must be {text}.")


def _check_dir(value: object, where: str) -> None:
    if not value:
        raise ConfigError(f'{where}: the text is empty. Write a directory, or "auto".')


def _check_sample(value: object, where: str) -> None:
    if not 0 < float(str(value)) <= 1:
        raise ConfigError(f"{where}: {value} is out of range: it must be above 0 and at most 1.")


TRACE_CHECKS: Final[dict[str, Callable[[object, str], None]]] = {
    "trace.dir": _check_dir,
    "trace.sample": _check_sample,
    "trace.roll_bytes": partial(_check_range, 4_096, "4096 or more"),
    "trace.roll_s": partial(_check_range, 1.0, "1 second or more"),
    "trace.disk_bytes_max": partial(_check_range, 8_192, "8192 or more"),
    **{f"trace.{name}": partial(_check_range, 0.0, "0 or more") for name in ("age_max_s", "snapshot_s", "clock_s")},
}


def check_trace_keys(keys: TraceConfig, origins: Mapping[str, str]) -> None:
    """Raises :class:`ConfigError` when the disk would not hold two files."""
    if keys.disk_bytes_max < 2 * keys.roll_bytes:
        name = "disk_bytes_max" if origins["trace.disk_bytes_max"] != "default" else "roll_bytes"
        raise ConfigError(
            f"{origins[f'trace.{name}'].removeprefix('file ')}: [trace] {name}: disk_bytes_max ({keys.disk_bytes_max}) "
            f"must hold two files of roll_bytes ({keys.roll_bytes}): one grows while another is read."
        )
