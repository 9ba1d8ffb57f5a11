"""The trace of the node: begun, ended, looked at."""

import dataclasses
from pathlib import Path

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import Fields, read_json
from dep2p.daemon.api.routing import route
from dep2p.daemon.problems import Problem, json_response
from dep2p.daemon.trace_settings import trace_settings
from dep2p.node.tracer import TraceStatus
from dep2p.tracing.settings import TraceSettings

_STOPPED_BY_CALL = "stopped by the control API"


def status_fields(status: TraceStatus) -> dict[str, object]:
    """In JSON."""
    found = dataclasses.asdict(status)
    return {**found, "directory": found["directory"] or None, "growing": found["growing"] or None}


async def look(control: Control, _request: Request) -> ASGIApp:
    """What the trace is doing."""
    return json_response(status_fields(control.node.tracer.status()))


async def start(control: Control, request: Request) -> ASGIApp:
    """Begin one; what the call leaves out is as [trace] says."""
    fields = await read_json(request, control.bounds)
    chosen = fields.optional_text("dir")
    directory = control.config.trace_dir if chosen is None else Path(chosen)
    if not directory.is_absolute():
        raise Problem("D1005", f"dir: {chosen} is relative: give the whole path on the daemon's machine")
    settings = _settings(fields, trace_settings(control.config.trace))
    fields.finish()
    with control.lifecycle.work():
        return json_response(status_fields(await control.node.tracer.start(directory, settings)), 201)


def _settings(fields: Fields, usual: TraceSettings) -> TraceSettings:
    given: dict[str, object] = {"rpcs": fields.boolean("rpcs", usual.rpcs)}
    given["sample"] = fields.number("sample", usual.sample, high=1)
    for name in ("roll_bytes", "disk_bytes_max"):
        given[name] = fields.integer(name, getattr(usual, name), low=1, high=1 << 50)
    for name in ("roll_s", "age_max_s", "snapshot_s", "clock_s"):
        given[name] = fields.number(name, getattr(usual, name), high=1e9)
    try:
        return dataclasses.replace(usual, **given)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise Problem("D1005", str(error)) from None


async def stop(control: Control, request: Request) -> ASGIApp:
    """End it: its file is complete when this answers. Nothing happens when there is none."""
    (await read_json(request, control.bounds)).finish()
    return json_response(status_fields(await control.node.tracer.stop(_STOPPED_BY_CALL)))


ROUTES: list[Route] = [
    route("GET", "/v1/trace", look),
    route("POST", "/v1/trace/start", start),
    route("POST", "/v1/trace/stop", stop),
]
