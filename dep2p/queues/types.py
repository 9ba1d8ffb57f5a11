"""Messages of queues on their way in and out: attributes, ids, deliveries, options of consumers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

from dep2p.arguments import WrongTypeError
from dep2p.errors import (
    HeadersTooLargeError,
    NotMemberError,
    PeerNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.protocols.queues.attributes import decode_attributes, encode_attributes
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.wire.frames import ATTRIBUTES_BYTES_MAX, WireMessage

UNREACHABLE_ERRORS: Final = (NotMemberError, PeerNotFoundError, RequestTimeoutError, StreamClosedError)
"""The node is not there now; another try may reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    """How a consumer takes messages. ``from_start``, ``filter`` and ``exclusive`` are for a new channel."""

    max_in_flight: int = 1
    """Messages that the consumer may hold without a result."""
    bytes_max: int | None = None
    """About the bytes of the bodies of held messages; None: the broker's bound."""
    from_start: bool = False
    filter: str = ""
    exclusive: bool = False
    of_distributed: bool = False
    """Whether the queue is a shard: then its controller makes the channel."""


class MessageDelivery(NamedTuple):
    """A message as a consumer gets it."""

    partition: int
    seq: int
    attempts: int
    published_us: int
    deadline_s: float
    """The time, by ``trio.current_time()``, from which it is not this consumer's any more."""
    attributes: bytes
    """Encoded by `encode_attributes`; decoded when an app asks for them."""
    body: bytes
    epoch: int = 0
    """In an exclusive channel: the epoch of the partition's lock when it was delivered."""


def node_names(nodes: Sequence[str]) -> list[str]:
    """Convert node names to the form of requests between nodes: "self", the node that is asked, is "home" there."""
    return ["home" if each == "self" else each for each in nodes]


def check_messages(messages: Sequence[WireMessage]) -> None:
    """Check messages before they go into a batch with messages of others.

    Raises `WrongTypeError` for anything but bytes, MessageTooLargeError for more attributes than a frame takes.
    """
    for attributes, body in messages:
        if type(body) is not bytes or type(attributes) is not bytes:
            wrong = body if type(body) is not bytes else attributes
            raise WrongTypeError(f"body and attributes of a message must be bytes, not {type(wrong).__name__}")
        if len(attributes) > ATTRIBUTES_BYTES_MAX:
            raise HeadersTooLargeError(
                f"a message with {len(attributes)} bytes of attributes: at most {ATTRIBUTES_BYTES_MAX} are allowed"
            )


def new_messages(messages: Sequence[WireMessage]) -> list[NewMessage]:
    """Convert messages for the core. Raises :class:`ProtocolError`."""
    return [
        NewMessage(body, *_for_core(attributes)) if attributes else NewMessage(body) for attributes, body in messages
    ]


@lru_cache(maxsize=64)
def _for_core(raw: bytes) -> tuple[bytes, str, int, float]:
    attributes = decode_attributes(raw)
    kept = encode_attributes(replace(attributes, delay_ms=0)) if attributes.delay_ms else raw
    return kept, attributes.key, attributes.priority, attributes.delay_ms / 1000
