"""Messages and dead letters of a distributed queue, looked at by its own name: its controller asks the nodes of its
partitions.

A reply has the controller's number of the partition, and its node. When a node is away, the request fails and names it,
so that a part is not taken for the whole; the other partitions can be read by their shards' names.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import trio
from msgspec.structs import replace

from dep2p.errors import Dep2pError, ProtocolError, QueueMessageNotFoundError
from dep2p.protocols.queues.admin import (
    ANSWER_BYTES,
    COUNT_MAX,
    BrowsedMessage,
    DeadLetterInfo,
    DeadLetterPage,
    DeleteDeadLetters,
    ExportMessages,
    ExportPage,
    ListDeadLetters,
    MessageCount,
    MessageInfo,
    MessageList,
    PeekMessages,
    QueueRequest,
    R,
    ReplayDeadLetters,
)
from dep2p.protocols.queues.names import message_id, parse_message_id
from dep2p.protocols.queues.ordering.placement import ShardLocation
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.distributed.shard_client import ShardClient
from dep2p.queues.types import UNREACHABLE_ERRORS

_ASKS: Final = 16
"""Partitions that are asked at once: the controller holds so many of their replies besides its own."""
_INDEX_BITS: Final = 10
"""Low bits of a dead letter's id that say its partition: the index among the queue's partitions in rising order.
Partitions that an expansion adds come last."""
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1

M = TypeVar("M", bound=BrowsedMessage)


class ControllerMessages:
    """Messages and dead letters of the distributed queues of one realm. All methods raise QueueMessageNotFoundError,
    and what the nodes raise."""

    def __init__(self, shards: ShardClient) -> None:
        self._shards = shards

    async def peek(self, queue: Queue, request: PeekMessages) -> MessageList:
        """The oldest messages of all partitions."""
        found: list[MessageInfo] = []

        def take(partition: int, reply: MessageList) -> None:
            found.extend(_messages(reply.messages, partition, queue.locations[partition]))
            found.sort(key=lambda message: (message.published_s, message.id))
            _cut(found, request.count)

        await self._ask(queue, dict.fromkeys(queue.locations, request), take)
        return MessageList(messages=tuple(found))

    async def export(self, queue: Queue, request: ExportMessages) -> ExportPage:
        """A part of the log, partition by partition. Raises ``ValueError`` for a position of another queue."""
        at, seq = parse_message_id(request.after) if request.after else (0, 0)
        if request.after and at not in queue.locations:
            raise ValueError("that position is of another queue")
        found: list[MessageInfo] = []

        def take(partition: int, reply: ExportPage) -> None:
            found.extend(_messages(reply.messages, partition, queue.locations[partition]))

        for partition in sorted(queue.locations):
            if partition < at:
                continue
            of_shard = replace(request, after="", after_seq=seq if partition == at else 0)
            await self._ask(queue, {partition: of_shard}, take)
            if found:
                break
        return ExportPage(messages=tuple(found), after=found[-1].id if found else "")

    async def dead_letters(self, queue: Queue, request: ListDeadLetters) -> DeadLetterPage:
        """Dead letters of all partitions, by their ids."""
        index = {partition: at for at, partition in enumerate(sorted(queue.locations))}
        found: list[DeadLetterInfo] = []
        complete_to = 1 << 63
        """The id behind which a partition may have dead letters that its reply does not hold."""
        more = False

        def take(partition: int, reply: DeadLetterPage) -> None:
            nonlocal complete_to, more
            letters = _dead_letters(reply.dead_letters, partition, index[partition], queue.locations[partition])
            if reply.more and letters:
                complete_to = min(complete_to, letters[-1].id)
                more = True
            found.extend(letters)
            found.sort(key=lambda letter: letter.id)
            more = _cut(found, request.count) or more

        asked = {
            partition: replace(request, after=max(0, (request.after - at) >> _INDEX_BITS))
            for partition, at in index.items()
        }
        await self._ask(queue, asked, take)
        return DeadLetterPage(dead_letters=tuple(each for each in found if each.id <= complete_to), more=more)

    async def act(self, queue: Queue, request: ReplayDeadLetters | DeleteDeadLetters) -> MessageCount:
        """Replay or delete dead letters, all or those with these ids, at the partitions that have them."""
        asked: dict[int, QueueRequest[MessageCount]] = dict.fromkeys(queue.locations, request)
        if request.ids is not None:
            partitions = sorted(queue.locations)
            chosen: dict[int, list[int]] = {}
            for each in request.ids:
                if each and each & _INDEX_MASK < len(partitions):
                    chosen.setdefault(partitions[each & _INDEX_MASK], []).append(each >> _INDEX_BITS)
            asked = {partition: replace(request, ids=tuple(ids)) for partition, ids in chosen.items()}
        done = 0

        def take(_partition: int, reply: MessageCount) -> None:
            nonlocal done
            done += reply.messages

        await self._ask(queue, asked, take)
        if request.ids is not None and not done:
            raise QueueMessageNotFoundError(f"channel {request.channel!r} has none of these dead letters")
        return MessageCount(messages=done)

    async def _ask(self, queue: Queue, requests: Mapping[int, QueueRequest[R]], take: Callable[[int, R], None]) -> None:
        """Ask these partitions, a few at a time. Raises the first error, after all requests that were begun have
        ended."""
        limiter = trio.CapacityLimiter(_ASKS)
        errors: list[Exception] = []

        async def ask(partition: int, location: ShardLocation) -> None:
            async with limiter:
                if errors:
                    return
                try:
                    take(
                        partition,
                        await self._shards.ask(location.node, replace(requests[partition], queue=location.shard)),
                    )
                except QueueMessageNotFoundError:
                    pass  # other partitions may have them
                except UNREACHABLE_ERRORS as error:
                    errors.append(_away(error, queue, partition))
                except (Dep2pError, ValueError) as error:  # raised as it is, not in the nursery's group
                    errors.append(error)

        async with trio.open_nursery() as nursery:
            for partition in sorted(requests):
                nursery.start_soon(ask, partition, queue.locations[partition])
        if errors:
            raise errors[0]


def _away(error: Dep2pError, queue: Queue, partition: int) -> Dep2pError:
    return type(error)(
        f"the partition {partition} of {queue.name!r} is away, and the others alone are not the whole queue: "
        f"each can be asked by its own name (`dep2p queue route {queue.name}` has the names). {error}"
    )


def _messages(given: Sequence[MessageInfo], partition: int, location: ShardLocation) -> list[MessageInfo]:
    """Convert a node's messages to the controller's number of their partition. Raises ProtocolError."""
    _require_count(given, location)
    return [
        replace(each, id=_renumbered(each.id, partition, location), partition=partition, node=location.node)
        for each in given
    ]


def _dead_letters(
    given: Sequence[DeadLetterInfo], partition: int, index: int, location: ShardLocation
) -> list[DeadLetterInfo]:
    """Convert a node's dead letters. Raises ProtocolError."""
    _require_count(given, location)
    return [
        replace(
            each,
            id=(each.id << _INDEX_BITS) | index,
            message_id=_renumbered(each.message_id, partition, location),
            partition=partition,
            node=location.node,
        )
        for each in given
    ]


def _require_count(given: Sequence[BrowsedMessage], location: ShardLocation) -> None:
    if len(given) > COUNT_MAX:
        raise ProtocolError(f"the node {location.node} answered with {len(given)} messages: at most {COUNT_MAX}")


def _renumbered(text: str, partition: int, location: ShardLocation) -> str:
    try:
        return message_id(partition, parse_message_id(text)[1])
    except ValueError as error:
        raise ProtocolError(f"the node {location.node}: {error}") from None


def _cut(messages: list[M], count: int) -> bool:
    """Keep the first messages that fit into a reply; return whether others are dropped."""
    size = 0
    for at, message in enumerate(messages):
        size += len(message.body)
        if at >= count or (at and size > ANSWER_BYTES):
            del messages[at:]
            return True
    return False
