"""Topics that control clients read: joined while they have readers, and left some time after the last reader is
gone."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypedDict

import trio
from msgspec import UNSET, structs
from starlette.types import Receive, Scope, Send

from dep2p.control_api.encoding import encode_headers, encode_line
from dep2p.control_api.replies import TopicJoined, TopicLine
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry, cancel_on_disconnect
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.node_interface import NodeInterface, TopicInterface, TopicMessages
from dep2p.daemon.problems import Problem, problem_of, problem_response
from dep2p.errors import TooManyTopicsError
from dep2p.gossipsub.patterns import has_wildcard, pattern_tokens
from dep2p.gossipsub.topic_types import Lagged, MatchedTopicsFull, OnFull, TopicMessage, TopicQuestion
from dep2p.types import RealmId

_BATCH_BYTES = 262_144


@dataclass(frozen=True, slots=True)
class Reading:
    """The request of one subscriber."""

    topic: str
    realm: str | None
    public: bool
    buffer_items: int
    buffer_bytes: int
    on_full: OnFull
    group: str | None
    """The readers that share the messages with it."""
    handle: str | None
    """The client's handle, whose own publishes it does not get."""


@dataclass(slots=True, eq=False)
class _Handle:
    """A handle of a topic that a client holds, and the number of its connections."""

    topic: TopicInterface
    realm: str | None
    public: bool
    users: int = 0


class _Options(TypedDict):
    """The options of a subscription."""

    buffer_items: int
    buffer_bytes: int
    on_full: OnFull
    group: str | None


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
        self._handles: dict[str, _Handle] = {}

    def handle(self, name: str | None) -> TopicInterface | None:
        """Return the handle that a client has under this name, while it holds or reads it."""
        found = None if name is None else self._handles.get(name)
        return None if found is None else found.topic

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

    @asynccontextmanager
    async def subscribed(self, reading: Reading) -> AsyncGenerator[TopicMessages, None]:
        """Yield the messages of a topic, or of those that match a pattern. Raises as `joined`, and :class:`Problem`
        D1005 for a pattern that is malformed or on the public network."""
        options = _Options(
            buffer_items=reading.buffer_items,
            buffer_bytes=reading.buffer_bytes,
            on_full=reading.on_full,
            group=reading.group,
        )
        async with AsyncExitStack() as stack:
            if not has_wildcard(reading.topic) or reading.public:
                place = (reading.topic, reading.realm, reading.public)
                opened = self.joined(*place) if reading.handle is None else self.held(*place, reading.handle)
                opening = (await stack.enter_async_context(opened)).subscribe(**options)
            else:
                try:
                    pattern_tokens(reading.topic)
                except ValueError as error:
                    raise Problem("D1005", str(error), field="topic") from None
                opening = self._node.subscribe(reading.topic, realm=reading.realm, **options)
            try:
                messages = await stack.enter_async_context(opening)
            except ValueError as error:  # the node reads in as many groups as it may
                raise Problem("D1005", str(error), field="group") from None
            yield messages

    @asynccontextmanager
    async def held(
        self, name: str, realm: str | None, public: bool, handle: str
    ) -> AsyncGenerator[TopicInterface, None]:
        """Yield the handle that a client has under a name, and that all its connections share. Raises as `joined`."""
        held = self._handles.get(handle)
        if held is None:
            topic = await self._join(name, realm, public)
            held = self._handles.setdefault(handle, _Handle(topic, realm, public))
            if held.topic is not topic:  # another connection was faster
                await topic.leave()
        if held.topic.name != name or (held.realm, held.public) != (realm, public):
            raise Problem("D1005", "this handle is one of another topic", field="handle")
        held.users += 1
        try:
            yield held.topic
        finally:
            held.users -= 1
            if not held.users:
                if self._handles.get(handle) is held:
                    del self._handles[handle]
                with trio.CancelScope(shield=True):
                    await self._park(held.topic)

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
        return TopicLines(self, self._subscriptions, self._counts, reading)

    def hold(self, name: str, realm: str | None, public: bool, handle: str) -> "HeldTopic":
        """Return the answer of a client that holds a handle."""
        return HeldTopic(self, self._subscriptions, name, realm, public, handle)


class TopicLines:
    """The messages of a topic as NDJSON. The bounded buffer and its policy are the library's own subscription. Unread
    messages wait there, are dropped there, or hold the peers back."""

    def __init__(
        self,
        table: TopicTable,
        subscriptions: SubscriptionRegistry,
        counts: Counter[str],
        reading: Reading,
    ) -> None:
        self._table = table
        self._subscriptions = subscriptions
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
            async with self._table.subscribed(reading) as messages:
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
        batch: list[bytes] = []
        size = 0
        async for item in messages:
            if isinstance(item, MatchedTopicsFull):
                line = encode_line({"topics_not_joined": item.topics, "topics_max": item.topics_max})
            elif isinstance(item, Lagged):
                self._counts["lagged_topics"] += item.count
                line = encode_line({"lagged": item.count})
            else:
                line = encode_line(_topic_line(item))
            batch.append(line)
            size += len(line)
            if not len(messages) or size >= _BATCH_BYTES:
                yield b"".join(batch)
                batch.clear()
                size = 0
        if batch:
            yield b"".join(batch)


def _topic_line(message: TopicMessage) -> TopicLine:
    line = TopicLine(
        topic=message.topic,
        sender=message.sender,
        seqno=message.seqno,
        id=message.id.hex(),
        received_from=message.received_from,
        received_at_s=round(message.received_at_s, 6),
        headers=encode_headers(message.headers) if message.headers else UNSET,
        data=message.body,
    )
    if not isinstance(message, TopicQuestion):
        return line
    wanted = message.reply_wanted
    within_s = round(max(0.0, wanted.until_s - trio.current_time()), 3)
    return structs.replace(line, reply_token=wanted.token.hex(), reply_within_s=within_s)


class HeldTopic:
    """A topic that a client holds a handle of: one line, and then nothing until either side hangs up."""

    def __init__(
        self,
        table: TopicTable,
        subscriptions: SubscriptionRegistry,
        name: str,
        realm: str | None,
        public: bool,
        handle: str,
    ) -> None:
        self._table = table
        self._subscriptions = subscriptions
        self._place = (name, realm, public, handle)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(receive, send)
        except Exception as error:
            if self._started:
                raise
            await problem_response(error)(scope, receive, send)

    async def _serve(self, receive: Receive, send: Send) -> None:
        ending = self._subscriptions.open("topics")
        last = b""
        try:
            async with self._table.held(*self._place) as topic:
                headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                line = encode_line(TopicJoined(topic=topic.name, realm_id=topic.realm_id))
                await send({"type": "http.response.body", "body": line, "more_body": True})
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancel_on_disconnect, receive, nursery.cancel_scope)
                    last = await ending.take()
                    nursery.cancel_scope.cancel()
        finally:
            self._subscriptions.forget(ending)
        await send({"type": "http.response.body", "body": last, "more_body": False})
