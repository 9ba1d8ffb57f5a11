"""Events of requests, notifies and streams. Their parts call these only while a trace is on."""

from typing import Literal, NamedTuple

from dep2p.errors import Dep2pError, WireError
from dep2p.messaging.message_stream import MessageStream
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId


def outcome_of(error: BaseException) -> str:
    """The name of an outcome: the wire's name of an error, else its class."""
    if isinstance(error, WireError):
        return error.code.name.lower()
    return type(error).__name__ if isinstance(error, Dep2pError) else "cancelled"


class TracedCall(NamedTuple):
    """A request or notify, as its events name it."""

    peer: PeerId
    name: str
    side: Literal["in", "out"]
    """``out`` at the caller, ``in`` at the handler."""
    size_bytes: int


def trace_request(log: TraceLog, call: TracedCall, outcome: str, took_s: float, reply_bytes: int | None) -> None:
    """A request ended, with an answer of so many bytes or none."""
    peer, name, side, size = call
    log.put(
        schema.RequestEvent(
            V, log.node, 0, log.t_us(), peer, name, side, outcome, round(took_s * 1e6), size, reply_bytes
        )
    )


def trace_notify(log: TraceLog, call: TracedCall, outcome: str) -> None:
    """A notify was sent, handled or dropped."""
    peer, name, side, size = call
    log.put(schema.NotifyEvent(V, log.node, 0, log.t_us(), peer, name, side, outcome, size))


def trace_stream(log: TraceLog, peer: PeerId, name: str, side: str, ended: MessageStream | None, took_s: float) -> None:
    """An app's stream was opened, or has ``ended`` after so long."""
    if ended is None:
        log.put(schema.StreamEvent(V, log.node, 0, log.t_us(), peer, name, side, "open"))
        return
    error = ended.error
    state, reason = ("closed", None) if error is None else ("reset", str(error)[:200])
    counts = ended.bytes_in, ended.bytes_out
    log.put(
        schema.StreamEvent(V, log.node, 0, log.t_us(), peer, name, side, state, round(took_s * 1e6), *counts, reason)
    )
