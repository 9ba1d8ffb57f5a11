"""The key queues of a partition: of each key only the first message that is not done may be delivered. Pure."""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.cbor import decode_bounded


class KeyQueues:
    """The key queues of one partition."""

    __slots__ = ("_key_of", "_key_queues", "ready", "waiting")

    def __init__(self) -> None:
        self.ready: deque[int] = deque()
        """Numbers of messages that may be delivered: heads of key queues, and messages without a key."""
        self.waiting: int = 0
        """Messages behind the heads."""
        self._key_queues: dict[str, deque[int]] = {}
        self._key_of: dict[int, str] = {}
        """The key of each head, by number."""

    @property
    def keys(self) -> int:
        """The number of keys that have a queue."""
        return len(self._key_queues)

    def join(self, seq: int, key: str) -> bool:
        """Put a message at the end of its key's queue; return whether it is the head."""
        key_queue = self._key_queues.get(key)
        if key_queue is not None:
            key_queue.append(seq)
            self.waiting += 1
            return False
        self._key_queues[key] = deque((seq,))
        self._key_of[seq] = key
        return True

    def is_head(self, seq: int) -> bool:
        """Whether a message is the head of its key queue."""
        return seq in self._key_of

    def leave(self, seq: int) -> int:
        """Remove a head from its key queue; return the next message of its key, 0 for none."""
        key = self._key_of.pop(seq, None)
        if key is None:
            return 0
        key_queue = self._key_queues[key]
        key_queue.popleft()
        if not key_queue:
            del self._key_queues[key]
            return 0
        self.waiting -= 1
        self._key_of[key_queue[0]] = key
        return key_queue[0]

    def heads_up_to(self, seq: int) -> list[int]:
        """Return the heads up to a number, for messages that leave the log."""
        return [each for each in self._key_of if each <= seq]

    def clear(self) -> None:
        """Forget everything."""
        self.ready.clear()
        self._key_queues.clear()
        self._key_of.clear()
        self.waiting = 0

    def put_back(self, seqs: Iterable[int]) -> None:
        """Put messages at the front, in their order."""
        self.ready.extendleft(reversed(list(seqs)))


def key_of(attributes: bytes) -> str:
    """Return the order key in a message's attributes; empty for none, and for attributes that cannot be read."""
    return _key_of(attributes) if attributes else ""


@lru_cache(maxsize=8_192)
def _key_of(attributes: bytes) -> str:
    try:
        fields: object = decode_bounded(attributes, "a message's attributes", depth_max=4, entries_max=64)
    except ProtocolError:
        return ""
    key: object = fields.get("k") if isinstance(fields, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return key if isinstance(key, str) else ""
