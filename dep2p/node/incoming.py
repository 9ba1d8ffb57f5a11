"""Requests, notifies and streams of a node by iterating, in place of handlers."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, Unpack

import trio

from dep2p.arguments import checks_arguments
from dep2p.control_api.errors import ControlError
from dep2p.errors import HandlerError
from dep2p.gossipsub.topic_types import Lagged
from dep2p.limits import HANDLER_CONCURRENCY, NOTIFY_CONCURRENCY
from dep2p.messaging.offered_services import OfferedService, offered_service
from dep2p.messaging.service import MessageStream, Messaging
from dep2p.protocols.messaging.incoming import IncomingRequest, Notification, Request
from dep2p.protocols.services.options import ServiceOptions
from dep2p.realm.credentials import RealmChoice

_BUFFER_ITEMS = 1_024
"""Notifies that wait for the loop; then their senders wait."""
_GONE = "the program that answers went away"


class HandlesMessages(Protocol):
    """The part of a node that registers handlers."""

    def handle(self, realm: RealmChoice, register: Callable[[Messaging], Callable[[], None]]) -> Callable[[], None]: ...


@checks_arguments
class NodeIncoming:
    """The part of :class:`dep2p.node.node.Node` that takes messages by iterating."""

    async def handlers_ready(self) -> None:
        """Return when every handler that was added is registered, which it is at once in a node."""
        await trio.lowlevel.checkpoint()

    def reply(
        self: HandlesMessages,
        name: str,
        *,
        realm: RealmChoice = None,
        concurrency: int = HANDLER_CONCURRENCY,
        rate_per_s: float = 0.0,
        **service: Unpack[ServiceOptions],
    ) -> AbstractAsyncContextManager[AsyncIterator[IncomingRequest]]:
        """Answer requests ``name`` while the block runs; at most ``concurrency`` wait for an answer at once.

        Raises ``ValueError`` when the name has a handler.
        """
        return _reply(self, name, realm, concurrency, rate_per_s, offered_service(name, service))

    def listen(
        self: HandlesMessages, name: str, *, realm: RealmChoice = None, rate_per_s: float = 0.0
    ) -> AbstractAsyncContextManager[AsyncIterator[Notification | Lagged]]:
        """Yield notifies ``name`` of every realm (or of ``realm``) from now on. Senders wait for a slow loop, so that
        none is lost. Raises ``ValueError`` when the name has a handler."""
        return _listen(self, name, realm, rate_per_s)

    def accept(
        self: HandlesMessages, name: str, *, realm: RealmChoice = None
    ) -> AbstractAsyncContextManager[AsyncIterator[MessageStream]]:
        """Yield streams ``name`` that members open to this node; use each as an async context manager.

        Leaving the block ends those that are still open. Raises ``ValueError`` when the name has a handler.
        """
        return _accept(self, name, realm, HANDLER_CONCURRENCY)


@asynccontextmanager
async def _listen(
    node: HandlesMessages, name: str, realm: RealmChoice, rate_per_s: float
) -> AsyncGenerator[AsyncIterator[Notification | Lagged], None]:
    """See `Node.listen`."""
    send, receive = trio.open_memory_channel[Notification | Lagged](_BUFFER_ITEMS)

    async def take(notification: Notification) -> None:
        try:
            await send.send(notification)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise HandlerError(_GONE) from None

    end = node.handle(realm, lambda m: m.on_notify(name, take, concurrency=NOTIFY_CONCURRENCY, rate_per_s=rate_per_s))
    try:
        async with receive:
            yield receive
    finally:
        end()
        send.close()


@asynccontextmanager
async def _reply(
    node: HandlesMessages,
    name: str,
    realm: RealmChoice,
    concurrency: int,
    rate_per_s: float,
    service: OfferedService | None,
) -> AsyncGenerator[AsyncIterator[IncomingRequest], None]:
    """See `Node.reply`."""
    send, receive = trio.open_memory_channel[IncomingRequest](math.inf)  # messaging bounds them by `concurrency`
    waiting: dict[_PendingAnswer, None] = {}

    async def serve(request: Request) -> bytes:
        pending = _PendingAnswer()
        waiting[pending] = None
        try:
            await send.send(IncomingRequest(request, pending.answer))
            await pending.answered.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise HandlerError(_GONE) from None
        finally:
            pending.is_over = True
            waiting.pop(pending, None)
        if pending.error is not None:
            raise HandlerError(pending.error)
        return pending.body

    end = node.handle(
        realm, lambda m: m.on_request(name, serve, concurrency=concurrency, rate_per_s=rate_per_s, service=service)
    )
    try:
        async with receive:
            yield receive
    finally:
        end()
        send.close()
        for pending in list(waiting):
            pending.error = pending.error or _GONE
            pending.answered.set()


class _PendingAnswer:
    """A request that waits for the program's answer."""

    def __init__(self) -> None:
        self.answered = trio.Event()
        self.body = b""
        self.error: str | None = None
        self.is_over = False

    async def answer(self, body: bytes, error: str | None) -> None:
        """Take the answer. Raises ControlError D5011 when nothing waits for it."""
        await trio.lowlevel.checkpoint()
        if self.is_over or self.answered.is_set():
            problem = {"code": "D5011", "status": 404, "detail": "the caller does not wait for this answer any more"}
            raise ControlError(problem)
        self.body, self.error = body, error
        self.answered.set()


@asynccontextmanager
async def _accept(
    node: HandlesMessages, name: str, realm: RealmChoice, concurrency: int
) -> AsyncGenerator[AsyncIterator[MessageStream], None]:
    """See `Node.accept`."""
    send, receive = trio.open_memory_channel[MessageStream](concurrency)
    over = trio.Event()

    async def serve(stream: MessageStream) -> None:
        try:
            await send.send(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise HandlerError(_GONE) from None
        async with trio.open_nursery() as nursery:

            async def until_over() -> None:
                await over.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_over)
            await stream.wait_left()
            nursery.cancel_scope.cancel()

    end = node.handle(realm, lambda m: m.on_stream(name, serve, concurrency=concurrency))
    try:
        async with receive:
            yield receive
    finally:
        end()
        send.close()
        over.set()
