"""Reliable publishes to topics: critical peers acknowledge straight to the publisher (docs/spec/delivery.md).

The message goes to everybody by pub/sub, as ever. Each critical peer is also asked, over its delivery link, to say when
its app has handled the message; when it has not heard of it by the ack timeout, the message itself is sent that way.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

import trio

from dep2p.delivery.receipts import Receipt, raise_unless_acknowledged
from dep2p.delivery.receiver import TopicVerdict
from dep2p.delivery.service import Delivery
from dep2p.errors import DeliveryFailedError, NoPeersSubscribedError, ProtocolError, PublishRefusedError
from dep2p.gossipsub.message_id import realm_id as realm_message_id
from dep2p.protocols.delivery.receiver import ReceiverLane
from dep2p.protocols.delivery.states import State
from dep2p.protocols.wire.frame import HEADERS
from dep2p.protocols.wire.headers import HeaderMap, Key, encode_headers
from dep2p.pubsub.service import PubSub
from dep2p.pubsub.types import Message, PublishResult, WaitFor
from dep2p.types import PeerId, peer_id_bytes

_ASK: Final = b"\x00"
_DATA: Final = b"\x01"
_SEQNO_BYTES: Final = 8
_REMEMBERED_MAX: Final = 16_384
"""Messages whose handling is remembered for a question that comes later."""
_ASKED_MAX: Final = 4_096
"""Messages that are asked about and were not handled yet; the oldest question is forgotten first, and comes again."""


class TopicReceipt(Receipt, eq=False):
    """A message of a topic, for one critical peer: a question first, the message itself when that was not enough."""

    is_whole: ClassVar[bool] = False

    def body_of_try(self) -> bytes:
        """One byte says which it is."""
        return self.body if self.tries > 1 or self.is_restored else _ASK


class TopicPublish:
    """A reliable publish: what pub/sub did with it, and the receipt of each critical peer."""

    def __init__(self, result: PublishResult, receipts: Sequence[Receipt], wait_for: WaitFor) -> None:
        self.result = result
        self.receipts = tuple(receipts)
        self.wait_for: WaitFor = wait_for

    @property
    def acknowledged_by(self) -> tuple[PeerId, ...]:
        """The critical peers whose app has handled it so far."""
        return tuple(each.peer for each in self.receipts if each.state is State.ACKNOWLEDGED)

    @property
    def missing(self) -> dict[PeerId, str]:
        """The critical peers that have not, each with its state or the reason of its failure."""
        return {
            each.peer: each.reason or each.state.value for each in self.receipts if each.state is not State.ACKNOWLEDGED
        }

    async def wait(self) -> None:
        """Until all (or any) critical peers have handled it. Raises DeliveryFailedError when that cannot be any more.

        With "all", the first one that fails ends the wait; the others are still tried.
        """
        if self.wait_for == "any":
            await self._wait_for_any()
            return
        failed: list[Receipt] = []
        async with trio.open_nursery() as nursery:

            async def one(receipt: Receipt) -> None:
                if await receipt.until_ended() is not State.ACKNOWLEDGED:
                    failed.append(receipt)
                    nursery.cancel_scope.cancel()

            for receipt in self.receipts:
                nursery.start_soon(one, receipt)
        if failed:
            raise_unless_acknowledged(failed[0].state, failed[0].peer, failed[0].reason)

    async def _wait_for_any(self) -> None:
        async with trio.open_nursery() as nursery:

            async def one(receipt: Receipt) -> None:
                if await receipt.until_ended() is State.ACKNOWLEDGED:
                    nursery.cancel_scope.cancel()

            for receipt in self.receipts:
                nursery.start_soon(one, receipt)
        if not self.acknowledged_by:
            reasons = "; ".join(f"{peer}: {why}" for peer, why in self.missing.items())
            raise DeliveryFailedError(f"none of the critical peers has acknowledged the message: {reasons}")


class DeliveryTopics:
    """Both ends, for one realm. Set as `PubSub.reliable` and `DeliveryInbound.topic_receiver`."""

    def __init__(self, delivery: Delivery, pubsub: PubSub) -> None:
        self._delivery = delivery
        self._pubsub = pubsub
        self._counters = delivery.counts
        self._handled: dict[bytes, None] = {}
        self._asked: dict[bytes, dict[tuple[PeerId, ReceiverLane, int], None]] = {}
        pubsub.reliable = self
        delivery.topics = self
        pubsub.on_handled = self._on_handled
        delivery.inbound.topic_receiver = self._receive
        delivery.topic_receipts = TopicReceipt

    # The publisher

    async def publish(
        self, topic: str, data: bytes, critical_peers: Sequence[PeerId] | None, wait_for: WaitFor, wait: bool
    ) -> TopicPublish:
        """See :meth:`dep2p.pubsub.topic.Topic.publish`."""
        if wait_for not in ("all", "any"):
            raise ValueError(f'wait_for is {wait_for!r}: it must be "all" or "any"')
        peers = list(dict.fromkeys(self._pubsub.peers(topic) if critical_peers is None else critical_peers))
        if not peers:
            raise NoPeersSubscribedError(
                f"nobody is critical for {topic!r}: no peer is subscribed now. Wait for one, or name critical_peers"
            )
        result = await self._pubsub.publish(topic, data, wait=wait, on_no_peers="ok")
        seqno = (result.seqno or 0).to_bytes(_SEQNO_BYTES, "big")
        head = encode_headers({Key.TOPIC: topic, Key.SEQNO: seqno})
        receipts: list[Receipt] = []
        for peer in peers:
            receipt = TopicReceipt(head, HEADERS, _DATA + data, trio.current_time(), peer=peer, name=topic, topic=topic)
            await self._delivery.accept(receipt, wait=wait)
            receipts.append(receipt)
        return TopicPublish(result, receipts, wait_for)

    # The critical peer

    async def _receive(
        self, peer: PeerId, lane: ReceiverLane, number: int, headers: HeaderMap, body: bytes
    ) -> tuple[TopicVerdict, str]:
        topic, seqno = headers.get(Key.TOPIC), headers.get(Key.SEQNO)
        if not isinstance(topic, str) or not isinstance(seqno, bytes) or len(seqno) != _SEQNO_BYTES:
            raise ProtocolError("a message for a topic without its TOPIC and SEQNO")
        if body[:1] not in (_ASK, _DATA):
            raise ProtocolError("a message for a topic that neither asks nor brings data")
        # From the authenticated sender, so that nobody can make us take a message of somebody else for seen.
        message_id = realm_message_id(peer_id_bytes(peer), seqno, topic, b"", b"")
        if message_id in self._handled:
            return "handled", ""
        if not self._pubsub.has_subscription(topic):
            # Perhaps its app is just starting again: the sender asks as often as it may.
            self._counters["topic_messages_without_subscription"] += 1
            return "absent", ""
        asked = self._asked.get(message_id)
        if asked is None:
            if len(self._asked) >= _ASKED_MAX:
                del self._asked[next(iter(self._asked))]
                self._counters["topic_questions_forgotten"] += 1
            asked = self._asked[message_id] = {}
        asked[(peer, lane, number)] = None
        if body[:1] == _DATA and not self._pubsub.has_seen(message_id):
            try:
                await self._pubsub.validators.judge_own(topic, body[1:], peer)
            except PublishRefusedError:
                del self._asked[message_id]
                return "rejected", "a validator of the topic refused it"
            if not self._pubsub.has_seen(message_id):  # it may have come while the validators were asked
                number_bytes = int.from_bytes(seqno, "big")
                self._pubsub.deliver_direct(topic, peer, number_bytes, message_id, body[1:])
                self._counters["topic_messages_delivered_direct"] += 1
        else:
            await trio.lowlevel.checkpoint()
        if message_id in self._handled:
            return "handled", ""
        return ("here" if self._pubsub.has_seen(message_id) else "absent"), ""

    def _on_handled(self, message: Message) -> None:
        handled = self._handled
        if len(handled) >= _REMEMBERED_MAX:
            for old in list(handled)[: _REMEMBERED_MAX // 16]:
                del handled[old]
        handled[message.id] = None
        if self._asked:
            for peer, lane, number in self._asked.pop(message.id, ()):
                self._delivery.inbound.topic_handled(peer, lane, number)
