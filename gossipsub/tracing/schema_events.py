"""The router's trace effects as events of the shared trace schema."""

from typing import Final

from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.gossipsub.tracing.libp2p_events import (
    AddPeer,
    DeliverMessage,
    DropRpc,
    DuplicateMessage,
    GraftPeer,
    JoinTopic,
    LeaveTopic,
    PrunePeer,
    PublishMessage,
    RecvRpc,
    RejectedMessage,
    RemovePeer,
    SendRpc,
    Trace,
)
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.types import PeerId

_PEER_BYTES: Final = 38
"""Bytes that a peer named in a PRUNE counts for: a multihash of 34 bytes with its framing."""

RpcParts = tuple[
    int,
    int,
    None,
    list[schema.MessageRef] | None,
    list[schema.SubscriptionRef] | None,
    list[schema.IHaveRef] | None,
    list[bytes] | None,
    list[bytes] | None,
    list[str] | None,
    list[str] | None,
]


def trace_events(trace: Trace, node: PeerId, seq: int, t_us: int) -> list[schema.TraceEvent]:
    """Return the trace events of one effect, numbered from ``seq``; several only for a `SendRpc` to several peers."""
    match trace:
        case SendRpc(peers, rpc):
            parts = rpc_parts(rpc)
            return [schema.SendRpcEvent(V, node, seq + n, t_us, peer, *parts) for n, peer in enumerate(peers)]
        case RecvRpc(peer, rpc):
            return [schema.RecvRpcEvent(V, node, seq, t_us, peer, *rpc_parts(rpc))]
        case DuplicateMessage(message, peer):
            return [schema.DuplicateEvent(V, node, seq, t_us, message.id, message.topic, peer, len(message.data))]
        case DeliverMessage(message, sender):
            origin = sender if sender != node else None
            return [schema.DeliverEvent(V, node, seq, t_us, message.id, message.topic, origin, len(message.data))]
        case _:
            return [_rare(trace, node, seq, t_us)]


def _rare(trace: Trace, node: PeerId, seq: int, t_us: int) -> schema.TraceEvent:
    match trace:
        case PublishMessage(message):
            return schema.PublishEvent(V, node, seq, t_us, message.id, message.topic, len(message.data))
        case RejectedMessage(message, peer, reason):
            return schema.RejectEvent(V, node, seq, t_us, message.id, message.topic, peer, reason, len(message.data))
        case AddPeer(peer, protocol):
            return schema.AddPeerEvent(V, node, seq, t_us, peer, protocol)
        case RemovePeer(peer):
            return schema.RemovePeerEvent(V, node, seq, t_us, peer)
        case DropRpc(peer, rpc):
            return schema.DropRpcEvent(V, node, seq, t_us, peer, *rpc_parts(rpc))
        case JoinTopic(topic):
            return schema.JoinEvent(V, node, seq, t_us, topic)
        case LeaveTopic(topic):
            return schema.LeaveEvent(V, node, seq, t_us, topic)
        case GraftPeer(peer, topic):
            return schema.GraftEvent(V, node, seq, t_us, peer, topic)
        case PrunePeer(peer, topic):
            return schema.PruneEvent(V, node, seq, t_us, peer, topic)
        case _:
            raise TypeError(f"not a rare trace effect: {trace!r}")


def rpc_parts(rpc: Rpc) -> RpcParts:
    """Return the fields of an RPC event after its peer; ids of IHAVE are counted, not kept."""
    return (
        sum([len(message.data) for message in rpc.messages]),
        control_bytes(rpc),
        None,
        [_reference(message) for message in rpc.messages] or None,
        [schema.SubscriptionRef(item.topic, item.subscribe) for item in rpc.subscriptions] or None,
        [schema.IHaveRef(item.topic, len(item.ids)) for item in rpc.ihave] or None,
        list(rpc.iwant) or None,
        list(rpc.idontwant) or None,
        list(rpc.graft) or None,
        [item.topic for item in rpc.prune] or None,
    )


def control_bytes(rpc: Rpc) -> int:
    """Count the bytes of ids, topic names and peers in the control parts and subscriptions of an RPC."""
    total = sum([len(item.topic) for item in rpc.subscriptions])
    for have in rpc.ihave:
        total += len(have.topic) + sum(map(len, have.ids))
    total += sum(map(len, rpc.iwant)) + sum(map(len, rpc.idontwant)) + sum(map(len, rpc.graft))
    for prune in rpc.prune:
        total += len(prune.topic) + _PEER_BYTES * len(prune.peers)
    return total


def _reference(message: RpcMessage) -> schema.MessageRef:
    return schema.MessageRef(message.id, message.topic, len(message.data))
