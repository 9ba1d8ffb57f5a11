"""The simple consumer on a queue whose partitions are on several nodes: receive, ack and change_invisible_duration.

The node that asks goes to the partitions' nodes itself, so that what was received is its own there, as with any queue.
Nothing of it is kept here: handles say the partition, and an answer that comes when another partition's has been taken,
or when the caller is gone, is given back at its node untried (`dep2p.queues.remote.abandoned_receives`).
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import trio

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    NotInFlightError,
    ProtocolError,
    QueueNotFoundError,
    StreamClosedError,
)
from dep2p.protocols.queues.ordering.placement import Place, Placement
from dep2p.queues.broker.admin import ReceiveAsked, channel_asked, handles_asked, invisible_asked, receive_asked
from dep2p.queues.broker.receive import ITEMS_MAX, parse_handle, require_lasting
from dep2p.queues.distributed.queue_placed_rows import Row, away, received_rows
from dep2p.queues.distributed.receive import LOOK_S, Receiving, Taken
from dep2p.queues.distributed.shard_client import AWAY
from dep2p.queues.remote.abandoned_receives import Ask, Receivings, Start
from dep2p.queues.types import message_id

if TYPE_CHECKING:
    from dep2p.queues.service.realm_queues import RealmQueues

logger = logging.getLogger("dep2p.queues")

SIMPLE_OPS: Final = ("receive", "ack", "invisible")
_FAILING_S: Final = 5.0
"""A node that failed is not among the first to be asked for so long."""
_TRIES: Final = 2
_CHANNELS_MAX: Final = 256
_ATTEMPTS_MAX: Final = 256


class Placed(Protocol):
    """The queue, as its publishers know it."""

    name: str

    async def placement(self, other_than: Placement | None = None) -> Placement:
        """See `PlacedQueue`."""
        ...

    async def ask_home(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request to the home."""
        ...


class PlacedSimple:
    """Of one such queue."""

    def __init__(
        self,
        queue: Placed,
        at: Callable[[str], "RealmQueues"],
        receivings: Receivings,
        start: Start,
    ) -> None:
        self.receivings = receivings
        self.queue = queue
        self.changed = trio.Event()
        """There are other partitions than before."""
        self._at = at
        self._start = start
        self._channels: OrderedDict[str, None] = OrderedDict()
        """Those that are there in all partitions."""
        self._attempts: OrderedDict[tuple[str, str], list[Taken]] = OrderedDict()
        self._failing: dict[str, float] = {}
        self._turn = 0
        self._looked_s = float("-inf")

    async def ask(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """One of `SIMPLE_OPS`; fields and answers are those of a plain queue.

        Raises what that raises; when no partition can be asked, or one that must be, its error with partition and node;
        QueueNotFoundError when the queue is on several nodes no more.
        """
        return await {"receive": self._receive, "ack": self._ack, "invisible": self._invisible}[op](fields)

    def at(self, place: Place) -> Ask:
        """The queues of that node. A share is a plain queue: never a table of its own, which could lead back here."""
        return self._at(place.node).ask_plain

    # Which nodes

    def rotated(self, used: Placement) -> list[int]:
        """All partitions, from another one on each time; those whose node has just failed are left out, unless all
        have."""
        self._turn += 1
        at = self._turn % len(used.partitions)
        order = [*used.partitions[at:], *used.partitions[:at]]
        return [each for each in order if not self.is_failing(used.places[each].node)] or order

    def is_failing(self, node: str) -> bool:
        """Whether it has just failed."""
        return trio.current_time() < self._failing.get(node, 0.0)

    def failed(self, node: str) -> None:
        """It did not answer."""
        now = trio.current_time()
        self._failing = {each: until_s for each, until_s in self._failing.items() if until_s > now}
        self._failing[node] = now + _FAILING_S

    def worked(self, node: str) -> None:
        """It did."""
        self._failing.pop(node, None)

    def look_soon(self) -> None:
        """Beside the caller: the home may be away. Partitions that were added are told by `changed`."""
        if trio.current_time() >= self._looked_s + LOOK_S:
            self._looked_s = trio.current_time()
            with contextlib.suppress(StreamClosedError):  # this node ends
                self._start(self._look)

    async def _look(self) -> None:
        try:
            before = await self.queue.placement()
            after = await self.queue.placement(before)
            if after.partitions != before.partitions:
                changed, self.changed = self.changed, trio.Event()
                changed.set()
        except (Dep2pError, ValueError) as error:
            logger.info("the partitions of %r are not known: %s", self.queue.name, error)
        except Exception:  # whatever it was, the realm's queues go on
            logger.exception("the partitions of %r are not known", self.queue.name)

    # Receiving

    async def _receive(self, fields: Mapping[str, object]) -> dict[str, Any]:
        asked = receive_asked(fields)
        require_lasting(asked.channel)
        deadline_s = trio.current_time() + asked.wait_s
        again = await self._received_before(asked)
        if again:
            return {"messages": again}
        tries, is_last = 0, False
        while True:
            tries += 1
            used = await self.queue.placement()
            if asked.channel not in self._channels:
                # First in all partitions, or messages of those where it begins later would be skipped.
                wanted = {"queue": self.queue.name, "channel": asked.channel, "from_start": asked.from_start}
                await self.queue.ask_home("create_channel", wanted)
                self._channels[asked.channel] = None
                if len(self._channels) > _CHANNELS_MAX:
                    self._channels.popitem(last=False)
            self.look_soon()
            receiving = Receiving(self, used, asked, deadline_s, is_last=is_last)
            try:
                rows = await receiving.run()
                break
            except ChannelNotFoundError:
                if tries > _TRIES:
                    raise
                self._channels.pop(asked.channel, None)  # it was deleted: as with any queue, it is made anew
            except QueueNotFoundError:
                if is_last:
                    raise
                with contextlib.suppress(*AWAY):
                    await self.queue.placement(used)  # raises, when it was deleted
                is_last = tries > _TRIES or (await self.queue.placement()).places == used.places
                if not is_last:  # it was made anew
                    self._channels.clear()
        if asked.attempt_id and rows:
            self._attempts[asked.channel, asked.attempt_id] = receiving.taken
            if len(self._attempts) > _ATTEMPTS_MAX:
                self._attempts.popitem(last=False)
        return {"messages": rows}

    async def _received_before(self, asked: ReceiveAsked) -> list[Row]:
        """The same receive, asked again since its answer was lost: what is still held of the same messages, and nothing
        that is new unless nothing is."""
        taken = self._attempts.get((asked.channel, asked.attempt_id), []) if asked.attempt_id else []
        found: dict[int, list[Row]] = {}

        async def ask(index: int, each: Taken, place: Place) -> None:
            fields = {**each.fields, "only_again": True, "wait_s": 0.0, "invisible_s": asked.invisible_s}
            try:
                answer = await self.at(place)("receive", fields)
                found[index] = received_rows(answer, each.partition, place.node, ITEMS_MAX)
            except (QueueNotFoundError, ChannelNotFoundError):
                found[index] = []
            except AWAY as error:
                errors.append(away(error, self.queue.name, each.partition, place.node))
            except (Dep2pError, ValueError) as error:  # raised as it is, not in the nursery's group
                errors.append(error)

        errors: list[Exception] = []
        if taken:
            places = (await self.queue.placement()).places
            async with trio.open_nursery() as nursery:
                for index, each in enumerate(taken):
                    if each.partition in places:
                        nursery.start_soon(ask, index, each, places[each.partition])
        rows = [row for index in sorted(found) for row in found[index]]
        if not rows and errors:
            raise errors[0]
        return rows

    # What was received

    async def _ack(self, fields: Mapping[str, object]) -> dict[str, Any]:
        """At all their nodes at once. Raises, with the handles that are not acknowledged, when one of them is away."""
        channel = channel_asked(fields)
        handles = handles_asked(fields)
        by_partition: dict[int, dict[str, str]] = {}
        for handle in handles:
            (partition, seq), attempts = parse_handle(handle)
            by_partition.setdefault(partition, {})[_of_share(seq, attempts)] = handle
        places = await self._places(by_partition)
        refused: dict[str, None] = {}
        unsure: dict[str, None] = {}
        errors: list[Exception] = []

        async def ack(partition: int, place: Place) -> None:
            of_share = by_partition[partition]
            wanted = {"queue": place.share, "channel": channel, "handles": list(of_share)}
            try:
                answer = await self.at(place)("ack", wanted)
                given: object = answer.get("refused")
                if not isinstance(given, list):
                    raise ProtocolError(f"the node {place.node} answered an ack without what is refused")
                refused.update(dict.fromkeys(handle for each, handle in of_share.items() if each in given))
            except QueueNotFoundError:
                gone.append(partition)
            except AWAY as error:
                unsure.update(dict.fromkeys(of_share.values()))
                errors.append(away(error, self.queue.name, partition, place.node))
            except (Dep2pError, ValueError) as error:  # raised as it is, not in the nursery's group
                errors.append(error)

        gone: list[int] = []
        async with trio.open_nursery() as nursery:
            for partition, place in places.items():
                nursery.start_soon(ack, partition, place)
        if gone:
            await self._require_there()
        if errors:
            error = errors[0]
            if isinstance(error, AWAY) and len(places) > 1:
                raise type(error)(f"{error}; not acknowledged, as far as is known: {', '.join(unsure)}")
            raise error
        for partition, of_share in by_partition.items():
            if partition not in places or partition in gone:
                refused.update(dict.fromkeys(of_share.values()))
        return {"refused": [handle for handle in handles if handle in refused]}

    async def _invisible(self, fields: Mapping[str, object]) -> dict[str, Any]:
        channel = channel_asked(fields)
        handle, invisible_s = invisible_asked(fields)
        (partition, seq), attempts = parse_handle(handle)
        place = (await self._places([partition])).get(partition)
        gone = NotInFlightError(
            f"the message {handle[:40]} is not held here any more: its time was over, or it is done"
        )
        if place is None:
            raise gone
        wanted = {
            "queue": place.share,
            "channel": channel,
            "handle": _of_share(seq, attempts),
            "invisible_s": invisible_s,
        }
        try:
            answer = await self.at(place)("invisible", wanted)
        except NotInFlightError:
            raise gone from None
        except QueueNotFoundError:
            await self._require_there()
            raise gone from None
        except AWAY as error:
            raise away(error, self.queue.name, partition, place.node) from error
        left_s: object = answer.get("invisible_s")
        if not isinstance(left_s, int | float):
            raise ProtocolError(f"the node {place.node} answered without invisible_s")
        return {"invisible_s": float(left_s)}

    async def _places(self, partitions: Sequence[int] | Mapping[int, object]) -> dict[int, Place]:
        """Of those that the queue has; one that is not known may have been added since the table was asked for."""
        used = await self.queue.placement()
        if any(each not in used.places for each in partitions):
            used = await self.queue.placement(used)
        return {each: used.places[each] for each in partitions if each in used.places}

    async def _require_there(self) -> None:
        """Raises QueueNotFoundError when the queue was deleted."""
        await self.queue.placement(await self.queue.placement())


def _of_share(seq: int, attempts: int) -> str:
    """A handle for the share, which has one partition, of a number that only its node knows."""
    return f"{message_id(0, seq)}-{attempts}"
