"""The states of a reliable message (the seed's message state machine)."""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where a message is. The last three are ends."""

    CREATED = "created"
    """Accepted: in the outbox, and on disk where the outbox is durable."""
    SENDING = "sending"
    """Given to the connection."""
    DELIVERED = "delivered"
    """The receiver has it; its handler has not answered for it yet."""
    RETRYING = "retrying"
    """The connection ended, or nothing was heard of it for the ack timeout: it is sent again."""
    ACKNOWLEDGED = "acknowledged"
    """The handler took it. An end."""
    FAILED = "failed"
    """The receiver rejected it, the tries are used up, or it was dropped by request: the reason says which. An end."""
    EXPIRED = "expired"
    """It grew older than the age allowed. An end."""


ENDS: Final = (State.ACKNOWLEDGED, State.FAILED, State.EXPIRED)

FOLLOWS: Final[dict[State, tuple[State, ...]]] = {
    State.CREATED: (State.SENDING, State.ACKNOWLEDGED, State.FAILED, State.EXPIRED),
    State.SENDING: (State.DELIVERED, State.ACKNOWLEDGED, State.RETRYING, State.FAILED, State.EXPIRED),
    State.DELIVERED: (State.ACKNOWLEDGED, State.RETRYING, State.FAILED, State.EXPIRED),
    State.RETRYING: (State.SENDING, State.DELIVERED, State.ACKNOWLEDGED, State.FAILED, State.EXPIRED),
    State.ACKNOWLEDGED: (),
    State.FAILED: (),
    State.EXPIRED: (),
}
"""What may follow each state. DELIVERED may be passed over: an acknowledgement says it too. One of an earlier run may
be acknowledged before this one has sent it again."""
