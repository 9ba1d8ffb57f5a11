"""The options of a queue and of a message. Defaults and bounds follow nsqd where it has one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypedDict, cast

from dep2p.protocols.queues.names import LOGICAL_PARTITIONS
from dep2p.types import Headers

ORDERS: Final = ("strict", "best_effort")
_LEASE_MIN_S: Final = 0.5
_LEASE_MAX_S: Final = 3_600.0

DEFAULT_IN_FLIGHT: Final = 1
"""Messages that a consumer holds without a result at most, unless it says otherwise."""

Access = Mapping[str, str | Sequence[str]]
"""``publish``, ``consume`` and ``administer``: "members", "owner" (this node alone), or a list of peer ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of one queue. Times in seconds. Raises ``ValueError`` that names the option."""

    partitions: int = 1
    """Ordered logs side by side; messages with the same key are in the same one."""
    max_attempts: int = 5
    """Deliveries of a message to a channel before it becomes a dead letter; 0: no limit."""
    msg_timeout_s: float = 60.0
    """A message that is not settled by then is delivered again."""
    msg_timeout_max_s: float = 900.0
    """The longest time from a delivery to its settling, however often the message is touched."""
    delay_max_s: float = 3_600.0
    """The longest delay of a requeue; longer ones are cut. Deferred publishes may wait up to ``defer_max_s``."""
    defer_max_s: float = 2_592_000.0
    """The longest delay of a deferred publish; longer ones are refused."""
    ttl_s: float = 0.0
    """Messages older than that are dropped and counted; 0: they are kept."""
    items_max: int = 10_000_000
    """Messages in the log; above it publishers wait. An ephemeral queue drops and counts instead."""
    bytes_max: int = 17_179_869_184
    """The same in bytes of the bodies."""
    message_bytes_max: int = 1_048_576
    """Bytes of one body at most."""
    dead_letters: bool = True
    """Whether messages that failed for good are kept, with their history; else they are dropped and counted."""
    dead_items_max: int = 100_000
    """Dead letters of a channel; the oldest go first."""
    requeue_on_disconnect: bool = True
    """Whether the messages of a consumer that is gone go to others at once; else when their time is over."""
    hold_without_channel: bool = True
    """Whether messages are kept for the first channel while there is none (as nsqd); else they are dropped and
    counted."""
    order: str = "best_effort"
    """The order of retries in an exclusive channel. ``strict``: a message that failed comes again before the next one
    of its key; ``best_effort``: it comes again later."""
    lease_s: float = 30.0
    """A consumer of an exclusive channel that is not heard of for so long has lost its partitions."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value >= 0:
                raise ValueError(f"the option {each.name} is {value}: it cannot be negative")
        if not 1 <= self.partitions <= LOGICAL_PARTITIONS:
            raise ValueError(f"the option partitions is {self.partitions}: it is 1 to {LOGICAL_PARTITIONS}")
        if self.order not in ORDERS:
            raise ValueError(f"the option order is {self.order!r}: it is {' or '.join(ORDERS)}")
        if not _LEASE_MIN_S <= self.lease_s <= _LEASE_MAX_S:
            raise ValueError(f"the option lease_s is {self.lease_s:g}: it is {_LEASE_MIN_S:g} to {_LEASE_MAX_S:g}")
        for name in ("items_max", "bytes_max", "message_bytes_max", "dead_items_max"):
            if not getattr(self, name):
                raise ValueError(f"the option {name} is 0: nothing could ever pass")
        if not 0.001 <= self.msg_timeout_s <= self.msg_timeout_max_s:
            raise ValueError(
                f"the option msg_timeout_s is {self.msg_timeout_s}: it is at least 0.001 and at most msg_timeout_max_s "
                f"({self.msg_timeout_max_s})"
            )


class ConsumeOptions(TypedDict, total=False):
    """The options of a consumer, as keyword arguments."""

    max_in_flight: int
    """Messages that it holds without a result at most; 1 by default."""
    from_start: bool
    """Whether a new channel gets everything that is there, not only what is published from now on."""
    bytes_max: int | None
    """About the bytes of the bodies that it holds at most; None: the broker's bound."""
    count: int | None
    """The messages after which the loop ends; None: it goes on."""
    filter: str
    """The messages that a new channel gets, like ``tag in (a, b) and header.size != 3``; empty: all."""
    exclusive: bool
    """Whether a new channel gives each partition to one consumer at a time, and of each key one message at a time."""


class MessageOptions(TypedDict, total=False):
    """The options of a message that is published, as keyword arguments."""

    key: str
    """Messages with the same key go to the same partition, in order."""
    tags: Sequence[str]
    """Tags, for the filters of channels."""
    priority: int
    """0 (the default) to 255; higher is delivered first."""
    delay_s: float
    """Seconds from the publish to the delivery."""
    headers: Headers | None
    """The app's headers, for its consumers and for filters."""


def options_from(given: Mapping[str, object], defaults: QueueOptions | None = None) -> QueueOptions:
    """Options by name over ``defaults``. Raises ``ValueError`` for an unknown name or a wrong type."""
    defaults = defaults or QueueOptions()
    known = {each.name: getattr(defaults, each.name) for each in fields(QueueOptions)}
    values: dict[str, Any] = dict(known)
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"there is no option {name!r} of a queue: there are {', '.join(known)}")
        default = known[name]
        if isinstance(default, bool):
            right, wanted = isinstance(value, bool), "true or false"
        elif isinstance(default, int):
            right, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
        elif isinstance(default, str):
            right, wanted = isinstance(value, str), "a text"
        else:
            right, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
        if not right:
            raise ValueError(f"the option {name} is {value!r}: it must be {wanted}")
        values[name] = float(cast(float, value)) if isinstance(default, float) else value
    return QueueOptions(**values)


def options_as_dict(options: QueueOptions) -> dict[str, bool | int | float | str]:
    """Every option by name."""
    return {each.name: getattr(options, each.name) for each in fields(QueueOptions)}
