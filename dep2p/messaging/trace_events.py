"""Events of requests, notifies, streams and reliable messages. Their parts call these only while a trace is on."""

from collections.abc import Callable

from dep2p.delivery.receipts import Status, Statuses
from dep2p.errors import Dep2pError, WireError
from dep2p.messaging.message_stream import MessageStream
from dep2p.protocols.delivery.states import State
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.tracing.event_log import TraceLog
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
    log.put(
        schema.Request(V, log.node, 0, log.t_us(), peer, name, side, outcome, round(took_s * 1e6), size, reply_size)
    )


def trace_notify(log: TraceLog, peer: PeerId, name: str, side: str, outcome: str, size: int) -> None:
    """A notify was sent, handled or dropped."""
    log.put(schema.Notify(V, log.node, 0, log.t_us(), peer, name, side, outcome, size))


def trace_stream(log: TraceLog, peer: PeerId, name: str, side: str, ended: MessageStream | None, took_s: float) -> None:
    """An app's stream was opened; or has ``ended``, after so long."""
    if ended is None:
        log.put(schema.Stream(V, log.node, 0, log.t_us(), peer, name, side, "open"))
        return
    error = ended.error
    state, reason = ("closed", None) if error is None else ("reset", str(error)[:200])
    counts = ended.bytes_in, ended.bytes_out
    log.put(schema.Stream(V, log.node, 0, log.t_us(), peer, name, side, state, round(took_s * 1e6), *counts, reason))


def delivery_message_id(epoch: bytes, number: int) -> bytes:
    """The id that a reliable message has in the traces of both ends: the sender's numbering, and the number."""
    return epoch + number.to_bytes(8, "big")


class TracedStatuses(Statuses):
    """Gives the changes of state of reliable messages, at their sender, to a trace."""

    def __init__(
        self,
        watchers: dict[Statuses, None],
        on_change: Callable[[], None],
        log: TraceLog,
        epoch_of: Callable[[PeerId], bytes],
    ) -> None:
        """``epoch_of``: of the numbering of what goes to a peer."""
        super().__init__(watchers, on_change)
        self._log = log
        self._epoch_of = epoch_of

    def put(self, status: Status) -> None:
        """For the service."""
        name = _STATES.get(status.state)
        if name is None:
            return
        log = self._log
        number = int(status.id.rpartition(":")[2])
        msg = delivery_message_id(self._epoch_of(status.peer), number)
        if log.is_sampled(msg):
            log.put(
                schema.Delivery(
                    *(V, log.node, 0, log.t_us(), msg, status.peer, name),
                    attempt=status.tries or None,
                    position=number,
                    reason=status.reason or None,
                )
            )


def trace_received(log: TraceLog, epoch: bytes, number: int, peer: PeerId, state: str, size: int) -> None:
    """A reliable message was handled here, or was known already."""
    msg = delivery_message_id(epoch, number)
    if log.is_sampled(msg):
        log.put(schema.Delivery(V, log.node, 0, log.t_us(), msg, peer, state, position=number, size=size))
