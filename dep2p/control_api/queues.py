"""Requests and replies of the control API about the messages of queues: publishing, deliveries and results.

Administrative requests and replies are the structs of `dep2p.protocols.queues.admin`. Requests are read strictly: an
unknown, misspelt or mistyped field is refused. Replies are read leniently, so that a newer daemon may say more.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

TAGS_MAX: Final = 32
PRIORITY_MAX: Final = 255
DELAY_MAX_S: Final = 10 * 365 * 86_400.0
RESULTS_MAX: Final = 4_096
"""Results of one call."""
BATCH_ITEMS_MAX: Final = 4_096
"""Messages that one call publishes all or none."""
PUBLISH_TIMEOUT_MAX_S: Final = 86_400.0

IN_FLIGHT_MAX: Final = 65_536
"""Messages of one consumer that may be out without a result."""

Delay = Annotated[float, Meta(ge=0, le=DELAY_MAX_S)]
PublishTimeout = Annotated[float, Meta(ge=0, le=PUBLISH_TIMEOUT_MAX_S)]
Do = Literal["finish", "requeue", "touch", "release", "reject"]
"""The kinds of results for a delivery."""


class NewQueueMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One message for a queue."""

    body: str
    """In base64, or as text: see ``encoding``."""
    encoding: Literal["base64", "utf-8"] = "base64"
    key: str = ""
    tags: Annotated[tuple[str, ...], Meta(max_length=TAGS_MAX)] = ()
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] = 0
    delay_s: Delay = 0.0
    headers: dict[str, object] = {}
    timeout_s: PublishTimeout | None = None
    """Seconds to wait while the queue is full; null: the broker's own bound."""


class NewQueueMessages(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Messages that are published all or none, with the same attributes."""

    bodies: Annotated[tuple[str, ...], Meta(min_length=1, max_length=BATCH_ITEMS_MAX)]
    """Each in base64, or as text: see ``encoding``."""
    encoding: Literal["base64", "utf-8"] = "base64"
    key: str = ""
    tags: Annotated[tuple[str, ...], Meta(max_length=TAGS_MAX)] = ()
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] = 0
    delay_s: Delay = 0.0
    headers: dict[str, object] = {}
    timeout_s: PublishTimeout | None = None
    """Seconds to wait while the queue is full; null: the broker's own bound."""


class BatchMessage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a batch."""

    body: str
    """In base64, or as text: see ``encoding``."""
    encoding: Literal["base64", "utf-8"] = "base64"
    key: str = ""
    tags: Annotated[tuple[str, ...], Meta(max_length=TAGS_MAX)] = ()
    priority: Annotated[int, Meta(ge=0, le=PRIORITY_MAX)] = 0
    delay_s: Delay = 0.0
    headers: dict[str, object] = {}


class NewQueueBatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Messages with attributes of their own that are published all or none, once if they have a publisher's number."""

    messages: Annotated[tuple[BatchMessage, ...], Meta(min_length=1, max_length=BATCH_ITEMS_MAX)]
    publisher: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")] | None = None
    """The name of a publisher whose last 64 numbers the queue remembers: a number that comes again is not taken again,
    and gives the ids of the first time."""
    number: Annotated[int, Meta(ge=1, lt=1 << 62)] | None = None
    """The number of the first message, with a ``publisher``; numbers of a publisher rise by at least one a message."""
    destination: str = ""
    """With a ``publisher``, for a queue on several nodes: the destination of the messages (`QueueDestinations`)."""
    timeout_s: PublishTimeout | None = None
    """Seconds to wait while the queue is full, without a publisher; null: the broker's own bound."""


class PublishedBatch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All messages of a batch are on disk."""

    ids: tuple[str, ...]
    """16 hex digits each, in the order of the call."""
    off_partition: tuple[str, ...] = ()
    """The ids of those that are in another partition than their key's, whose node was away."""


class FindDestinations(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Asks where messages with these keys go, of a queue on several nodes."""

    keys: Annotated[tuple[str, ...], Meta(min_length=1, max_length=BATCH_ITEMS_MAX)]
    """The key of each message; empty: none."""
    is_stale: bool = False
    """Whether a destination of an earlier answer has refused its messages."""


class QueueDestinations(Struct, frozen=True, kw_only=True):
    """The destinations of messages, for a `NewQueueBatch` with a publisher."""

    destinations: tuple[str, ...]
    """One for each key, a text that may be kept; empty for a queue on one node."""


class PublishedMessages(Struct, frozen=True, kw_only=True):
    """All messages of one call are on disk."""

    ids: tuple[str, ...]
    """16 hex digits each, in the order of the call."""


class PublishedMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The message is on disk."""

    id: str
    """16 hex digits."""
    off_partition: bool = False
    """Whether it is in another partition than its key's, whose node was away."""


class QueuedMany(Struct, frozen=True, kw_only=True):
    """The messages of one call are on disk."""

    messages: int
    bytes: int
    first_id: str
    """The id of the first message; empty when there were none."""
    last_id: str


class ConsumerOpened(Struct, frozen=True, kw_only=True):
    """The first line of a consumer."""

    consumer: str
    """The consumer's name in calls with results."""
    queue: str
    channel: str


class DeliveredMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A further line of a consumer: a message that it holds."""

    id: str
    attempts: int
    published_s: float
    """Unix seconds."""
    timeout_s: float
    """Seconds from its delivery on; then it goes to another consumer."""
    body: bytes
    encoding: Literal["base64"]
    key: str = ""
    tags: tuple[str, ...] = ()
    priority: int = 0
    headers: dict[str, object] = {}
    """The headers in JSON's form."""


class ConsumerLoss(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a consumer that asked for losses: messages that it got are not, or not for long, its own."""

    loss: Literal["revoked", "connection"]
    """``revoked``: the partition goes to another consumer, or has gone there; begin nothing more of it.
    ``connection``: the connection to the queue was lost with all messages before this line; they come again."""
    partition: int | None = None
    """The partition that is revoked."""


class MessageResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of one delivery."""

    id: str
    """The id of the message."""
    do: Do
    delay_s: Delay = 0.0
    """The delay of a requeue."""
    reason: str = ""


class SettleMessages(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The results of deliveries."""

    results: Annotated[tuple[MessageResult, ...], Meta(max_length=RESULTS_MAX)] = ()
    durable: bool = False
    """Whether the reply comes when the results are on disk."""
    max_in_flight: Annotated[int, Meta(ge=0, le=IN_FLIGHT_MAX)] | None = None
    """From now on, before the results: the messages that may be out without a result; 0: no more are delivered."""


class SettledMessages(Struct, frozen=True, kw_only=True):
    """The outcome of the results."""

    refused: dict[str, dict[str, object]]
    """By message: the problem of one that is not held any more."""
    timeouts_s: dict[str, float]
    """By message: the seconds that are left, of a touch."""
