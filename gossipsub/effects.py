"""The effects of a router: actions that its shell performs. One list per call, in order.

The effects that are made for each message are not frozen: making a frozen object costs several times as much.
"""

from dataclasses import dataclass
from enum import IntEnum

from dep2p.gossipsub.rpc import PeerInfo, Rpc, RpcMessage
from dep2p.gossipsub.tracing.libp2p_events import Trace
from dep2p.types import PeerId


class Lane(IntEnum):
    """The one of a peer's outbound queues that an RPC goes to; lower numbers go first."""

    CONTROL = 0
    """Subscriptions, GRAFT, PRUNE, IDONTWANT: small, and late ones do harm."""
    MESSAGE = 1
    GOSSIP = 2
    """IHAVE and IWANT: the first to drop when a peer is slow."""


@dataclass(slots=True)
class Send:
    """Queue one RPC for these peers: encoded once. Report a full queue with `SendDropped`."""

    peers: tuple[PeerId, ...]
    rpc: Rpc
    lane: Lane


@dataclass(slots=True)
class Deliver:
    """Hand a message to the topic's subscribers. ``peer`` is who sent the first copy, None for this node's own."""

    message: RpcMessage
    peer: PeerId | None


@dataclass(slots=True)
class Validate:
    """Ask the topic's validator, then answer with `Validated`.

    With ``authenticate`` MAC and signature were not checked yet: do that first, answer BAD_SIGNATURE when they fail.
    """

    ticket: int
    message: RpcMessage
    peer: PeerId
    authenticate: bool


@dataclass(slots=True)
class PublishAccepted:
    """A publish was taken: sent to ``peers``, or ``queued`` until the topic has a first peer."""

    ref: int
    message: RpcMessage
    peers: tuple[PeerId, ...]
    queued: bool = False


@dataclass(frozen=True, slots=True)
class PublishExpired:
    """A queued publish found no peer in time."""

    ref: int
    message: RpcMessage


@dataclass(frozen=True, slots=True)
class TopicMatched:
    """A pattern of this node matches this topic, which it has joined now. Messages follow."""

    topic: str


@dataclass(frozen=True, slots=True)
class TopicUnmatched:
    """The node has left a topic that it had joined for a pattern."""

    topic: str


@dataclass(frozen=True, slots=True)
class TopicsNotJoined:
    """So many further topics match a pattern of this node and found no place."""

    count: int


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open the outbound stream to a connected peer, then say `StreamUp` or `StreamDown`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class ResetStream:
    """Reset the peer's stream to us, which cannot be read any further."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class HoldPeer:
    """Read nothing of the peer for so long: it sends more than its rate. A shell without back-pressure ignores it."""

    peer: PeerId
    seconds: float


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A hint that this peer is not worth its connection."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Dial:
    """A hint to connect: a direct peer that is away, or one named in a PRUNE (then ``info`` holds what was said).

    Check a signed record before using its addresses.
    """

    peer: PeerId | None
    info: PeerInfo | None = None


Effect = (
    Send
    | Deliver
    | Validate
    | PublishAccepted
    | PublishExpired
    | TopicMatched
    | TopicUnmatched
    | TopicsNotJoined
    | OpenStream
    | ResetStream
    | HoldPeer
    | Disconnect
    | Dial
    | Trace
)
