"""The operations of a side of a benchmark; the same loops measure every side."""

import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import trio

Send = Callable[[bytes], Awaitable[None]]
"""Send one message or one bulk piece; returns when it may be followed by the next."""


class Arrivals:
    """Counts what a server received, with the clock of the machine, which its processes share."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.last_at_s = 0.0
        self._changed = trio.Event()
        self._wanted_bytes = -1

    def add(self, messages: int, size_bytes: int) -> None:
        """``messages`` with together ``size_bytes`` arrived now."""
        self.messages += messages
        self.bytes += size_bytes
        self.last_at_s = time.monotonic()
        if 0 <= self._wanted_bytes <= self.bytes:
            self._changed.set()

    def reset(self) -> None:
        """Begin to count again."""
        self.messages = self.bytes = 0

    async def reach(self, size_bytes: int) -> None:
        """Wait until at least ``size_bytes`` arrived since the reset."""
        self._changed = trio.Event()
        self._wanted_bytes = size_bytes
        if self.bytes < size_bytes:
            await self._changed.wait()
        self._wanted_bytes = -1


@dataclass(frozen=True, slots=True)
class DialTimes:
    """Milliseconds from the call to dial."""

    usable_ms: float
    """Until the connection may be used (for dep2p: the peer is a verified member)."""
    answered_ms: float
    """Until the answer to a first request arrived."""


class Server(Protocol):
    """The end that listens, answers and counts."""

    @property
    def address(self) -> str:
        """The address by which a client finds it."""
        ...

    @property
    def arrivals(self) -> Arrivals: ...


class Client(Protocol):
    """The end that connects and sends."""

    async def request(self, data: bytes) -> bytes:
        """The server's answer: the same bytes."""
        ...

    def open_notify(self) -> AbstractAsyncContextManager[Send]:
        """One-way messages, one call each."""
        ...

    def open_bulk(self) -> AbstractAsyncContextManager[Send]:
        """One-way bulk pieces."""
        ...


class Side(Protocol):
    """One of the things compared. ``secret`` is 32 bytes as hex that all processes of a run share."""

    def serve(self, secret: str) -> AbstractAsyncContextManager[Server]: ...

    def connect(self, secret: str, address: str, *, listen: bool = True) -> AbstractAsyncContextManager[Client]:
        """A new client, connected. Without ``listen`` no peer can dial it, so that many of them make no mesh."""
        ...

    async def dial_fresh(self, secret: str, address: str) -> DialTimes:
        """Dial from a node that was made for it, and take it down again."""
        ...
