"""RPCs on their way into the queues of their recipients: encoded once, or only when they are written."""

from collections.abc import Callable
from typing import Final

from dep2p.gossipsub.codecs.split import RPC_BYTES, message_bytes
from dep2p.gossipsub.effects import Lane, Send
from dep2p.gossipsub.rpc import Rpc
from dep2p.pubsub.peer_links import PubSubLinks
from dep2p.pubsub.send_queue import LateFrame
from dep2p.pubsub.wire_formats import Wire
from dep2p.types import PeerId

_MANY_BYTES: Final = 1_048_576
"""Bytes of an RPC from which on its messages are encoded one by one, so that a full queue ends it early."""
_IDONTWANT_IDS_MAX: Final = 10
"""Ids of one IDONTWANT: go and js read no more out of one RPC."""


class RpcSender:
    """Performs `Send`."""

    def __init__(self, links: PubSubLinks, wire: Wire, on_dropped: Callable[[PeerId, Rpc, Lane], None]) -> None:
        """``on_dropped``: called with each recipient whose queue did not take the RPC."""
        self._links = links
        self._frame = wire.frame
        self._pace = wire.pace
        self._encode = wire.codec.encode
        self._on_dropped = on_dropped
        self._unwanted: dict[tuple[PeerId, ...], list[bytes]] = {}

    def send(self, send: Send) -> None:
        """Queue an RPC; IDONTWANT waits for `flush`."""
        rpc, lane = send.rpc, send.lane
        if rpc.idontwant and lane == Lane.CONTROL and rpc == Rpc(idontwant=rpc.idontwant):
            self._unwanted.setdefault(send.peers, []).extend(rpc.idontwant)
            return
        self._send_now(send.peers, rpc, lane)

    def flush(self) -> None:
        """Send the IDONTWANT of all messages of one read as one RPC."""
        if self._unwanted:
            unwanted, self._unwanted = self._unwanted, {}
            for peers, ids in unwanted.items():
                for start in range(0, len(ids), _IDONTWANT_IDS_MAX):
                    self._send_now(peers, Rpc(idontwant=tuple(ids[start : start + _IDONTWANT_IDS_MAX])), Lane.CONTROL)

    def _send_now(self, peers: tuple[PeerId, ...], rpc: Rpc, lane: Lane) -> None:
        messages = rpc.messages
        if len(messages) == 1 and not messages[0].wire:
            late = LateFrame(lambda: self._frame_of(rpc), message_bytes(messages[0]) + RPC_BYTES)
            self._put(peers, rpc, lane, late)
            return
        if len(messages) > 1 and sum(map(message_bytes, messages)) > _MANY_BYTES:
            for message in messages:
                one = Rpc((message,))
                self._put(peers, one, lane, self._frame_of(one))
            return
        if self._pace is not None and len(messages) > self._pace.messages:
            # Answers to IWANT: as many together as the peer takes at once.
            for start in range(0, len(messages), self._pace.messages):
                part = Rpc(messages[start : start + self._pace.messages])
                self._put(peers, part, lane, self._frame_of(part))
            return
        frame = self._frame_of(rpc)
        if frame:
            self._put(peers, rpc, lane, frame)

    def _frame_of(self, rpc: Rpc) -> bytes:
        payloads = self._encode(rpc)
        if len(payloads) == 1:
            return self._frame(payloads[0])
        return b"".join([self._frame(payload) for payload in payloads])

    def _put(self, peers: tuple[PeerId, ...], rpc: Rpc, lane: Lane, frame: bytes | LateFrame) -> None:
        links = self._links
        for peer in peers:
            queue = links.queue_of(peer)
            if queue is None or not queue.put(lane, frame, rpc):
                self._on_dropped(peer, rpc, lane)
            elif queue.is_pressed:
                links.pressed[queue] = None
        links.bytes_since_yield += (frame.size if type(frame) is LateFrame else len(frame)) * len(peers)
