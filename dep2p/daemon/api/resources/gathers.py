"""Requests over topics that control clients make: the answers as NDJSON."""

import trio
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from dep2p.control_api.encoding import encode_headers, encode_line
from dep2p.control_api.gathers import GatherAnswerLine, GatherAskedLine, GatherResultLine
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry, cancel_on_disconnect
from dep2p.daemon.problems import problem_response
from dep2p.protocols.messaging.answers import GatherOptions, TopicAnswer
from dep2p.services.gathers import Gathering, TopicGathers


class GatherLines:
    """Whom the node asked, the answers as they come, and the result."""

    def __init__(
        self,
        subscriptions: SubscriptionRegistry,
        gathers: TopicGathers,
        topic: str,
        body: bytes,
        options: GatherOptions,
    ) -> None:
        self._subscriptions = subscriptions
        self._gathers = gathers
        self._topic = topic
        self._body = body
        self._options = options
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            ending = self._subscriptions.open("gathers")
            try:
                async with self._gathers.gather(self._topic, self._body, self._options) as answers:
                    await self._send_all(answers, ending, receive, send)
            finally:
                self._subscriptions.forget(ending)
        except Exception as error:
            if self._started:
                raise
            await problem_response(error)(scope, receive, send)

    async def _send_all(self, answers: Gathering, ending: LineQueue, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        asked = encode_line(GatherAskedLine(asked=answers.asked))
        await send({"type": "http.response.body", "body": asked, "more_body": True})
        last = b""

        async def end_early() -> None:
            nonlocal last
            last = await ending.take()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on_disconnect, receive, nursery.cancel_scope)
            nursery.start_soon(end_early)
            async for answer in answers:
                await send({"type": "http.response.body", "body": _line(answer), "more_body": True})
            nursery.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": last or _result(answers), "more_body": False})


def _line(answer: TopicAnswer) -> bytes:
    return encode_line(
        GatherAnswerLine(
            peer=answer.peer,
            data=answer.body,
            headers=encode_headers(answer.headers) if answer.headers else UNSET,
            failed=UNSET if answer.error is None else answer.error,
        )
    )


def _result(answers: Gathering) -> bytes:
    result = answers.result()
    return encode_line(
        GatherResultLine(
            answered=result.answered,
            failed=dict(result.failed),
            missing=result.missing,
            has_quorum=result.has_quorum,
            refused=dict(result.refused),
        )
    )
