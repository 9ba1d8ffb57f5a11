"""Liveness probes for connections whose multiplexer makes none: pings on a stream of their own."""

import logging
import secrets

import trio

from dep2p.errors import ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.connections.connection import PeerConnection
from dep2p.host.connections.identify import PING, PING_BYTES
from dep2p.host.interface import ByteStream

logger: logging.Logger = logging.getLogger("dep2p.host")


async def watch(connection: PeerConnection) -> None:
    """Ping until the connection ends; end it when a ping is not answered in time."""
    limits = connection.limits
    stream: ByteStream | None = None
    while not connection.is_closed:
        sent_s = trio.current_time()
        failure = "no answer to a liveness probe"
        alive = False
        with trio.move_on_after(limits.liveness_timeout_s):
            try:
                if stream is None or stream.is_write_closed:
                    stream = await connection.open_stream(PING, timeout_s=limits.liveness_timeout_s)
                    sent_s = trio.current_time()
                alive = await _probe(stream)
            except ProtocolNotSupportedError:
                connection.count("liveness_not_supported")
                logger.debug("%r does not answer pings: only its own end will be noticed", connection)
                return
            except (RequestTimeoutError, StreamClosedError) as error:
                failure = f"the liveness probe failed: {error}"
        if connection.is_closed:
            return
        if not alive:
            connection.count("liveness_lost")
            connection.abort(failure)
            return
        connection.set_rtt(trio.current_time() - sent_s)
        await trio.sleep(max(0.0, sent_s + limits.liveness_interval_s - trio.current_time()))


async def _probe(stream: ByteStream) -> bool:
    payload = secrets.token_bytes(PING_BYTES)
    stream.write_nowait(payload, urgent=True)
    answer = b""
    while len(answer) < PING_BYTES:
        data = await stream.read(PING_BYTES - len(answer))
        if not data:
            return False
        answer += data
    return answer == payload
