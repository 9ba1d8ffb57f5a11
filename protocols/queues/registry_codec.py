"""What a store keeps of queues besides their messages: small values by key, read at once when a node starts. Pure."""

from collections.abc import Mapping
from typing import Any, Final, cast

from dep2p.errors import ProtocolError
from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.exclusive_channel import ExclusiveChannel
from dep2p.protocols.queues.filters import Filter
from dep2p.protocols.queues.names import is_ephemeral
from dep2p.protocols.queues.options import QueueOptions, options_as_dict, options_from
from dep2p.protocols.queues.ordering.placement import Place, Served, places_from
from dep2p.protocols.queues.ordering.route_table import RouteTable
from dep2p.protocols.queues.queue import Queue, Run
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical

_OPTIONS: Final = options_as_dict(QueueOptions())
"""What is known, and of which type."""

QueueKey = tuple[str, str]
"""Namespace and name."""


class Definitions:
    """The part of a `QueueBook` that knows which queues there are."""

    def __init__(self) -> None:
        self.queues: dict[QueueKey, Queue] = {}
        self._definitions: dict[str, bytes | None] = {}
        self._next_partition = 1
        self._next_channel = 1
        self.left: dict[tuple[str, str, str], str] = {}
        """By namespace, share and channel ("": the share itself): the node where it is still to be removed."""
        self._publishers: dict[int, list[tuple[bytes, int, dict[int, list[Run]]]]] = {}

    def restore(self, definitions: Mapping[str, bytes]) -> None:
        """Know the queues that the store has. Cheap: none of them is loaded. Raises ProtocolError for a damaged one."""
        options: dict[bytes, QueueOptions] = {}
        exclusive: dict[int, ExclusiveChannel] = {}
        groups: dict[str, bytes] = {}
        for key, raw in definitions.items():
            if key.startswith("group/"):
                groups[key] = raw  # when their channels are known
            else:
                self._restore_one(key, raw, options, exclusive)
        for key, raw in groups.items():
            self._restore_one(key, raw, options, exclusive)

    def _restore_one(
        self, key: str, raw: bytes, options: dict[bytes, QueueOptions], exclusive: dict[int, ExclusiveChannel]
    ) -> None:
        try:
            self._restore(key, raw, options, exclusive)
        except (ProtocolError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"the store's definition {key[:120]!r} is damaged ({error})") from None

    def _restore(
        self, key: str, raw: bytes, options: dict[bytes, QueueOptions], exclusive: dict[int, ExclusiveChannel]
    ) -> None:
        kind, _, rest = key.partition("/")
        if kind == "ids":
            partition, channel_id = cast(list[int], _decode(raw, key))
            self._next_partition = max(self._next_partition, partition)
            self._next_channel = max(self._next_channel, channel_id)
        elif kind == "queue":
            namespace, _, name = rest.rpartition("/")
            self._restore_queue(namespace, name, cast(dict[str, Any], _decode(raw, key)), options, exclusive)
        elif kind == "left":
            namespace, share, name = rest.split("/")
            self.left[namespace, share, name] = str(_decode(raw, key))
        elif kind == "group":
            channel = exclusive.get(int(rest))
            if channel is not None:
                channel.group.restore(_decode(raw, key))
        elif kind == "publisher":
            partition_text, _, publisher = rest.partition("/")
            last, runs = cast(list[Any], _decode(raw, key))
            recent = {int(first): [Run(*run) for run in each] for first, each in runs}
            self._publishers.setdefault(int(partition_text), []).append((bytes.fromhex(publisher), int(last), recent))

    def _restore_queue(
        self,
        namespace: str,
        name: str,
        fields: dict[str, Any],
        known_options: dict[bytes, QueueOptions],
        exclusive: dict[int, ExclusiveChannel],
    ) -> None:
        # Nearly all queues have the options of others: looked at once, thousands of queues hold no start up.
        as_written = encode_canonical(fields["options"])
        options = known_options.get(as_written)
        if options is None:
            # Floats travel as text: CBOR of ours has none.
            known = {
                key: float(value) if isinstance(_OPTIONS[key], float) else value
                for key, value in fields["options"].items()
                if key in _OPTIONS
            }
            options = known_options[as_written] = options_from(known)
        routes = RouteTable.from_value(fields["routes"]) if "routes" in fields else None
        queue = self.queues[(namespace, name)] = Queue(self, namespace, name, options, fields["partitions"], routes)
        queue.is_paused = bool(fields["paused"])
        queue.places = places_from(fields.get("places", []))
        queue.growing = places_from(fields.get("growing", []))
        queue.made_by = str(fields.get("made_by", ""))
        queue.serves = Served(*map(int, fields["serves"])) if "serves" in fields else None
        for channel_name, (channel_id, filter_text, paused, *more) in fields["channels"].items():
            filter_ = Filter(filter_text) if filter_text else None
            channel: Channel
            if more and more[0]:
                channel = exclusive[channel_id] = ExclusiveChannel(
                    queue, channel_id, channel_name, filter_, is_paused=bool(paused)
                )
            else:
                channel = Channel(queue, channel_id, channel_name, filter_, is_paused=bool(paused))
            queue.channels[channel_name] = channel

    def define(self, key: str, value: object | None) -> None:
        """A small value goes into the next batch; None removes it."""
        self._definitions[key] = None if value is None else encode_canonical(value)

    def leave(self, namespace: str, share: str, channel: str, node: str | None) -> None:
        """Remember what is to be removed from a node that is away; None: it is done."""
        if node is None:
            if self.left.pop((namespace, share, channel), None) is not None:
                self.define(f"left/{namespace}/{share}/{channel}", None)
        else:
            self.left[namespace, share, channel] = node
            self.define(f"left/{namespace}/{share}/{channel}", node)

    def define_queue(self, queue: Queue) -> None:
        """What the store keeps of a queue."""
        if queue.is_ephemeral or queue.is_deleted:
            return
        options = {
            key: repr(value) if isinstance(value, float) else value
            for key, value in options_as_dict(queue.options).items()
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
        self.define(
            f"queue/{queue.namespace}/{queue.name}",
            {
                "options": options,
                "partitions": list(queue.partition_ids),
                "channels": channels,
                "paused": queue.is_paused,
                # Without them they are those of a new queue.
                **({"routes": queue.routes.to_value()} if queue.is_expanded else {}),
                **_places("places", queue.places),
                **_places("growing", queue.growing),
                **({"made_by": queue.made_by} if queue.made_by else {}),
                **({} if queue.serves is None else {"serves": list(queue.serves)}),
            },
        )
        self.define("ids", [self._next_partition, self._next_channel])


def _places(name: str, places: Mapping[int, Place]) -> dict[str, object]:
    return {name: [[partition, *place] for partition, place in places.items()]} if places else {}


def _decode(raw: bytes, key: str) -> object:
    return decode_bounded(raw, f"the definition {key}", depth_max=8, entries_max=100_000)
