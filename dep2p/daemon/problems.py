"""Errors of the control API: RFC 9457 problems with a D-code."""

import logging
from collections.abc import Mapping

import msgspec
from msgspec import Struct
from starlette.responses import Response

from dep2p.control_api.errors import code_of
from dep2p.error_codes import ERRORS
from dep2p.errors import Dep2pError, NotOwnerError, RateLimitedError

_logger = logging.getLogger("dep2p.daemon.control")


class Problem(Dep2pError):
    """A call that the control API refuses itself. ``code`` is a key of the table of D-codes."""

    def __init__(self, code: str, detail: str, **extra: object) -> None:
        super().__init__(detail)
        self.code = code
        self.extra = extra


def problem_of(error: BaseException) -> dict[str, object]:
    """Return the fields of a problem. An unforeseen exception becomes D9001 without its text, and a line in the log."""
    extra: dict[str, object] = {}
    if isinstance(error, Problem):
        code, detail, extra = error.code, str(error), error.extra
    elif isinstance(error, Dep2pError):
        code, detail = code_of(error), str(error)
        if isinstance(error, RateLimitedError):
            extra = {"retry_after_ms": error.retry_after_ms}
        if isinstance(error, NotOwnerError):
            extra = {"owner": error.owner, "nodes": list(error.nodes)}
    else:
        code, detail = "D9001", f"{type(error).__name__}; the daemon's log has the details"
    if code == "D9001":
        _logger.error("a control call failed", exc_info=error)
    info = ERRORS[code]
    return {
        "type": f"urn:dep2p:error:{code}",
        "title": info.title,
        "status": info.http_status,
        "detail": detail or info.explanation,
        "code": code,
        "try": info.what_to_try,
        **extra,
    }


def problem_response(error: BaseException, **extra: object) -> Response:
    """Return the whole answer for an error, with further fields."""
    problem = problem_of(error) | extra
    status = int(str(problem["status"]))
    headers: dict[str, str] = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if "allow" in problem:
        headers["allow"] = str(problem["allow"])
    return Response(msgspec.json.encode(problem), status, headers, "application/problem+json")


def json_response(value: Struct | Mapping[str, object], status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(value), status, None, "application/json")
