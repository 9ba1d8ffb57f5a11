"""Connections multiplexed by py-libp2p itself (QUIC, relayed) behind our `Muxer`."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import trio

from dep2p.errors import StreamClosedError
from dep2p.host.interface import MuxedConnection
from dep2p.host.resources.turns import EARLY_WEIGHT_MAX, STREAM_WEIGHT
from dep2p.host.upstream.byte_stream import MuxedByteStream

if TYPE_CHECKING:
    from libp2p.abc import IMuxedConn, IMuxedStream

logger: logging.Logger = logging.getLogger("dep2p.host")


class UpstreamMuxer:
    """Runs a py-libp2p muxed connection and its streams."""

    def __init__(self, muxed: "IMuxedConn", stream_type: type[MuxedByteStream] = MuxedByteStream) -> None:
        self._muxed = muxed
        self._stream_type = stream_type
        self._streams: dict[int, MuxedByteStream] = {}
        self._connection: MuxedConnection | None = None
        self._nursery: trio.Nursery | None = None
        self._started = trio.Event()

    @property
    def rtt_s(self) -> float | None:
        return None

    @property
    def received_bytes(self) -> int:
        return 0

    @property
    def probes_itself(self) -> bool:
        return False

    def counters(self) -> Mapping[str, int]:
        return {}

    def open_protocols(self) -> list[str]:
        return [stream.protocol for stream in self._streams.values()]

    def bind(self, connection: MuxedConnection) -> None:
        self._connection = connection

    async def run(self, connection: MuxedConnection, nursery: trio.Nursery) -> str:
        self._nursery = nursery
        async with trio.open_nursery() as own:
            own.start_soon(self._muxed.start)
            await self._muxed.event_started.wait()
            self._started.set()
            reason = await self._accept_streams(connection, nursery)
            connection.end(reason)
            for stream in list(self._streams.values()):
                stream.connection_lost(f"the connection has ended: {reason}")
            own.cancel_scope.cancel()
        return reason

    async def _accept_streams(self, connection: MuxedConnection, nursery: trio.Nursery) -> str:
        worked = 0
        while True:
            await connection.negotiation_place()
            if not connection.resources.is_proven:
                await connection.turns.next(STREAM_WEIGHT, is_early=worked < EARLY_WEIGHT_MAX)
                worked += STREAM_WEIGHT
            try:
                muxed = await self._muxed.accept_stream()
            except Exception as error:
                return f"closed by the peer or lost ({type(error).__name__})"
            stream = self._adopt(muxed, connection, nursery)
            if len(self._streams) > connection.limits.streams_per_connection_max:
                connection.count("inbound_stream_refused_streams_max")
                stream.reset()
                continue
            if not stream.reserve_stream():
                connection.count("inbound_stream_refused_memory")
                stream.reset()
                continue
            connection.serve(stream)

    def _adopt(self, muxed: "IMuxedStream", connection: MuxedConnection, nursery: trio.Nursery) -> MuxedByteStream:
        stream = self._stream_type(
            muxed,
            connection,
            nursery,
            on_done=self._forget,
            close_timeout_s=connection.limits.close_timeout_s,
        )
        self._streams[id(stream)] = stream
        return stream

    def _forget(self, stream: MuxedByteStream) -> None:
        self._streams.pop(id(stream), None)

    async def open(self) -> MuxedByteStream:
        await self._started.wait()
        connection, nursery = self._connection, self._nursery
        if connection is None or nursery is None or connection.is_closed:
            raise StreamClosedError("the connection has ended")
        if len(self._streams) >= connection.limits.streams_per_connection_max:
            connection.count("outbound_stream_refused_streams_max")
            raise StreamClosedError(
                f"{connection.limits.streams_per_connection_max} streams are open on this connection, its limit "
                "(streams_per_connection_max): close some first"
            )
        try:
            muxed = await self._muxed.open_stream()
        except Exception as error:
            raise StreamClosedError(f"no stream can be opened to {connection.peer}: {error!r}") from None
        return self._adopt(muxed, connection, nursery)

    def fail(self, reason: str) -> None:
        for stream in list(self._streams.values()):
            stream.connection_lost(reason)

    async def close(self) -> None:
        self.fail("the connection was closed")
        await self._muxed.close()
