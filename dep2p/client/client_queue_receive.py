"""The client's calls that receive messages of queues and settle them, one call each."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast
from urllib.parse import quote

from dep2p.client.transport import Transport
from dep2p.control_api.encoding import decode_headers, decode_payload
from dep2p.types import Headers

_ANSWER_TIMEOUT_S: Final = 60.0
"""For a commit, and for a member that keeps the queue."""


@dataclass(frozen=True, slots=True)
class ReceivedQueueMessage:
    """A message that was received by a call: nobody else's for ``invisible_s``. ``handle`` names this delivery."""

    handle: str
    id: str
    data: bytes
    attempts: int
    published_s: float
    """Unix seconds."""
    invisible_s: float
    """From its receipt on; then it is delivered again."""
    key: str
    tags: tuple[str, ...]
    priority: int
    headers: Headers


class QueueReceiveCalls:
    """The part of :class:`dep2p.client.Client` that receives by calls."""

    _transport: Transport

    async def queue_receive(
        self,
        name: str,
        channel: str,
        *,
        count: int = 1,
        wait_s: float = 10.0,
        invisible_s: float = 60.0,
        attempt_id: str = "",
        from_start: bool = False,
        realm: str | None = None,
        peer: str | None = None,
    ) -> list[ReceivedQueueMessage]:
        """Up to ``count`` messages (at most 32), none when ``wait_s`` (at most 20) seconds are over.

        They are delivered to nobody else for ``invisible_s``. Asked again with the same ``attempt_id``, the call gives
        the same messages, in case its answer was lost. Nothing is tried again. The channel is made when it is new.
        Raises QueueNotFoundError, ``ControlError`` D1005 for a number out of its bounds.
        """
        body: dict[str, object] = {"count": count, "wait_s": wait_s, "invisible_s": invisible_s}
        body |= {"attempt_id": attempt_id} if attempt_id else {}
        body |= {"from_start": True} if from_start else {}
        answer = await self._transport.call(
            "POST",
            _path(name, channel, "receive"),
            body,
            params=_params(realm, peer),
            timeout_s=wait_s + _ANSWER_TIMEOUT_S,
        )
        return [
            ReceivedQueueMessage(
                str(each["handle"]),
                str(each["id"]),
                decode_payload(str(each["data"]), str(each["encoding"])),
                int(each["attempts"]),
                float(each["published_s"]),
                float(each["invisible_s"]),
                str(each.get("key", "")),
                tuple(str(tag) for tag in each.get("tags", ())),
                int(each.get("priority", 0)),
                decode_headers(each.get("headers") or {}),
            )
            for each in cast(list[dict[str, Any]], answer["messages"])
        ]

    async def queue_ack(
        self,
        name: str,
        channel: str,
        handles: Iterable[str],
        *,
        realm: str | None = None,
        peer: str | None = None,
    ) -> list[str]:
        """These are done, on disk when it returns; gives the handles of those whose time was over before."""
        answer = await self._transport.call(
            "POST",
            _path(name, channel, "ack"),
            {"handles": list(handles)},
            params=_params(realm, peer),
        )
        return [str(each) for each in answer["refused"]]

    async def queue_change_invisible(
        self,
        name: str,
        channel: str,
        handle: str,
        seconds: float,
        *,
        realm: str | None = None,
        peer: str | None = None,
    ) -> float:
        """Deliver it again ``seconds`` from now, unless it is acknowledged before (0: at once); returns the seconds
        that it was given. Raises NotInFlightError."""
        answer = await self._transport.call(
            "POST",
            _path(name, channel, "invisible"),
            {"handle": handle, "invisible_s": seconds},
            params=_params(realm, peer),
        )
        return float(answer["invisible_s"])


def _path(name: str, channel: str, call: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}/channels/{quote(channel, safe='')}/{call}"


def _params(realm: str | None, peer: str | None) -> dict[str, str]:
    return {name: value for name, value in (("realm", realm), ("peer", peer)) if value is not None}
