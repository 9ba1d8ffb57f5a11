"""The client's requests over topics, and its answers to those of others."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, Self, Unpack
from urllib.parse import quote

from msgspec import UNSET

from dep2p.arguments import as_bytes, check_text, checks_arguments
from dep2p.client.models import realm_text
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.control_api.calls import base64_text
from dep2p.control_api.encoding import decode_headers, encode_headers, fields_of
from dep2p.control_api.gathers import (
    AnswerCall,
    AnswerOutcomeReply,
    GatherAnswerLine,
    GatherAskedLine,
    GatherCall,
    GatherResultLine,
)
from dep2p.control_api.replies import parse_reply
from dep2p.errors import ProtocolError
from dep2p.gossipsub.headers import ReplyWanted, message_headers
from dep2p.gossipsub.topic_types import GiveAnswer
from dep2p.protocols.messaging.answers import (
    GATHER_TIMEOUT_S,
    GatherOptions,
    GatherResult,
    TopicAnswer,
    read_outcome,
)
from dep2p.types import AnswerOutcome, PeerId

if TYPE_CHECKING:
    from dep2p.realm.credentials import RealmChoice

_MARGIN_S: Final = 10.0


class ClientGathering:
    """The answers to a message of a topic as they come: ``async for answer in answers``. It ends at the quorum or at
    the deadline. Use it in one task."""

    def __init__(self, lines: NdjsonLines, asked: tuple[PeerId, ...], quorum: int | None) -> None:
        self._lines = lines
        self._asked = asked
        self._quorum = quorum
        self._answered: dict[PeerId, str | None] = {}
        self._result: GatherResult | None = None

    @property
    def asked(self) -> tuple[PeerId, ...]:
        """The subscribers that the node knew at the publish."""
        return self._asked

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicAnswer:
        """Return the next answer. Cancelling it loses none."""
        if self._result is not None:
            raise StopAsyncIteration
        line = await self._lines.next_line()
        if "peer" not in line:
            last = parse_reply(line, GatherResultLine)
            self._result = GatherResult(last.answered, last.failed, last.missing, last.has_quorum, last.refused)
            raise StopAsyncIteration
        found = parse_reply(line, GatherAnswerLine)
        error = None if found.failed is UNSET else found.failed
        self._answered[found.peer] = error
        headers = decode_headers({} if found.headers is UNSET else found.headers)
        return TopicAnswer(found.peer, found.data, headers, error)

    def result(self) -> GatherResult:
        """Say who has answered so far, and which known subscribers have not."""
        if self._result is not None:
            return self._result
        return GatherResult.of(self._answered, self._asked, self._quorum, {})


@checks_arguments
class GatherClientApi:
    """The part of :class:`dep2p.client.Client` about requests over topics."""

    _transport: Transport

    @asynccontextmanager
    async def gather(
        self, topic: str, body: bytes, *, realm: "RealmChoice" = None, **options: Unpack[GatherOptions]
    ) -> AsyncGenerator[ClientGathering, None]:
        """Publish a message that asks its subscribers for answers, and yield these as they come; see
        :meth:`dep2p.Node.gather`.

        Raises NoPeersSubscribedError, RequestTimeoutError (nothing could be published in time), OverloadedError,
        MessageTooLargeError, NotInRealmError, ControlError D1005 for a quorum or a time that is not allowed.
        """
        headers, quorum = options.get("headers"), options.get("quorum")
        call = GatherCall(
            data=base64_text(body),
            realm=realm_text(realm),
            headers=encode_headers(headers) if headers else None,
            quorum=quorum,
            timeout_s=options.get("timeout_s", GATHER_TIMEOUT_S),
        )
        path = f"/v1/topics/{quote(topic, safe='')}/gathers"
        async with self._transport.opened("POST", path, body=fields_of(call)) as answer:
            lines = NdjsonLines(answer)
            asked = parse_reply(await lines.next_line(), GatherAskedLine)
            yield ClientGathering(lines, asked.asked, quorum)


def giving(transport: Transport, realm: str | None) -> GiveAnswer:
    """Return what sends the answers to messages of a subscription. Times are those of `time.monotonic`."""

    async def give(
        author: PeerId, wanted: ReplyWanted, body: bytes, headers: Mapping[str, object] | None, error: str | None
    ) -> AnswerOutcome:
        checked = message_headers(headers)
        if error is not None:
            check_text(error, "the text of a failure")
        data = as_bytes(body, "the answer")
        within_s = wanted.until_s - time.monotonic()
        if within_s <= 0:
            return "late"
        call = AnswerCall(
            author=author,
            token=wanted.token.hex(),
            within_s=within_s,
            data=base64_text(data),
            headers=encode_headers(checked) if checked else None,
            error=error,
            realm=realm,
        )
        reply = await transport.ask("POST", "/v1/answers", AnswerOutcomeReply, call, timeout_s=within_s + _MARGIN_S)
        outcome = read_outcome(reply.outcome.encode())
        if outcome is None:
            raise ProtocolError(f"the daemon says of the answer: {reply.outcome[:40]!r}")
        return outcome

    return give
