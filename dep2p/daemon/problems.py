"""Errors of the control API: RFC 9457 problems with a D-code."""

import json
import logging
from typing import Any

from starlette.responses import Response

from dep2p.client.errors import code_of
from dep2p.error_codes import ERRORS
from dep2p.errors import Dep2pError, NotOwnerError, RateLimitedError

_logger = logging.getLogger("dep2p.daemon.control")


class Problem(Dep2pError):
    """A call that the control API refuses itself. ``code`` is a key of the table of D-codes."""

    def __init__(self, code: str, detail: str, **extra: object) -> None:
        super().__init__(detail)
        self.code = code
        self.extra = extra


def problem_of(error: BaseException) -> dict[str, Any]:
    """The problem's fields. An exception that nobody foresaw becomes D9001 without its text, and a line in the log."""
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
    """The whole answer for an error, with further fields."""
    problem: dict[str, Any] = {**problem_of(error), **extra}
    headers: dict[str, str] = {}
    if problem["status"] == 401:
        headers["www-authenticate"] = "Bearer"
    if "allow" in problem:
        headers["allow"] = str(problem["allow"])
    return Response(json.dumps(problem), problem["status"], headers, "application/problem+json")


def json_response(value: dict[str, Any], status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(json.dumps(value, separators=(",", ":")), status, None, "application/json")
