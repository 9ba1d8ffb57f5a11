"""Reliable publishes to topics: critical peers acknowledge straight to the publisher (docs/spec/delivery.md).

The message goes to all subscribers by pub/sub. The publisher also asks each critical peer, over its delivery link, to
report when its app has handled the message. A peer that has not got the message by the ack timeout gets it over that
link.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import trio

from dep2p.arguments import as_bytes
from dep2p.delivery.receipts import Receipt, TopicPublish
from dep2p.delivery.receive_link import TopicVerdict
from dep2p.delivery.service import ReliableDelivery, checked_ttl_s
from dep2p.errors import NoPeersSubscribedError, ProtocolError, PublishRefusedError
from dep2p.gossipsub.headers import NO_HEADERS, message_headers
from dep2p.gossipsub.messages.message_id import realm_id as realm_message_id
from dep2p.gossipsub.topic_types import Acknowledgement, TopicMessage
from dep2p.protocols.delivery.receiver import ReceiveWindow
from dep2p.protocols.wire.frame import HEADERS
from dep2p.protocols.wire.headers import HeaderKey, HeaderMap, app_headers, encode_headers
from dep2p.pubsub.service import PubSub
from dep2p.types import PeerId, peer_id_bytes

_ASK: Final = b"\x00"
_DATA: Final = b"\x01"
_SEQNO_BYTES: Final = 8
_OWN_HEADERS_BYTES: Final = 32
"""Bytes that TOPIC and SEQNO add to an app's headers, without the topic's name."""
_REMEMBERED_MAX: Final = 16_384
"""Handled messages that are remembered for a later question."""
_ASKED_MAX: Final = 4_096
"""Questions about messages that were not handled yet; the oldest is forgotten first, and comes again."""


class TopicReceipt(Receipt, eq=False):
    """A message of a topic, for one critical peer: first a question, then the message itself when that was not
    enough."""

    is_whole: ClassVar[bool] = False

    def body_of_try(self) -> bytes:
        """Return the body of this try; its first byte says whether it is the question or the message."""
        return self.body if self.tries > 1 or self.is_restored else _ASK


class DeliveryTopics:
    """Both ends of reliable publishes, for one realm. Sets itself as `PubSub.reliable` and as the topics of
    `delivery`."""

    def __init__(self, delivery: ReliableDelivery, pubsub: PubSub) -> None:
        self._delivery = delivery
        self._pubsub = pubsub
        self._counters = delivery.counts
        self._handled: dict[bytes, None] = {}
        self._asked: dict[bytes, dict[tuple[PeerId, ReceiveWindow, int], None]] = {}
        pubsub.reliable = self
        self._unread: dict[bytes, None] = {}
        """Messages that pub/sub brought when no app read their topics: their senders must bring them again."""
        pubsub.on_handled = self._on_handled
        pubsub.on_unread = self._on_unread
        pubsub.on_subscribed = lambda topic: delivery.inbound.app_came(("topic", topic))
        delivery.attach_topics(self, TopicReceipt)

    # The publisher

    async def publish(
        self,
        topic: str,
        body: bytes,
        by: Acknowledgement,
        wait: bool,
        *,
        origin: object | None = None,
        headers: Mapping[str, object] | None = None,
    ) -> TopicPublish:
        """See :meth:`dep2p.pubsub.topic.Topic.publish`."""
        critical_peers, wait_for = by.critical_peers, by.wait_for
        if wait_for not in ("all", "any"):
            raise ValueError(f'wait_for is {wait_for!r}: it must be "all" or "any"')
        ttl_s = 0.0 if by.ttl_s is None else checked_ttl_s(by.ttl_s)
        body = as_bytes(body, "the message")
        peers = list(dict.fromkeys(self._subscribed(topic, origin) if critical_peers is None else critical_peers))
        if not peers:
            raise NoPeersSubscribedError(
                f"no peer is critical for {topic!r}: no peer is subscribed now. Wait for one, or name critical_peers"
            )
        checked = NO_HEADERS if headers is None else self._pubsub.checked_headers(headers)
        headers_bytes_max = self._delivery.context.limits.headers_bytes_max
        if (
            checked is not NO_HEADERS
            and checked.size_bytes + len(topic.encode()) + _OWN_HEADERS_BYTES > headers_bytes_max
        ):
            raise ValueError(
                f"headers of {checked.size_bytes} bytes: with the topic's name at most {headers_bytes_max} are allowed"
            )
        result = await self._pubsub.publish(topic, body, wait=wait, on_no_peers="ok", origin=origin, headers=checked)
        seqno = (result.seqno or 0).to_bytes(_SEQNO_BYTES, "big")
        head = encode_headers({HeaderKey.TOPIC: topic, HeaderKey.SEQNO: seqno}, checked)
        receipts: list[Receipt] = []
        for peer in peers:
            receipt = TopicReceipt(head, HEADERS, _DATA + body, trio.current_time(), peer=peer, name=topic, topic=topic)
            receipt.ttl_s = ttl_s
            await self._delivery.accept(receipt, wait=wait)
            receipts.append(receipt)
        return TopicPublish(result, receipts, wait_for)

    def _subscribed(self, topic: str, origin: object | None) -> list[PeerId]:
        """The subscribed peers, and this node when another program of it is subscribed."""
        own = [self._delivery.own_peer] if self._pubsub.has_local_readers(topic, origin) else []
        return [*self._pubsub.peers(topic), *own]

    # The critical peer

    async def receive(
        self, peer: PeerId, window: ReceiveWindow, number: int, headers: HeaderMap, body: bytes
    ) -> tuple[TopicVerdict, str]:
        topic, seqno = headers.get(HeaderKey.TOPIC), headers.get(HeaderKey.SEQNO)
        if not isinstance(topic, str) or not isinstance(seqno, bytes) or len(seqno) != _SEQNO_BYTES:
            raise ProtocolError("a message for a topic without its TOPIC and SEQNO")
        if body[:1] not in (_ASK, _DATA):
            raise ProtocolError("a message for a topic that neither asks nor brings data")
        try:
            given = message_headers(app_headers(headers))
        except ValueError as error:
            raise ProtocolError(f"a message for a topic with other headers than are allowed: {error}") from None
        # The id is made with the authenticated sender: no peer can make another peer's message count as seen.
        message_id = realm_message_id(peer_id_bytes(peer), seqno, topic, b"", b"")
        if message_id in self._handled:
            return "handled", ""
        if not self._pubsub.has_subscription(topic):
            return "unsubscribed", ""
        asked = self._asked.get(message_id)
        if asked is None:
            if len(self._asked) >= _ASKED_MAX:
                del self._asked[next(iter(self._asked))]
                self._counters["topic_questions_forgotten"] += 1
            asked = self._asked[message_id] = {}
        asked[(peer, window, number)] = None
        if message_id in self._unread and body[:1] == _ASK:
            await trio.lowlevel.checkpoint()
            return "absent", ""
        if body[:1] == _DATA and not self._has_come(message_id):
            try:
                await self._pubsub.validators.judge_own(topic, body[1:], peer, given)
            except PublishRefusedError:
                del self._asked[message_id]
                return "rejected", "a validator of the topic refused it"
            if not self._has_come(message_id):  # it may have come while the validators worked
                number_bytes = int.from_bytes(seqno, "big")
                self._unread.pop(message_id, None)
                self._pubsub.deliver_direct(topic, peer, number_bytes, message_id, body[1:], given)
                self._counters["topic_messages_delivered_direct"] += 1
        else:
            await trio.lowlevel.checkpoint()
        if message_id in self._handled:
            return "handled", ""
        return ("here" if self._has_come(message_id) else "absent"), ""

    def _has_come(self, message_id: bytes) -> bool:
        """Whether pub/sub has brought the message while an app read its topic."""
        return self._pubsub.has_seen(message_id) and message_id not in self._unread

    def _on_unread(self, message: TopicMessage) -> None:
        if len(self._unread) >= _REMEMBERED_MAX:
            del self._unread[next(iter(self._unread))]
        self._unread[message.id] = None

    def _on_handled(self, message: TopicMessage) -> None:
        handled = self._handled
        if len(handled) >= _REMEMBERED_MAX:
            for old in list(handled)[: _REMEMBERED_MAX // 16]:
                del handled[old]
        handled[message.id] = None
        if self._asked:
            for peer, window, number in self._asked.pop(message.id, ()):
                self._delivery.inbound.topic_handled(peer, window, number)
