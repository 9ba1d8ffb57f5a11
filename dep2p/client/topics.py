"""Topics through the daemon: handles, subscriptions, and the conversions of what the client's calls give."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from types import TracebackType
from typing import Final, Literal, Self, Unpack, overload
from urllib.parse import quote

import anyio
from msgspec import UNSET, Struct
from msgspec.structs import replace

from dep2p.arguments import checks_arguments
from dep2p.client.background import Background
from dep2p.client.delivery import FULL_TIMEOUT_S, ClientReceipt, ClientTopicPublish
from dep2p.client.gathers import giving
from dep2p.client.models import NoticingEventStream, line_or_lag
from dep2p.client.reconnection.feeds import FeedCall, opened_feed
from dep2p.client.reconnection.held_connection import HeldConnection
from dep2p.client.transport import Transport
from dep2p.client.upload import Batches
from dep2p.control_api.calls import PublishCall, base64_text
from dep2p.control_api.encoding import decode_headers, encode_headers
from dep2p.control_api.replies import (
    PublishManyReply,
    PublishReply,
    ReliablePublishReply,
    TopicJoined,
    TopicLine,
    TopicPeers,
    TopicsNotJoinedLine,
    parse_reply,
)
from dep2p.errors import NotInRealmError, TopicNotFoundError
from dep2p.gossipsub.headers import NO_HEADERS, ReplyWanted, message_headers
from dep2p.gossipsub.topic_types import (
    BUFFER_BYTES,
    BUFFER_ITEMS,
    Acknowledgement,
    AcknowledgementOptions,
    GiveAnswer,
    Lagged,
    MatchedTopicsFull,
    OnFull,
    OnNoPeers,
    PublishedMany,
    PublishResult,
    TopicMessage,
    TopicQuestion,
    WaitFor,
    acknowledgement_of,
    check_unacknowledged,
)
from dep2p.types import PeerId, RealmId

_LOOK_TIMEOUT_S: Final = 10.0
_PUBLISH_TIMEOUT_S: Final = 120.0  # a publish waits while neighbours' queues are full
_QUERY_HEADERS_BYTES_MAX: Final = 8_192


def publish_result(done: PublishReply) -> PublishResult:
    """Convert the daemon's reply."""
    return PublishResult(
        bytes.fromhex(done.id), done.sent_to, done.queued, done.dropped, done.seqno, done.local_subscriptions
    )


class TopicPlace(Struct, frozen=True, kw_only=True):
    """The network of a topic, and the handle that publishes."""

    topic: str
    realm: str | None
    public: bool
    handle: str | None = None

    @property
    def path(self) -> str:
        """The topic's path in the control API."""
        return f"/v1/topics/{quote(self.topic, safe='')}"

    @property
    def params(self) -> dict[str, str]:
        """The network, as query parameters."""
        params = {} if self.realm is None else {"realm": self.realm}
        params |= {"public": "1"} if self.public else {}
        return params if self.handle is None else params | {"handle": self.handle}


async def publish(
    transport: Transport,
    place: TopicPlace,
    body: bytes,
    *,
    wait: bool,
    on_no_peers: OnNoPeers,
    headers: Mapping[str, object] | None,
) -> PublishResult:
    """Publish one message."""
    call = PublishCall(
        data=base64_text(body),
        wait=wait,
        on_no_peers=on_no_peers,
        headers=encode_headers(headers) if headers else None,
        realm=place.realm,
        public=place.public,
        handle=place.handle,
    )
    path = f"{place.path}/messages"
    return publish_result(await transport.ask("POST", path, PublishReply, call, timeout_s=_PUBLISH_TIMEOUT_S))


async def publish_from(
    transport: Transport,
    place: TopicPlace,
    messages: AsyncIterator[bytes],
    on_no_peers: OnNoPeers,
    headers: Mapping[str, object] | None,
) -> PublishedMany:
    """Publish messages in one call."""
    batches = Batches(messages)
    error: Exception | None = None
    done: PublishManyReply | None = None
    params = {"on_no_peers": on_no_peers, **place.params}
    if headers:
        params["headers"] = json.dumps(encode_headers(headers), separators=(",", ":"))
        if len(quote(params["headers"])) > _QUERY_HEADERS_BYTES_MAX:
            raise ValueError("headers of a stream of messages may have 8 KiB: publish messages one by one for more")
    async with anyio.create_task_group() as group:
        group.start_soon(batches.fill)
        try:
            async with aclosing(batches.pieces()) as pieces:
                answer = await transport.upload(f"{place.path}/messages", pieces, params=params)
                done = parse_reply(answer, PublishManyReply)
        except Exception as raised:
            error = raised
        group.cancel_scope.cancel()
    if error is not None:
        raise error
    assert done is not None
    return PublishedMany(done.messages, done.bytes, done.queued, done.dropped, done.peers, done.local_subscriptions)


async def publish_reliably(
    transport: Transport,
    place: TopicPlace,
    body: bytes,
    by: Acknowledgement,
    *,
    wait: bool,
    headers: Mapping[str, object] | None,
) -> ClientTopicPublish:
    """Publish one message that critical peers must have handled."""
    call = PublishCall(
        data=base64_text(body),
        realm=place.realm,
        handle=place.handle,
        wait=wait,
        reliable=True,
        critical_peers=None if by.critical_peers is None else tuple(by.critical_peers),
        wait_for=by.wait_for,
        ttl_s=by.ttl_s,
        headers=encode_headers(headers) if headers else None,
    )
    path = f"{place.path}/messages"
    done = await transport.ask("POST", path, ReliablePublishReply, call, timeout_s=FULL_TIMEOUT_S)
    receipts = [ClientReceipt(transport, each, place.topic, place.topic) for each in done.receipts]
    return ClientTopicPublish(publish_result(done), receipts, by.wait_for)


@checks_arguments
class ClientTopic:
    """A handle of a joined topic, from ``await client.join(name)``. The last handle that leaves leaves the topic.

    Also an async context manager that leaves at its end. The daemon is in the topic while the handle is, and leaves it
    some time after the last one. After a restart of the daemon it is joined again.
    """

    def __init__(self, transport: Transport, place: TopicPlace, realm_id: RealmId | None, hold: HeldConnection) -> None:
        """``hold``: the connection by which the daemon knows that this handle is there."""
        self._transport = transport
        self._place = place
        self._realm_id = realm_id
        self._hold = hold
        self._has_left = False
        self._critical_peers: tuple[PeerId, ...] | None = None

    @classmethod
    async def join(cls, transport: Transport, background: Background, place: TopicPlace) -> "ClientTopic":
        """See `Client.join`."""
        place = replace(place, handle=secrets.token_hex(8))
        name = f"the handle of topic {place.topic!r}"
        call = FeedCall("GET", f"{place.path}/handle", name, loses=False, params=place.params)
        hold = HeldConnection()
        joined = parse_reply(await hold.open(transport, background, call), TopicJoined)
        return cls(transport, place, joined.realm_id, hold)

    @property
    def name(self) -> str:
        """The topic's name."""
        return self._place.topic

    @property
    def realm_id(self) -> RealmId | None:
        """The realm's id; None on the public network."""
        return self._realm_id

    @property
    def is_joined(self) -> bool:
        """Whether this handle is joined, or will be when the daemon is back: false once it has left."""
        return not self._has_left and self._hold.is_held

    def __repr__(self) -> str:
        return f"ClientTopic({self.name!r}{'' if self.is_joined else ', left'})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.leave()

    @overload
    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        headers: Mapping[str, object] | None = None,
        reliable: Literal[False] = False,
    ) -> PublishResult: ...

    @overload
    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        headers: Mapping[str, object] | None = None,
        reliable: Literal[True],
        critical_peers: Sequence[PeerId] | None = None,
        wait_for: WaitFor = "all",
        ttl_s: float | None = None,
    ) -> ClientTopicPublish: ...

    async def publish(
        self,
        body: bytes,
        *,
        wait: bool = True,
        on_no_peers: OnNoPeers = "error",
        headers: Mapping[str, object] | None = None,
        reliable: bool = False,
        **options: Unpack[AcknowledgementOptions],
    ) -> PublishResult | ClientTopicPublish:
        """Publish ``body``. Returns when it is in the bounded queues of the neighbours that forward it.

        With ``wait`` it waits while the publish rate is used up or a neighbour's queue is full; a neighbour that is
        much slower than the others is not waited for, and listed in ``dropped``. Without, it waits for nothing.
        Subscriptions of other handles on this node get it, too, without the network.
        ``on_no_peers``: what to do while no peer and no other handle here is subscribed: "error" raises
        NoPeersSubscribedError, "queue" keeps it for a first peer, "ok" publishes to no peer.

        Raises MessageTooLargeError (``Limits.message_bytes_max``), RateLimitedError (``pubsub_publish_per_s``, only
        without ``wait``), NoPeersSubscribedError, PublishRefusedError (a validator of this topic said no),
        TopicNotFoundError (this handle has left); nothing was sent then.

        ``reliable``: each of ``critical_peers`` (by default `ClientTopic.critical_peers`, or who is subscribed now)
        must have handled it, or the returned receipt says why not. Raises NoPeersSubscribedError when there is no
        critical peer, StoreError when it is published but could not be kept for them. ``ttl_s``: seconds until it
        expires, at most 30 days; ``Limits.delivery_age_max_s`` by default.
        """
        self._check()
        if reliable:
            if self._place.public:
                raise NotInRealmError("reliable publishing needs a realm: the public network has no acknowledgements")
            by = acknowledgement_of(options, self._critical_peers)
            return await publish_reliably(self._transport, self._place, body, by, wait=wait, headers=headers)
        check_unacknowledged(options)
        return await publish(self._transport, self._place, body, wait=wait, on_no_peers=on_no_peers, headers=headers)

    @property
    def critical_peers(self) -> tuple[PeerId, ...] | None:
        """The peers that must acknowledge reliable publishes by this handle; None: all that are subscribed then."""
        return self._critical_peers

    @critical_peers.setter
    def critical_peers(self, peers: Sequence[PeerId] | None) -> None:
        """Set the critical peers of the publishes that follow."""
        self._critical_peers = None if peers is None else tuple(peers)

    def subscribe(
        self,
        *,
        buffer_items: int = BUFFER_ITEMS,
        buffer_bytes: int = BUFFER_BYTES,
        on_full: OnFull = "drop_oldest",
        group: str | None = None,
    ) -> "ClientSubscription":
        """Subscribe to the messages of others: ``async with topic.subscribe() as messages: async for message in
        messages``.

        Others are all members, and the other programs of this node: what this very handle publishes does not come back
        to it, what another handle of the topic or `Client.publish` publishes does.

        ``on_full``: "drop_oldest" and "drop_newest" drop, count and say so by a `Lagged` item; "pause" takes nothing
        more from any neighbour of this network until half of the buffer is read, and loses nothing. The daemon bounds
        the buffer, too.
        ``group``: share the messages with all subscriptions to this topic, of every member, that name the same group:
        each message goes to one of them, also what this handle publishes. While readers come and go, a message may
        reach none of them or two; a queue is for work that must be done exactly by one.
        Raises ``ValueError``, and TopicNotFoundError when this handle has left.
        """
        self._check()
        return ClientSubscription(self._transport, self._place, buffer_items, buffer_bytes, on_full, group)

    async def peers(self) -> list[PeerId]:
        """List the neighbours that are subscribed."""
        return list((await self._look()).peers)

    async def mesh(self) -> list[PeerId]:
        """List the neighbours with which the node exchanges every message."""
        return list((await self._look()).mesh)

    async def scores(self) -> dict[PeerId, float]:
        """The router's opinion of each subscribed neighbour; below 0 it leaves the mesh."""
        return (await self._look()).scores

    async def _look(self) -> TopicPeers:
        place = replace(self._place, handle=None)
        return await self._transport.ask("GET", place.path, TopicPeers, params=place.params, timeout_s=_LOOK_TIMEOUT_S)

    async def leave(self) -> None:
        """Give up this handle. Idempotent."""
        self._has_left = True
        await self._hold.aclose()

    def _check(self) -> None:
        if self._has_left:
            raise TopicNotFoundError(f"the topic {self.name!r} was left")
        if not self._hold.is_held:
            why = self._hold.error or "its client has ended"
            raise TopicNotFoundError(f"the topic {self.name!r} is no longer joined: {why}")


class ClientSubscription:
    """``async with topic.subscribe() as messages: async for message in messages``.

    Messages that arrive inside the block are buffered in the daemon: at most ``buffer_items``, and ``buffer_bytes`` of
    payload. Iterating gives each :class:`TopicMessage`, and a :class:`Lagged` where some were dropped; it ends when the
    topic is left. When the daemon goes away, it waits for it and goes on; a :class:`FeedInterrupted` and a
    :class:`FeedResumed` say so, and what was published in between is lost. Iterate in one task.
    """

    def __init__(
        self,
        transport: Transport,
        place: TopicPlace,
        buffer_items: int,
        buffer_bytes: int,
        on_full: OnFull,
        group: str | None = None,
    ) -> None:
        if buffer_items < 1 or buffer_bytes < 1:
            raise ValueError("buffer_items and buffer_bytes must be at least 1")
        params = place.params | {"buffer": str(buffer_items), "buffer_bytes": str(buffer_bytes), "on_full": on_full}
        if group is not None:
            params["group"] = group
        name = f"messages of topic {place.topic!r}"
        feed = FeedCall("GET", f"{place.path}/messages", name, loses=True, params=params)
        self._opening = opened_feed(transport, feed)
        self._give = giving(transport, place.realm)
        self._stack = AsyncExitStack()
        self._items: NoticingEventStream[TopicMessage | Lagged] | None = None
        self._is_over = False
        self.lagged_total: int = 0
        """Messages dropped so far."""

    async def __aenter__(self) -> Self:
        if self._items is not None or self._is_over:
            raise RuntimeError("a subscription is entered once: make another one")
        lines = await self._stack.enter_async_context(self._opening)
        self._items = NoticingEventStream(lines, lambda line: _message(line, self._give))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        await self._stack.__aexit__(kind, error, trace)

    def close(self) -> None:
        """End it: iterating ends. Idempotent."""
        self._is_over = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TopicMessage | Lagged:
        """Return the next item. Cancelling it loses none."""
        if self._is_over:
            raise StopAsyncIteration
        if self._items is None:
            raise RuntimeError("enter the subscription first: `async with topic.subscribe() as messages`")
        item = await anext(self._items)
        if isinstance(item, Lagged):
            self.lagged_total += item.count
        return item


def _message(line: dict[str, object], give: GiveAnswer) -> TopicMessage | Lagged:
    if "topics_not_joined" in line:
        full = parse_reply(line, TopicsNotJoinedLine)
        return MatchedTopicsFull(0, full.topics_not_joined, full.topics_max)
    message = line_or_lag(line, TopicLine)
    if isinstance(message, Lagged):
        return message
    message_id = bytes.fromhex(message.id)
    made = TopicMessage(
        message.topic,
        message.data,
        message.sender,
        message.seqno,
        message_id,
        message.received_from,
        NO_HEADERS if message.headers is UNSET else message_headers(decode_headers(message.headers)),
        message.received_at_s,
    )
    if message.sender is None or message.reply_token is UNSET or message.reply_within_s is UNSET:
        return made
    wanted = ReplyWanted(bytes.fromhex(message.reply_token), time.monotonic() + message.reply_within_s)
    return TopicQuestion(made, message.sender, wanted, give)
