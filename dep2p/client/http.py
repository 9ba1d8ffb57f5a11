"""HTTP/1.1 over anyio and h11, for one host: only the parts that the client needs.

Not httpx, for two reasons that were measured: its nested async generators cannot be closed from outside, so that every
subscription or stream that is left early warns under trio; and importing it takes longer than most commands do.
"""

import select
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import h11

from dep2p.client.tls import TlsTrust

_READ_BYTES: Final = 262_144
_IDLE_MAX: Final = 8
_IDLE_EXPIRY_S: Final = 20.0  # shorter than the daemon's own, so that no call meets a connection it just closed
_CONNECT_TIMEOUT_S: Final = 5.0

LOST: Final = (
    OSError,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    h11.RemoteProtocolError,
)
"""Errors that any call here raises when the other side is not there, goes away, or does not speak HTTP."""


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """The address of the daemon: a Unix socket, or host and port."""

    socket: Path | None
    host: str = ""
    port: int = 0
    tls: TlsTrust | None = None
    """For a control API over TLS: by what its certificate is known."""

    @property
    def host_header(self) -> str:
        """The daemon's name in a request; a fixed one for a Unix socket."""
        if self.socket is not None:
            return "dep2p"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def connect(self) -> anyio.abc.ByteStream:
        """A new connection, within 5 s. Raises OSError, and ControlError D1011 for a wrong certificate."""
        with anyio.fail_after(_CONNECT_TIMEOUT_S):
            if self.socket is not None:
                return await anyio.connect_unix(self.socket)
            stream = await anyio.connect_tcp(self.host, self.port)
            return stream if self.tls is None else await self.tls.secure(stream, self.host)


class HttpExchange:
    """One request and its answer on a connection. Use it by `HttpPool.exchange`."""

    def __init__(self, stream: anyio.abc.ByteStream, host_header: str) -> None:
        self._stream = stream
        self._host = ("host", host_header)
        self._http = h11.Connection(h11.CLIENT)
        self.status: int = 0
        self.headers: dict[bytes, bytes] = {}
        self.idle_since_s: float = 0.0

    @property
    def is_reusable(self) -> bool:
        """Whether the exchange ended so that another one may follow."""
        return self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    def recycle(self) -> None:
        """Prepare for the next exchange."""
        self._http.start_next_cycle()
        self.idle_since_s = time.monotonic()

    def is_stale(self) -> bool:
        """Whether it was idle for too long, or the other side has closed it (nothing else may come on an idle
        connection)."""
        raw = self._stream.extra(anyio.abc.SocketAttribute.raw_socket)
        poll = select.poll()
        poll.register(raw.fileno(), select.POLLIN)
        return time.monotonic() - self.idle_since_s > _IDLE_EXPIRY_S or bool(poll.poll(0))

    async def send_head(self, method: str, target: str, headers: list[tuple[str, str]]) -> None:
        """Send the request without its body."""
        await self._send(h11.Request(method=method, target=target, headers=[self._host, *headers]))

    async def send_body(self, data: bytes) -> None:
        """Send the whole body, and its end."""
        parts = [self._http.send(h11.Data(data=data))] if data else []
        parts.append(self._http.send(h11.EndOfMessage()))
        if whole := b"".join(part for part in parts if part):
            await self._stream.send(whole)

    async def send_pieces(self, pieces: AsyncIterator[bytes]) -> None:
        """Send a body piece by piece, and its end."""
        async for piece in pieces:
            await self._send(h11.Data(data=piece))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: h11.Event) -> None:
        data: bytes | None = self._http.send(event)  # pyright: ignore[reportUnknownMemberType]
        if data:
            await self._stream.send(data)

    async def receive_head(self) -> None:
        """Read the head of the answer: status and headers."""
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {bytes(name): bytes(value) for name, value in event.headers}
                return

    async def piece(self) -> bytes:
        """Read a part of the answer's body; b"" at its end."""
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if isinstance(event, h11.EndOfMessage):
                return b""

    async def body(self) -> bytes:
        """Read the rest of the answer's body."""
        pieces: list[bytes] = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    async def _next_event(self) -> object:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            try:
                data = await self._stream.receive(_READ_BYTES)
            except anyio.EndOfStream:
                data = b""
                if self._http.their_state is h11.SEND_RESPONSE:
                    raise
            self._http.receive_data(data)

    async def aclose(self) -> None:
        """Cut the connection."""
        await anyio.aclose_forcefully(self._stream)


class HttpPool:
    """Connections to one daemon; idle ones are used again."""

    def __init__(self, address: DaemonAddress) -> None:
        self._address = address
        self._idle: list[HttpExchange] = []

    async def take(self) -> HttpExchange:
        """Return an idle connection, or a new one. Raises OSError, TimeoutError."""
        while self._idle:
            exchange = self._idle.pop()
            if not exchange.is_stale():
                return exchange
            await exchange.aclose()
        return HttpExchange(await self._address.connect(), self._address.host_header)

    async def give_back(self, exchange: HttpExchange) -> None:
        """Take a connection back after an exchange, however that went. Never raises; a cancelled caller does not stop
        it."""
        if exchange.is_reusable and len(self._idle) < _IDLE_MAX:
            exchange.recycle()
            self._idle.append(exchange)
        else:
            with anyio.CancelScope(shield=True):
                await exchange.aclose()

    async def aclose(self) -> None:
        """Close the idle connections."""
        with anyio.CancelScope(shield=True):
            while self._idle:
                await self._idle.pop().aclose()
