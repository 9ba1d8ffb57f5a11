"""The items that subscriptions of the client yield."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from msgspec import Struct

from dep2p.control_api.errors import FeedEndedError, unexpected_answer
from dep2p.control_api.replies import parse_reply
from dep2p.gossipsub.topic_types import Lagged

if TYPE_CHECKING:
    from dep2p.realm.credentials import RealmChoice

T = TypeVar("T")
L = TypeVar("L", bound=Struct)


@dataclass(frozen=True, slots=True)
class FeedInterrupted(Lagged):
    """A subscription has lost its daemon and waits for it. ``count`` is 0: how many entries are lost is not known."""

    feed: str
    """The content of the feed: "messages of topic 'chat'"."""
    reason: str


@dataclass(frozen=True, slots=True)
class FeedResumed(Lagged):
    """The subscription is open again; its next entry is a new one. ``count`` is 0, as in `FeedInterrupted`."""

    feed: str
    """As in `FeedInterrupted`."""
    away_s: float
    """Seconds since it was lost."""
    loses: bool
    """Whether entries of the time in between are lost. Queues, reliable messages and sessions keep theirs."""


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


def realm_text(realm: "RealmChoice") -> str | None:
    """Return a realm as the daemon takes it: the id of a `Realm`, or the caller's own text."""
    return realm if realm is None or isinstance(realm, str) else realm.realm_id


def line_or_lag(line: dict[str, object], kind: type[L]) -> L | Lagged:
    """Decode a line of a subscription. Raises ``ValueError`` for one that is not of that kind."""
    lagged = line.get("lagged")
    return Lagged(lagged) if isinstance(lagged, int) else parse_reply(line, kind)


class FeedLines(Protocol):
    """Parsed lines of a feed, and its interruptions."""

    @property
    def name(self) -> str:
        """The content of the feed, for people."""
        ...

    async def next_line(self) -> dict[str, object] | FeedInterrupted | FeedResumed:
        """Return the next line. Raises DaemonUnreachableError and FeedEndedError."""
        ...


class NoticingEventStream(Generic[T]):
    """An async iterator over the entries of a feed, in order. Use it in one task.

    An item stands where the feed was interrupted, and where it goes on.
    """

    def __init__(self, lines: FeedLines, convert: Callable[[dict[str, object]], T]) -> None:
        self._lines = lines
        self._convert = convert

    def __aiter__(self) -> AsyncIterator[T | Lagged]:
        return self

    async def __anext__(self) -> T | Lagged:
        line = await self._lines.next_line()
        if isinstance(line, Lagged):
            return line
        try:
            return self._convert(line)
        except ValueError as error:  # of another version
            raise FeedEndedError(self._lines.name, unexpected_answer(str(error))) from error


class EventStream(Generic[T]):
    """The same for a feed that loses nothing, or whose entries have callers that learn of it: without the items."""

    def __init__(self, lines: FeedLines, convert: Callable[[dict[str, object]], T]) -> None:
        self._entries = NoticingEventStream(lines, convert)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while isinstance(entry := await anext(self._entries), Lagged):
            pass
        return entry
