"""Topics that control clients read: joined while they have readers, and left some time after the last reader is
gone."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from starlette.types import Receive, Scope, Send

from dep2p.control_api.encoding import encode_line
from dep2p.control_api.replies import TopicLine
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry, cancel_on_disconnect
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.node_interface import NodeInterface, TopicInterface, TopicMessages
from dep2p.daemon.problems import Problem, problem_of, problem_response
from dep2p.errors import TooManyTopicsError
from dep2p.pubsub.types import Lagged, OnFull
from dep2p.types import RealmId

_BATCH_BYTES = 262_144


@dataclass(frozen=True, slots=True)
class Reading:
    """The request of one subscriber."""

    topic: str
    realm: str | None
    public: bool
    buffer_items: int
    on_full: OnFull


class TopicTable:
    """Readers of topics. A topic that lost its last reader stays joined for a grace, so that a reader that comes back
    finds the mesh as it was."""

    def __init__(
        self, node: NodeInterface, subscriptions: SubscriptionRegistry, bounds: ControlBounds, counts: Counter[str]
    ) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._bounds = bounds
        self._counts = counts
        self._parked: dict[tuple[RealmId | None, str], tuple[TopicInterface, float]] = {}
        """Handles without a reader, and the time at which each is left."""

    @property
    def parked_count(self) -> int:
        """The number of topics that are joined only until their grace is over."""
        return len(self._parked)

    @asynccontextmanager
    async def joined(self, name: str, realm: str | None, public: bool) -> AsyncGenerator[TopicInterface, None]:
        """Yield a handle of a topic. Raises NotInRealmError, TooManyTopicsError and :class:`Problem` D1005 for the
        name."""
        topic = await self._join(name, realm, public)
        try:
            yield topic
        finally:
            with trio.CancelScope(shield=True):
                await self._park(topic)

    async def _join(self, name: str, realm: str | None, public: bool) -> TopicInterface:
        try:
            try:
                return await self._node.join(name, realm=realm, public=public)
            except TooManyTopicsError:
                if not self._parked:
                    raise
            await self._leave_parked(float("inf"))  # new topics need their places
            return await self._node.join(name, realm=realm, public=public)
        except ValueError as error:
            raise Problem("D1005", f"topic {name[:80]!r}: {error}", field="topic") from None

    async def _park(self, topic: TopicInterface) -> None:
        if topic.is_joined:
            key = (topic.realm_id, topic.name)
            before = self._parked.pop(key, None)
            self._parked[key] = topic, trio.current_time() + self._bounds.topic_idle_timeout_s
            if before is not None:
                await before[0].leave()

    async def _leave_parked(self, now: float) -> None:
        for key, (topic, leave_at) in list(self._parked.items()):
            if leave_at <= now or not topic.is_joined:
                # Another one may have been parked under this key meanwhile.
                if self._parked.get(key) == (topic, leave_at):
                    del self._parked[key]
                await topic.leave()

    async def reap(self) -> None:
        """Leave topics whose grace is over, until cancelled."""
        while True:
            await trio.sleep(min(5.0, self._bounds.topic_idle_timeout_s / 4))
            await self._leave_parked(trio.current_time())

    def read(self, reading: Reading) -> "TopicLines":
        """Return the answer of a subscription."""
        return TopicLines(self, self._subscriptions, self._bounds, self._counts, reading)


class TopicLines:
    """The messages of a topic as NDJSON. The bounded buffer and its policy are the library's own subscription. Unread
    messages wait there, are dropped there, or hold the peers back."""

    def __init__(
        self,
        table: TopicTable,
        subscriptions: SubscriptionRegistry,
        bounds: ControlBounds,
        counts: Counter[str],
        reading: Reading,
    ) -> None:
        self._table = table
        self._subscriptions = subscriptions
        self._bounds = bounds
        self._counts = counts
        self._reading = reading
        self._last = b""
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(receive, send)
        except Exception as error:
            if self._started:
                raise
            await problem_response(error)(scope, receive, send)

    async def _serve(self, receive: Receive, send: Send) -> None:
        reading = self._reading
        ending = self._subscriptions.open("topics")
        try:
            async with self._table.joined(reading.topic, reading.realm, reading.public) as topic:
                async with topic.subscribe(
                    buffer_items=reading.buffer_items,
                    buffer_bytes=self._bounds.subscription_bytes_max,
                    on_full=reading.on_full,
                ) as messages:
                    await self._send_all(messages, ending, receive, send)
        finally:
            self._subscriptions.forget(ending)

    async def _send_all(self, messages: TopicMessages, ending: LineQueue, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on_disconnect, receive, nursery.cancel_scope)
            nursery.start_soon(self._close_at_end, ending, messages)
            async for lines in self._batches(messages):
                await send({"type": "http.response.body", "body": lines, "more_body": True})
            nursery.cancel_scope.cancel()
        last = self._last or encode_line({"error": problem_of(Problem("D4003", "the node left the topic's realm"))})
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _close_at_end(self, ending: LineQueue, messages: TopicMessages) -> None:
        self._last = await ending.take()
        messages.close()

    async def _batches(self, messages: TopicMessages) -> AsyncIterator[bytes]:
        topic = self._reading.topic
        batch: list[bytes] = []
        size = 0
        async for item in messages:
            if isinstance(item, Lagged):
                self._counts["lagged_topics"] += item.count
                line = encode_line({"lagged": item.count})
            else:
                line = encode_line(
                    TopicLine(
                        topic=topic,
                        sender=item.sender,
                        seqno=item.seqno,
                        id=item.id.hex(),
                        received_from=item.received_from,
                        data=item.body,
                    )
                )
            batch.append(line)
            size += len(line)
            if not len(messages) or size >= _BATCH_BYTES:
                yield b"".join(batch)
                batch.clear()
                size = 0
        if batch:
            yield b"".join(batch)
