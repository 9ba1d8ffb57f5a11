"""Requests over a topic: one message to all of its subscribers, and their answers until a quorum or a deadline."""

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Final, Self

import trio

from dep2p.arguments import as_bytes, check_number, check_text
from dep2p.errors import HandlerError, ProtocolError, RequestTimeoutError
from dep2p.gossipsub.headers import OwnHeader, ReplyWanted, message_headers
from dep2p.limits import Limits
from dep2p.messaging.service import Messaging
from dep2p.outside_text import one_line
from dep2p.protocols.messaging.answers import (
    ANSWER_NAME,
    FAILED_HEADER,
    FAILURE_BYTES_MAX,
    GATHER_TIMEOUT_S,
    GATHER_TIMEOUT_S_MAX,
    OWN_PREFIX,
    QUORUM_MAX,
    TOKEN_BYTES,
    TOKEN_HEADER,
    AnswerCollector,
    CollectedAnswers,
    GatherOptions,
    GatherResult,
    TopicAnswer,
    is_token,
    read_outcome,
)
from dep2p.protocols.messaging.incoming import Request
from dep2p.pubsub.service import PubSub
from dep2p.types import AnswerOutcome, PeerId

_CONCURRENCY: Final = 64


class Gathering:
    """The answers to a message of a topic as they come: ``async for answer in answers``. It ends at the quorum or at
    the deadline; answers that came before are given first."""

    def __init__(self, collector: AnswerCollector, collected: CollectedAnswers) -> None:
        self._collector = collector
        self._collected = collected
        self._lot = trio.lowlevel.ParkingLot()
        self._asked: tuple[PeerId, ...] = ()

    @property
    def asked(self) -> tuple[PeerId, ...]:
        """The subscribers that this node knew at the publish: neighbours, and this node itself."""
        return self._asked

    def published_to(self, peers: list[PeerId]) -> None:
        """Note the known subscribers. Called by `TopicGathers`."""
        self._asked = tuple(peers)

    def answer_came(self) -> None:
        """Wake the reader. Called by `TopicGathers`."""
        self._lot.unpark_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicAnswer:
        """Return the next answer. Cancelling it loses none."""
        await trio.lowlevel.checkpoint()
        while True:
            answer = self._collector.next_answer(self._collected)
            if answer is not None:
                return answer
            if self._collected.is_over(trio.current_time()):
                raise StopAsyncIteration
            with trio.move_on_at(self._collected.deadline):
                await self._lot.park()

    def result(self) -> GatherResult:
        """Say who has answered so far, and which known subscribers have not."""
        collected = self._collected
        return GatherResult.of(collected.answered, self._asked, collected.quorum, dict(collected.refused))


class TopicGathers:
    """The gathers of one realm: those of this node, and its answers to those of others."""

    def __init__(self, messaging: Messaging, pubsub: PubSub, limits: Limits, own: PeerId) -> None:
        self._messaging = messaging
        self._pubsub = pubsub
        self._limits = limits
        self._own = own
        self._collector = AnswerCollector()
        self._gatherings: dict[bytes, Gathering] = {}
        self._counts: Counter[str] = Counter()
        pubsub.give_answer = self.answer
        # Here and not in `run`: the name is taken before an app can have it.
        messaging.on_request(ANSWER_NAME, self._take, concurrency=_CONCURRENCY)

    # RealmService

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        task_status.started()
        await trio.sleep_forever()

    async def drain(self) -> None:
        """Do nothing: a gather ends by its deadline, and is its caller's."""
        await trio.lowlevel.checkpoint()

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return dict(self._counts)

    def stats(self) -> object:
        """Return the number of gathers that wait, and the bytes of answers that no app has read."""
        return {"open": len(self._collector), "waiting_bytes": self._collector.waiting_bytes}

    # Asking

    @asynccontextmanager
    async def gather(self, topic: str, body: bytes, options: GatherOptions) -> AsyncGenerator[Gathering, None]:
        """See :meth:`dep2p.node.node.Node.gather`."""
        quorum = options.get("quorum")
        timeout_s = options.get("timeout_s", GATHER_TIMEOUT_S)
        check_gather(topic, quorum, timeout_s)
        token = secrets.token_bytes(TOKEN_BYTES)
        own: dict[int, object] = {OwnHeader.REPLY_TOKEN: token, OwnHeader.TIMEOUT_MS: max(1, int(timeout_s * 1000))}
        headers = message_headers(options.get("headers"), own, bytes_max=self._limits.headers_bytes_max)
        deadline = trio.current_time() + timeout_s
        collected = self._collector.open(token, quorum, deadline)
        gathering = self._gatherings[token] = Gathering(self._collector, collected)
        try:
            self._counts["sent"] += 1
            with trio.move_on_at(deadline) as publishing:
                published = await self._pubsub.publish(topic, as_bytes(body, "the message"), headers=headers)
                here = [self._own] if published.local_subscriptions else []
                gathering.published_to([*here, *self._pubsub.peers(topic)])
            if publishing.cancelled_caught:
                raise RequestTimeoutError(f"nothing could be published to {topic[:80]!r} within {timeout_s:g} s")
            yield gathering
        finally:
            self._collector.close(collected)
            del self._gatherings[token]

    async def _take(self, request: Request) -> bytes:
        """Take the answer of a member, or of a program of this node."""
        await trio.lowlevel.checkpoint()
        token, failed = request.headers.get(TOKEN_HEADER), request.headers.get(FAILED_HEADER, False)
        if not is_token(token) or type(failed) is not bool:
            self._counts["answers_malformed"] += 1
            raise HandlerError("the answer has no token of 16 bytes")
        try:
            given = {name: value for name, value in request.headers.items() if not name.startswith(OWN_PREFIX)}
            headers = message_headers(given)
            error = request.body.decode("utf-8") if failed else None
        except ValueError:
            self._counts["answers_malformed"] += 1
            raise HandlerError("the answer has headers that are not allowed, or an error that is no text") from None
        if failed and len(request.body) > FAILURE_BYTES_MAX:
            self._counts["answers_malformed"] += 1
            raise HandlerError(f"the text of an error has at most {FAILURE_BYTES_MAX} bytes")
        answer = TopicAnswer(request.peer, b"" if failed else request.body, headers, error)
        outcome = self._collector.take(token, answer, headers.size_bytes, trio.current_time())
        self._counts[f"answers_{outcome}"] += 1
        gathering = self._gatherings.get(token)
        if gathering is not None and outcome == "taken":
            gathering.answer_came()
        return outcome.encode("ascii")

    # Answering

    async def answer(
        self, author: PeerId, wanted: ReplyWanted, body: bytes, headers: Mapping[str, object] | None, error: str | None
    ) -> AnswerOutcome:
        """Send an answer to the author of a message; see :meth:`dep2p.gossipsub.topic_types.TopicMessage.reply`."""
        sent: dict[str, object] = dict(message_headers(headers, bytes_max=self._limits.headers_bytes_max))
        if any(name.startswith(OWN_PREFIX) for name in sent):
            raise ValueError(f"headers that begin with {OWN_PREFIX!r} are dep2p's own")
        sent[TOKEN_HEADER] = wanted.token
        data = as_bytes(body, "the answer")
        if error is not None:
            check_text(error, "the text of a failure")
            sent[FAILED_HEADER] = True
            data = error.encode("utf-8")[:FAILURE_BYTES_MAX].decode("utf-8", "ignore").encode("utf-8")
        left_s = wanted.until_s - trio.current_time()
        if left_s <= 0:
            await trio.lowlevel.checkpoint()
            self._counts["own_answers_late"] += 1
            return "late"
        timeout_s = min(left_s, self._limits.request_timeout_s)
        reply = await self._messaging.request(author, ANSWER_NAME, data, timeout_s=timeout_s, headers=sent)
        outcome = read_outcome(reply)
        if outcome is None:
            raise ProtocolError(f"{author} says of the answer: {one_line(repr(reply[:40]))}")
        self._counts[f"own_answers_{outcome}"] += 1
        return outcome


def check_gather(topic: str, quorum: int | None, timeout_s: float) -> None:
    """Raises `WrongTypeError` and ``ValueError`` for arguments that no gather can have."""
    check_text(topic, "a topic name")
    check_number(timeout_s, "timeout_s")
    if quorum is not None and (type(quorum) is not int or not 1 <= quorum <= QUORUM_MAX):
        raise ValueError(f"quorum is {quorum!r}: it is a whole number from 1 to {QUORUM_MAX}, or None for all")
    if not 0 < timeout_s <= GATHER_TIMEOUT_S_MAX:
        raise ValueError(f"timeout_s is {timeout_s}: it is more than 0 and at most {GATHER_TIMEOUT_S_MAX:g}")
