"""The outermost part of the control API: the check of callers, the counts, and the last resort for errors."""

import hmac
import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dep2p.daemon.api.context import Control
from dep2p.daemon.api.routes import delivery as routes_delivery
from dep2p.daemon.api.routes import messages as routes_messages
from dep2p.daemon.api.routes import peers as routes_peers
from dep2p.daemon.api.routes import process as routes_process
from dep2p.daemon.api.routes import queues as routes_queues
from dep2p.daemon.api.routes import realms as routes_realms
from dep2p.daemon.api.routes import services as routes_services
from dep2p.daemon.api.routes import sessions as routes_sessions
from dep2p.daemon.api.routes import streams as routes_streams
from dep2p.daemon.api.routes import topics as routes_topics
from dep2p.daemon.api.routes import trace as routes_trace
from dep2p.daemon.api.routing import ROUTE_KEY, no_route
from dep2p.daemon.http.host_header import is_loopback_host
from dep2p.daemon.problems import Problem, problem_response

_logger = logging.getLogger("dep2p.daemon.control")


def build_app(control: Control) -> Starlette:
    """Build the app with all routes, for one node."""
    routes = [
        *routes_process.ROUTES,
        *routes_peers.ROUTES,
        *routes_realms.ROUTES,
        *routes_messages.ROUTES,
        *routes_streams.ROUTES,
        *routes_topics.ROUTES,
        *routes_queues.ROUTES,
        *routes_sessions.ROUTES,
        *routes_delivery.ROUTES,
        *routes_trace.ROUTES,
        *routes_services.ROUTES,
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False
    app.state.control = control
    return app


class ControlApp:
    """The ASGI app of the control API.

    With a ``token``, as over TCP, every call must bring it as a bearer token, and its Host must name this machine.
    """

    def __init__(self, app: ASGIApp, control: Control, token: str | None = None) -> None:
        self._app = app
        self._control = control
        self._token = None if token is None else token.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        # Routes match the raw path: in a decoded one, a %2F in a realm's name would look like a slash.
        scope["path"] = scope.get("raw_path", scope["path"].encode("utf-8")).decode("ascii", "backslashreplace")
        try:
            self._check_caller(scope)
            await self._app(scope, receive, counted_send)
        except ClientDisconnect:
            return  # the client is gone, so nothing can be answered
        except Exception as error:
            if status:
                _logger.exception("an answer broke off", extra={"path": scope["path"]})
            else:
                await problem_response(error)(scope, receive, counted_send)
        finally:
            if status:
                # Only our routes and usual methods become labels: a client must not invent labels.
                route = str(scope.get(ROUTE_KEY, "none"))
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._control.requests[(method, route, status)] += 1
                _logger.debug("answered", extra={"method": method, "path": scope["path"][:200], "status": status})

    def _check_caller(self, scope: Scope) -> None:
        """Raises :class:`Problem` D1010, D1008."""
        if self._token is None:
            return
        if not all(is_loopback_host(value.decode("latin-1")) for name, value in scope["headers"] if name == b"host"):
            raise Problem("D1010", "the Host of the request does not name this machine")
        expected = b"Bearer " + self._token
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], expected):
            raise Problem("D1008", "the bearer token is missing or wrong")


_METHODS = ("GET", "HEAD", "POST", "DELETE")
