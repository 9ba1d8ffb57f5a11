"""The client's calls about the node's trace."""

import os
from pathlib import Path
from typing import Any, Final

from dep2p.client.transport import Transport

_LOOK_TIMEOUT_S: Final = 10.0
_DISK_TIMEOUT_S: Final = 120.0
"""For what waits for a disk."""


def _whole(directory: Path | str) -> str:
    return os.path.abspath(os.path.expanduser(directory))


class TraceCalls:
    """The part of :class:`dep2p.client.Client` about the trace that the daemon writes."""

    _transport: Transport

    async def trace_status(self) -> dict[str, Any]:
        """``is_on``, ``directory``, ``settings``, counts and the last error: docs/reference/control-api.md."""
        return await self._transport.call("GET", "/v1/trace", timeout_s=_LOOK_TIMEOUT_S)

    async def trace_start(self, directory: Path | str | None = None, **settings: Any) -> dict[str, Any]:
        """Begin a trace in a directory of the daemon's machine, by default the one that [trace] names.

        ``settings`` are keys of [trace] by name, where they should differ: ``rpcs``, ``sample``, ``roll_bytes``,
        ``roll_s``, ``disk_bytes_max``, ``age_max_s``, ``snapshot_s``, ``clock_s``. Raises TraceRunningError and
        TraceError.
        """
        body: dict[str, Any] = dict(settings)
        if directory is not None:
            body["dir"] = _whole(directory)
        return await self._transport.call("POST", "/v1/trace/start", body, timeout_s=_DISK_TIMEOUT_S)

    async def trace_stop(self) -> dict[str, Any]:
        """End it; returns what `trace_status` does, when the last file is complete."""
        return await self._transport.call("POST", "/v1/trace/stop", {}, timeout_s=_DISK_TIMEOUT_S)
