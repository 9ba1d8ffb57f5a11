"""The receiving end of reliable delivery in one realm: the links of all senders, and what was handled of each."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Literal

from dep2p.delivery.receive_link import Receiving
from dep2p.host.interface import ByteStream
from dep2p.links.pull_link import SessionLink
from dep2p.protocols.delivery.receiver import ReceiverLane
from dep2p.protocols.wire.headers import HeaderMap, Key
from dep2p.protocols.wire.payload import PayloadReader
from dep2p.storage.delivery_store import InboxRow
from dep2p.types import PeerId

if TYPE_CHECKING:
    from dep2p.delivery.service import Delivery

_LINKS_PER_PEER_MAX: Final = 2
"""Two for a moment, when a peer reconnects."""

TopicVerdict = Literal["handled", "here", "absent", "rejected"]
"""Of a message for a topic: ``here`` says that `DeliveryInbound.topic_handled` follows, ``absent`` that it should be
sent."""
TopicReceiver = Callable[[PeerId, ReceiverLane, int, HeaderMap, bytes], Awaitable[tuple[TopicVerdict, str]]]
"""Gives the verdict, and why it is rejected."""


class DeliveryInbound:
    """A sender's numbering outlives its links: what was handled is remembered by peer."""

    def __init__(self, service: "Delivery") -> None:
        self.topic_receiver: TopicReceiver | None = None
        """Takes messages for topics; set by who knows the realm's pub/sub."""
        self._service = service
        self._lanes: dict[PeerId, ReceiverLane] = {}
        self._receiving: dict[Receiving, None] = {}

    def restore(self, peer: PeerId, row: InboxRow) -> None:
        """What an earlier run had handled."""
        self._lanes[peer] = ReceiverLane(row.epoch, floor=row.floor, done=row.done, rejected=row.rejected)

    def links(self) -> list[SessionLink]:
        """Those that are open."""
        return [each.link for each in self._receiving]

    async def accept(self, stream: ByteStream) -> None:
        """A peer has opened a stream."""
        service, peer = self._service, stream.connection.peer
        if service.is_draining:
            stream.reset()
        elif sum(each.link.peer == peer for each in self._receiving) >= _LINKS_PER_PEER_MAX:
            service.counts["links_refused_per_peer_max"] += 1
            stream.reset()
        elif not service.start(lambda: self._serve(stream)):
            stream.reset()

    async def _serve(self, stream: ByteStream) -> None:
        service = self._service
        payloads = PayloadReader(service.limits, service.zstd_for(stream.connection))
        receiving = Receiving(service, stream, service.counts, payloads)
        self._receiving[receiving] = None
        try:
            await receiving.run(is_verified=service.gate.is_verified(stream.connection))
        finally:
            del self._receiving[receiving]

    # What was handled

    def lane(self, peer: PeerId, epoch: bytes) -> ReceiverLane:
        """What was handled of a sender's numbering; another epoch begins a new one."""
        lane = self._lanes.get(peer)
        if lane is None or lane.epoch != epoch:
            if lane is None and len(self._lanes) >= self._service.limits.peers_known_max:
                busy = {each.link.peer for each in self._receiving}
                idle = next((known for known in self._lanes if known not in busy), None)
                if idle is not None:
                    del self._lanes[idle]
                    self._service.counts["senders_forgotten"] += 1
            lane = self._lanes[peer] = ReceiverLane(epoch)
        return lane

    def is_current(self, peer: PeerId, lane: ReceiverLane) -> bool:
        """Whether the sender has not begun to count anew since."""
        return self._lanes.get(peer) is lane

    def receiving_of(self, peer: PeerId, lane: ReceiverLane) -> Receiving | None:
        """The live link of a sender on which this numbering is used."""
        for receiving in self._receiving:
            if receiving.link.peer == peer and receiving.lane is lane and receiving.link.error is None:
                return receiving
        return None

    def note_later(self, peer: PeerId, lane: ReceiverLane) -> None:
        """A handler ended when its sender was gone: write it down all the same."""
        journal = self._service.journal
        if journal.is_durable and self.is_current(peer, lane):
            row = InboxRow(lane.epoch, *lane.dump(), lane.dump_rejected())
            journal.note_soon(self._service.realm_id, peer, row)

    # Messages for topics

    def is_for_topic(self, headers: HeaderMap) -> bool:
        """Whether a message belongs to pub/sub."""
        return Key.TOPIC in headers

    async def receive_for_topic(
        self, peer: PeerId, lane: ReceiverLane, number: int, headers: HeaderMap, body: bytes
    ) -> tuple[TopicVerdict, str]:
        """What becomes of it, and why it is rejected."""
        if self.topic_receiver is None:
            return "rejected", "this node has no pub/sub"
        return await self.topic_receiver(peer, lane, number, headers, body)

    def topic_handled(self, peer: PeerId, lane: ReceiverLane, number: int) -> None:
        """An app here has handled a message of a topic that ``peer`` has asked about, in this numbering."""
        if not self.is_current(peer, lane):
            return
        lane.finish(number)
        receiving = self.receiving_of(peer, lane)
        if receiving is not None:
            receiving.tell_handled(number)
