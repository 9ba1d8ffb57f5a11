"""The client's calls about publish/subscribe."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Literal, cast
from urllib.parse import quote

import anyio

from dep2p.client.delivery import ReliablyPublished, reliable_body, reliably_published
from dep2p.client.models import Lagged, Published, PublishedMany, Subscription, TopicMessage
from dep2p.client.transport import NdjsonLines, Transport
from dep2p.client.upload import Batches
from dep2p.control_api.encoding import decode_payload, encode_payload
from dep2p.types import PeerId

_LOOK_TIMEOUT_S: Final = 10.0
_PUBLISH_TIMEOUT_S: Final = 120.0  # a publish waits while neighbours' queues are full

OnNoPeers = Literal["error", "queue", "ok"]
"""While nobody is subscribed: NoPeersSubscribedError, wait for a first subscriber, or go to nobody."""
OnFull = Literal["drop_oldest", "drop_newest", "pause"]
"""When a reader is too slow: forget the oldest messages, refuse the newest, or hold back the node's neighbours."""


class TopicCalls:
    """The part of :class:`dep2p.client.Client` about topics.

    ``realm`` as everywhere; ``public`` means libp2p's public network instead, when the daemon speaks it.
    """

    _transport: Transport

    async def publish(
        self,
        topic: str,
        data: bytes,
        *,
        realm: str | None = None,
        public: bool = False,
        on_no_peers: OnNoPeers = "error",
    ) -> Published:
        """Publish one message; returns when it is in the queues of the neighbours that carry it on.

        Waits while the node's publish rate is used up or a neighbour's queue is full. Raises NoPeersSubscribedError,
        MessageTooLargeError, NotInRealmError.
        """
        body = {**encode_payload(data), "on_no_peers": on_no_peers}
        if realm is not None:
            body["realm"] = realm
        if public:
            body["public"] = True
        answer = await self._transport.call("POST", f"{_path(topic)}/messages", body, timeout_s=_PUBLISH_TIMEOUT_S)
        return Published(
            str(answer["id"]),
            tuple(PeerId(str(peer)) for peer in answer["sent_to"]),
            bool(answer["queued"]),
            tuple(PeerId(str(peer)) for peer in answer["dropped"]),
        )

    async def publish_reliably(
        self,
        topic: str,
        data: bytes,
        *,
        critical_peers: Sequence[PeerId | str] = (),
        wait_for: Literal["all", "any"] = "all",
        wait_s: float = 30.0,
        realm: str | None = None,
    ) -> ReliablyPublished:
        """Publish one message that all (or any) of ``critical_peers`` must have handled: by default who is subscribed.

        Returns when they have, or after ``wait_s`` with what is known then; the daemon goes on trying. Raises
        DeliveryFailedError, DeliveryExpiredError when it cannot be any more, NoPeersSubscribedError.
        """
        body = {**encode_payload(data), **reliable_body(critical_peers, wait_for, wait_s)}
        if realm is not None:
            body["realm"] = realm
        path = f"{_path(topic)}/messages"
        answer = await self._transport.call("POST", path, body, timeout_s=wait_s + _PUBLISH_TIMEOUT_S)
        return reliably_published(answer)

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
        answer: dict[str, Any] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batches.fill)
            try:
                async with aclosing(batches.pieces()) as pieces:
                    answer = await self._transport.upload(f"{_path(topic)}/messages", pieces, params=params)
            except Exception as raised:
                error = raised
            tasks.cancel_scope.cancel()
        if error is not None:
            raise error
        return PublishedMany(
            int(answer["messages"]),
            int(answer["bytes"]),
            int(answer["queued"]),
            int(answer["dropped"]),
            int(answer["peers"]),
        )

    @asynccontextmanager
    async def subscribe(
        self,
        topic: str,
        *,
        realm: str | None = None,
        public: bool = False,
        buffer_items: int = 1_024,
        on_full: OnFull = "drop_oldest",
    ) -> AsyncGenerator[AsyncIterator[TopicMessage | Lagged], None]:
        """The messages of others from now on, and a :class:`Lagged` where some were dropped.

        ``buffer_items`` (at most 65,536) wait in the daemon for this reader; ``on_full`` says what happens to more.
        Raises NotInRealmError, TooManyTopicsError.
        """
        params = {"buffer": str(buffer_items), "on_full": on_full, **_params(realm, public)}
        async with self._transport.opened("GET", f"{_path(topic)}/messages", params=params) as answer:
            yield Subscription(NdjsonLines(answer), _message)

    async def topics(self) -> list[dict[str, Any]]:
        """Joined topics: ``topic``, ``realm``, ``realm_id``, ``peers``, ``mesh``, ``subscriptions``,
        ``buffered_items`` (counts)."""
        answer = await self._transport.call("GET", "/v1/topics", timeout_s=_LOOK_TIMEOUT_S)
        return cast(list[dict[str, Any]], answer["topics"])

    async def topic(self, name: str, *, realm: str | None = None, public: bool = False) -> dict[str, Any]:
        """``topic``, ``realm_id``, ``joined``; ``peers`` and ``mesh`` (ids); ``scores`` (by id).

        Raises TopicNotFoundError when neither this node nor a neighbour is in it.
        """
        return await self._transport.call("GET", _path(name), params=_params(realm, public), timeout_s=_LOOK_TIMEOUT_S)


def _path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


def _params(realm: str | None, public: bool) -> dict[str, str]:
    params = {} if realm is None else {"realm": realm}
    return params | {"public": "1"} if public else params


def _message(line: dict[str, object]) -> TopicMessage | Lagged:
    fields = cast(dict[str, Any], line)
    if "lagged" in fields:
        return Lagged(int(fields["lagged"]))
    sender, via = fields["sender"], fields["received_from"]
    return TopicMessage(
        str(fields["topic"]),
        decode_payload(str(fields["data"]), str(fields["encoding"])),
        None if sender is None else PeerId(str(sender)),
        None if fields["seqno"] is None else int(fields["seqno"]),
        str(fields["id"]),
        None if via is None else PeerId(str(via)),
    )
