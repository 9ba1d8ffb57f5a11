"""The interface of a side of the pub/sub benchmark, its messages, and a receiver's record of them."""

import os
import struct
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio

_HEAD = struct.Struct(">dII")
"""When it was published (the machine's monotonic clock, which its processes share), its publisher, its number."""
_HEAD_BYTES = _HEAD.size
_TAIL = os.urandom(1_048_576)
"""Random, so that compression cannot help."""


def make_message(publisher: int, number: int, size_bytes: int) -> bytes:
    """A payload that no other message has."""
    return _HEAD.pack(time.monotonic(), publisher, number) + _TAIL[: size_bytes - _HEAD_BYTES]


class Received:
    """The messages that one subscriber got since the reset: each once, with its age."""

    def __init__(self) -> None:
        self.again = 0
        """Messages that were delivered a second time."""
        self.last_at_s = 0.0
        self.ages_s: list[float] = []
        self._seen: set[bytes] = set()
        self._wanted = -1
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, data: bytes) -> None:
        """A message was delivered now."""
        head = data[8:_HEAD_BYTES]
        if head in self._seen:
            self.again += 1
            return
        self._seen.add(head)
        self.last_at_s = now_s = time.monotonic()
        self.ages_s.append(now_s - _HEAD.unpack_from(data)[0])
        if len(self._seen) == self._wanted:
            self._changed.set()

    def reset(self) -> None:
        """Begin to count again."""
        self.again = 0
        self.ages_s = []
        self._seen = set()

    async def reach(self, count: int, quiet_s: float) -> None:
        """Wait until ``count`` messages came, or until none has come for ``quiet_s``."""
        self._changed = trio.Event()
        self._wanted = count
        had = -1
        while len(self._seen) < count and len(self._seen) != had:
            had = len(self._seen)
            with trio.move_on_after(quiet_s):
                await self._changed.wait()
        self._wanted = -1


class Subscriber(Protocol):
    """A node that is subscribed to the benchmark's topic."""

    @property
    def address(self) -> str:
        """Where others can dial it."""
        ...

    @property
    def received(self) -> Received: ...

    @property
    def mesh(self) -> Sequence[object]:
        """Its peers in the topic's mesh, now."""
        ...

    async def connect(self, address: str) -> None:
        """Dial another one."""
        ...

    async def publish(self, data: bytes) -> None:
        """One signed message; returns when it may be followed by the next."""
        ...


class PubSubSide(Protocol):
    """One of the things compared. ``secret`` is 32 bytes as hex that all processes of a run share."""

    def subscribe(self, secret: str, *, is_limited: bool) -> AbstractAsyncContextManager[Subscriber]:
        """A new node, listening and subscribed. ``is_limited``: with the default limit of its publish rate, if any."""
        ...
