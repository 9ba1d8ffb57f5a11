"""The daemon's control API: JSON calls, NDJSON and long bodies, over its Unix socket or loopback TCP."""

import errno
import json
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

import anyio
import msgspec
from msgspec import Struct

from dep2p.client.http import LOST, DaemonAddress, HttpExchange, HttpPool
from dep2p.client.reconnection.outages import DaemonWatch, ReconnectBounds, repeated
from dep2p.client.tls import TlsTrust
from dep2p.control_api.calls import Call
from dep2p.control_api.encoding import LineSplitter, fields_of
from dep2p.control_api.errors import ControlError, DaemonUnreachableError, error_from_problem
from dep2p.errors import ConfigError, Dep2pError

_LINE_BYTES_MAX: Final = 268_435_456
_ANSWER_TIMEOUT_S: Final = 60.0
_BODY_TOO_LARGE: Final = "D1007"
_LINES: Final = msgspec.json.Decoder(dict[str, object])

R = TypeVar("R", bound=Struct)


class Transport:
    """One daemon's control API. Any number of calls and streams at once; each stream has a connection of its own."""

    def __init__(
        self,
        socket: Path | None,
        tcp: str | None,
        token: str | None,
        tls: TlsTrust | None = None,
        bounds: ReconnectBounds | None = None,
    ) -> None:
        """Raises ConfigError when ``tcp`` is not HOST:PORT."""
        self._socket = socket
        scheme = "http" if tls is None else "https"
        self.where: str = f"{scheme}://{tcp}" if socket is None else str(socket)
        self.watch: DaemonWatch = DaemonWatch(self.where, bounds or ReconnectBounds())
        self._headers = [("user-agent", "dep2p-client")]
        if token is not None:
            self._headers.append(("authorization", f"Bearer {token}"))
        host, _, port = (tcp or ":0").rpartition(":")
        if not port.isdecimal() or int(port) > 65_535 or (socket is None and not host):
            raise ConfigError(f"{tcp!r} is not HOST:PORT: write it like 127.0.0.1:4780")
        self._pool = HttpPool(DaemonAddress(socket, host.strip("[]"), int(port), tls))

    async def aclose(self) -> None:
        """Close the connections that are idle; those in use end with their calls."""
        await self._pool.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _ANSWER_TIMEOUT_S,
        repeatable: bool = False,
    ) -> dict[str, Any]:
        """Make one JSON call. ``timeout_s`` bounds the wait for the answer, of each try.

        While the daemon is away, the call is made again within the bound of `ReconnectBounds` if the daemon certainly
        did not carry it out, or if it may be carried out twice: GET, and what the caller calls ``repeatable``. Raises
        the exception of the daemon's problem, or DaemonUnreachableError.
        """
        status, content = await self.raw(method, path, body, params=params, timeout_s=timeout_s, repeatable=repeatable)
        return self._object(status, content)

    async def ask(
        self,
        method: str,
        path: str,
        kind: type[R],
        call: Call | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _ANSWER_TIMEOUT_S,
        repeatable: bool = False,
    ) -> R:
        """Make a call with a body and an answer of `dep2p.control_api.calls` and `.replies`. Raises as `call`."""
        body = None if call is None else fields_of(call)
        status, content = await self.raw(method, path, body, params=params, timeout_s=timeout_s, repeatable=repeatable)
        return self.reply(status, content, kind)

    def reply(self, status: int, content: bytes, kind: type[R]) -> R:
        """Decode the answer in ``content``. Raises ControlError D3007 for one that is not of that kind."""
        try:
            return msgspec.json.decode(content, type=kind)
        except ValueError as error:
            detail = f"{self.where} did not answer with JSON as expected: {error}"
            raise ControlError({"code": "D3007", "status": status, "detail": detail}) from None

    def _object(self, status: int, content: bytes) -> dict[str, Any]:
        try:
            return msgspec.json.decode(content or b"{}", type=dict[str, Any])
        except ValueError:
            detail = f"{self.where} did not answer with JSON"
            raise ControlError({"code": "D3007", "status": status, "detail": detail}) from None

    async def raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = _ANSWER_TIMEOUT_S,
        accept_statuses: tuple[int, ...] = (),
        repeatable: bool = False,
    ) -> tuple[int, bytes]:
        """Return status and body of one call. Problems with other than ``accept_statuses`` are raised as by `call`."""

        async def attempt() -> tuple[int, bytes]:
            try:
                with anyio.fail_after(timeout_s):
                    async with self._exchange(method, path, body, params) as exchange:
                        content = await self._whole(exchange)
            except TimeoutError as error:
                if isinstance(error, Dep2pError):
                    raise
                raise self._unreachable(error) from error
            if exchange.status >= 400 and exchange.status not in accept_statuses:
                raise _problem(exchange.status, content, body)
            return exchange.status, content

        if not self.watch.bounds.call_s:
            return await attempt()
        may_repeat = repeatable or method == "GET"
        return await repeated(self.watch, attempt, lambda error: may_repeat or not error.was_sent)

    @asynccontextmanager
    async def opened(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> AsyncGenerator["Body", None]:
        """Open an answer whose body is read as it comes, without a time limit. Raises as `call`."""
        async with self._exchange(method, path, body, params) as exchange:
            if exchange.status >= 400:
                raise _problem(exchange.status, await self._whole(exchange))
            yield Body(self, exchange)

    @asynccontextmanager
    async def lines(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> AsyncGenerator["NdjsonLines", None]:
        """Open an answer of lines. Raises as `call`."""
        async with self.opened(method, path, body=body, params=params) as answer:
            yield NdjsonLines(answer)

    async def upload(self, path: str, pieces: AsyncIterator[bytes], *, params: Mapping[str, str]) -> dict[str, Any]:
        """POST a body piece by piece, and return the answer. An answer that comes before the end is an error, and ends
        it.

        It is never made again. Raises as `call`, and what ``pieces`` raises.
        """
        failed: list[Exception] = []
        answer: bytes | None = None
        exchange: HttpExchange | None = None
        try:
            exchange = await self._pool.take()
            headers = [*self._headers, ("content-type", "application/octet-stream"), ("transfer-encoding", "chunked")]
            await exchange.send_head("POST", f"{path}?{urlencode(params)}", headers)
            async with anyio.create_task_group() as tasks:

                async def send(scope: anyio.CancelScope) -> None:
                    assert exchange is not None
                    try:
                        await exchange.send_pieces(pieces)
                    except LOST:
                        return  # the answer, which the other task waits for, says why
                    except Exception as error:
                        failed.append(error)
                        scope.cancel()

                tasks.start_soon(send, tasks.cancel_scope)
                try:
                    await exchange.receive_head()
                    content = await exchange.body()
                    self.watch.answers()
                    if exchange.status >= 400:
                        failed.append(_partly(_problem(exchange.status, content)))
                    else:
                        answer = content
                except LOST as error:
                    failed.append(self._unreachable(error))
                tasks.cancel_scope.cancel()
        except (TimeoutError, *LOST) as error:
            failed.append(self._unreachable(error, was_sent=exchange is not None))
        finally:
            if exchange is not None:
                await self._pool.give_back(exchange)
        if failed:
            raise failed[0]
        assert exchange is not None and answer is not None
        return self._object(exchange.status, answer)

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Mapping[str, object] | None, params: Mapping[str, str] | None
    ) -> AsyncGenerator[HttpExchange, None]:
        """Make a call up to the head of its answer."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode("ascii")
        headers = list(self._headers)
        if body is not None or method == "POST":
            headers += [("content-type", "application/json"), ("content-length", str(len(content)))]
        target = f"{path}?{urlencode(params)}" if params else path
        exchange: HttpExchange | None = None
        try:
            try:
                exchange = await self._pool.take()
                self.watch.was_reached = True
                await exchange.send_head(method, target, headers)
                try:
                    await exchange.send_body(content)
                except LOST:
                    pass  # an early answer says why
                await exchange.receive_head()
            except (TimeoutError, *LOST) as error:
                if isinstance(error, Dep2pError):
                    raise  # RequestTimeoutError is a TimeoutError, too: the caller's own
                raise self._unreachable(error, was_sent=exchange is not None) from error
            self.watch.answers()
            # Outside of the `try`: an OSError of the caller's own block is not the connection's.
            yield exchange
        finally:
            if exchange is not None:
                await self._pool.give_back(exchange)

    def _unreachable(self, error: Exception, *, was_sent: bool = True) -> DaemonUnreachableError:
        if not isinstance(error, OSError):
            text = f"the daemon at {self.where} went away during the call"
            return DaemonUnreachableError(text, was_sent=was_sent)
        if isinstance(error, TimeoutError) and error.errno is None:
            cause, hint = self._silence()
            text = f"the daemon at {self.where} does not answer: {cause}"
            return DaemonUnreachableError(text, hint, was_sent=was_sent)
        text = f"cannot reach the daemon at {self.where}: {self._cause(error)}"
        return DaemonUnreachableError(text, was_sent=was_sent)

    def _cause(self, error: BaseException) -> str:
        found: BaseException = error
        while (not isinstance(found, OSError) or found.errno is None) and (found.__cause__ or found.__context__):
            found = found.__cause__ or found.__context__ or found
        number = found.errno if isinstance(found, OSError) else None
        if self._socket is not None and not os.path.exists(self._socket):
            return "no such socket; no daemon runs for that data directory" + self._lock_holder()
        if number == errno.ECONNREFUSED:
            return "nothing listens there any more" + self._lock_holder()
        if number in (errno.EACCES, errno.EPERM):
            return "it belongs to another user"
        return str(found)

    def _silence(self) -> tuple[str, str]:
        """Return why a daemon that accepts connections does not answer, as far as the client can see, and what to
        do."""
        pid = self._lock_pid()
        if pid is None:
            return "it took the call and gave no answer in time", "Try again; if it stays so, look at the daemon's log."
        if _process_state(pid) in ("T", "t"):
            return f"its process {pid} is stopped (SIGSTOP or a debugger)", f"Let it go on: kill -CONT {pid}"
        return (
            f"its process {pid} runs, but gave no answer in time",
            f"Try again and look at its log; if it hangs: kill -9 {pid}, and start it again.",
        )

    def _lock_pid(self) -> int | None:
        if self._socket is None:
            return None
        try:
            return int((self._socket.parent / "daemon.lock").read_text("ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return None

    def _lock_holder(self) -> str:
        pid = self._lock_pid()
        if pid is None:
            return ""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return f" (stale lock of pid {pid})"
        except OSError:
            return f" (the lock names pid {pid}, of another user)"
        if _process_state(pid) == "Z":
            return f" (stale lock of pid {pid}, which has ended)"
        return f" (the lock names pid {pid}, which runs: it may still be starting or stopping)"

    async def _whole(self, exchange: HttpExchange) -> bytes:
        try:
            return await exchange.body()
        except LOST as error:
            raise self._unreachable(error) from error

    async def piece(self, exchange: HttpExchange) -> bytes:
        """Read a part of an opened answer; b"" at its end. Raises DaemonUnreachableError."""
        try:
            return await exchange.piece()
        except LOST as error:
            raise self._unreachable(error) from error


def _process_state(pid: int) -> str:
    """Return Linux's letter: R, S, D run, T is stopped, Z has ended; empty where the client cannot see it."""
    try:
        # The first word after the name in parentheses, which may have any characters.
        return Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class Body:
    """The body of an answer, as it comes."""

    def __init__(self, transport: Transport, exchange: HttpExchange) -> None:
        self._transport = transport
        self._exchange = exchange

    async def piece(self) -> bytes:
        """Read a part; b"" at the end. Raises DaemonUnreachableError."""
        return await self._transport.piece(self._exchange)


class NdjsonLines:
    """The lines of a body, parsed. An ``error`` line is raised."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._splitter = LineSplitter(_LINE_BYTES_MAX)
        self._ready: deque[bytes] = deque()

    @property
    def has_line(self) -> bool:
        """Whether a whole line is here already."""
        return bool(self._ready)

    async def next_line(self) -> dict[str, object]:
        """The next object; raises StopAsyncIteration at the end, or the exception of an ``error`` line."""
        while not self._ready:
            piece = await self._body.piece()
            if not piece:
                raise StopAsyncIteration
            self._ready = self._splitter.feed(piece)
        return _checked(_LINES.decode(self._ready.popleft()))


def _checked(line: dict[str, object]) -> dict[str, object]:
    """Decode a line of an answer. Raises the exception of a line that is an error and nothing else."""
    if len(line) == 1 and "error" in line:
        try:
            problem = msgspec.convert(line["error"], dict[str, object])
        except ValueError:
            return line  # the text of an error is a field of a reply
        raise error_from_problem(problem)
    return line


def _partly(error: Exception) -> Exception:
    """Note that a part of the body may have been taken."""
    if isinstance(error, DaemonUnreachableError):
        error.was_sent = True
    return error


def _problem(status: int, content: bytes, body: Mapping[str, object] | None = None) -> Exception:
    """Return the error of an answer. One about the size of a body says how large its data is, as its caller gave it."""
    try:
        problem = _LINES.decode(content)
    except ValueError:
        problem = {"detail": content[:200].decode("latin-1")}
    data = None if body is None else body.get("data")
    if problem.get("code") == _BODY_TOO_LARGE and isinstance(data, str) and body is not None:
        size = (
            len(data) * 3 // 4 - data[-2:].count("=")
            if body.get("encoding", "base64") == "base64"
            else len(data.encode())
        )
        problem["detail"] = f"the data has {size} bytes. In the call, {problem.get('detail')}"
    return error_from_problem(problem, status)
