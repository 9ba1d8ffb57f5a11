"""Messages and dead letters of a placed queue, looked at by its own name: its home asks the nodes of its partitions.

What is told has the partition's number as the home gives it, and its node. When a node is away, the request fails and
names it, so that nobody takes a part for the whole; the other partitions can be looked at by their own names.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import trio

from dep2p.errors import Dep2pError, ProtocolError, QueueMessageNotFoundError
from dep2p.protocols.queues.ordering.placement import Place
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.broker.admin import ANSWER_BYTES, COUNT_MAX
from dep2p.queues.distributed.shard_client import AWAY, Shares, whole
from dep2p.queues.types import message_id, parse_message_id

_ASKS: Final = 16
"""Partitions that are asked at once: so much is held of their answers, besides what will be told."""
_INDEX_BITS: Final = 10
"""Of a dead letter's id: which partition it is of, among all in their order. New ones come behind the others."""
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
_IDS_MAX: Final = 10_000

Row = dict[str, Any]


class HomeMessages:
    """Of the placed queues of one realm."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    async def perform(self, op: str, queue: Queue, fields: Mapping[str, object]) -> dict[str, Any]:
        """One of `OPS`. Raises ``ValueError``, QueueMessageNotFoundError, and what the nodes raise."""
        return await {
            "peek": self._peek,
            "export": self._export,
            "dead": self._dead,
            "replay": self._act,
            "forget_dead": self._act,
        }[op](op, queue, fields)

    OPS: Final = ("peek", "export", "dead", "replay", "forget_dead")

    async def _peek(self, op: str, queue: Queue, fields: Mapping[str, object]) -> dict[str, Any]:
        count = _count(fields, 10)
        found: list[Row] = []

        def take(partition: int, answer: Mapping[str, Any]) -> None:
            found.extend(_rows(answer, "messages", partition, queue.places[partition]))
            found.sort(key=lambda row: (row["published_s"], row["id"]))
            _cut(found, count)

        await self._ask(queue, op, dict.fromkeys(queue.places, _named(fields, count=count)), take)
        return {"messages": found}

    async def _export(self, op: str, queue: Queue, fields: Mapping[str, object]) -> dict[str, Any]:
        after = fields.get("after")
        if not isinstance(after, str):
            raise ValueError("after is missing or not a text")
        at, seq = parse_message_id(after) if after else (0, 0)
        if after and at not in queue.places:
            raise ValueError("that position is of another queue")
        found: list[Row] = []

        def take(partition: int, answer: Mapping[str, Any]) -> None:
            found.extend(_rows(answer, "messages", partition, queue.places[partition]))

        for partition in sorted(queue.places):
            if partition < at:
                continue
            position = seq if partition == at else 0
            asked = _named(fields, count=_count(fields, 100), after="", after_seq=position)
            await self._ask(queue, op, {partition: asked}, take)
            if found:
                break
        return {"messages": found, "after": found[-1]["id"] if found else ""}

    async def _dead(self, op: str, queue: Queue, fields: Mapping[str, object]) -> dict[str, Any]:
        count = max(1, _count(fields, 100))
        after = fields.get("after", 0)
        if not isinstance(after, int) or isinstance(after, bool) or not 0 <= after <= 10**17:
            raise ValueError("after is not a whole number from 0 to 10**17")
        index = {partition: at for at, partition in enumerate(sorted(queue.places))}
        found: list[Row] = []
        complete_to = 1 << 63
        """Behind it a partition may have others, which it did not tell yet."""

        def take(partition: int, answer: Mapping[str, Any]) -> None:
            nonlocal complete_to
            rows = _rows(answer, "dead", partition, queue.places[partition])
            for row in rows:
                row["id"] = (whole(row, "id") << _INDEX_BITS) | index[partition]
            if answer.get("more") and rows:
                complete_to = min(complete_to, rows[-1]["id"])
            found.extend(rows)
            found.sort(key=lambda row: row["id"])
            _cut(found, count)

        asked = {
            partition: _named(fields, count=count, after=max(0, (after - at) >> _INDEX_BITS))
            for partition, at in index.items()
        }
        await self._ask(queue, op, asked, take)
        return {"dead": [row for row in found if row["id"] <= complete_to]}

    async def _act(self, op: str, queue: Queue, fields: Mapping[str, object]) -> dict[str, Any]:
        """With all dead letters, or those with these ids: at the partitions that have them."""
        ids: object = fields.get("ids")
        chosen: dict[int, list[int]] | None = None
        if ids is not None:
            if not isinstance(ids, list) or len(cast(list[object], ids)) > _IDS_MAX:
                raise ValueError(f"ids is not a list of at most {_IDS_MAX} whole numbers")
            partitions = sorted(queue.places)
            chosen = {}
            for each in cast(list[object], ids):
                if not isinstance(each, int) or isinstance(each, bool):
                    raise ValueError("ids is not a list of whole numbers")
                if 0 < each and each & _INDEX_MASK < len(partitions):
                    chosen.setdefault(partitions[each & _INDEX_MASK], []).append(each >> _INDEX_BITS)
        done = 0

        def take(_partition: int, answer: Mapping[str, Any]) -> None:
            nonlocal done
            done += whole(answer, "messages")

        if chosen is None:
            asked = dict.fromkeys(queue.places, _named(fields))
        else:
            asked = {partition: _named(fields, ids=each) for partition, each in chosen.items()}
        await self._ask(queue, op, asked, take)
        if chosen is not None and not done:
            raise QueueMessageNotFoundError(f"channel {fields.get('channel')!r} has none of these dead letters")
        return {"messages": done}

    async def _ask(
        self,
        queue: Queue,
        op: str,
        fields: Mapping[int, Mapping[str, object]],
        take: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        """Ask these partitions, a few at a time. Raises what the first one raised, when all that were begun have
        answered."""
        limiter = trio.CapacityLimiter(_ASKS)
        errors: list[Exception] = []

        async def ask(partition: int, place: Place) -> None:
            async with limiter:
                if errors:
                    return
                try:
                    take(partition, await self._shares.ask(place.node, op, {**fields[partition], "queue": place.share}))
                except QueueMessageNotFoundError:
                    pass  # others may have them
                except AWAY as error:
                    errors.append(_away(error, queue, partition))
                except (Dep2pError, ValueError) as error:  # raised as it is, not in the nursery's group
                    errors.append(error)

        async with trio.open_nursery() as nursery:
            for partition in sorted(fields):
                nursery.start_soon(ask, partition, queue.places[partition])
        if errors:
            raise errors[0]


def _away(error: Dep2pError, queue: Queue, partition: int) -> Dep2pError:
    return type(error)(
        f"the partition {partition} of {queue.name!r} is away, and the others alone are not the whole queue: "
        f"each can be asked by its own name (`dep2p queue route {queue.name}` has the names). {error}"
    )


def _named(fields: Mapping[str, object], **more: object) -> Mapping[str, object]:
    channel = fields.get("channel")
    return {**({} if channel is None else {"channel": channel}), **more}


def _count(fields: Mapping[str, object], default: int) -> int:
    count = fields.get("count", default)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= COUNT_MAX:
        raise ValueError(f"count is not a whole number from 0 to {COUNT_MAX}")
    return count


def _rows(answer: Mapping[str, Any], name: str, partition: int, place: Place) -> list[Row]:
    """Messages as their node told them, under the home's number of their partition. Raises ProtocolError."""
    given = answer.get(name)
    key = "message_id" if name == "dead" else "id"
    if not isinstance(given, list) or len(cast(list[object], given)) > COUNT_MAX:
        raise ProtocolError(f"the node {place.node} answered without {name}")
    rows: list[Row] = []
    for each in cast(list[object], given):
        row = cast(Row, each) if isinstance(each, dict) else {}
        if not isinstance(row.get("published_s"), int | float) or not isinstance(row.get("data"), str):
            raise ProtocolError(f"the node {place.node} answered with {name} that are none")
        try:
            seq = parse_message_id(str(row.get(key)))[1]
        except ValueError as error:
            raise ProtocolError(f"the node {place.node}: {error}") from None
        rows.append({**row, key: message_id(partition, seq), "partition": partition, "node": place.node})
    return rows


def _cut(rows: list[Row], count: int) -> None:
    """The first ones, as far as they fit into an answer."""
    size = 0
    for at, row in enumerate(rows):
        size += len(row["data"]) * 3 // 4
        if at >= count or (at and size > ANSWER_BYTES):
            del rows[at:]
            return
