"""The client's consumer of a queue: messages that a channel gives to it, and their results."""

from typing import Final, Protocol, Self
from urllib.parse import quote

import anyio
from msgspec import convert
from msgspec.json import decode, encode

from dep2p.arguments import checks_arguments
from dep2p.client.models import FeedInterrupted
from dep2p.client.reconnection.feeds import Feed
from dep2p.client.transport import Transport
from dep2p.control_api.encoding import decode_headers
from dep2p.control_api.errors import DaemonUnreachableError, FeedEndedError, error_from_problem, unexpected_answer
from dep2p.control_api.queues import ConsumerOpened, DeliveredMessage, MessageResult, SettledMessages, SettleMessages
from dep2p.errors import NotInFlightError, QueueConsumerClosedError
from dep2p.gossipsub.topic_types import Lagged
from dep2p.protocols.queues.wire.admin import reply_fields
from dep2p.types import Headers

_RESULTS_MAX: Final = 512
"""Results in one call; further ones go into the next call."""


class _Round:
    """Results that go into one call together."""

    def __init__(self) -> None:
        self.results: list[MessageResult] = []
        self.durable = False
        self.done = anyio.Event()
        self.settled = SettledMessages(refused={}, timeouts_s={})
        self.error: Exception | None = None


class Settling:
    """Sends the results of the messages that one connection has delivered. It ends with the connection.

    Results that come while a call is under way go together in the next call.
    """

    def __init__(self, transport: Transport, consumer_id: str) -> None:
        self._transport = transport
        self._path = f"/v1/queue-consumers/{quote(consumer_id, safe='')}/results"
        self._round = _Round()
        self._is_sending = False
        self._is_lost = False

    def lose(self) -> None:
        """Note that the connection is lost: its messages are not held any more."""
        self._is_lost = True

    async def settle(self, result: MessageResult, *, durable: bool = False) -> float:
        """Report one result. Returns the seconds that are left, for a touch. Raises NotInFlightError, and
        ``ValueError`` for a malformed result: the daemon would refuse it together with all others of its round."""
        result = decode(encode(result), type=MessageResult)
        while len(self._round.results) >= _RESULTS_MAX:
            await self._round.done.wait()
        if self._is_lost:
            raise _not_held(result.id)
        mine = self._round
        mine.results.append(result)
        mine.durable = mine.durable or durable
        if not self._is_sending:
            await self._send_rounds(mine)
        await mine.done.wait()
        if isinstance(mine.error, DaemonUnreachableError | QueueConsumerClosedError):
            raise _not_held(result.id) from mine.error
        if mine.error is not None:
            raise mine.error
        problem = mine.settled.refused.get(result.id)
        if problem is not None:
            raise error_from_problem(problem)
        return mine.settled.timeouts_s.get(result.id, 0.0)

    async def _send_rounds(self, own: _Round) -> None:
        """Send results until the caller's own round is answered: one task calls for all, then the next one does."""
        self._is_sending = True
        try:
            while not own.done.is_set():
                current, self._round = self._round, _Round()
                try:
                    await self._send(current)
                finally:
                    if not current.done.is_set():
                        current.error = current.error or ConnectionError("the call about these results was cancelled")
                        current.done.set()
        finally:
            self._is_sending = False
        if self._round.results:
            with anyio.CancelScope(shield=True):
                await self._send_rounds(self._round)

    async def _send(self, current: _Round) -> None:
        try:
            given = SettleMessages(results=tuple(current.results), durable=current.durable)
            answer = await self._transport.call("POST", self._path, reply_fields(given))
            current.settled = convert(answer, SettledMessages)
        except Exception as error:  # for every task that waits for this round
            current.error = error
        current.done.set()


class ResultTaker(Protocol):
    """Takes the results of messages."""

    async def settle(self, result: MessageResult, *, durable: bool = False) -> float:
        """Report one result. Returns the seconds that are left, for a touch."""
        ...


@checks_arguments
class ClientQueueMessage:
    """A message that a consumer holds. Settle it once: finish, requeue, release or reject."""

    def __init__(self, settling: ResultTaker, opened: ConsumerOpened, message: DeliveredMessage) -> None:
        self._settling = settling
        self._opened = opened
        self._message = message
        self._headers: Headers = decode_headers(message.headers) if message.headers else {}
        self._scopes: list[anyio.CancelScope] = []
        self.deadline_s: float = anyio.current_time() + message.timeout_s
        """The time, on the event loop's clock (``anyio.current_time()``), at which it goes to another consumer."""

    def __repr__(self) -> str:
        return f"<message {self.id} of {self.queue!r}, channel {self.channel!r}>"

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._opened.queue

    @property
    def channel(self) -> str:
        """The channel's name."""
        return self._opened.channel

    @property
    def body(self) -> bytes:
        """The body, as the producer published it."""
        return self._message.body

    @property
    def id(self) -> str:
        """16 hex digits; the same for every channel and every delivery, and never given again on its node."""
        return self._message.id

    @property
    def attempts(self) -> int:
        """The number of this delivery, from 1. Above 1 an earlier delivery did not finish: the message may have been
        worked on."""
        return self._message.attempts

    @property
    def is_redelivered(self) -> bool:
        """Whether this is not the first delivery."""
        return self._message.attempts > 1

    @property
    def published_s(self) -> float:
        """When it was published, Unix seconds of the node that keeps the queue."""
        return self._message.published_s

    @property
    def key(self) -> str:
        """The order key; empty when there is none."""
        return self._message.key

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags, for filters."""
        return self._message.tags

    @property
    def priority(self) -> int:
        """The priority; higher ones are delivered first."""
        return self._message.priority

    @property
    def headers(self) -> Headers:
        """The app's own headers."""
        return self._headers

    @property
    def expired(self) -> bool:
        """Whether its time is over: another consumer gets it. Stop working on it."""
        return anyio.current_time() >= self.deadline_s

    def scope(self) -> anyio.CancelScope:
        """A cancel scope that ends when the message's time does, and moves when it is touched::

        with message.scope() as scope:
            await work(message.body)
        if not scope.cancelled_caught:
            await message.finish()
        """
        scope = anyio.CancelScope(deadline=self.deadline_s)
        self._scopes.append(scope)
        return scope

    async def finish(self, *, durable: bool = False) -> None:
        """Report success. With ``durable``, return when the message cannot come back. Raises NotInFlightError."""
        await self._settling.settle(MessageResult(id=self.id, do="finish"), durable=durable)

    async def requeue(self, delay_s: float = 0.0, reason: str = "") -> None:
        """Report a failure: deliver the message again, after ``delay_s``. Raises NotInFlightError, and ``ValueError``
        for a delay of more than ten years."""
        await self._settling.settle(MessageResult(id=self.id, do="requeue", delay_s=max(0.0, delay_s), reason=reason))

    async def release(self) -> None:
        """Release the message: the attempt does not count. Raises NotInFlightError."""
        await self._settling.settle(MessageResult(id=self.id, do="release"))

    async def reject(self, reason: str = "") -> None:
        """Report that the message can never work: it becomes a dead letter at once. Raises NotInFlightError."""
        await self._settling.settle(MessageResult(id=self.id, do="reject", reason=reason))

    async def touch(self) -> float:
        """Begin the message's time anew, while work goes on. Returns the new ``deadline_s``. Raises
        NotInFlightError."""
        left_s = await self._settling.settle(MessageResult(id=self.id, do="touch"))
        self.move_deadline(anyio.current_time() + left_s)
        return self.deadline_s

    def move_deadline(self, deadline_s: float) -> None:
        """Take a new deadline of a renewed message: its scopes end then."""
        self.deadline_s = deadline_s
        for scope in self._scopes:
            scope.deadline = deadline_s


class ClientMessages:
    """An async iterator over a consumer's messages, for one task; made by ``queue.consume(…)``.

    When the daemon goes away, it waits for it and goes on. The messages that were held are delivered again, to any
    consumer; a late result of such a delivery raises NotInFlightError and settles nothing.
    """

    def __init__(self, transport: Transport, feed: Feed, opened: ConsumerOpened, count: int | None) -> None:
        """``count``: the iterator ends after so many messages, which can be settled until the block ends."""
        self._transport = transport
        self._feed = feed
        self._opened = opened
        self._left = count
        self._settling = Settling(transport, opened.consumer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ClientQueueMessage:
        if self._left == 0:
            raise StopAsyncIteration
        message = await self._next_message()
        if self._left is not None:
            self._left -= 1
            self._feed.call.params = {**self._feed.call.params, "count": str(self._left)}
        return ClientQueueMessage(self._settling, self._opened, message)

    async def _next_message(self) -> DeliveredMessage:
        while True:
            line = await self._feed.next_line()
            if isinstance(line, FeedInterrupted):
                self._settling.lose()
            elif not isinstance(line, Lagged):
                try:
                    if "consumer" not in line:
                        return convert(line, DeliveredMessage)
                    self._settling = Settling(self._transport, convert(line, ConsumerOpened).consumer)
                except ValueError as error:  # of another version
                    raise FeedEndedError(self._feed.name, unexpected_answer(str(error))) from error


def _not_held(message_id: str) -> NotInFlightError:
    return NotInFlightError(
        f"the message {message_id} is not held here any more: the connection to the daemon was lost. Unless an earlier "
        "result of it arrived, it is delivered again"
    )
