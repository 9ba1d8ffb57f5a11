"""Which member made which queues, and how much those hold: what the quotas of members are compared with. Pure."""

from typing import Protocol


class MadeQueue(Protocol):
    """The part of a queue that counting needs."""

    namespace: str
    name: str
    made_by: str
    """The member that made it, by peer id; empty for this node itself."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its messages; 0 before it is loaded."""
        ...


class QueueMakers:
    """The queues of each member that made some."""

    __slots__ = ("_of", "_room")

    def __init__(self) -> None:
        self._of: dict[str, dict[MadeQueue, None]] = {}
        self._room: dict[str, int] = {}
        """By member, how many bytes may come before its queues are looked at again: counting them costs more."""

    def add(self, queue: MadeQueue) -> None:
        """A queue is there."""
        if queue.made_by:
            self._of.setdefault(queue.made_by, {})[queue] = None

    def remove(self, queue: MadeQueue) -> None:
        """It is gone."""
        queues = self._of.get(queue.made_by)
        if queues is not None:
            queues.pop(queue, None)
            if not queues:
                del self._of[queue.made_by]
                self._room.pop(queue.made_by, None)

    def names(self, maker: str) -> list[tuple[str, str]]:
        """Namespace and name of those that a member made."""
        return [(queue.namespace, queue.name) for queue in self._of.get(maker, ())]

    def count(self, maker: str) -> int:
        """How many a member made."""
        return len(self._of.get(maker, ()))

    def stored_bytes(self, maker: str) -> int:
        """Bytes of messages in its queues that are loaded."""
        return sum(queue.size_bytes for queue in self._of.get(maker, ()))

    def has_room(self, maker: str, size: int, *, most: int) -> bool:
        """Whether ``size`` bytes more fit below ``most`` in the queues of a member. Takes them then."""
        room = self._room.get(maker, 0) - size
        if room < 0:
            room = most - self.stored_bytes(maker) - size
            if room < 0:
                self._room[maker] = 0
                return False
        self._room[maker] = room
        return True
