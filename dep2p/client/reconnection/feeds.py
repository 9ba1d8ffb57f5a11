"""Feeds: answers that go on until the program leaves them, over restarts of the daemon."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from dep2p.client.models import FeedInterrupted, FeedResumed
from dep2p.client.reconnection.outages import DaemonWatch, Outages, repeated
from dep2p.control_api.errors import DaemonUnreachableError
from dep2p.errors import Dep2pError


class JsonLines(Protocol):
    """Parsed lines of one answer."""

    @property
    def has_line(self) -> bool:
        """Whether a whole line is here already."""
        ...

    async def next_line(self) -> dict[str, object]:
        """Return the next line. Raises StopAsyncIteration at the end."""
        ...


class FeedTransport(Protocol):
    """The part of the transport that a feed needs."""

    @property
    def watch(self) -> DaemonWatch:
        """The state of the daemon."""
        ...

    def lines(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[JsonLines]:
        """Open an answer of lines."""
        ...


@dataclass(slots=True)
class FeedCall:
    """The call that opens a feed. It is made again after each loss."""

    method: str
    path: str
    name: str
    """The content of the feed, for people: "messages of topic 'chat'"."""
    loses: bool
    """Whether entries are lost while it is not open."""
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    """May be replaced for the next opening."""
    body: Mapping[str, object] | None = None


class Feed:
    """The lines of a feed, and an item where it was lost and where it goes on. Use it in one task."""

    def __init__(self, transport: FeedTransport, call: FeedCall) -> None:
        self.call = call
        self._transport = transport
        self._outages = Outages(transport.watch, call.name, loses=call.loses)
        self._connection = AsyncExitStack()
        self._lines: JsonLines | None = None

    @property
    def name(self) -> str:
        """The content of the feed, for people."""
        return self.call.name

    @property
    def has_line(self) -> bool:
        """Whether the next line is here already: it came together with the one before."""
        return self._lines is not None and self._lines.has_line

    async def open(self) -> None:
        """Open it for the first time. Raises what the call raises."""
        call, connection = self.call, AsyncExitStack()
        opening = self._transport.lines(call.method, call.path, body=call.body, params=call.params)
        self._lines = await connection.enter_async_context(opening)
        self._connection = connection

    async def next_line(self) -> dict[str, object] | FeedInterrupted | FeedResumed:
        """Return the next line, or such an item. Raises DaemonUnreachableError and FeedEndedError."""
        if self._lines is None:
            await self._outages.over(self.open)
            return self._outages.resumed()
        try:
            return await self._lines.next_line()
        except StopAsyncIteration:
            error: Exception = DaemonUnreachableError(f"the daemon ended {self.call.name}")
        except (Dep2pError, ValueError) as raised:
            error = raised
        await self.aclose()
        return self._outages.lost(error)

    async def aclose(self) -> None:
        """Close the connection."""
        self._lines = None
        with anyio.CancelScope(shield=True):
            await self._connection.aclose()


@asynccontextmanager
async def opened_feed(transport: FeedTransport, call: FeedCall) -> AsyncGenerator[Feed, None]:
    """Open a feed for the block. Raises what the call raises."""
    feed = Feed(transport, call)
    await repeated(transport.watch, feed.open, lambda _error: True)
    try:
        yield feed
    finally:
        await feed.aclose()
