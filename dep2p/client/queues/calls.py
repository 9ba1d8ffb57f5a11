"""Calls of the control API about the queues of one broker."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from dep2p.client.transport import Transport
from dep2p.control_api.errors import ControlError, unexpected_answer
from dep2p.control_api.structs import S
from dep2p.errors import MessageTooLargeError
from dep2p.protocols.queues.wire.admin import parse_reply

ANSWER_TIMEOUT_S: Final = 60.0
"""Seconds for a call that waits for a commit, or for another member."""
MALFORMED_CODES: Final = frozenset({"D1005", "D1006", "D1007"})
"""Codes of a call that the daemon refuses each time."""


def is_malformed(error: Exception) -> bool:
    """Whether the daemon refuses the call each time, for what is in it."""
    return isinstance(error, MessageTooLargeError) or (
        isinstance(error, ControlError) and error.code in MALFORMED_CODES
    )


class BrokerCalls:
    """Calls about the queues of one broker."""

    def __init__(self, transport: Transport, params: dict[str, str]) -> None:
        """``params``: the query parameters that name the broker."""
        self.transport = transport
        self.params = params

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        repeatable: bool = False,
    ) -> dict[str, object]:
        """Make a call. ``repeatable``: it may be carried out twice."""
        params = {**self.params, **(params or {})}
        fields = None if body is None else dict(body)
        return await self.transport.call(
            method, path, fields, params=params, timeout_s=timeout_s, repeatable=repeatable
        )

    async def ask(
        self,
        kind: type[S],
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> S:
        """Make a call whose answer is a ``kind``. Raises as `read_answer`."""
        return read_answer(kind, await self.call(method, path, body, params=params, timeout_s=timeout_s))


def read_answer(kind: type[S], answer: Mapping[str, object]) -> S:
    """Make the struct of an answer. Raises ControlError D3007 for an answer of another version, which says neither that
    the call was refused nor that it was not carried out."""
    try:
        return parse_reply(kind, answer)
    except ValueError as error:
        raise unexpected_answer(str(error)) from error


def queue_path(name: str) -> str:
    """Return the path of the calls about a queue."""
    return f"/v1/queues/{quote(name, safe='')}"


def channel_path(name: str, channel: str) -> str:
    """Return the path of the calls about a channel."""
    return f"{queue_path(name)}/channels/{quote(channel, safe='')}"
