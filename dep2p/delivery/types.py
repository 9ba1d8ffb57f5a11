"""Human-readable views of an outbox."""

from dataclasses import dataclass

from dep2p.protocols.delivery.states import DeliveryState
from dep2p.types import PeerId


@dataclass(frozen=True, slots=True)
class OutboxItem:
    """A message that waits, human-readable."""

    id: str
    peer: PeerId
    name: str
    topic: str
    state: DeliveryState
    size_bytes: int
    tries: int
    age_s: float
    last_error: str
    """The last error of the link to the receiver; "" when there is a link or none was tried. Of a lost message the
    reason of its end."""
    may_have_been_taken: bool = False
    """Whether it is lost, and the receiver's handler may have taken it all the same: a replay may be the second."""


@dataclass(frozen=True, slots=True)
class DeliveryStats:
    """Counts of an outbox at this moment."""

    is_durable: bool
    waiting_items: int
    waiting_bytes: int
    peers: int
    links_out: int
    links_in: int
    lost_items: int
    """Messages that failed or expired, and are kept to be sent again."""
