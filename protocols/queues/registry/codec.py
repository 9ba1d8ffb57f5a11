"""The stored form of queues without their messages: small values by key, read at once when a node starts. Pure."""

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.options import QueueOptions, options_as_dict, options_from
from dep2p.protocols.queues.ordering.placement import Served, ShardLocation, locations_from
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.queues.queue import Queue
from dep2p.protocols.queues.records import Run
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical

_T = TypeVar("_T")
_OPTIONS: Final = options_as_dict(QueueOptions())
"""The known options, and by their defaults the type of each."""


class ChannelDefinition(NamedTuple):
    """The stored form of a channel."""

    name: str
    id: int
    filter: Filter | None
    is_paused: bool
    is_exclusive: bool


class QueueDefinition(NamedTuple):
    """The stored form of a queue."""

    options: QueueOptions
    partitions: list[int]
    routes: RouteTable | None
    """The routes; None: those of a new queue."""
    is_paused: bool
    locations: dict[int, ShardLocation]
    pending_expansion: dict[int, ShardLocation]
    made_by: str
    serves: Served | None
    channels: list[ChannelDefinition]


class _StoredChannel(msgspec.Struct, array_like=True):
    """The list of a channel in its queue's definition."""

    id: int
    filter: str
    paused: bool
    exclusive: bool = False


class _StoredQueue(msgspec.Struct, kw_only=True):
    """The map of a queue's definition. It ignores unknown fields, which a later version may have written."""

    options: dict[str, bool | int | str]
    """Numbers with a fraction are texts: our CBOR has none."""
    partitions: list[int]
    paused: bool
    channels: dict[str, _StoredChannel]
    routes: object = None
    places: list[object] = []
    growing: list[object] = []
    made_by: str = ""
    serves: tuple[int, int, int, int] | None = None


def decode_value(raw: bytes, key: str) -> object:
    """Decode a stored value. Raises ProtocolError."""
    return decode_bounded(raw, f"the definition {key}", depth_max=8, entries_max=100_000)


def decode_ids(raw: bytes, key: str) -> tuple[int, int]:
    """Decode the next ids of partitions and channels. Raises ProtocolError."""
    return _convert(raw, key, tuple[int, int])


def decode_producer(raw: bytes, key: str) -> tuple[int, dict[int, list[Run]]]:
    """Decode the last number of a producer, and its publishes that are remembered. Raises ProtocolError."""
    last, runs = _convert(raw, key, tuple[int, list[tuple[int, list[tuple[int, int, int]]]]])
    return last, {first: [Run(*run) for run in each] for first, each in runs}


def decode_queue(raw: bytes, key: str, known_options: dict[bytes, QueueOptions]) -> QueueDefinition:
    """Decode a queue. ``known_options``: options decoded before, by their bytes. Nearly all queues have the same, so
    that thousands of queues do not slow the start. Raises ProtocolError and ``ValueError``."""
    stored = _convert(raw, key, _StoredQueue)
    as_written = encode_canonical(stored.options)
    options = known_options.get(as_written)
    if options is None:
        known = {
            name: float(value) if isinstance(_OPTIONS[name], float) else value
            for name, value in stored.options.items()
            if name in _OPTIONS
        }
        options = known_options[as_written] = options_from(known)
    return QueueDefinition(
        options,
        stored.partitions,
        None if stored.routes is None else RouteTable.from_value(stored.routes),
        stored.paused,
        locations_from(stored.places),
        locations_from(stored.growing),
        stored.made_by,
        None if stored.serves is None else Served(*stored.serves),
        [
            ChannelDefinition(name, each.id, Filter(each.filter) if each.filter else None, each.paused, each.exclusive)
            for name, each in stored.channels.items()
        ],
    )


def queue_value(queue: Queue) -> dict[str, object]:
    """Return the stored form of a queue; the counterpart of `decode_queue`."""
    options = {
        key: repr(value) if isinstance(value, float) else value for key, value in options_as_dict(queue.options).items()
    }
    channels = {
        name: [
            channel.id,
            "" if channel.filter is None else channel.filter.text,
            channel.is_paused,
            *((True,) if channel.is_exclusive else ()),
        ]
        for name, channel in queue.channels.items()
        if not is_ephemeral(name)
    }
    return {
        "options": options,
        "partitions": list(queue.partition_ids),
        "channels": channels,
        "paused": queue.is_paused,
        # Without them they are those of a new queue.
        **({"routes": queue.routes.to_value()} if queue.is_expanded else {}),
        **_locations("places", queue.locations),
        **_locations("growing", queue.pending_expansion),
        **({"made_by": queue.made_by} if queue.made_by else {}),
        **({} if queue.serves is None else {"serves": list(queue.serves)}),
    }


def _locations(name: str, locations: Mapping[int, ShardLocation]) -> dict[str, object]:
    return {name: [[partition, *location] for partition, location in locations.items()]} if locations else {}


def _convert(raw: bytes, key: str, kind: type[_T]) -> _T:
    try:
        return msgspec.convert(decode_value(raw, key), kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the definition {key} is malformed: {error}") from None
