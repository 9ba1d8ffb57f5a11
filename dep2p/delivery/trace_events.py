"""Events of reliable messages. Delivery calls these only while a trace is on."""

from collections.abc import Callable

from dep2p.delivery.receipts import Statuses
from dep2p.protocols.delivery.states import DeliveryState, DeliveryStatus
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.tracing.event_log import TraceLog
from dep2p.types import PeerId

_STATES = {
    DeliveryState.CREATED: "created",
    DeliveryState.SENDING: "sending",
    DeliveryState.ACKNOWLEDGED: "acknowledged",
    DeliveryState.FAILED: "failed",
    DeliveryState.EXPIRED: "expired",
}
"""The states that a trace records. Others add nothing to these."""


def delivery_message_id(epoch: bytes, number: int) -> bytes:
    """Return the id of a reliable message in the traces of both ends: the sender's numbering, and the number."""
    return epoch + number.to_bytes(8, "big")


class TracedStatuses(Statuses):
    """Writes the changes of state of reliable messages, at their sender, to a trace."""

    def __init__(
        self,
        watchers: dict[Statuses, None],
        on_change: Callable[[], None],
        log: TraceLog,
        epoch_of: Callable[[PeerId], bytes],
    ) -> None:
        """``epoch_of``: returns the numbering of the messages to a peer."""
        super().__init__(watchers, on_change)
        self._log = log
        self._epoch_of = epoch_of

    def put(self, status: DeliveryStatus) -> None:
        """Write a change. Called by the service."""
        name = _STATES.get(status.state)
        if name is None:
            return
        log = self._log
        number = int(status.id.rpartition(":")[2])
        msg = delivery_message_id(self._epoch_of(status.peer), number)
        if log.is_sampled(msg):
            log.put(
                schema.DeliveryEvent(
                    *(V, log.node, 0, log.t_us(), msg, status.peer, name),
                    attempt=status.tries or None,
                    position=number,
                    reason=status.reason or None,
                )
            )


def trace_received(log: TraceLog, epoch: bytes, number: int, peer: PeerId, state: str, size: int) -> None:
    """Record that a reliable message was handled here, or was known already."""
    msg = delivery_message_id(epoch, number)
    if log.is_sampled(msg):
        log.put(schema.DeliveryEvent(V, log.node, 0, log.t_us(), msg, peer, state, position=number, size=size))
