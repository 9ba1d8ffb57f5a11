"""Messages and results of topics, for apps with a node of their own and for those of a daemon."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from dep2p.gossipsub.headers import NO_HEADERS, MessageHeaders, ReplyWanted
from dep2p.types import AnswerOutcome, PeerId

OnFull = Literal["drop_oldest", "drop_newest", "pause"]
"""A full subscription buffer: it drops its oldest messages, refuses the newest, or holds back all peers."""

OnNoPeers = Literal["error", "queue", "ok"]
"""A publish while no peer is subscribed: it raises NoPeersSubscribedError, waits in a queue, or is sent to no peer."""

WaitFor = Literal["all", "any"]
"""The critical peers that must acknowledge a reliable publish."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The peers that must acknowledge a reliable publish, and their time."""

    critical_peers: Sequence[PeerId] | None = None
    """None: all that are subscribed then."""
    wait_for: WaitFor = "all"
    ttl_s: float | None = None
    """Seconds until it expires, at most 30 days; ``Limits.delivery_age_max_s`` by default."""


class AcknowledgementOptions(TypedDict, total=False):
    """The options of a reliable publish by a handle of a topic, as keyword arguments."""

    critical_peers: Sequence[PeerId] | None
    """None: the critical peers of the topic's handle, or who is subscribed then."""
    wait_for: WaitFor
    """Whether "all" of them must have handled it, or "any" one."""
    ttl_s: float | None
    """Seconds until it expires, at most 30 days; ``Limits.delivery_age_max_s`` by default."""


def acknowledgement_of(options: AcknowledgementOptions, usual: Sequence[PeerId] | None) -> Acknowledgement:
    """Return the acknowledgement that a reliable publish asks for; ``usual`` are the critical peers of its handle.

    Raises ``TypeError`` for an option that there is not.
    """
    _check_known(options)
    peers = options.get("critical_peers")
    return Acknowledgement(usual if peers is None else peers, options.get("wait_for", "all"), options.get("ttl_s"))


def check_unacknowledged(options: AcknowledgementOptions) -> None:
    """Raises ``ValueError`` for an option that only a reliable publish has, ``TypeError`` for one that there is not."""
    _check_known(options)
    for name in ("critical_peers", "ttl_s"):
        if options.get(name) is not None:
            raise ValueError(f"{name} is for a reliable publish: add reliable=True")


def _check_known(options: AcknowledgementOptions) -> None:
    if unknown := options.keys() - AcknowledgementOptions.__annotations__.keys():
        raise TypeError(f"publish takes no {', '.join(sorted(unknown))}")


BUFFER_ITEMS = 16_384
"""Messages that wait for a subscription at most, unless it says otherwise."""
BUFFER_BYTES = 33_554_432
"""The same in bytes of their bodies."""


@dataclass(slots=True)
class TopicMessage:
    """A message of a topic."""

    topic: str
    body: bytes
    sender: PeerId | None
    """The author, whose signature holds; None on a network that does not sign."""
    seqno: int | None
    """The author's number for the message, which rises; None on a network that does not sign."""
    id: bytes
    """The same at every receiver and in the publisher's :class:`PublishResult`."""
    received_from: PeerId | None
    """The neighbour that sent the first copy; None for a message that was published on this very node."""
    headers: MessageHeaders = NO_HEADERS
    """The author's headers, a read-only mapping; empty when it gave none. Its signature covers them."""
    received_at_s: float = field(default=0.0, compare=False)
    """When it came to the node, in seconds since 1970."""

    @property
    def wants_answer(self) -> bool:
        """Whether the author waits for answers (`gather`), so that `reply` and `fail` may be called."""
        return False

    async def reply(self, body: bytes, *, headers: Mapping[str, object] | None = None) -> AnswerOutcome:
        """Send an answer to the author, and return what it did with it: "taken", or the reason why not. That it came
        "late", when the author has enough, is no error. Of all programs of this node it takes one answer.

        Raises ``ValueError`` when the author waits for no answer, or for headers that are not allowed;
        MessageTooLargeError, and what a request to the author raises: PeerNotFoundError, RequestTimeoutError and so on.
        """
        raise ValueError("the author of this message waits for no answer: it was published, not gathered")

    async def fail(self, text: str) -> AnswerOutcome:
        """Tell the author that this program cannot answer, in a text of at most 1,024 bytes; more is cut off. Returns
        and raises as `reply`."""
        raise ValueError("the author of this message waits for no answer: it was published, not gathered")


GiveAnswer = Callable[[PeerId, ReplyWanted, bytes, Mapping[str, object] | None, str | None], Awaitable[AnswerOutcome]]
"""Sends to an author what it wants: the answer's body and headers, or the text of an error."""


class TopicQuestion(TopicMessage):
    """A message whose author waits for answers."""

    __slots__ = ("_author", "_give", "reply_wanted")

    def __init__(self, message: TopicMessage, author: PeerId, wanted: ReplyWanted, give: GiveAnswer) -> None:
        super().__init__(
            message.topic,
            message.body,
            author,
            message.seqno,
            message.id,
            message.received_from,
            message.headers,
            message.received_at_s,
        )
        self.reply_wanted: ReplyWanted = wanted
        self._author = author
        self._give = give

    @property
    def wants_answer(self) -> bool:
        return True

    async def reply(self, body: bytes, *, headers: Mapping[str, object] | None = None) -> AnswerOutcome:
        return await self._give(self._author, self.reply_wanted, body, headers, None)

    async def fail(self, text: str) -> AnswerOutcome:
        return await self._give(self._author, self.reply_wanted, b"", None, text)


@dataclass(frozen=True, slots=True)
class Lagged:
    """A gap: so many messages were dropped here, because this reader was too slow."""

    count: int


@dataclass(frozen=True, slots=True)
class MatchedTopicsFull(Lagged):
    """In a subscription to a pattern: further topics match, and the node is in as many as it may be for patterns.

    Messages of these topics do not come. ``count`` is 0: their number is not known.
    """

    topics: int = 0
    """How many more topics match."""
    topics_max: int = 0
    """Topics that the node joins for all its patterns together: ``pubsub_matched_topics_max`` in [limits]."""


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The outcome of a publish."""

    id: bytes
    """The message's id, as receivers see it."""
    sent_to: tuple[PeerId, ...]
    """The neighbours whose queues took the message; they forward it to others."""
    queued: bool
    """Whether it waits for a first peer. It is sent later, or dropped and counted after ``pending_publish_ttl_s``."""
    dropped: tuple[PeerId, ...]
    """Neighbours that did not get it: their queues were full, and they are too slow."""
    seqno: int | None = None
    """This node's number for the message, which rises; None on a network that does not sign."""
    local_subscriptions: int = 0
    """Subscriptions of this node's programs that got it."""


@dataclass(frozen=True, slots=True)
class PublishedMany:
    """The outcome of publishing many messages in one call."""

    messages: int
    bytes: int
    queued: int
    """Messages that wait for a first peer."""
    dropped: int
    """How often a neighbour did not get a message because it is too slow."""
    peers: int
    """The fewest neighbours that took a message."""
    local_subscriptions: int = 0
    """The fewest subscriptions of this node's programs that got a message."""
