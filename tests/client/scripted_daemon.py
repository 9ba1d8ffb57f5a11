"""A daemon that answers what a test says, goes away when the test says so, and comes back."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import anyio
import anyio.abc
import h11

from dep2p.error_codes import ERRORS

_Listener = anyio.abc.Listener[anyio.abc.SocketStream]
Ending = Literal["cut", "stop", "end"]


def problem_fields(code: str, detail: str = "as the test says") -> dict[str, object]:
    info = ERRORS[code]
    return {"code": code, "title": info.title, "status": info.http_status, "detail": detail}


@dataclass
class Call:
    """A call that arrived."""

    method: str
    path: str
    params: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        fields: dict[str, object] = json.loads(self.body)
        return fields


@dataclass
class Answer:
    """``lines``: a feed, which stays open. ``cut``: the connection ends in place of an answer."""

    status: int = 200
    fields: dict[str, object] = field(default_factory=dict[str, object])
    lines: list[dict[str, object]] | None = None
    cut: bool = False


def refused(code: str) -> Answer:
    return Answer(ERRORS[code].http_status, problem_fields(code))


class ScriptedDaemon:
    """Serves on a Unix socket while it is up. ``answers`` has the test's answer for each call, in order of need."""

    def __init__(self, socket: Path, tasks: anyio.abc.TaskGroup) -> None:
        self.socket = socket
        self.calls: list[Call] = []
        self.answer: Callable[[Call], Answer] = lambda call: Answer()
        self._tasks = tasks
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._ending: Ending = "cut"
        self._leave = anyio.Event()
        self._streams: dict[int, anyio.abc.ByteStream] = {}

    async def start(self) -> None:
        listener = await anyio.create_unix_listener(self.socket)
        self._leave, self._ended = anyio.Event(), anyio.Event()
        self._scope = anyio.CancelScope()
        self._tasks.start_soon(self._serve, listener, self._scope, self._ended)

    async def _serve(self, listener: _Listener, scope: anyio.CancelScope, ended: anyio.Event) -> None:
        try:
            with scope:
                async with anyio.create_task_group() as connections:
                    await listener.serve(self._connection, connections)
        finally:
            with anyio.CancelScope(shield=True):
                await listener.aclose()
            ended.set()

    async def go_away(self, ending: Ending = "cut") -> None:
        """End all connections, and the socket."""
        self._ending = ending
        self._leave.set()
        await self.cut() if ending == "cut" else await anyio.sleep(0.02)
        assert self._scope is not None
        self._scope.cancel()
        await self._ended.wait()
        self.socket.unlink(missing_ok=True)

    async def restart(self, ending: Ending = "cut") -> None:
        await self.go_away(ending)
        await self.start()

    async def cut(self) -> None:
        """Cut all connections, and go on listening."""
        for stream in list(self._streams.values()):
            await anyio.aclose_forcefully(stream)

    async def _connection(self, stream: anyio.abc.SocketStream) -> None:
        self._streams[id(stream)] = stream
        http = h11.Connection(h11.SERVER)
        try:
            async with stream:
                while await self._exchange(http, stream):
                    http.start_next_cycle()
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, OSError):
            return
        finally:
            del self._streams[id(stream)]

    async def _exchange(self, http: h11.Connection, stream: anyio.abc.ByteStream) -> bool:
        head, body = await _read(http, stream)
        if head is None:
            return False
        target = urlsplit(head.target.decode())
        params = {name: values[0] for name, values in parse_qs(target.query).items()}
        call = Call(head.method.decode(), target.path, params, body)
        self.calls.append(call)
        answer = self.answer(call)
        if answer.cut:
            return False
        headers = [("content-type", "application/json")]
        await _send(http, stream, h11.Response(status_code=answer.status, headers=headers))
        if answer.lines is None:
            await _send(http, stream, h11.Data(data=json.dumps(answer.fields).encode()))
        else:
            lines = b"".join(json.dumps(line).encode() + b"\n" for line in answer.lines)  # in one piece
            await _send(http, stream, h11.Data(data=lines))
            await self._leave.wait()
            if self._ending == "cut":
                return False
            if self._ending == "stop":
                last = json.dumps({"error": problem_fields("D3006", "the daemon stops")}).encode()
                await _send(http, stream, h11.Data(data=last + b"\n"))
        await _send(http, stream, h11.EndOfMessage())
        return http.our_state is h11.DONE and http.their_state is h11.DONE


async def _read(http: h11.Connection, stream: anyio.abc.ByteStream) -> tuple[h11.Request | None, bytes]:
    head: h11.Request | None = None
    body = b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            try:
                http.receive_data(await stream.receive(65_536))
            except anyio.EndOfStream:
                return None, b""
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        else:
            return (head, body) if isinstance(event, h11.EndOfMessage) else (None, b"")


async def _send(http: h11.Connection, stream: anyio.abc.ByteStream, event: h11.Event) -> None:
    data: bytes | None = http.send(event)  # pyright: ignore[reportUnknownMemberType]
    if data:
        await stream.send(data)


@asynccontextmanager
async def scripted_daemon(socket: Path) -> AsyncGenerator[ScriptedDaemon, None]:
    """A daemon that is up."""
    async with anyio.create_task_group() as tasks:
        daemon = ScriptedDaemon(socket, tasks)
        await daemon.start()
        yield daemon
        tasks.cancel_scope.cancel()
