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

Delay = Annotated[float, Meta(ge=0, le=DELAY_MAX_S)]
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


class SettledMessages(Struct, frozen=True, kw_only=True):
    """The outcome of the results."""

    refused: dict[str, dict[str, object]]
    """By message: the problem of one that is not held any more."""
    timeouts_s: dict[str, float]
    """By message: the seconds that are left, of a touch."""
