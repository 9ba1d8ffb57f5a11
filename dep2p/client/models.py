"""What a subscription of the client yields."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dep2p.types import Headers, PeerId, RealmId

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Notice:
    """A notify that a member of the realm sent to this node."""

    peer: PeerId
    name: str
    data: bytes
    headers: Headers
    realm: RealmId


@dataclass(frozen=True, slots=True)
class Lagged:
    """This reader was too slow: ``count`` entries before the next one are lost."""

    count: int


@dataclass(frozen=True, slots=True)
class TopicMessage:
    """A message of a topic."""

    topic: str
    data: bytes
    sender: PeerId | None
    """Its author, whose signature holds; None on a network that does not sign."""
    seqno: int | None
    """Grows with each message of its author; None on a network that does not sign."""
    id: str
    """In hex; the same at every receiver and in :class:`Published`."""
    received_from: PeerId | None
    """The neighbour that brought the first copy."""


@dataclass(frozen=True, slots=True)
class Published:
    """What became of a message."""

    id: str
    """In hex."""
    sent_to: tuple[PeerId, ...]
    """The neighbours that took it; they carry it on to the others."""
    queued: bool
    """It waits for a first subscriber, for 30 s."""
    dropped: tuple[PeerId, ...]
    """Neighbours that did not get it, being too slow to be waited for."""


@dataclass(frozen=True, slots=True)
class PublishedMany:
    """What became of many messages."""

    messages: int
    bytes: int
    queued: int
    """Messages that wait for a first subscriber."""
    dropped: int
    """How often a neighbour did not get a message, being too slow to be waited for."""
    peers: int
    """The fewest neighbours that took a message."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened on the node.

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


Respond = Callable[[str, dict[str, object]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request of a member that waits for this program's answer. Answer exactly once."""

    id: str
    peer: PeerId
    name: str
    data: bytes
    headers: Headers
    deadline_ms: int
    """Milliseconds from the moment it was handed out until the caller gives up."""
    realm: RealmId
    _respond: Respond = field(repr=False, compare=False)

    async def respond(self, data: bytes) -> None:
        """Send the answer.

        Raises ControlError D5011 when the caller no longer waits, MessageTooLargeError, DaemonUnreachableError.
        """
        from dep2p.control_api.encoding import encode_payload

        await self._respond(self.id, encode_payload(data))

    async def fail(self, text: str) -> None:
        """Tell the caller that it failed: it gets :class:`HandlerError` with ``text``. Raises as :meth:`respond`."""
        await self._respond(self.id, {"error": text})


class Lines(Protocol):
    """Parsed NDJSON lines of one answer."""

    async def next_line(self) -> dict[str, object]:
        """Raises StopAsyncIteration at the end."""
        ...


class Subscription(Generic[T]):
    """An async iterator over what the daemon tells, in order. Use it in one task."""

    def __init__(self, lines: Lines, convert: Callable[[dict[str, object]], T]) -> None:
        self._lines = lines
        self._convert = convert

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        return self._convert(await self._lines.next_line())
