"""The simple consumer on a queue whose partitions are on several nodes: receive, ack and change_invisible.

The node that asks goes to the partitions' nodes itself, so that what was received is its own there, as with any queue.
Nothing of it is kept here: handles say the partition, and an answer that comes when another partition's has been taken,
or when the caller is gone, is given back at its node untried (`dep2p.queues.remote.abandoned_receives`).
"""

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio
from msgspec.structs import replace

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    NotInFlightError,
    QueueNotFoundError,
    StreamClosedError,
)
from dep2p.protocols.queues.admin import (
    RECEIVE_ITEMS_MAX,
    AckMessages,
    AdminReply,
    ChangeInvisible,
    CreateChannel,
    InvisibleTime,
    ReceivedMessage,
    ReceivedMessages,
    ReceiveMessages,
    RefusedHandles,
)
from dep2p.protocols.queues.names import message_id
from dep2p.protocols.queues.ordering.placement import Placement, ShardLocation
from dep2p.queues.broker.receive import parse_handle, require_lasting
from dep2p.queues.distributed.interfaces import MemberQueues, PlacementSource
from dep2p.queues.distributed.receive import INSPECT_S, ShardAnswer, ShardReceive, renumbered
from dep2p.queues.distributed.shard_client import away
from dep2p.queues.remote.abandoned_receives import Ask, Receivings, Start
from dep2p.queues.types import UNREACHABLE_ERRORS

logger: logging.Logger = logging.getLogger("dep2p.queues")

SimpleRequest = ReceiveMessages | AckMessages | ChangeInvisible
SIMPLE_REQUESTS: Final = (ReceiveMessages, AckMessages, ChangeInvisible)
"""The requests that the asker itself sends to the nodes of the partitions."""
_FAILING_S: Final = 5.0
"""The time for which a failed node is not among the first to be asked."""
_TRIES: Final = 2
_CHANNELS_MAX: Final = 256
_ATTEMPTS_MAX: Final = 256


class DistributedSimpleConsumer:
    """A simple consumer of one distributed queue."""

    def __init__(
        self,
        queue: PlacementSource,
        at: Callable[[str], MemberQueues],
        receivings: Receivings,
        start: Start,
    ) -> None:
        self.receivings = receivings
        self.queue = queue
        self.changed: trio.Event = trio.Event()
        """Set when the queue's partitions have changed."""
        self._at = at
        self._start = start
        self._channels: OrderedDict[str, None] = OrderedDict()
        """Channels that exist in all partitions."""
        self._attempts: OrderedDict[tuple[str, str], list[ShardAnswer]] = OrderedDict()
        self._failing: dict[str, float] = {}
        self._turn = 0
        self._checked_s = float("-inf")

    async def ask(self, request: SimpleRequest) -> AdminReply:
        """Carry out a request as a local queue does.

        Raises the errors of a local queue; when no partition can be asked, or a needed one cannot, its error with
        partition and node; QueueNotFoundError when the queue is on several nodes no more.
        """
        if isinstance(request, ReceiveMessages):
            return await self._receive(request)
        return await (self._ack(request) if isinstance(request, AckMessages) else self._invisible(request))

    def at(self, location: ShardLocation) -> Ask:
        """Return the queues of a node. A shard is a local queue: it never has a table of its own, which could lead back
        here."""
        return self._at(location.node).ask_broker

    # Which nodes

    def rotated(self, used: Placement) -> list[int]:
        """Return all partitions, each time from another one on, without those whose node has just failed, unless all
        have."""
        self._turn += 1
        at = self._turn % len(used.partitions)
        order = [*used.partitions[at:], *used.partitions[:at]]
        return [each for each in order if not self.is_failing(used.locations[each].node)] or order

    def is_failing(self, node: str) -> bool:
        """Whether the node has just failed."""
        return trio.current_time() < self._failing.get(node, 0.0)

    def failed(self, node: str) -> None:
        """Note that a node did not answer."""
        now = trio.current_time()
        self._failing = {each: until_s for each, until_s in self._failing.items() if until_s > now}
        self._failing[node] = now + _FAILING_S

    def worked(self, node: str) -> None:
        """Note that a node answered."""
        self._failing.pop(node, None)

    def check_soon(self) -> None:
        """Refresh the table beside the caller: the controller may be away. `changed` is set when partitions were
        added."""
        if trio.current_time() >= self._checked_s + INSPECT_S:
            self._checked_s = trio.current_time()
            with contextlib.suppress(StreamClosedError):  # this node ends
                self._start(self._check)

    async def _check(self) -> None:
        try:
            before = await self.queue.placement()
            after = await self.queue.placement(before)
            if after.partitions != before.partitions:
                changed, self.changed = self.changed, trio.Event()
                changed.set()
        except (Dep2pError, ValueError) as error:
            logger.info("the partitions of %r are not known: %s", self.queue.name, error)
        except Exception:  # no error here ends the realm's queues
            logger.exception("the partitions of %r are not known", self.queue.name)

    # Receiving

    async def _receive(self, asked: ReceiveMessages) -> ReceivedMessages:
        require_lasting(asked.channel)
        deadline_s = trio.current_time() + asked.wait_s
        again = await self._received_before(asked)
        if again:
            return ReceivedMessages(messages=tuple(again))
        tries, is_last = 0, False
        while True:
            tries += 1
            used = await self.queue.placement()
            if asked.channel not in self._channels:
                # Make the channel in all partitions first: messages would be skipped where it begins later.
                await self.queue.ask_controller(
                    CreateChannel(queue=self.queue.name, channel=asked.channel, from_start=asked.from_start)
                )
                self._channels[asked.channel] = None
                if len(self._channels) > _CHANNELS_MAX:
                    self._channels.popitem(last=False)
            self.check_soon()
            receiving = ShardReceive(self, used, asked, deadline_s, is_last=is_last)
            try:
                messages = await receiving.run()
                break
            except ChannelNotFoundError:
                if tries > _TRIES:
                    raise
                self._channels.pop(asked.channel, None)  # it was deleted: as with any queue, it is made anew
            except QueueNotFoundError:
                if is_last:
                    raise
                with contextlib.suppress(*UNREACHABLE_ERRORS):
                    await self.queue.placement(used)  # raises when the queue was deleted
                is_last = tries > _TRIES or (await self.queue.placement()).locations == used.locations
                if not is_last:  # it was made anew
                    self._channels.clear()
        if asked.attempt_id and messages:
            self._attempts[asked.channel, asked.attempt_id] = receiving.taken
            if len(self._attempts) > _ATTEMPTS_MAX:
                self._attempts.popitem(last=False)
        return ReceivedMessages(messages=tuple(messages))

    async def _received_before(self, asked: ReceiveMessages) -> list[ReceivedMessage]:
        """Repeat a receive whose answer was lost: return the same messages that are still held, and new ones only when
        there are none."""
        taken = self._attempts.get((asked.channel, asked.attempt_id), []) if asked.attempt_id else []
        found: dict[int, list[ReceivedMessage]] = {}

        async def ask(index: int, each: ShardAnswer, location: ShardLocation) -> None:
            again = replace(each.request, only_again=True, wait_s=0.0, invisible_s=asked.invisible_s)
            try:
                found[index] = renumbered(
                    await self.at(location)(again), each.partition, location.node, RECEIVE_ITEMS_MAX
                )
            except (QueueNotFoundError, ChannelNotFoundError):
                found[index] = []
            except UNREACHABLE_ERRORS as error:
                errors.append(away(error, self.queue.name, each.partition, location.node))
            except (Dep2pError, ValueError) as error:  # raised as it is, not in the nursery's group
                errors.append(error)

        errors: list[Exception] = []
        if taken:
            locations = (await self.queue.placement()).locations
            async with trio.open_nursery() as nursery:
                for index, each in enumerate(taken):
                    if each.partition in locations:
                        nursery.start_soon(ask, index, each, locations[each.partition])
        messages = [message for index in sorted(found) for message in found[index]]
        if not messages and errors:
            raise errors[0]
        return messages

    # What was received

    async def _ack(self, request: AckMessages) -> RefusedHandles:
        """Acknowledge at all nodes at once. When a node is away, the error names the handles that are not
        acknowledged."""
        handles = request.handles
        by_partition: dict[int, dict[str, str]] = {}
        for handle in handles:
            (partition, seq), attempts = parse_handle(handle)
            by_partition.setdefault(partition, {})[_of_shard(seq, attempts)] = handle
        locations = await self._locations(by_partition)
        refused: dict[str, None] = {}
        unsure: dict[str, None] = {}
        errors: list[Exception] = []

        async def ack(partition: int, location: ShardLocation) -> None:
            of_shard = by_partition[partition]
            wanted = AckMessages(queue=location.shard, channel=request.channel, handles=tuple(of_shard))
            try:
                reply = await self.at(location)(wanted)
                refused.update(dict.fromkeys(handle for each, handle in of_shard.items() if each in reply.refused))
            except QueueNotFoundError:
                gone.append(partition)
            except UNREACHABLE_ERRORS as error:
                unsure.update(dict.fromkeys(of_shard.values()))
                errors.append(away(error, self.queue.name, partition, location.node))
            except (Dep2pError, ValueError) as error:  # raised as it is, not in the nursery's group
                errors.append(error)

        gone: list[int] = []
        async with trio.open_nursery() as nursery:
            for partition, location in locations.items():
                nursery.start_soon(ack, partition, location)
        if gone:
            await self._require_there()
        if errors:
            error = errors[0]
            if isinstance(error, UNREACHABLE_ERRORS) and len(locations) > 1:
                raise type(error)(f"{error}; not acknowledged, as far as is known: {', '.join(unsure)}")
            raise error
        for partition, of_shard in by_partition.items():
            if partition not in locations or partition in gone:
                refused.update(dict.fromkeys(of_shard.values()))
        return RefusedHandles(refused=tuple(handle for handle in handles if handle in refused))

    async def _invisible(self, request: ChangeInvisible) -> InvisibleTime:
        handle = request.handle
        (partition, seq), attempts = parse_handle(handle)
        location = (await self._locations([partition])).get(partition)
        gone = NotInFlightError(
            f"the message {handle[:40]} is not held here any more: its time was over, or it is done"
        )
        if location is None:
            raise gone
        try:
            return await self.at(location)(replace(request, queue=location.shard, handle=_of_shard(seq, attempts)))
        except NotInFlightError:
            raise gone from None
        except QueueNotFoundError:
            await self._require_there()
            raise gone from None
        except UNREACHABLE_ERRORS as error:
            raise away(error, self.queue.name, partition, location.node) from error

    async def _locations(self, partitions: Sequence[int] | Mapping[int, object]) -> dict[int, ShardLocation]:
        """Return the locations of those partitions that the queue has. For an unknown one it asks for the table anew:
        an expansion may have added it."""
        used = await self.queue.placement()
        if any(each not in used.locations for each in partitions):
            used = await self.queue.placement(used)
        return {each: used.locations[each] for each in partitions if each in used.locations}

    async def _require_there(self) -> None:
        """Raises QueueNotFoundError when the queue was deleted."""
        await self.queue.placement(await self.queue.placement())


def _of_shard(seq: int, attempts: int) -> str:
    """Return a handle for the shard, which has one partition, under a number that only its node knows."""
    return f"{message_id(0, seq)}-{attempts}"
