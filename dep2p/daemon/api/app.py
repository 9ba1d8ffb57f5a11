"""The outermost part of the control API: who may call, what is counted, and the last resort for errors."""

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
from dep2p.daemon.api.routes import sessions as routes_sessions
from dep2p.daemon.api.routes import streams as routes_streams
from dep2p.daemon.api.routes import topics as routes_topics
from dep2p.daemon.api.routes import trace as routes_trace
from dep2p.daemon.api.routing import ROUTE_KEY, no_route
from dep2p.daemon.problems import Problem, problem_response

_logger = logging.getLogger("dep2p.daemon.control")


def build_app(control: Control) -> Starlette:
    """All routes, for one node."""
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
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False
    app.state.control = control
    return app


class Edge:
    """Around the application. With a ``token``, every call must bring it as a bearer token."""

    def __init__(self, app: ASGIApp, control: Control, token: str | None = None) -> None:
        self._app = app
        self._control = control
        self._token = None if token is None else token.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        status = 0
        whole = not any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])

        async def watched_receive() -> Message:
            nonlocal whole
            message = await receive()
            whole = whole or not message.get("more_body", False)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if not whole:
                    # The rest of the body stands in the way of another request: the client has to know.
                    message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        # Routes are matched on the path as it came: in a decoded one, a %2F in a realm's name would look like a slash.
        scope["path"] = scope.get("raw_path", scope["path"].encode("utf-8")).decode("ascii", "backslashreplace")
        try:
            if self._is_allowed(scope):
                await self._app(scope, watched_receive, watched_send)
            else:
                await problem_response(Problem("D1008", "the bearer token is missing or wrong"))(
                    scope, watched_receive, watched_send
                )
        except ClientDisconnect:
            return  # nobody is left to be answered
        except Exception as error:
            if status:
                _logger.exception("an answer broke off", extra={"path": scope["path"]})
            else:
                await problem_response(error)(scope, watched_receive, watched_send)
        finally:
            if status:
                # Only routes of ours and usual methods become labels: a client must not be able to invent any.
                route = str(scope.get(ROUTE_KEY, "none"))
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._control.requests[(method, route, status)] += 1
                _logger.debug("answered", extra={"method": method, "path": scope["path"][:200], "status": status})

    def _is_allowed(self, scope: Scope) -> bool:
        if self._token is None:
            return True
        expected = b"Bearer " + self._token
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], expected)


_METHODS = ("GET", "HEAD", "POST", "DELETE")
