"""The simple consumer: receive, ack and change_invisible_duration, as thin calls that try nothing again."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dep2p.control_api.encoding import decode_headers
from dep2p.errors import NotInFlightError
from dep2p.types import Headers

if TYPE_CHECKING:
    from dep2p.queues.api.queues import Queues


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message that is this asker's for its invisible duration. ``handle`` names this delivery of it."""

    handle: str
    id: str
    body: bytes
    attempts: int
    """1 at the first delivery."""
    published_s: float
    """Unix seconds."""
    invisible_s: float
    """From its receipt on; then it is delivered again."""
    key: str
    tags: tuple[str, ...]
    priority: int
    headers: Headers


class SimpleConsumer:
    """Made by ``queue.simple_consumer(group)``. It has no state: any of its calls may come from any task, and a message
    may be acknowledged through another consumer of this node, by its handle."""

    def __init__(self, place: "Queues", queue: str, channel: str) -> None:
        self.queue = queue
        self.channel = channel
        self._place = place

    async def receive(
        self,
        items_max: int = 16,
        *,
        wait_s: float = 10.0,
        invisible_duration_s: float = 60.0,
        attempt_id: str = "",
        from_start: bool = False,
    ) -> list[ReceivedMessage]:
        """What is there: up to ``items_max`` messages (at most 32), none when ``wait_s`` (at most 20) seconds are over.

        Each is delivered to nobody else for ``invisible_duration_s`` (at most the queue's ``msg_timeout_max_s``). A
        receive whose answer was lost may be asked again with the same ``attempt_id`` (any text of up to 64 characters):
        it gives the same messages, those that are still held. The channel is made when it is new. Cancelled without an
        ``attempt_id``, it holds nothing: what it took goes to others, untried.

        Of a queue on several nodes, it gives what those have that are there.

        Raises QueueNotFoundError, QueueExistsError (an exclusive channel), ``ValueError`` (ProtocolError from another
        member) for a number out of its bounds, and what a request raises.
        """
        answer = await self._place.ask(
            "receive",
            {
                **self._names(),
                "count": items_max,
                "wait_s": wait_s,
                "invisible_s": invisible_duration_s,
                "attempt_id": attempt_id,
                "from_start": from_start,
            },
        )
        return [received_message(each) for each in answer["messages"]]

    async def ack(self, *messages: ReceivedMessage | str) -> None:
        """These (or these handles) are done; durable on return. Raises NotInFlightError that names those whose time was
        over, and of a queue on several nodes what a request raises, with those whose node is away; the others are done
        all the same."""
        handles = [_handle(each) for each in messages]
        answer = await self._place.ask("ack", {**self._names(), "handles": handles})
        if answer["refused"]:
            raise NotInFlightError(
                f"not held here any more, since their time was over or they are done: {', '.join(answer['refused'])}"
            )

    async def change_invisible_duration(self, message: ReceivedMessage | str, seconds: float) -> float:
        """Deliver it again ``seconds`` from now, unless it is acknowledged before; 0: at once. Returns the seconds that
        it was given (the queue's ``msg_timeout_max_s`` counts from the receipt). Raises NotInFlightError."""
        answer = await self._place.ask(
            "invisible", {**self._names(), "handle": _handle(message), "invisible_s": seconds}
        )
        return float(answer["invisible_s"])

    def _names(self) -> dict[str, object]:
        return {"queue": self.queue, "channel": self.channel}


def received_message(fields: Mapping[str, Any]) -> ReceivedMessage:
    """From the plain values of the control API."""
    return ReceivedMessage(
        str(fields["handle"]),
        str(fields["id"]),
        base64.b64decode(fields["data"]),
        int(fields["attempts"]),
        float(fields["published_s"]),
        float(fields["invisible_s"]),
        str(fields.get("key", "")),
        tuple(str(tag) for tag in fields.get("tags", ())),
        int(fields.get("priority", 0)),
        decode_headers(fields.get("headers") or {}),
    )


def _handle(message: ReceivedMessage | str) -> str:
    return message if isinstance(message, str) else message.handle
