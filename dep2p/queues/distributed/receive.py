"""One receive from a queue whose partitions are on several nodes.

First it takes messages that are there, in turn and never more than wanted. Then it waits on all partitions, and takes
the first messages that come. Messages that others give then, or give too late, are released at their nodes without an
attempt. Kept here they might never be asked for, and would be hidden from others for their invisible duration.
"""

from collections import deque
from typing import Final

import trio
from msgspec.structs import replace

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    OverloadedError,
    ProtocolError,
    QueueConsumerClosedError,
    QueueExistsError,
    QueueFullError,
    QueueNotFoundError,
)
from dep2p.protocols.queues.admin import ReceivedMessage, ReceivedMessages, ReceiveMessages
from dep2p.protocols.queues.names import message_id
from dep2p.protocols.queues.ordering.placement import Placement, ShardLocation
from dep2p.queues.broker.receive import BODIES_BYTES, parse_handle
from dep2p.queues.distributed.interfaces import ReceiveOwner
from dep2p.queues.distributed.shard_client import away
from dep2p.queues.remote.abandoned_receives import Ask
from dep2p.queues.types import UNREACHABLE_ERRORS

_FIRST_S: Final = 0.5
"""The time for which partitions are asked in turn; then all are asked at once, and surplus messages are released."""
_ANSWER_S: Final = 2.0
"""A receive that has an answer of one node waits no longer than this for another."""
_LATE_S: Final = 1.0
"""Seconds for answers after the time that a receive may wait."""
_RETRY_S: Final = 1.0
_WAITS_PER_NODE: Final = 16
"""Partitions of one node on which a receive waits at once, in turns when there are more: a link takes 64."""
_TURN_S: Final = 1.0
INSPECT_S: Final = 5.0
"""Seconds between two looks for partitions that were added to a queue in use."""


class ShardAnswer:
    """An answer of one partition, with messages."""

    def __init__(self, partition: int, ask: Ask, request: ReceiveMessages) -> None:
        self.partition = partition
        self.ask = ask
        self.request = request


def renumbered(reply: ReceivedMessages, partition: int, node: str, items_max: int) -> list[ReceivedMessage]:
    """Convert messages to the queue's own number of the partition. Raises ProtocolError, which names the node."""
    if len(reply.messages) > items_max:
        raise ProtocolError(f"the node {node} answered a receive with {len(reply.messages)} messages, not {items_max}")
    try:
        return [_renumbered(each, partition) for each in reply.messages]
    except ValueError as error:
        raise ProtocolError(f"the node {node}: {error}") from None


def _renumbered(message: ReceivedMessage, partition: int) -> ReceivedMessage:
    (_local, seq), attempts = parse_handle(message.handle)
    named = message_id(partition, seq)
    return replace(message, id=named, handle=f"{named}-{attempts}")


class ShardReceive:
    """One receive."""

    def __init__(
        self,
        owner: ReceiveOwner,
        used: Placement,
        asked: ReceiveMessages,
        deadline_s: float,
        *,
        is_last: bool,
    ) -> None:
        """``is_last``: a partition that does not exist counts as one that cannot be asked; otherwise the table is
        refreshed."""
        self.messages: list[ReceivedMessage] = []
        self.taken: list[ShardAnswer] = []
        self._owner = owner
        self._asked = asked
        self._deadline_s = deadline_s
        self._is_last = is_last
        self._size = 0
        self._answered: dict[int, None] = {}
        self._failed: dict[int, Exception] = {}
        self._error: Dep2pError | None = None
        """The error that ended it for all partitions."""
        self._scope = trio.CancelScope()
        self._used = used
        self._waiting: dict[str, deque[int]] = {}
        self._workers: dict[str, int] = {}

    async def run(self) -> list[ReceivedMessage]:
        """Run it and return the messages. It raises its error only when no message came. When it is cancelled, it holds
        no message."""
        try:
            await self._take_in_turn()
            if not self.messages and self._error is None and not self._are_all_away:
                await self._wait()
        except BaseException:
            for each in self.taken:
                self._owner.receivings.end_soon(each.ask, each.request)
            raise
        if self.messages:
            return self.messages
        if self._error is not None:
            raise self._error
        failures = list(self._failed.values())
        full = [error for error in failures if isinstance(error, QueueFullError)]
        if full or not self._answered:
            raise full[0] if full else failures[0]
        return []

    @property
    def _are_all_away(self) -> bool:
        return not self._answered and len(self._failed) >= len(self._used.partitions)

    @property
    def _left(self) -> int:
        return self._asked.count - len(self.messages) if self._size < BODIES_BYTES else 0

    async def _take_in_turn(self) -> None:
        """Take messages that are there, without waiting. The wanted number is divided among the partitions that are
        asked at once, so that they never give more in all. When some have come, only partitions that gave all they were
        asked for are asked for more."""
        used = self._used
        others = deque(self._owner.rotated(used))
        full: deque[int] = deque()
        until_s = trio.current_time() + _FIRST_S

        async def take(partition: int, items: int) -> None:
            with trio.move_on_after(_ANSWER_S) as scope:
                if await self._take(partition, used.locations[partition], items, 0.0) == items:
                    full.append(partition)
            if scope.cancelled_caught:
                self._owner.failed(used.locations[partition].node)

        while self._left > 0 and self._error is None:
            source = full if self.messages else others
            batch = [source.popleft() for _ in range(min(self._left, len(source)))]
            if not batch or trio.current_time() >= until_s:
                return
            shard = self._left // len(batch)
            async with trio.open_nursery() as nursery:
                for partition in batch:
                    nursery.start_soon(take, partition, shard)

    async def _take(self, partition: int, location: ShardLocation, items: int, wait_s: float) -> int:
        """Ask one partition; return the number of messages taken."""
        owner, asked = self._owner, self._asked
        ask = owner.at(location)
        request = ReceiveMessages(
            queue=location.shard,
            channel=asked.channel,
            count=items,
            wait_s=wait_s,
            invisible_s=asked.invisible_s,
            attempt_id=owner.receivings.new_attempt_id(),
            of_distributed=True,
        )
        try:
            reply = await owner.receivings.receive(ask, request)
            try:
                messages = renumbered(reply, partition, location.node, items)
            except ProtocolError:
                owner.receivings.end_soon(ask, request)
                raise
        except (*UNREACHABLE_ERRORS, OverloadedError) as error:
            owner.failed(location.node)
            self._fail(partition, away(error, owner.queue.name, partition, location.node))
        except (ChannelNotFoundError, QueueExistsError, QueueConsumerClosedError) as error:
            self._end(error)
        except QueueNotFoundError as error:
            self._fail(partition, error)
            if not self._is_last:
                self._end(error)
        except (Dep2pError, ValueError) as error:
            self._fail(partition, error)
        else:
            owner.worked(location.node)
            self._failed.pop(partition, None)
            self._answered[partition] = None
            # It does not wait for the others.
            self._scope.deadline = max(trio.current_time(), self._deadline_s) + _LATE_S
            if messages and len(messages) <= self._left:
                self.messages += messages
                self._size += sum(len(each.body) for each in messages)
                self.taken.append(ShardAnswer(partition, ask, request))
                return len(messages)
            if messages:
                owner.receivings.end_soon(ask, request)
        return 0

    def _fail(self, partition: int, error: Exception) -> None:
        self._failed[partition] = error

    def _end(self, error: Dep2pError) -> None:
        self._error = self._error or error
        self._scope.cancel()

    # Waiting

    async def _wait(self) -> None:
        """Wait on all partitions, until messages come from one. Without time left, ask those that were not asked
        yet."""
        has_time = trio.current_time() < self._deadline_s
        first = self._owner.rotated(self._used)
        for partition in dict.fromkeys([*first, *self._used.partitions]):
            if has_time or (partition in first and partition not in self._answered and partition not in self._failed):
                self._waiting.setdefault(self._used.locations[partition].node, deque()).append(partition)
        if not self._waiting:
            return
        if self._answered:
            self._scope.deadline = max(trio.current_time(), self._deadline_s) + _LATE_S
        with self._scope:
            async with trio.open_nursery() as nursery:
                self._start_workers(nursery)
                nursery.start_soon(self._watch, nursery)

    def _start_workers(self, nursery: trio.Nursery) -> None:
        for node, queued in self._waiting.items():
            for _ in range(min(len(queued), _WAITS_PER_NODE - self._workers.get(node, 0))):
                self._workers[node] = self._workers.get(node, 0) + 1
                nursery.start_soon(self._work, node)

    async def _work(self, node: str) -> None:
        queued = self._waiting[node]
        while queued:
            partition = queued.popleft()
            wait_s = max(0.0, self._deadline_s - trio.current_time())
            if queued:
                wait_s = min(wait_s, _TURN_S)
            items = max(1, self._asked.count // len(self._used.partitions))
            await self._take(partition, self._used.locations[partition], items, wait_s)
            if self.messages or self._are_all_away:
                self._scope.cancel()
            left_s = self._deadline_s - trio.current_time()
            if left_s > 0:
                queued.append(partition)
                if partition in self._failed:
                    await trio.sleep(min(_RETRY_S, left_s))
        self._workers[node] -= 1
        if not any(self._workers.values()):
            self._scope.cancel()

    async def _watch(self, nursery: trio.Nursery) -> None:
        """Wait on partitions that are added, too."""
        while True:
            changed = self._owner.changed
            self._owner.check_soon()
            with trio.move_on_after(INSPECT_S):
                await changed.wait()
            before, now = self._used, await self._owner.queue.placement()
            added = [each for each in now.partitions if each not in before.locations]
            if added and all(each in now.locations for each in before.locations):
                self._used = now
                for partition in added:
                    self._waiting.setdefault(now.locations[partition].node, deque()).append(partition)
                self._start_workers(nursery)
