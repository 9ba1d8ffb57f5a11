"""Events of requests, notifies, streams and reliable messages. Their parts call these only while a trace is on."""

from dep2p.errors import Dep2pError, WireError
from dep2p.io.delivery_receipt import Receipt
from dep2p.io.trace_log import TraceLog
from dep2p.protocols.delivery.states import State
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.types import PeerId

_STATES = {
    State.CREATED: "created",
    State.SENDING: "sending",
    State.ACKNOWLEDGED: "acknowledged",
    State.FAILED: "failed",
    State.EXPIRED: "expired",
}
"""Others tell nothing that these do not."""


def outcome_of(error: BaseException) -> str:
    """How an end is called: the wire's name of an error, else the class's."""
    if isinstance(error, WireError):
        return error.code.name.lower()
    return type(error).__name__ if isinstance(error, Dep2pError) else "cancelled"


def trace_request(
    log: TraceLog, peer: PeerId, name: str, side: str, outcome: str, took_s: float, size: int, reply_size: int | None
) -> None:
    """A request ended at the asker (``out``) or the answerer (``in``)."""
    log.put(schema.Request(V, log.node, 0, log.t_us(), peer, name, side, outcome, int(took_s * 1e6), size, reply_size))


def trace_notify(log: TraceLog, peer: PeerId, name: str, side: str, outcome: str, size: int) -> None:
    """A notify was sent, handled or dropped."""
    log.put(schema.Notify(V, log.node, 0, log.t_us(), peer, name, side, outcome, size))


def trace_stream(log: TraceLog, peer: PeerId, name: str, side: str, state: str, took_s: float, reason: str) -> None:
    """An app's stream was opened or ended."""
    took_us = None if state == "open" else int(took_s * 1e6)
    log.put(schema.Stream(V, log.node, 0, log.t_us(), peer, name, side, state, took_us, reason=reason or None))


def trace_sent(log: TraceLog, epoch: bytes, message: Receipt, state: State) -> None:
    """A reliable message changed its state at its sender."""
    name = _STATES.get(state)
    if name is not None:
        log.put(
            schema.Delivery(
                *(V, log.node, 0, log.t_us(), _message_id(epoch, message.number), message.peer, name),
                message.topic or None,
                message.tries or None,
                size=len(message.body),
                reason=message.reason or None,
            )
        )


def trace_received(log: TraceLog, epoch: bytes, number: int, peer: PeerId, state: str, size: int) -> None:
    """A reliable message was handled here, or was known already."""
    log.put(
        schema.Delivery(
            *(V, log.node, 0, log.t_us(), _message_id(epoch, number), peer, state), position=number, size=size
        )
    )


def _message_id(epoch: bytes, number: int) -> bytes:
    """The same at both ends: the sender's epoch for this receiver, and the message's number in it."""
    return epoch[:8] + number.to_bytes(6, "big")
