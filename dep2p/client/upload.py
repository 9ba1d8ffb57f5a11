"""The body of a call that is made of messages while they come."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import anyio

from dep2p.control_api.encoding import encode_item

_PENDING_BYTES_MAX: Final = 262_144


class Batches:
    """Messages on their way into a body. Those that come while a piece is being sent become one piece."""

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self._messages = messages
        self._parts: list[bytes] = []
        self._bytes = 0
        self._wake = anyio.Event()
        self._room = anyio.Event()
        self._ended = False
        self._error: Exception | None = None

    async def fill(self) -> None:
        """Take all messages."""
        try:
            async for message in self._messages:
                item = encode_item(message)
                self._parts.append(item)
                self._bytes += len(item)
                self._wake.set()
                while self._bytes > _PENDING_BYTES_MAX:
                    self._room = anyio.Event()
                    await self._room.wait()
        except Exception as error:  # `pieces` raises it for the caller of publish_many
            self._error = error
        finally:
            self._ended = True
            self._wake.set()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body. Raises the error of the messages after those before it."""
        while True:
            if self._parts:
                piece = b"".join(self._parts)
                self._parts.clear()
                self._bytes = 0
                self._room.set()
                yield piece
            elif self._ended:
                if self._error is not None:
                    raise self._error
                return
            else:
                self._wake = anyio.Event()
                await self._wake.wait()
