"""HTTP to the daemon, over its Unix socket or loopback TCP, on asyncio or trio: calls, NDJSON, item streams."""

import errno
import json
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import anyio
import httpx

from dep2p.client_errors import ControlError, DaemonUnreachableError, error_from_problem
from dep2p.control_wire import LineSplitter

LINE_BYTES_MAX: Final = 268_435_456
_CONNECT_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 60.0
_KEEPALIVE_EXPIRY_S: Final = 5.0  # shorter than the daemon's own, so that no call meets a connection it just closed


class Transport:
    """One daemon's control API. Any number of calls and streams at once; each stream has a connection of its own."""

    def __init__(self, socket: Path | None, tcp: str | None, token: str | None) -> None:
        self._socket = socket
        self.where = f"http://{tcp}" if socket is None else str(socket)
        headers = {"user-agent": "dep2p-client"} | ({} if token is None else {"authorization": f"Bearer {token}"})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=_KEEPALIVE_EXPIRY_S)
        # No TLS on a loopback socket: loading the certificate bundle would only slow each start. trust_env=False: a
        # library reads no environment, and a proxy has no part in this.
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=None if socket is None else str(socket), limits=limits, verify=False, trust_env=False
            ),
            base_url="http://dep2p" if socket is not None else self.where,
            headers=headers,
            timeout=httpx.Timeout(_ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, pool=None),
            trust_env=False,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        with anyio.CancelScope(shield=True):
            await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> dict[str, Any]:
        """One JSON call. ``timeout_s`` bounds the wait for the answer.

        Raises the exception of the daemon's problem, or DaemonUnreachableError.
        """
        return self._object(await self.raw(method, path, body, params=params, timeout_s=timeout_s))

    async def raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _ANSWER_TIMEOUT_S,
        accept_statuses: tuple[int, ...] = (),
    ) -> httpx.Response:
        """As :meth:`call`, with the whole response; problems with other than ``accept_statuses`` are raised."""
        try:
            response = await self._http.request(
                method,
                path,
                json=body,
                params=params,
                timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S, pool=None),
            )
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        if response.status_code >= 400 and response.status_code not in accept_statuses:
            raise _problem(response)
        return response

    @asynccontextmanager
    async def opened(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[httpx.Response, None]:
        """A response whose body is read as it comes, without a time limit. Raises as :meth:`call`."""
        request = self._http.build_request(
            method, path, json=body, params=params, timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S, pool=None)
        )
        response = await self._send(request)
        try:
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def upload(self, path: str, content: AsyncIterator[bytes], *, params: Mapping[str, str]) -> None:
        """POST a body as it is made. Raises as :meth:`call`."""
        request = self._http.build_request(
            "POST",
            path,
            content=content,
            params=params,
            headers={"content-type": "application/octet-stream"},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S, pool=None),
        )
        response = await self._send(request)
        await response.aclose()

    async def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._http.send(request, stream=True)
            if response.status_code >= 400:
                try:
                    await response.aread()
                finally:
                    await response.aclose()
                raise _problem(response)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        return response

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        try:
            value: object = response.json() if response.content else {}
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ControlError(
                {"code": "D3007", "status": response.status_code, "detail": f"{self.where} did not answer with JSON"}
            )
        return cast(dict[str, Any], value)

    def unreachable(self, error: httpx.HTTPError) -> DaemonUnreachableError:
        """Say why, as far as it can be known from here."""
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
            return DaemonUnreachableError(f"the daemon at {self.where} does not answer")
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return DaemonUnreachableError(f"the daemon at {self.where} went away during the call ({error or 'closed'})")
        return DaemonUnreachableError(f"cannot reach the daemon at {self.where}: {self._cause(error)}")

    def _cause(self, error: BaseException) -> str:
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):
            found = found.__cause__ or found.__context__
        number = found.errno if isinstance(found, OSError) else None
        if self._socket is not None and not os.path.exists(self._socket):
            return "no such socket; no daemon runs for that data directory" + self._lock_holder()
        if number == errno.ECONNREFUSED or (number is None and self._socket is not None):
            return "nothing listens there any more" + self._lock_holder()
        if number in (errno.EACCES, errno.EPERM):
            return "it belongs to another user"
        return str(found.strerror or found) if isinstance(found, OSError) else str(error) or type(error).__name__

    def _lock_holder(self) -> str:
        if self._socket is None:
            return ""
        try:
            pid = int((self._socket.parent / "daemon.lock").read_text("ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return ""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return f" (stale lock of pid {pid})"
        except OSError:
            return f" (the lock names pid {pid}, of another user)"
        return f" (the lock names pid {pid}, which runs: it may still be starting or stopping)"


class NdjsonLines:
    """The lines of one response, parsed. An ``error`` line is raised."""

    def __init__(self, transport: Transport, response: httpx.Response) -> None:
        self._transport = transport
        self._pieces = cast(AsyncGenerator[bytes, None], response.aiter_raw())
        self._splitter = LineSplitter(LINE_BYTES_MAX)
        self._ready: deque[bytes] = deque()

    async def next_line(self) -> dict[str, object]:
        """The next object; raises StopAsyncIteration at the end, or the exception of an ``error`` line."""
        while not self._ready:
            try:
                piece = await anext(self._pieces)
            except httpx.HTTPError as error:
                raise self._transport.unreachable(error) from error
            self._ready = self._splitter.feed(piece)
        line = cast(dict[str, object], json.loads(self._ready.popleft()))
        problem = line.get("error")
        if isinstance(problem, dict) and len(line) == 1:
            raise error_from_problem(cast(dict[str, Any], problem))
        return line

    async def aclose(self) -> None:
        """Stop reading."""
        await self._pieces.aclose()


def _problem(response: httpx.Response) -> Exception:
    try:
        value: object = response.json()
    except ValueError:
        value = None
    problem = cast(dict[str, Any], value) if isinstance(value, dict) else {"detail": response.text[:200]}
    return error_from_problem(problem, response.status_code)
