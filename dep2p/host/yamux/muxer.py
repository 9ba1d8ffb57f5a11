"""Our yamux behind the connection's `Muxer`."""

from collections.abc import Mapping

import trio
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from dep2p.errors import StreamClosedError
from dep2p.host.interface import MuxedConnection
from dep2p.host.resources.turns import STREAM_WEIGHT
from dep2p.host.yamux.byte_stream import YamuxByteStream
from dep2p.host.yamux.connection import YamuxConnection


class YamuxMuxer:
    """Runs a `YamuxConnection` and hands its streams on."""

    def __init__(self, yamux: YamuxConnection) -> None:
        self._yamux = yamux
        self._connection: MuxedConnection | None = None

    @property
    def rtt_s(self) -> float | None:
        return self._yamux.rtt_s

    @property
    def received_bytes(self) -> int:
        return self._yamux.received_bytes

    @property
    def probes_itself(self) -> bool:
        return True

    def counters(self) -> Mapping[str, int]:
        return self._yamux.counters()

    def open_protocols(self) -> list[str]:
        return self._yamux.open_protocols()

    def bind(self, connection: MuxedConnection) -> None:
        self._connection = connection
        self._yamux.bind(connection.resources, connection.turns)

    async def run(self, connection: MuxedConnection, nursery: trio.Nursery) -> str:
        async with trio.open_nursery() as own:
            own.start_soon(self._yamux.start)
            try:
                while True:
                    await connection.negotiation_place()
                    if not self._yamux.is_proven:
                        await connection.turns.next(STREAM_WEIGHT, is_early=self._yamux.is_early)
                    connection.serve(YamuxByteStream(await self._yamux.accept_stream(), connection))
            except MuxedConnUnavailable:
                connection.end(self._yamux.close_reason)  # before the socket's own, slower end
        return self._yamux.close_reason

    async def open(self) -> YamuxByteStream:
        connection = self._connection
        if connection is None:
            raise StreamClosedError("the connection has not begun, or has ended")
        if not self._yamux.event_started.is_set():
            await self._yamux.event_started.wait()  # a write that fails before the start would leave it half closed
        return YamuxByteStream(await self._yamux.open_stream(), connection)

    def fail(self, reason: str) -> None:
        self._yamux.fail(reason)

    async def close(self) -> None:
        await self._yamux.close()
        self._connection = None  # else the two keep each other
