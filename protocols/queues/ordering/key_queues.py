"""The lines of a partition's keys: of each key only the first message that is not done may be handed out. Pure."""

from collections import deque
from collections.abc import Iterable
from functools import lru_cache

from dep2p.errors import ProtocolError
from dep2p.protocols.wire.cbor import decode_bounded


class Lines:
    """Of one partition."""

    __slots__ = ("_key_of", "_lines", "ready", "waiting")

    def __init__(self) -> None:
        self.ready: deque[int] = deque()
        """What may be handed out: heads of lines, and messages without a key."""
        self.waiting = 0
        """Behind the heads."""
        self._lines: dict[str, deque[int]] = {}
        self._key_of: dict[int, str] = {}
        """Of the heads."""

    @property
    def keys(self) -> int:
        """How many keys have a line."""
        return len(self._lines)

    def join(self, seq: int, key: str) -> bool:
        """A message goes to the end of its key's line; gives whether it is the head."""
        line = self._lines.get(key)
        if line is not None:
            line.append(seq)
            self.waiting += 1
            return False
        self._lines[key] = deque((seq,))
        self._key_of[seq] = key
        return True

    def is_head(self, seq: int) -> bool:
        """Whether it stands first in a line."""
        return seq in self._key_of

    def leave(self, seq: int) -> int:
        """A head is done with, or goes without its line: gives the next one of its key; 0 for none."""
        key = self._key_of.pop(seq, None)
        if key is None:
            return 0
        line = self._lines[key]
        line.popleft()
        if not line:
            del self._lines[key]
            return 0
        self.waiting -= 1
        self._key_of[line[0]] = key
        return line[0]

    def heads_up_to(self, seq: int) -> list[int]:
        """For what leaves the log."""
        return [each for each in self._key_of if each <= seq]

    def clear(self) -> None:
        """Forget everything."""
        self.ready.clear()
        self._lines.clear()
        self._key_of.clear()
        self.waiting = 0

    def put_back(self, seqs: Iterable[int]) -> None:
        """To the front, in their order."""
        self.ready.extendleft(reversed(list(seqs)))


def key_of(attributes: bytes) -> str:
    """The order key in a message's attributes; empty for none, and for what cannot be read."""
    return _key_of(attributes) if attributes else ""


@lru_cache(maxsize=8_192)
def _key_of(attributes: bytes) -> str:
    try:
        fields: object = decode_bounded(attributes, "a message's attributes", depth_max=4, entries_max=64)
    except ProtocolError:
        return ""
    key: object = fields.get("k") if isinstance(fields, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return key if isinstance(key, str) else ""
