"""The client's calls about publish/subscribe."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final, Literal
from urllib.parse import quote

import anyio

from dep2p.arguments import checks_arguments
from dep2p.client.delivery import ReliablyPublished
from dep2p.client.models import EventStream, FeedLagged, Published, PublishedMany, TopicMessage, line_or_lag
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.client.upload import Batches
from dep2p.control_api.calls import OnNoPeers, PublishCall, base64_text
from dep2p.control_api.replies import (
    PublishManyReply,
    PublishReply,
    ReliablePublishReply,
    TopicLine,
    TopicList,
    TopicPeers,
    TopicSummary,
    parse_reply,
)
from dep2p.types import PeerId

_LOOK_TIMEOUT_S: Final = 10.0
_PUBLISH_TIMEOUT_S: Final = 120.0  # a publish waits while neighbours' queues are full

OnFull = Literal["drop_oldest", "drop_newest", "pause"]
"""The policy for a reader that is too slow: forget the oldest messages, refuse the newest, or hold back the
neighbours."""


@checks_arguments
class TopicClientApi:
    """The part of :class:`dep2p.client.Client` about topics.

    ``realm`` as everywhere; ``public`` means libp2p's public network instead, when the daemon speaks it.
    """

    _transport: Transport

    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        realm: str | None = None,
        public: bool = False,
        on_no_peers: OnNoPeers = "error",
    ) -> Published:
        """Publish one message. Returns when it is in the queues of the neighbours that forward it.

        Every subscription of this daemon's programs gets it, too, this program's own among them.

        Waits while the node's publish rate is used up or a neighbour's queue is full. Raises NoPeersSubscribedError,
        MessageTooLargeError, NotInRealmError.
        """
        call = PublishCall(data=base64_text(body), on_no_peers=on_no_peers, realm=realm, public=public)
        path = f"{_path(topic)}/messages"
        done = await self._transport.ask("POST", path, PublishReply, call, timeout_s=_PUBLISH_TIMEOUT_S)
        return Published(done.id, done.sent_to, done.queued, done.dropped, done.local_subscriptions)

    async def publish_reliably(
        self,
        topic: str,
        body: bytes,
        *,
        critical_peers: Sequence[PeerId | str] = (),
        wait_for: Literal["all", "any"] = "all",
        wait_s: float = 30.0,
        realm: str | None = None,
    ) -> ReliablyPublished:
        """Publish one message that all (or any) of ``critical_peers`` must have handled: by default the subscribed
        peers.

        Returns when they have, or after ``wait_s`` with the state of that moment; the daemon goes on trying. Raises
        DeliveryFailedError, DeliveryExpiredError when it cannot be any more, NoPeersSubscribedError.
        """
        call = PublishCall(
            data=base64_text(body),
            realm=realm,
            reliable=True,
            critical_peers=tuple(critical_peers),
            wait_for=wait_for,
            wait_s=wait_s,
        )
        path, timeout_s = f"{_path(topic)}/messages", wait_s + _PUBLISH_TIMEOUT_S
        done = await self._transport.ask("POST", path, ReliablePublishReply, call, timeout_s=timeout_s)
        return ReliablyPublished(done.id, done.sent_to, done.acknowledged_by, done.missing)

    async def publish_many(
        self,
        topic: str,
        messages: AsyncIterator[bytes],
        *,
        realm: str | None = None,
        public: bool = False,
        on_no_peers: OnNoPeers = "error",
    ) -> PublishedMany:
        """Publish messages in one call, in order, each as soon as ``messages`` gives it and as fast as they are taken.

        Raises as :meth:`publish`; messages before the one that failed are published then. What ``messages`` raises
        ends the call, too.
        """
        params = {"on_no_peers": on_no_peers, **_params(realm, public)}

        batches = Batches(messages)
        error: Exception | None = None
        done: PublishManyReply | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batches.fill)
            try:
                async with aclosing(batches.pieces()) as pieces:
                    answer = await self._transport.upload(f"{_path(topic)}/messages", pieces, params=params)
                    done = parse_reply(answer, PublishManyReply)
            except Exception as raised:
                error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        assert done is not None
        return PublishedMany(done.messages, done.bytes, done.queued, done.dropped, done.peers, done.local_subscriptions)

    @asynccontextmanager
    async def subscribe(
        self,
        topic: str,
        *,
        realm: str | None = None,
        public: bool = False,
        buffer_items: int = 1_024,
        on_full: OnFull = "drop_oldest",
    ) -> AsyncGenerator[AsyncIterator[TopicMessage | FeedLagged], None]:
        """Yield the messages of others from now on, and a :class:`FeedLagged` where some were dropped.

        ``buffer_items`` (at most 65,536) wait in the daemon for this reader; ``on_full`` is the policy for more.
        Raises NotInRealmError, TooManyTopicsError.
        """
        params = {"buffer": str(buffer_items), "on_full": on_full, **_params(realm, public)}
        async with self._transport.opened("GET", f"{_path(topic)}/messages", params=params) as answer:
            yield EventStream(NdjsonLines(answer), _message)

    async def topics(self) -> list[TopicSummary]:
        """The joined topics, in counts."""
        return list((await self._transport.ask("GET", "/v1/topics", TopicList, timeout_s=_LOOK_TIMEOUT_S)).topics)

    async def topic(self, name: str, *, realm: str | None = None, public: bool = False) -> TopicPeers:
        """The neighbours that are in a topic, those in the mesh, and their scores.

        Raises TopicNotFoundError when neither this node nor a neighbour is in it.
        """
        params = _params(realm, public)
        return await self._transport.ask("GET", _path(name), TopicPeers, params=params, timeout_s=_LOOK_TIMEOUT_S)


def _path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


def _params(realm: str | None, public: bool) -> dict[str, str]:
    params = {} if realm is None else {"realm": realm}
    return params | {"public": "1"} if public else params


def _message(line: dict[str, object]) -> TopicMessage | FeedLagged:
    message = line_or_lag(line, TopicLine)
    if isinstance(message, FeedLagged):
        return message
    return TopicMessage(message.topic, message.data, message.sender, message.seqno, message.id, message.received_from)
