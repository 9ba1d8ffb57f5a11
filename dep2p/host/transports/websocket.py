"""WebSocket as a transport (/tcp/…/ws): the frames by wsproto, the socket by trio, no background task.

py-libp2p's WebSocket transport is not used: its listener lives in a system task of its own and swallows failures.
"""

import re
from collections.abc import Iterator

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.utilities import ProtocolError as WSProtocolError

from dep2p.host.addresses import Address
from dep2p.host.resources.control_allowance import ControlRate
from dep2p.host.scopes import shielded
from dep2p.host.transports.tcp import connect_tcp

_RECEIVE_BYTES = 65_536
_FRAME_BYTES_MAX = 65_536
_CLOSE_TIMEOUT_S = 1.0
_RESOURCE = "/"
_HEAD_END = re.compile(rb"\n\r?\n")
_HEAD_BYTES_MAX = 16_384
_EVENTS_PER_STEP = 64
_EMPTY_FRAMES_PER_S = 256
"""Pings, pongs and empty frames: implementations send one in some seconds."""
_EMPTY_FRAMES_BURST_S = 4


class WebSocketStream(ReadWriteCloser):
    """The bytes of binary messages, without their boundaries."""

    def __init__(self, tcp: TrioTCPStream, kind: ConnectionType) -> None:
        self._tcp = tcp
        self._ws = WSConnection(kind)
        self._buffer = bytearray()
        self._ended = False
        self._closed = False
        self._write_lock = trio.Lock()
        self._rate = ControlRate(_EMPTY_FRAMES_PER_S, _EMPTY_FRAMES_BURST_S, trio.current_time())
        self._data_bytes = 0

    @classmethod
    async def accept(cls, tcp: TrioTCPStream) -> "WebSocketStream":
        """The server's handshake. Raises ConnectionClosedError for anything but a WebSocket request."""
        self = cls(tcp, ConnectionType.SERVER)
        head = b""
        while (end := _HEAD_END.search(head)) is None:
            if len(head) > _HEAD_BYTES_MAX:
                raise ConnectionClosedError(f"a WebSocket request of more than {_HEAD_BYTES_MAX} bytes")
            data = await self._tcp.read(_RECEIVE_BYTES)
            if not data:
                raise ConnectionClosedError("the connection ended in the WebSocket handshake")
            head += data
        self._feed(head[: end.end()])
        if not isinstance(next(self._events(), None), Request):
            raise ConnectionClosedError("not a WebSocket request")
        await self._send(AcceptConnection())
        # wsproto drops what follows the request in the same call.
        self._feed(head[end.end() :])
        await self._take_events()
        return self

    @classmethod
    async def connect(cls, address: Address) -> "WebSocketStream":
        """Dial and do the client's handshake. Raises OSError, ConnectionClosedError."""
        self = cls(await connect_tcp(address), ConnectionType.CLIENT)
        try:
            host = f"[{address.host}]" if address.family == "ip6" else address.host
            await self._send(Request(host=f"{host}:{address.port}", target=_RESOURCE))
            while True:
                for event in await self._receive():
                    if isinstance(event, AcceptConnection):
                        await self._take_events()  # go-libp2p sends its first frame in the same segment as the answer
                        return self
                    status = f"status {event.status_code}" if isinstance(event, RejectConnection) else "no handshake"
                    raise ConnectionClosedError(f"the server refused the WebSocket: {status}")
        except BaseException:
            with shielded(_CLOSE_TIMEOUT_S):
                await tcp_close(self._tcp)
            raise

    async def _receive(self) -> Iterator[Event]:
        """The next events of the handshake. Raises ConnectionClosedError at the end or on a violation."""
        data = await self._tcp.read(_RECEIVE_BYTES)
        if not data:
            raise ConnectionClosedError("the connection ended in the WebSocket handshake")
        self._feed(data)
        return self._events()

    def _feed(self, data: bytes | None) -> None:
        try:
            self._ws.receive_data(data)
        except (WSProtocolError, ValueError) as error:  # wsproto lets a UnicodeDecodeError of a hostile header pass
            raise ConnectionClosedError(f"WebSocket: {error}") from error

    def _events(self) -> Iterator[Event]:
        """Parse what was fed, one event at a time: a read of many tiny frames must not hold up other tasks."""
        events = self._ws.events()
        while True:
            try:
                event = next(events, None)
            except (WSProtocolError, ValueError) as error:
                raise ConnectionClosedError(f"WebSocket: {error}") from error
            if event is None:
                return
            yield event

    async def _take_events(self) -> None:
        taken = 0
        for event in self._events():
            await self._take(event)
            taken += 1
            if taken % _EVENTS_PER_STEP == 0:
                await trio.lowlevel.checkpoint()

    async def _send(self, event: Event) -> None:
        async with self._write_lock:
            try:
                data = self._ws.send(event)
            except WSProtocolError as error:
                raise ConnectionClosedError(f"WebSocket: {error}") from error
            await self._tcp.write(data)

    async def read(self, n: int | None = None) -> bytes:
        """Up to ``n`` bytes, at least one; b"" at the end. Raises ConnectionClosedError."""
        while not self._buffer and not self._ended:
            data = await self._tcp.read(_RECEIVE_BYTES)
            self._feed(data or None)
            await self._take_events()
            if not data:
                self._ended = True
        size = len(self._buffer) if n is None or n < 0 else n
        out = bytes(self._buffer[:size])
        del self._buffer[:size]
        return out

    async def _take(self, event: Event) -> None:
        match event:
            case BytesMessage():
                if not event.data:
                    self._charge()
                self._buffer += event.data
                self._data_bytes += len(event.data)
            case Ping():
                self._charge()
                await self._send(event.response())
            case Pong():
                self._charge()
            case CloseConnection():
                self._ended = True
                if not self._closed:
                    await self._send(event.response())
            case TextMessage():
                raise ConnectionClosedError("WebSocket: a text message, only binary ones are spoken here")
            case _:
                return

    def _charge(self) -> None:
        """Count a frame without data; a flood of them ends the connection."""
        if not self._rate.take(1) and not self._rate.refill(trio.current_time(), self._data_bytes):
            raise ConnectionClosedError("WebSocket: more pings and empty frames than are allowed")

    async def write(self, data: bytes) -> None:
        """Send one or more binary messages. Raises ConnectionClosedError."""
        for start in range(0, len(data), _FRAME_BYTES_MAX):
            await self._send(BytesMessage(data=data[start : start + _FRAME_BYTES_MAX]))

    async def close(self) -> None:
        """Say goodbye and close the socket. Bounded, idempotent."""
        if not self._closed:
            self._closed = True
            with shielded(_CLOSE_TIMEOUT_S):
                try:
                    await self._send(CloseConnection(code=1000))
                except (ConnectionClosedError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                    self._ended = True
        with shielded(_CLOSE_TIMEOUT_S):
            await tcp_close(self._tcp)

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._tcp.get_remote_address()


async def tcp_close(tcp: TrioTCPStream) -> None:
    """Close the socket; no failure is of interest."""
    await trio.aclose_forcefully(tcp.stream)
