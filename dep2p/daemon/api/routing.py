"""Turns functions into routes: errors become problems, and each route is known by its template."""

from collections.abc import Awaitable, Callable
from typing import cast
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dep2p.concurrency.exception_groups import first_error
from dep2p.daemon.api.context import Control
from dep2p.daemon.problems import Problem, problem_response

ROUTE_KEY = "dep2p.route"
Action = Callable[[Control, Request], Awaitable[ASGIApp]]


def route(method: str, path: str, action: Action, *, path_names: tuple[str, ...] = ()) -> Route:
    """Make a route of the control API. Parts of the path in ``path_names`` may hold a slash, written %2F."""

    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE_KEY] = path
        control = cast(Control, request.app.state.control)
        try:
            answer = await action(control, request)
        except ClientDisconnect:
            raise
        except BaseExceptionGroup as group:
            # A group of a nursery below: the caller needs the error of its task.
            answer = problem_response(_first(group))
        except Exception as error:
            answer = problem_response(error)
        # Starlette only calls it: any ASGI application will do.
        return cast(Response, answer)

    pattern = path
    for name in path_names:
        pattern = pattern.replace(f"{{{name}}}", f"{{{name}:path}}")
    return Route(pattern, endpoint, methods=[method], name=f"{method} {path}")


def _first(group: BaseExceptionGroup[BaseException]) -> Exception:
    plain, rest = group.split(Exception)
    if plain is None or rest is not None:
        raise group  # the group has a cancellation or the end of the process
    return first_error(plain)


async def no_route(_request: Request, error: Exception) -> Response:
    """Answer Starlette's 404 and 405 as problems."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        problem = Problem("D1006", f"this path takes {allow or 'other methods'}", status=405, allow=allow)
        return problem_response(problem)
    return problem_response(Problem("D1006", "there is no such path"))


def path_text(request: Request, name: str) -> str:
    """Return a part of the path, decoded."""
    return unquote(str(request.path_params[name]))
