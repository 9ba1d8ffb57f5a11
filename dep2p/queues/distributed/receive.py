"""One receive from a queue whose partitions are on several nodes.

First what is there, in turn and never more than is wanted; then it waits on all partitions, and takes what comes first.
What another one gives then, or gives too late, is given back at its node untried: it is neither kept here, where nobody
may ask for it again, nor hidden from others for its invisible duration.
"""

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import trio

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
from dep2p.protocols.queues.ordering.placement import Place, Placement
from dep2p.queues.broker.admin import ReceiveAsked
from dep2p.queues.broker.receive import BODIES_BYTES
from dep2p.queues.distributed.queue_placed_rows import Row, away, received_rows, size_of
from dep2p.queues.distributed.shard_client import AWAY
from dep2p.queues.remote.abandoned_receives import Ask

if TYPE_CHECKING:
    from dep2p.queues.distributed.simple_consumer import PlacedSimple

_FIRST_S: Final = 0.5
"""So long partitions are asked in turn for what is there; then all at once, and what is too much goes back."""
_ANSWER_S: Final = 2.0
"""A node that does not answer within it holds up nobody who has an answer of another one."""
_LATE_S: Final = 1.0
"""For answers behind the time that a receive may wait."""
_RETRY_S: Final = 1.0
_WAITS_PER_NODE: Final = 16
"""Partitions of a node that one receive waits on at once, since its link takes 64; on more of them in turn."""
_TURN_S: Final = 1.0
LOOK_S: Final = 5.0
"""How often a queue in use is looked at for partitions that were added."""


class Taken:
    """An answer with messages."""

    def __init__(self, partition: int, ask: Ask, fields: Mapping[str, object]) -> None:
        self.partition = partition
        self.ask = ask
        self.fields = fields


class Receiving:
    """One receive."""

    def __init__(
        self, owner: "PlacedSimple", used: Placement, asked: ReceiveAsked, deadline_s: float, *, is_last: bool
    ) -> None:
        """``is_last``: a partition that is not there is one that cannot be asked; else the table is looked at anew."""
        self.rows: list[Row] = []
        self.taken: list[Taken] = []
        self._owner = owner
        self._asked = asked
        self._deadline_s = deadline_s
        self._is_last = is_last
        self._size = 0
        self._answered: dict[int, None] = {}
        self._failed: dict[int, Exception] = {}
        self._error: Dep2pError | None = None
        """Why nothing more comes of any partition."""
        self._scope = trio.CancelScope()
        self._used = used
        self._waiting: dict[str, deque[int]] = {}
        self._workers: dict[str, int] = {}

    async def run(self) -> list[Row]:
        """Raises what ends it, unless messages came: then those are given. Cancelled, nothing is held of it."""
        try:
            await self._take_in_turn()
            if not self.rows and self._error is None and not self._is_nobody_there:
                await self._wait()
        except BaseException:
            for each in self.taken:
                self._owner.receivings.end_soon(each.ask, each.fields)
            raise
        if self.rows:
            return self.rows
        if self._error is not None:
            raise self._error
        failures = list(self._failed.values())
        full = [error for error in failures if isinstance(error, QueueFullError)]
        if full or not self._answered:
            raise full[0] if full else failures[0]
        return []

    @property
    def _is_nobody_there(self) -> bool:
        return not self._answered and len(self._failed) >= len(self._used.partitions)

    @property
    def _left(self) -> int:
        return self._asked.items - len(self.rows) if self._size < BODIES_BYTES else 0

    async def _take_in_turn(self) -> None:
        """What is there, without waiting: the messages that are wanted are divided among the partitions that are asked
        at once, so that never more are taken. When some have come, only partitions that gave all they were asked for
        are asked for more."""
        used = self._used
        others = deque(self._owner.rotated(used))
        full: deque[int] = deque()
        until_s = trio.current_time() + _FIRST_S

        async def take(partition: int, items: int) -> None:
            with trio.move_on_after(_ANSWER_S) as scope:
                if await self._take(partition, used.places[partition], items, 0.0) == items:
                    full.append(partition)
            if scope.cancelled_caught:
                self._owner.failed(used.places[partition].node)

        while self._left > 0 and self._error is None:
            source = full if self.rows else others
            batch = [source.popleft() for _ in range(min(self._left, len(source)))]
            if not batch or trio.current_time() >= until_s:
                return
            share = self._left // len(batch)
            async with trio.open_nursery() as nursery:
                for partition in batch:
                    nursery.start_soon(take, partition, share)

    async def _take(self, partition: int, place: Place, items: int, wait_s: float) -> int:
        """Ask one partition; gives how many messages were taken."""
        owner, asked = self._owner, self._asked
        ask = owner.at(place)
        fields: dict[str, object] = {
            "queue": place.share,
            "channel": asked.channel,
            "count": items,
            "wait_s": wait_s,
            "invisible_s": asked.invisible_s,
            "attempt_id": owner.receivings.new_attempt_id(),
            "of_placed": True,
        }
        try:
            answer = await owner.receivings.receive(ask, fields)
            try:
                rows = received_rows(answer, partition, place.node, items)
            except ProtocolError:
                owner.receivings.end_soon(ask, fields)
                raise
        except (*AWAY, OverloadedError) as error:
            owner.failed(place.node)
            self._fail(partition, away(error, owner.queue.name, partition, place.node))
        except (ChannelNotFoundError, QueueExistsError, QueueConsumerClosedError) as error:
            self._end(error)
        except QueueNotFoundError as error:
            self._fail(partition, error)
            if not self._is_last:
                self._end(error)
        except (Dep2pError, ValueError) as error:
            self._fail(partition, error)
        else:
            owner.worked(place.node)
            self._failed.pop(partition, None)
            self._answered[partition] = None
            # Whoever has not answered yet is not waited for.
            self._scope.deadline = max(trio.current_time(), self._deadline_s) + _LATE_S
            if rows and len(rows) <= self._left:
                self.rows += rows
                self._size += size_of(rows)
                self.taken.append(Taken(partition, ask, fields))
                return len(rows)
            if rows:
                owner.receivings.end_soon(ask, fields)
        return 0

    def _fail(self, partition: int, error: Exception) -> None:
        self._failed[partition] = error

    def _end(self, error: Dep2pError) -> None:
        self._error = self._error or error
        self._scope.cancel()

    # Waiting

    async def _wait(self) -> None:
        """On all partitions, until something comes from one. Without time, those are asked that were not yet."""
        has_time = trio.current_time() < self._deadline_s
        first = self._owner.rotated(self._used)
        for partition in dict.fromkeys([*first, *self._used.partitions]):
            if has_time or (partition in first and partition not in self._answered and partition not in self._failed):
                self._waiting.setdefault(self._used.places[partition].node, deque()).append(partition)
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
            items = max(1, self._asked.items // len(self._used.partitions))
            await self._take(partition, self._used.places[partition], items, wait_s)
            if self.rows or self._is_nobody_there:
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
        """Partitions that are added are waited on, too."""
        while True:
            changed = self._owner.changed
            self._owner.look_soon()
            with trio.move_on_after(LOOK_S):
                await changed.wait()
            before, now = self._used, await self._owner.queue.placement()
            added = [each for each in now.partitions if each not in before.places]
            if added and all(each in now.places for each in before.places):
                self._used = now
                for partition in added:
                    self._waiting.setdefault(now.places[partition].node, deque()).append(partition)
                self._start_workers(nursery)
