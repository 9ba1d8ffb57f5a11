"""The connection of a host to itself. It carries streams between the parts and programs of one node."""

import logging
from collections import deque
from collections.abc import Mapping
from typing import Final

import trio

from dep2p.concurrency.wait_queue import Sleeper
from dep2p.errors import ProtocolError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.counters import Counters
from dep2p.host.interface import CircuitUse, Direction, StreamHandler
from dep2p.host.loopback.stream import LoopbackStream
from dep2p.limits import Limits
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

LOOPBACK_ID: Final = 0
"""The id of the loopback connection: ids of connections to peers begin at 1."""


class LoopbackConnection:
    """The host's `Connection` to itself: always open while `run` runs, with the same bounds as one to a peer.

    It is in no table of connections: no event announces it, and it counts for no limit of peers.
    """

    id: int = LOOPBACK_ID
    direction: Direction = "outbound"
    remote_addr: str = ""
    channel_binding: bytes = b""
    rtt_s: float | None = 0.0
    is_superseded: bool = False
    is_limited: bool = False
    circuit: CircuitUse | None = None

    def __init__(self, own: PeerId, handlers: Mapping[str, StreamHandler], limits: Limits, counters: Counters) -> None:
        """``handlers``: the host's handlers of inbound streams, by protocol."""
        self.peer: PeerId = own
        self.opened_at_s: float = 0.0
        self.is_closed: bool = True
        self._handlers = handlers
        self._limits = limits
        self._counters = counters
        self._streams: dict[LoopbackStream, None] = {}
        self._due: deque[LoopbackStream] = deque()
        self._sleeper = Sleeper()
        self._nursery: trio.Nursery | None = None

    def __repr__(self) -> str:
        return f"<loopback connection of {self.peer[-6:]}>"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry streams until cancelled; then every stream ends."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.opened_at_s = trio.current_time()
                self.is_closed = False
                task_status.started()
                while True:
                    await self._move_due()
        finally:
            self._nursery = None
            self.is_closed = True
            for stream in list(self._streams):
                stream.fail(StreamClosedError("this host was closed"))

    async def _move_due(self) -> None:
        due = self._due
        if not due:
            await self._sleeper.wait()
        for _ in range(len(due)):
            stream = due.popleft()
            stream.is_scheduled = False
            try:
                has_more = stream.move()
            except Exception:  # a receiver must not raise; one that does ends its own stream alone
                self._counters.add("loopback_receiver_failed")
                logger.exception("the receiver of a local stream of %s failed", stream.protocol)
                stream.reset()
                continue
            if has_more:
                self._schedule(stream)
        await trio.lowlevel.checkpoint()

    def _schedule(self, stream: LoopbackStream) -> None:
        if not stream.is_scheduled:
            stream.is_scheduled = True
            self._due.append(stream)
            self._sleeper.wake()

    def _forget(self, stream: LoopbackStream) -> None:
        self._streams.pop(stream, None)

    async def open_stream(self, protocol: str, *, timeout_s: float = 10.0) -> LoopbackStream:
        """Open a stream to the handler of ``protocol`` on this very host. ``timeout_s`` has no meaning: no peer is
        asked.

        Raises ProtocolNotSupportedError, or StreamClosedError (the host is closed, too many streams).
        """
        await trio.lowlevel.checkpoint()
        handler, nursery = self._handlers.get(protocol), self._nursery
        if nursery is None:
            raise StreamClosedError("this host is closed")
        if handler is None:
            raise ProtocolNotSupportedError(f"this node does not speak {protocol}")
        if len(self._streams) >= 2 * self._limits.streams_per_connection_max:
            self._counters.add("loopback_streams_refused_limit")
            raise StreamClosedError(
                f"{self._limits.streams_per_connection_max} streams are open between programs of this node: "
                "close some first"
            )
        opened, served = (
            LoopbackStream(self, protocol, schedule=self._schedule, on_done=self._forget) for _ in range(2)
        )
        opened.other, served.other = served, opened
        self._streams[opened] = self._streams[served] = None
        self._counters.add("loopback_streams_opened")
        nursery.start_soon(self._serve, handler, served)
        return opened

    async def _serve(self, handler: StreamHandler, stream: LoopbackStream) -> None:
        try:
            await handler(stream)
        except (ProtocolError, RequestTimeoutError, StreamClosedError) as error:
            self._counters.add("stream_handler_gave_up")
            logger.debug("a local stream of %s ended: %r", stream.protocol, error)
            stream.reset()
        except Exception:
            self._counters.add("stream_handler_failed")
            logger.exception("the handler of %s failed for a local stream", stream.protocol)
            stream.reset()

    async def close(self) -> None:
        """End every stream; the connection itself lives as long as its host. Never needed: for the interface."""
        for stream in list(self._streams):
            stream.reset()
        await trio.lowlevel.checkpoint_if_cancelled()
