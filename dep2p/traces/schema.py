"""The events of a trace, one struct a kind; the shared schema of writer, simulator, importers and analysis.

Every event has ``v`` (schema version), ``node`` (peer id of the writer), ``seq`` (counts from 0 in each run of a node,
so that gaps show), ``t`` (µs since the Unix epoch by the node's own clock) and ``kind``. Ids of messages are bytes
here and base64 in JSON; peers are peer ids as text. A field of one name has one type in all kinds: see `columns`.
Fields may be added within a version; a field that changes its meaning makes a new version.
"""

import types
from typing import Final, Union, get_args, get_origin, get_type_hints

import msgspec

SCHEMA_VERSION: Final = 1


class TraceEvent(msgspec.Struct, tag_field="kind", omit_defaults=True, gc=False):
    """The fields of all events. ``v``, ``node``, ``seq`` and ``t`` come first, in this order, in every constructor."""

    v: int
    node: str
    seq: int
    t: int


# Publish/subscribe: libp2p's thirteen, with what they lack ------------------------------------------------------------


class PublishEvent(TraceEvent, tag="publish"):
    """This node published. ``size``: bytes of the payload."""

    msg: bytes
    topic: str
    size: int | None = None
    attrs: dict[str, str] | None = None


class RejectEvent(TraceEvent, tag="reject"):
    """A message was not taken. ``peer`` sent it; ``reason`` is one of :mod:`dep2p.gossipsub.reasons`."""

    msg: bytes
    topic: str
    peer: str | None
    reason: str
    size: int | None = None
    attrs: dict[str, str] | None = None


class DuplicateEvent(TraceEvent, tag="duplicate"):
    """A further copy came from ``peer``."""

    msg: bytes
    topic: str
    peer: str | None
    size: int | None = None
    attrs: dict[str, str] | None = None


class DeliverEvent(TraceEvent, tag="deliver"):
    """The first copy, from ``peer``, passed all checks; no peer: it is the node's own. ``validation_us`` if known."""

    msg: bytes
    topic: str
    peer: str | None = None
    size: int | None = None
    validation_us: int | None = None
    attrs: dict[str, str] | None = None


class DeliverLocalEvent(TraceEvent, tag="deliver_local"):
    """This node gave a message of its own to ``readers`` subscriptions of its other programs."""

    msg: bytes
    topic: str
    readers: int
    size: int | None = None
    attrs: dict[str, str] | None = None


class AddPeerEvent(TraceEvent, tag="add_peer"):
    """The outbound pub/sub stream to the peer is open."""

    peer: str
    protocol: str | None = None
    attrs: dict[str, str] | None = None


class RemovePeerEvent(TraceEvent, tag="remove_peer"):
    """The outbound pub/sub stream to the peer is closed."""

    peer: str
    reason: str | None = None
    attrs: dict[str, str] | None = None


class MessageRef(msgspec.Struct, omit_defaults=True, gc=False):
    """A message in an RPC."""

    msg: bytes
    topic: str
    size: int | None = None


class OneMessage(msgspec.Struct, array_like=True, gc=False):
    """A list of one message, in JSON. Most RPCs hold one, and a list would be an object more for the collector."""

    only: MessageRef


class IHaveRef(msgspec.Struct, omit_defaults=True, gc=False):
    """An IHAVE: the number of ids, and the ids when the writer keeps them."""

    topic: str
    count: int
    msgs: list[bytes] | None = None


class SubscriptionRef(msgspec.Struct, omit_defaults=True, gc=False):
    """A change of interest in an RPC."""

    topic: str
    subscribe: bool


class RpcEvent(TraceEvent):
    """The fields of the three RPC events: no kind of its own.

    ``message_bytes``: payload bytes of the messages. ``control_bytes``: bytes of the ids and topic names in control
    parts and subscriptions, and 38 for each peer named in a PRUNE. Both are sums over parts, whatever the encoding.
    ``size``: bytes on the wire, when known.
    """

    peer: str
    message_bytes: int = 0
    control_bytes: int = 0
    size: int | None = None
    messages: list[MessageRef] | None = None
    subscriptions: list[SubscriptionRef] | None = None
    ihave: list[IHaveRef] | None = None
    iwant: list[bytes] | None = None
    idontwant: list[bytes] | None = None
    grafts: list[str] | None = None
    prunes: list[str] | None = None
    reason: str | None = None
    attrs: dict[str, str] | None = None


class RecvRpcEvent(RpcEvent, tag="recv_rpc"):
    """An RPC came from ``peer``."""


class SendRpcEvent(RpcEvent, tag="send_rpc"):
    """An RPC was given to the queue of ``peer``."""


class DropRpcEvent(RpcEvent, tag="drop_rpc"):
    """The queue of ``peer`` did not take an RPC; ``reason`` if known."""


class JoinEvent(TraceEvent, tag="join"):
    """This node subscribed."""

    topic: str
    attrs: dict[str, str] | None = None


class LeaveEvent(TraceEvent, tag="leave"):
    """This node unsubscribed."""

    topic: str
    attrs: dict[str, str] | None = None


class GraftEvent(TraceEvent, tag="graft"):
    """``peer`` is now in this node's mesh."""

    peer: str
    topic: str
    attrs: dict[str, str] | None = None


class PruneEvent(TraceEvent, tag="prune"):
    """``peer`` is no longer in this node's mesh."""

    peer: str
    topic: str
    reason: str | None = None
    attrs: dict[str, str] | None = None


# Requests, notifies, streams ------------------------------------------------------------------------------------------


class RequestEvent(TraceEvent, tag="request"):
    """A request ended. ``side``: ``out`` at the asker, ``in`` at the answerer. ``outcome``: ``ok`` or the error."""

    peer: str
    name: str
    side: str
    outcome: str
    duration_us: int
    size: int | None = None
    reply_size: int | None = None
    attempt: int | None = None
    attrs: dict[str, str] | None = None


class NotifyEvent(TraceEvent, tag="notify"):
    """A notify was sent (``out``), handled (``in``) or dropped (``outcome`` says why)."""

    peer: str
    name: str
    side: str
    outcome: str
    size: int | None = None
    attrs: dict[str, str] | None = None


class StreamEvent(TraceEvent, tag="stream"):
    """A stream of an app was opened (``state`` ``open``) or ended (``closed``, ``reset``)."""

    peer: str
    name: str
    side: str
    state: str
    duration_us: int | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    reason: str | None = None
    attrs: dict[str, str] | None = None


# Delivery, sessions, queues -------------------------------------------------------------------------------------------


class DeliveryEvent(TraceEvent, tag="delivery"):
    """A reliable message changed its state.

    At the sender: ``created``, ``sending`` (with ``attempt`` from 1), ``acknowledged``, ``failed``, ``expired``,
    ``dropped``. At the receiver: ``received`` (given to the handler) and ``repeated`` (a copy was recognised).
    ``msg`` is the same at both ends; ``position`` is the sender's count for this receiver, when there is one.
    """

    msg: bytes
    peer: str
    state: str
    topic: str | None = None
    attempt: int | None = None
    position: int | None = None
    size: int | None = None
    reason: str | None = None
    attrs: dict[str, str] | None = None


class SessionTraceEvent(TraceEvent, tag="session"):
    """An ordered session changed: ``opened``, ``resumed``, ``lost``, ``reset``, ``closed``, ``failed``, ``skipped``; or
    its pushes went on, some together: ``sent``, ``resent``, ``acknowledged`` (handled by the client's app) at the
    server, ``received`` at the client.

    ``position``: the highest number that this is about. ``count``: how many pushes.
    """

    session: str
    peer: str
    side: str
    state: str
    epoch: int | None = None
    position: int | None = None
    count: int | None = None
    reason: str | None = None
    attrs: dict[str, str] | None = None


class QueueEvent(TraceEvent, tag="queue"):
    """A change of a queue's message.

    ``state``: ``published`` (no channel), ``handed_out`` (with ``attempt`` from 1), ``finished``, ``requeued``,
    ``timed_out``, ``released`` (the attempt does not count), ``rejected``, ``dead``, ``dropped`` (without a dead
    letter), ``expired``. ``position``: the message's number in its queue (partition). ``key``: what its order key
    hashes to, when it has one. ``duration_us``: since it was published, when it is handed out; since it was handed out,
    when its consumer is done with it.
    """

    namespace: str
    queue: str
    state: str
    msg: bytes
    channel: str | None = None
    consumer: str | None = None
    partition: int | None = None
    position: int | None = None
    attempt: int | None = None
    key: str | None = None
    size: int | None = None
    reason: str | None = None
    duration_us: int | None = None
    attrs: dict[str, str] | None = None


# Snapshots ------------------------------------------------------------------------------------------------------------


class PeerScore(msgspec.Struct, omit_defaults=True, gc=False):
    """A peer's score in this node's eyes."""

    peer: str
    score: float


class Depth(msgspec.Struct, omit_defaults=True, gc=False):
    """Messages that wait in one place; ``name`` is ``kind:which``, e.g. ``queue:jobs/mail`` or ``peer:12D3Koo…``."""

    name: str
    items: int
    bytes: int = 0


class PeerRtt(msgspec.Struct, omit_defaults=True, gc=False):
    """The round trip to a peer."""

    peer: str
    rtt_us: int


class MeshEvent(TraceEvent, tag="mesh"):
    """Snapshot: the whole mesh of a topic; ``known`` is how many peers are subscribed to it."""

    topic: str
    peers: list[str]
    known: int | None = None
    attrs: dict[str, str] | None = None


class ScoresEvent(TraceEvent, tag="scores"):
    """Snapshot: scores of all peers."""

    scores: list[PeerScore]
    attrs: dict[str, str] | None = None


class DepthsEvent(TraceEvent, tag="depths"):
    """Snapshot: messages that wait in this node."""

    depths: list[Depth]
    attrs: dict[str, str] | None = None


class RttsEvent(TraceEvent, tag="rtts"):
    """Snapshot: round trips to peers."""

    rtts: list[PeerRtt]
    attrs: dict[str, str] | None = None


# About the trace itself -----------------------------------------------------------------------------------------------


class NodeStartEvent(TraceEvent, tag="node_start"):
    """A run begins; always its first event. ``version``: of the software. ``sample``: the share of messages whose
    events are written, when it is not all.
    """

    version: str | None = None
    name: str | None = None
    sample: float | None = None
    attrs: dict[str, str] | None = None


class NodeStopEvent(TraceEvent, tag="node_stop"):
    """A run ends in order; always its last event. A run without it was killed."""

    reason: str | None = None
    attrs: dict[str, str] | None = None


class DroppedEvent(TraceEvent, tag="dropped"):
    """``count`` events were not written since the last such event, because of ``reason``. They took no ``seq``."""

    count: int
    reason: str
    attrs: dict[str, str] | None = None


class ClockEvent(TraceEvent, tag="clock"):
    """The clock of ``peer`` is ahead of this node's by ``offset_us``, give or take ``error_us``."""

    peer: str
    offset_us: int
    error_us: int
    attrs: dict[str, str] | None = None


KINDS: Final[dict[str, type[TraceEvent]]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        *(
            PublishEvent,
            RejectEvent,
            DuplicateEvent,
            DeliverEvent,
            AddPeerEvent,
            RemovePeerEvent,
            RecvRpcEvent,
            SendRpcEvent,
            DropRpcEvent,
            JoinEvent,
            LeaveEvent,
        ),
        *(
            GraftEvent,
            PruneEvent,
            RequestEvent,
            NotifyEvent,
            StreamEvent,
            DeliveryEvent,
            SessionTraceEvent,
            QueueEvent,
            MeshEvent,
            ScoresEvent,
            DepthsEvent,
            RttsEvent,
        ),
        *(NodeStartEvent, NodeStopEvent, DroppedEvent, ClockEvent),
        DeliverLocalEvent,  # the last: stored tables hold the places of kinds in this list
    )
}
"""All kinds by their names."""

AnyEvent = (
    PublishEvent
    | RejectEvent
    | DuplicateEvent
    | DeliverEvent
    | AddPeerEvent
    | RemovePeerEvent
    | RecvRpcEvent
    | SendRpcEvent
    | DropRpcEvent
    | JoinEvent
    | LeaveEvent
    | GraftEvent
    | PruneEvent
    | RequestEvent
    | NotifyEvent
    | StreamEvent
    | DeliveryEvent
    | SessionTraceEvent
    | QueueEvent
    | MeshEvent
    | ScoresEvent
    | DepthsEvent
    | RttsEvent
    | NodeStartEvent
    | NodeStopEvent
    | DroppedEvent
    | ClockEvent
    | DeliverLocalEvent
)

_SQL_TYPES: Final[dict[object, str]] = {
    int: "BIGINT",
    float: "DOUBLE",
    str: "STRING",
    bytes: "STRING",
    bool: "BOOLEAN",
}


def columns() -> dict[str, str]:
    """All fields of all kinds, as SQL types: name → type. Raises ``TypeError`` when two kinds disagree on one."""
    found = {"v": "BIGINT", "node": "STRING", "seq": "BIGINT", "t": "BIGINT", "kind": "STRING"}
    for kind in KINDS.values():
        for name, hint in get_type_hints(kind).items():
            if name.startswith("_"):
                continue
            sql = _sql_type(hint)
            if found.setdefault(name, sql) != sql:
                raise TypeError(f"field {name} is {found[name]} in one kind of event and {sql} in {kind.__name__}")
    return found


def _sql_type(hint: object) -> str:
    if hint in _SQL_TYPES:
        return _SQL_TYPES[hint]
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        return _sql_type(inner)
    if origin is list:
        return f"ARRAY<{_sql_type(get_args(hint)[0])}>"
    if origin is dict:
        key, value = get_args(hint)
        return f"MAP<{_sql_type(key)}, {_sql_type(value)}>"
    fields = ", ".join(
        f"{name}: {_sql_type(of)}" for name, of in get_type_hints(hint).items() if not name.startswith("_")
    )
    return f"STRUCT<{fields}>"
