"""Arguments of handlers, in a node of their own and through a daemon. Structs: they are made in half the time of a
dataclass."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypedDict

import msgspec

from dep2p.types import Headers, PeerId, RealmId


class RequestOptions(TypedDict, total=False):
    """The options of a request, as keyword arguments."""

    timeout_s: float | None
    """Seconds for all tries together; None (the default) for ``Limits.request_timeout_s``."""
    idempotent: bool
    """Whether the request may be sent again, so that the peer may handle it more than once."""
    headers: Mapping[str, object] | None
    """The app's headers, for the handler."""


class SendOptions(TypedDict, total=False):
    """The options of a message to one peer, as keyword arguments."""

    headers: Headers | None
    """The app's headers, for the handler."""
    wait: bool
    """Whether to wait while the outbox is full (the default), for a reliable message."""
    ttl_s: float | None
    """Seconds until a reliable message expires, at most 30 days; ``Limits.delivery_age_max_s`` by default."""


class Request(msgspec.Struct, frozen=True):
    """A request to answer."""

    peer: PeerId
    """The transport-authenticated caller, a verified member of the realm."""
    name: str
    body: bytes
    headers: Headers
    deadline_s: float
    """The time, on the event loop's clock (``trio.current_time()``, ``anyio.current_time()``), at which the caller
    stops waiting; a handler is cancelled then."""
    idempotent: bool
    """Whether the caller may send it again, so that it may be handled more than once."""
    realm: RealmId


class Notification(msgspec.Struct):
    """A notify that came in."""

    peer: PeerId
    """The transport-authenticated sender, a verified member of the realm."""
    name: str
    body: bytes
    headers: Headers
    realm: RealmId
    received_at_s: float = 0.0
    """When it came to the node, in seconds since 1970; 0 in a node of one's own, where the handler runs at once."""
    is_reliable: bool = False
    """Whether the sender keeps it until the handler has returned. In a program of a daemon: of several programs that
    take the name, the first one's word counts, and for the others this is False."""


Answer = Callable[[bytes, str | None], Awaitable[None]]
"""Takes the answer of a request, or the text of an error."""


class IncomingRequest:
    """A request that waits for an answer: :meth:`respond` or :meth:`fail`, once."""

    __slots__ = ("_answer", "request")

    def __init__(self, request: Request, answer: Answer) -> None:
        self.request: Request = request
        self._answer = answer

    def __repr__(self) -> str:
        return f"<request {self.name!r} of {self.peer[-6:]}>"

    @property
    def peer(self) -> PeerId:
        """The transport-authenticated caller, a verified member of the realm."""
        return self.request.peer

    @property
    def name(self) -> str:
        """The name of the request."""
        return self.request.name

    @property
    def body(self) -> bytes:
        """The payload."""
        return self.request.body

    @property
    def headers(self) -> Headers:
        """The app's headers."""
        return self.request.headers

    @property
    def deadline_s(self) -> float:
        """The time, on the event loop's clock, at which the caller stops waiting."""
        return self.request.deadline_s

    @property
    def idempotent(self) -> bool:
        """Whether the caller may send it again, so that it may be handled more than once."""
        return self.request.idempotent

    @property
    def realm(self) -> RealmId:
        """The realm in which it came."""
        return self.request.realm

    async def respond(self, body: bytes) -> None:
        """Send the answer. Raises ControlError D5011 when the caller does not wait any more, MessageTooLargeError."""
        await self._answer(body, None)

    async def fail(self, text: str) -> None:
        """Report a failure: the caller gets :class:`HandlerError` with ``text``. Raises as :meth:`respond`."""
        await self._answer(b"", text)
