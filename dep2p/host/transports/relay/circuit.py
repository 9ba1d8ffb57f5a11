"""One end of a circuit: a stream through a relay, as the transport of a connection that is upgraded over it."""

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError

from dep2p.errors import StreamClosedError
from dep2p.host.connections.circuit_limit import CircuitLimit, CircuitMeter
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream


class RelayedTransport(ReadWriteCloser):
    """A stream through a relay, as the transport of a connection that is upgraded over it."""

    def __init__(self, stream: ByteStream, limit: CircuitLimit, counters: Counters) -> None:
        self._stream = stream
        self.meter: CircuitMeter = CircuitMeter(stream.connection.peer, limit, trio.current_time())
        self._counters = counters

    async def read(self, n: int | None = None) -> bytes:
        """Return up to ``n`` bytes; b"" at the end. Raises ConnectionClosedError."""
        try:
            with trio.move_on_at(self.meter.end_s):
                data = await self._stream.read(65_536 if n is None or n < 0 else n)
                self.meter.received_bytes += len(data)
                return data
        except StreamClosedError as error:
            raise ConnectionClosedError(str(error)) from error
        raise self._used_up()

    async def write(self, data: bytes) -> None:
        """Send all of the bytes. Raises ConnectionClosedError, also for more than the relay carries."""
        if not self.meter.may_send(len(data)) or trio.current_time() >= self.meter.end_s:
            raise self._used_up()
        self.meter.sent_bytes += len(data)
        try:
            await self._stream.write(data)
        except StreamClosedError as error:
            raise ConnectionClosedError(str(error)) from error

    def _used_up(self) -> ConnectionClosedError:
        self._counters.add("relay_limit_reached")
        return ConnectionClosedError(f"the relay carries at most {self.meter.limit} for this connection")

    async def close(self) -> None:
        await self._stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None
