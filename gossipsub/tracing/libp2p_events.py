"""libp2p's 13 pubsub trace events as effects, and their JSON form (pb/trace.proto of go-libp2p-pubsub).

They carry no time: the caller that performs the effects knows the `now` that it gave. RPC events keep the RPC itself,
which the writer turns into JSON. Several are made for each message: as msgspec structs they cost a quarter of
what named tuples do.
"""

import base64
from collections import deque
from typing import Final

import msgspec

from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.types import PeerId, peer_id_bytes


class PublishMessage(msgspec.Struct, gc=False):
    """This node published."""

    message: RpcMessage


class RejectedMessage(msgspec.Struct, gc=False):
    """A message was not taken; ``reason`` is one of :mod:`dep2p.gossipsub.reasons`."""

    message: RpcMessage
    received_from: PeerId
    reason: str


class DuplicateMessage(msgspec.Struct, gc=False):
    """A further copy came."""

    message: RpcMessage
    received_from: PeerId


class DeliverMessage(msgspec.Struct, gc=False):
    """The first copy passed all checks."""

    message: RpcMessage
    received_from: PeerId | None


class AddPeer(msgspec.Struct, gc=False):
    """Our outbound stream to the peer is open."""

    peer: PeerId
    protocol: str


class RemovePeer(msgspec.Struct, gc=False):
    """Our outbound stream to the peer is closed."""

    peer: PeerId


class RecvRpc(msgspec.Struct, gc=False):
    """An RPC came in."""

    received_from: PeerId
    rpc: Rpc


class SendRpc(msgspec.Struct, gc=False):
    """An RPC was handed to the queues of these peers: one libp2p event for each."""

    send_to: tuple[PeerId, ...]
    rpc: Rpc


class DropRpc(msgspec.Struct, gc=False):
    """A peer's queue did not take an RPC."""

    send_to: PeerId
    rpc: Rpc


class JoinTopic(msgspec.Struct, gc=False):
    """This node joined."""

    topic: str


class LeaveTopic(msgspec.Struct, gc=False):
    """This node left."""

    topic: str


class GraftPeer(msgspec.Struct, gc=False):
    """The peer is now in our mesh."""

    peer: PeerId
    topic: str


class PrunePeer(msgspec.Struct, gc=False):
    """The peer is no longer in our mesh."""

    peer: PeerId
    topic: str


Trace = (
    PublishMessage
    | RejectedMessage
    | DuplicateMessage
    | DeliverMessage
    | AddPeer
    | RemovePeer
    | RecvRpc
    | SendRpc
    | DropRpc
    | JoinTopic
    | LeaveTopic
    | GraftPeer
    | PrunePeer
)

TRACE_TYPES: Final[dict[type, int]] = {
    PublishMessage: 0,
    RejectedMessage: 1,
    DuplicateMessage: 2,
    DeliverMessage: 3,
    AddPeer: 4,
    RemovePeer: 5,
    RecvRpc: 6,
    SendRpc: 7,
    DropRpc: 8,
    JoinTopic: 9,
    LeaveTopic: 10,
    GraftPeer: 11,
    PrunePeer: 12,
}
"""The number of each event in libp2p's enum."""

_NAMES: Final = (
    "publishMessage",
    "rejectMessage",
    "duplicateMessage",
    "deliverMessage",
    "addPeer",
    "removePeer",
    "recvRPC",
    "sendRPC",
    "dropRPC",
    "join",
    "leave",
    "graft",
    "prune",
)


def trace_to_json(trace: Trace, own: PeerId, timestamp_ns: int) -> list[dict[str, object]]:
    """Return the event in the form of libp2p's JSON tracer, ready for ``json.dumps``; one object per line of the file.

    More than one for a :class:`SendRpc` to several peers.
    """
    number = TRACE_TYPES[type(trace)]
    head: dict[str, object] = {"type": number, "peerID": _peer(own), "timestamp": timestamp_ns}
    if isinstance(trace, SendRpc):
        meta = rpc_meta(trace.rpc)
        return [{**head, "sendRPC": {"sendTo": _peer(peer), "meta": meta}} for peer in trace.send_to]
    return [{**head, _NAMES[number]: _payload(trace)}]


def _payload(trace: Trace) -> dict[str, object]:
    match trace:
        case PublishMessage(message):
            return {"messageID": _b64(message.id), "topic": message.topic}
        case RejectedMessage(message, received_from, reason):
            return {
                "messageID": _b64(message.id),
                "receivedFrom": _peer(received_from),
                "reason": reason,
                "topic": message.topic,
            }
        case DuplicateMessage(message, received_from):
            return {"messageID": _b64(message.id), "receivedFrom": _peer(received_from), "topic": message.topic}
        case DeliverMessage(message, received_from):
            payload: dict[str, object] = {"messageID": _b64(message.id), "topic": message.topic}
            if received_from is not None:
                payload["receivedFrom"] = _peer(received_from)
            return payload
        case AddPeer(peer, protocol):
            return {"peerID": _peer(peer), "proto": protocol}
        case RemovePeer(peer):
            return {"peerID": _peer(peer)}
        case RecvRpc(received_from, rpc):
            return {"receivedFrom": _peer(received_from), "meta": rpc_meta(rpc)}
        case SendRpc(send_to, rpc):
            return {"sendTo": [_peer(peer) for peer in send_to], "meta": rpc_meta(rpc)}
        case DropRpc(send_to, rpc):
            return {"sendTo": _peer(send_to), "meta": rpc_meta(rpc)}
        case JoinTopic(topic) | LeaveTopic(topic):
            return {"topic": topic}
        case GraftPeer(peer, topic) | PrunePeer(peer, topic):
            return {"peerID": _peer(peer), "topic": topic}


def rpc_meta(rpc: Rpc) -> dict[str, object]:
    """Return the part of an RPC that libp2p's tracer records: ids and topics, no payload."""
    meta: dict[str, object] = {}
    if rpc.messages:
        meta["messages"] = [{"messageID": _b64(message.id), "topic": message.topic} for message in rpc.messages]
    if rpc.subscriptions:
        meta["subscription"] = [{"subscribe": item.subscribe, "topic": item.topic} for item in rpc.subscriptions]
    control: dict[str, object] = {}
    if rpc.ihave:
        control["ihave"] = [{"topic": item.topic, "messageIDs": [_b64(i) for i in item.ids]} for item in rpc.ihave]
    if rpc.iwant:
        control["iwant"] = [{"messageIDs": [_b64(i) for i in rpc.iwant]}]
    if rpc.graft:
        control["graft"] = [{"topic": topic} for topic in rpc.graft]
    if rpc.prune:
        control["prune"] = [
            {"topic": item.topic, "peers": [_b64(info.peer) for info in item.peers]} for item in rpc.prune
        ]
    if rpc.idontwant:
        control["idontwant"] = [{"messageIDs": [_b64(i) for i in rpc.idontwant]}]
    if control:
        meta["control"] = control
    return meta


class TraceBuffer:
    """A bounded sink inside the process: keeps the oldest events until drained, drops the newest when full."""

    __slots__ = ("_events", "_items_max", "dropped")

    def __init__(self, items_max: int = 65_536) -> None:
        self._events: deque[tuple[float, Trace]] = deque()
        self._items_max = items_max
        self.dropped: int = 0
        """Events that found the buffer full."""

    def __len__(self) -> int:
        return len(self._events)

    def put(self, trace: Trace, now: float) -> None:
        """Keep one event with the time it happened at."""
        if len(self._events) < self._items_max:
            self._events.append((now, trace))
        else:
            self.dropped += 1

    def drain(self) -> list[tuple[float, Trace]]:
        """Take everything out, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _peer(peer: PeerId) -> str:
    """Return the base64 of a peer id's multihash bytes, or of the text of an id that is no multihash (a simulated
    node)."""
    try:
        return _b64(peer_id_bytes(peer))
    except ValueError:
        return _b64(peer.encode("utf-8", "replace"))
