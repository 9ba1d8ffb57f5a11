"""Reliable messages that control clients have sent, so that they can wait for the ends of those."""

from typing import Final

from dep2p.delivery.receipts import Receipt
from dep2p.errors import DeliveryUnknownError

_RECEIPTS_MAX: Final = 65_536
"""Messages that are remembered: the outbox itself holds as many by default."""


class ReceiptTable:
    """The latest receipts by their ids; the oldest are forgotten, those of messages that have ended first."""

    def __init__(self) -> None:
        self._waiting: dict[str, Receipt] = {}
        self._ended: dict[str, Receipt] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ended)

    def add(self, receipt: Receipt) -> None:
        """Remember a receipt."""
        self._waiting[receipt.id] = receipt
        if len(self) > _RECEIPTS_MAX:
            self._make_room()

    def _make_room(self) -> None:
        if not self._ended:
            ended = [name for name, receipt in self._waiting.items() if receipt.has_ended]
            for name in ended:
                self._ended[name] = self._waiting.pop(name)
        oldest = self._ended or self._waiting
        del oldest[next(iter(oldest))]

    def find(self, message_id: str) -> Receipt:
        """Return the receipt of a message. Raises DeliveryUnknownError."""
        receipt = self._waiting.get(message_id) or self._ended.get(message_id)
        if receipt is None:
            raise DeliveryUnknownError(
                f"this daemon does not know how the message {message_id[:120]!r} ended: it did not accept it since its "
                "start, or has forgotten it"
            )
        return receipt
