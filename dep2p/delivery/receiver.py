"""The receiving end of reliable delivery in one realm: the links of all senders, and the receive window of each."""

from typing import Final, Protocol

from dep2p.delivery.context import DeliveryContext
from dep2p.delivery.receive_link import ReceiveLink, TopicVerdict, Wanted
from dep2p.host.interface import ByteStream
from dep2p.links.pull_link import SessionLink
from dep2p.protocols.delivery.receiver import ReceiveWindow
from dep2p.protocols.wire.headers import HeaderKey, HeaderMap
from dep2p.protocols.wire.payload import PayloadReader
from dep2p.storage.delivery_store import InboxRow
from dep2p.types import PeerId

_LINKS_PER_PEER_MAX: Final = 2
"""Links of one peer; two for a moment, when it reconnects."""


class TopicReceiver(Protocol):
    """Takes messages for topics."""

    async def receive(
        self, peer: PeerId, window: ReceiveWindow, number: int, headers: HeaderMap, body: bytes
    ) -> tuple[TopicVerdict, str]:
        """Return the verdict on a message, and the reason of a rejection. Raises ProtocolError for a malformed one."""
        ...


class DeliveryInbound:
    """The receiving end. A sender's window outlives its links: it is remembered by peer."""

    def __init__(self, context: DeliveryContext) -> None:
        self.topic_receiver: TopicReceiver | None = None
        """The receiver of messages for topics; None in a realm without pub/sub."""
        self._context = context
        self._windows: dict[PeerId, ReceiveWindow] = {}
        self._receiving: dict[ReceiveLink, None] = {}

    def restore(self, peer: PeerId, row: InboxRow) -> None:
        """Restore a sender's window from an earlier run."""
        self._windows[peer] = ReceiveWindow(row.epoch, floor=row.floor, done=row.done, rejected=row.rejected)

    def links(self) -> list[SessionLink]:
        """The open links."""
        return [each.link for each in self._receiving]

    async def accept(self, stream: ByteStream) -> None:
        """Take a stream that a peer has opened."""
        context, peer = self._context, stream.connection.peer
        if context.is_draining:
            stream.reset()
        elif sum(each.link.peer == peer for each in self._receiving) >= _LINKS_PER_PEER_MAX:
            context.counts["links_refused_per_peer_max"] += 1
            stream.reset()
        elif not context.start(lambda: self._serve(stream)):
            stream.reset()

    async def _serve(self, stream: ByteStream) -> None:
        context = self._context
        payloads = PayloadReader(context.limits, context.zstd_for(stream.connection))
        receiving = ReceiveLink(context, self, stream, payloads)
        self._receiving[receiving] = None
        try:
            await receiving.run(is_verified=context.gate.is_verified(stream.connection))
        finally:
            del self._receiving[receiving]

    # Receive windows

    def window(self, peer: PeerId, epoch: bytes) -> ReceiveWindow:
        """Return the window of a sender's numbering; another epoch begins a new one."""
        window = self._windows.get(peer)
        if window is None or window.epoch != epoch:
            if window is None and len(self._windows) >= self._context.limits.peers_known_max:
                busy = {each.link.peer for each in self._receiving}
                idle = next((known for known in self._windows if known not in busy), None)
                if idle is not None:
                    del self._windows[idle]
                    self._context.counts["senders_forgotten"] += 1
            window = self._windows[peer] = ReceiveWindow(epoch)
        return window

    def is_current(self, peer: PeerId, window: ReceiveWindow) -> bool:
        """Whether the sender still uses this numbering."""
        return self._windows.get(peer) is window

    def receive_link_of(self, peer: PeerId, window: ReceiveWindow) -> ReceiveLink | None:
        """The live link of a sender on which this numbering is used."""
        for receiving in self._receiving:
            if receiving.link.peer == peer and receiving.window is window and receiving.link.error is None:
                return receiving
        return None

    def note_later(self, peer: PeerId, window: ReceiveWindow) -> None:
        """Write the window of a sender that is gone, after a handler has ended."""
        journal = self._context.journal
        if journal.is_durable and self.is_current(peer, window):
            row = InboxRow(window.epoch, *window.dump(), window.dump_rejected())
            journal.note_soon(self._context.realm_id, peer, row)

    def app_came(self, wanted: Wanted) -> None:
        """Note that a handler or a subscription is here now: messages that wait for it come again."""
        for receiving in list(self._receiving):
            receiving.app_came(wanted)

    # Messages for topics

    def is_for_topic(self, headers: HeaderMap) -> bool:
        """Whether a message belongs to pub/sub."""
        return HeaderKey.TOPIC in headers

    async def receive_for_topic(
        self, peer: PeerId, window: ReceiveWindow, number: int, headers: HeaderMap, body: bytes
    ) -> tuple[TopicVerdict, str]:
        """Handle a message for a topic. Return the verdict, and the reason of a rejection."""
        if self.topic_receiver is None:
            return "rejected", "this node has no pub/sub"
        return await self.topic_receiver.receive(peer, window, number, headers, body)

    def topic_handled(self, peer: PeerId, window: ReceiveWindow, number: int) -> None:
        """Settle a message of a topic that ``peer`` has asked about, in this numbering: an app here has handled it."""
        if not self.is_current(peer, window):
            return
        window.finish(number)
        receiving = self.receive_link_of(peer, window)
        if receiving is not None:
            receiving.report_handled(number)
