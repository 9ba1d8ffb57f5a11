"""The client's calls about the node's trace."""

import os
from pathlib import Path
from typing import Final, TypedDict, Unpack

from dep2p.arguments import checks_arguments
from dep2p.client.transport import Transport
from dep2p.control_api.calls import EmptyCall, StartTrace
from dep2p.control_api.replies import TraceState

_LOOK_TIMEOUT_S: Final = 10.0
_DISK_TIMEOUT_S: Final = 120.0
"""Seconds for a call that waits for a disk."""


def _whole(directory: Path | str) -> str:
    return os.path.abspath(os.path.expanduser(directory))


class TraceOptions(TypedDict, total=False):
    """Keys of [trace] that replace the configured ones."""

    rpcs: bool
    sample: float
    roll_bytes: int
    roll_s: float
    disk_bytes_max: int
    age_max_s: float
    snapshot_s: float
    clock_s: float


@checks_arguments
class ClientTracer:
    """The trace that the daemon writes: ``client.tracer``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def status(self) -> TraceState:
        """Return whether the daemon traces, and where, with its settings, counts and last error."""
        return await self._transport.ask("GET", "/v1/trace", TraceState, timeout_s=_LOOK_TIMEOUT_S)

    async def start(self, directory: Path | str | None = None, **settings: Unpack[TraceOptions]) -> TraceState:
        """Begin a trace in a directory of the daemon's machine, by default the one that [trace] names.

        Raises TraceRunningError and TraceError.
        """
        call = StartTrace(dir=None if directory is None else _whole(directory), **settings)
        return await self._transport.ask("POST", "/v1/trace/start", TraceState, call, timeout_s=_DISK_TIMEOUT_S)

    async def stop(self) -> TraceState:
        """End the trace. Returns the same as `status`, when the last file is complete."""
        return await self._transport.ask("POST", "/v1/trace/stop", TraceState, EmptyCall(), timeout_s=_DISK_TIMEOUT_S)
