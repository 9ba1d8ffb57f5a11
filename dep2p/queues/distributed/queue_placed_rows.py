"""Received messages as the node of a share gave them: checked, and under the queue's own number of the partition."""

from collections.abc import Mapping
from typing import Any, cast

from dep2p.errors import Dep2pError, ProtocolError
from dep2p.queues.broker.receive import parse_handle
from dep2p.queues.types import message_id

Row = dict[str, Any]


def received_rows(answer: Mapping[str, Any], partition: int, node: str, items_max: int) -> list[Row]:
    """Raises ProtocolError, which names the node."""
    given: object = answer.get("messages")
    if not isinstance(given, list) or len(cast(list[object], given)) > items_max:
        raise ProtocolError(f"the node {node} answered a receive without messages, or with more than {items_max}")
    return [_row(each, partition, node) for each in cast(list[object], given)]


def _row(given: object, partition: int, node: str) -> Row:
    row = cast(Row, given) if isinstance(given, dict) else {}
    numbers = (row.get("published_s"), row.get("invisible_s"), row.get("attempts"))
    if not isinstance(row.get("data"), str) or not all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in numbers
    ):
        raise ProtocolError(f"the node {node} answered with messages that are none")
    try:
        (_local, seq), attempts = parse_handle(str(row.get("handle")))
    except ValueError as error:
        raise ProtocolError(f"the node {node}: {error}") from None
    named = message_id(partition, seq)
    return {**row, "id": named, "handle": f"{named}-{attempts}"}


def size_of(rows: list[Row]) -> int:
    """About the bytes of their bodies."""
    return sum(len(row["data"]) * 3 // 4 for row in rows)


def away(error: Dep2pError, queue: str, partition: int, node: str) -> Dep2pError:
    """The same, with partition and node."""
    return type(error)(f"partition {partition} of the queue {queue!r}, at {node}: {error}")
