"""The items that subscriptions of the client yield."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from dep2p.arguments import checks_arguments
from dep2p.control_api.calls import GiveReply, base64_text
from dep2p.control_api.replies import parse_reply
from dep2p.types import Headers, PeerId, RealmId

T = TypeVar("T")
L = TypeVar("L", bound=Struct)


@dataclass(frozen=True, slots=True)
class IncomingNotification:
    """A notify that a member of the realm sent to this node."""

    peer: PeerId
    name: str
    body: bytes
    headers: Headers
    realm: RealmId


@dataclass(frozen=True, slots=True)
class FeedLagged:
    """This reader was too slow: ``count`` entries before the next one are lost."""

    count: int


@dataclass(frozen=True, slots=True)
class TopicMessage:
    """A message of a topic."""

    topic: str
    body: bytes
    sender: PeerId | None
    """The author, whose signature holds; None on a network that does not sign."""
    seqno: int | None
    """The author's number for the message, which rises; None on a network that does not sign."""
    id: str
    """The message id in hex; the same at every receiver and in :class:`Published`."""
    received_from: PeerId | None
    """The neighbour that brought the first copy."""


@dataclass(frozen=True, slots=True)
class Published:
    """The result of publishing a message."""

    id: str
    """The message id in hex."""
    sent_to: tuple[PeerId, ...]
    """The neighbours that took the message; they forward it to others."""
    queued: bool
    """Whether the message waits for a first subscriber, for 30 s."""
    dropped: tuple[PeerId, ...]
    """Neighbours that did not get the message: they are too slow."""
    local_subscriptions: int = 0
    """Subscriptions of programs of this daemon, the publisher's own among them, that got it."""


@dataclass(frozen=True, slots=True)
class PublishedMany:
    """The result of publishing many messages."""

    messages: int
    bytes: int
    queued: int
    """Messages that wait for a first subscriber."""
    dropped: int
    """How often a neighbour did not get a message because it is too slow."""
    peers: int
    """The fewest neighbours that took a message."""
    local_subscriptions: int = 0
    """The fewest subscriptions of programs of this daemon that got a message."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on the node.

    ``kind``: ``peer_connected``, ``peer_disconnected``, ``peer_discovered``, ``member_joined``, ``member_up``,
    ``member_down``, ``member_left`` or ``member_expired``. ``fields`` has the rest: ``peer``, ``addr``, ``direction``,
    ``reason``, ``last``, ``addrs``, ``source``, ``realm``, ``realm_id``, as the kind needs.
    """

    id: int
    """Increases by one with each event of the daemon."""
    kind: str
    time_s: float
    """Seconds since 1970."""
    fields: dict[str, object]


Respond = Callable[[str, GiveReply], Awaitable[None]]


@dataclass(frozen=True, slots=True)
@checks_arguments
class IncomingRequest:
    """A request of a member that waits for this program's answer. Answer exactly once."""

    id: str
    peer: PeerId
    name: str
    body: bytes
    headers: Headers
    deadline_ms: int
    """Milliseconds until the caller gives up, from the moment when this program got the request."""
    realm: RealmId
    _respond: Respond = field(repr=False, compare=False)

    async def respond(self, body: bytes) -> None:
        """Send the answer.

        Raises ControlError D5011 when the caller no longer waits, MessageTooLargeError, DaemonUnreachableError.
        """
        await self._respond(self.id, GiveReply(data=base64_text(body)))

    async def fail(self, text: str) -> None:
        """Report a failure to the caller: it gets :class:`HandlerError` with ``text``. Raises as :meth:`respond`."""
        await self._respond(self.id, GiveReply(error=text))


def line_or_lag(line: dict[str, object], kind: type[L]) -> L | FeedLagged:
    """Decode a line of a subscription. Raises ``ValueError`` for one that is not of that kind."""
    lagged = line.get("lagged")
    return FeedLagged(lagged) if isinstance(lagged, int) else parse_reply(line, kind)


class JsonLines(Protocol):
    """Parsed lines of one NDJSON answer."""

    async def next_line(self) -> dict[str, object]:
        """Return the next line. Raises StopAsyncIteration at the end."""
        ...


class EventStream(Generic[T]):
    """An async iterator over the lines of a subscription, in order. Use it in one task."""

    def __init__(self, lines: JsonLines, convert: Callable[[dict[str, object]], T]) -> None:
        self._lines = lines
        self._convert = convert

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        return self._convert(await self._lines.next_line())
