"""The trace of the node: start, stop, state."""

import dataclasses
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.control_api.calls import EmptyCall, StartTrace
from dep2p.control_api.encoding import fields_of
from dep2p.control_api.replies import TraceSettingsSummary, TraceState, parse_reply
from dep2p.daemon.api.context import Control
from dep2p.daemon.api.fields import read_call
from dep2p.daemon.api.routing import route
from dep2p.daemon.problems import Problem, json_response
from dep2p.daemon.trace_settings import trace_settings
from dep2p.node.tracer import TraceStatus
from dep2p.tracing.settings import TraceSettings

_STOPPED_BY_CALL = "stopped by the control API"


def _state(status: TraceStatus) -> TraceState:
    found = dataclasses.asdict(status)
    return parse_reply(found | {"directory": status.directory or None, "growing": status.growing or None}, TraceState)


async def look(control: Control, _request: Request) -> ASGIApp:
    """Return the state of the trace."""
    return json_response(_state(control.node.tracer.status()))


async def start(control: Control, request: Request) -> ASGIApp:
    """Begin a trace; settings that the call leaves out are those of [trace]."""
    call = await read_call(request, control.bounds, StartTrace)
    directory = control.config.trace_dir if call.dir is None else Path(call.dir)
    if not directory.is_absolute():
        raise Problem("D1005", f"dir: {call.dir} is relative: give the whole path on the daemon's machine")
    settings = _settings(call, trace_settings(control.config.trace))
    with control.lifecycle.work():
        return json_response(_state(await control.node.tracer.start(directory, settings)), 201)


def _settings(call: StartTrace, usual: TraceSettings) -> TraceSettings:
    settings = fields_of(parse_reply(dataclasses.asdict(usual), TraceSettingsSummary))
    settings |= {name: value for name, value in fields_of(call).items() if name != "dir"}
    try:
        return msgspec.convert(settings, TraceSettings)
    except ValueError as error:
        raise Problem("D1005", str(error)) from None


async def stop(control: Control, request: Request) -> ASGIApp:
    """End the trace: its file is complete when this answers. Nothing happens when there is none."""
    await read_call(request, control.bounds, EmptyCall)
    return json_response(_state(await control.node.tracer.stop(_STOPPED_BY_CALL)))


ROUTES: list[Route] = [
    route("GET", "/v1/trace", look),
    route("POST", "/v1/trace/start", start),
    route("POST", "/v1/trace/stop", stop),
]
