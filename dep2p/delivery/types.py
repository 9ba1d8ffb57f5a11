"""What people see of an outbox."""

from dataclasses import dataclass

from dep2p.protocols.delivery.states import State
from dep2p.types import PeerId


@dataclass(frozen=True, slots=True)
class OutboxItem:
    """A message that waits, for people."""

    id: str
    peer: PeerId
    name: str
    topic: str
    state: State
    size_bytes: int
    tries: int
    age_s: float
    last_error: str
    """Of the link to the receiver; "" when there is a link or none was tried."""


@dataclass(frozen=True, slots=True)
class DeliveryStats:
    """What the outbox holds now."""

    is_durable: bool
    waiting_items: int
    waiting_bytes: int
    peers: int
    links_out: int
    links_in: int
