"""Human-readable views of an outbox."""

from dataclasses import dataclass
from typing import TypedDict

from dep2p.protocols.delivery.states import DeliveryState
from dep2p.types import Headers, PeerId


class SendOptions(TypedDict, total=False):
    """The options of a message to one peer, as keyword arguments."""

    headers: Headers | None
    """The app's headers, for the handler."""
    wait: bool
    """Whether to wait while the outbox is full (the default), for a reliable message."""
    ttl_s: float | None
    """Seconds until a reliable message expires, at most 30 days; ``Limits.delivery_age_max_s`` by default."""


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
