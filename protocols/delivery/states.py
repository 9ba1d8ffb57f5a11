"""The states of a reliable message (docs/spec/delivery.md)."""

from enum import StrEnum
from typing import Final


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
    """The receiver rejected it, the tries are used up, or it was dropped by request: the reason says which. An end."""
    EXPIRED = "expired"
    """It grew older than the age allowed. An end."""


ENDS: Final = (DeliveryState.ACKNOWLEDGED, DeliveryState.FAILED, DeliveryState.EXPIRED)
