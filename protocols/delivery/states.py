"""The states of a reliable message (docs/spec/delivery.md)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from dep2p.errors import DeliveryExpiredError, DeliveryFailedError, StreamClosedError
from dep2p.types import PeerId, RealmId


class DeliveryState(StrEnum):
    """The state of a message. The last three are ends."""

    CREATED = "created"
    """Accepted: in the outbox, and on disk where the outbox is durable."""
    SENDING = "sending"
    """Given to the connection."""
    DELIVERED = "delivered"
    """The receiver has it; its handler has not ended yet."""
    RETRYING = "retrying"
    """The connection ended, or the receiver was silent for the ack timeout: it is sent again."""
    ACKNOWLEDGED = "acknowledged"
    """The handler took it. An end."""
    FAILED = "failed"
    """The receiver rejected it, the tries are used up, or it was dropped by request: the reason says which. An end. The
    last two do not say that the receiver has not taken it: see ``may_have_been_taken``."""
    EXPIRED = "expired"
    """It grew older than the age allowed. An end."""


ENDS: Final = (DeliveryState.ACKNOWLEDGED, DeliveryState.FAILED, DeliveryState.EXPIRED)


@dataclass(frozen=True, slots=True)
class DeliveryStatus:
    """A change of a reliable message's state."""

    id: str
    peer: PeerId
    name: str
    state: DeliveryState
    tries: int
    reason: str
    realm: RealmId
    may_have_been_taken: bool = False
    """Whether the message failed or expired after it was sent, and the receiver's handler may have taken it. Sent
    again, it may have its effect twice."""


def raise_unless_acknowledged(state: DeliveryState, peer: str, reason: str, *, may_have_been_taken: bool) -> None:
    """Raise the error of an end that is not ACKNOWLEDGED."""
    but = "; its handler may have taken it all the same" if may_have_been_taken else ""
    if state is DeliveryState.EXPIRED:
        raise DeliveryExpiredError(f"{peer} did not acknowledge the message: {reason}{but}")
    if state not in ENDS:
        raise StreamClosedError("this node has stopped: the message is kept in its outbox, and sent when it runs again")
    if state is not DeliveryState.ACKNOWLEDGED:
        raise DeliveryFailedError(
            f"{peer} did not {'acknowledge' if may_have_been_taken else 'take'} the message: {reason or state}{but}"
        )


class ReceiverState(Protocol):
    """The part of a receipt that says how far its receiver is."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def state(self) -> DeliveryState: ...

    @property
    def reason(self) -> str: ...


def acknowledged_by(receipts: Sequence[ReceiverState]) -> tuple[PeerId, ...]:
    """Return the receivers whose app has handled the message so far."""
    return tuple(each.peer for each in receipts if each.state is DeliveryState.ACKNOWLEDGED)


def missing(receipts: Sequence[ReceiverState]) -> dict[PeerId, str]:
    """Return the receivers that have not handled the message, each with its state or the reason of its failure."""
    return {
        each.peer: each.reason or each.state.value for each in receipts if each.state is not DeliveryState.ACKNOWLEDGED
    }
