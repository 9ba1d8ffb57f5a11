"""The inputs of a router. Every event goes through `Router.handle(event, now)`."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from dep2p.gossipsub.headers import NO_HEADERS, MessageHeaders
from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.gossipsub.scoring.params import TopicScoreParams
from dep2p.types import PeerId


class Version(IntEnum):
    """The protocol version that a peer speaks. A peer on the realm wire counts as `V1_2`."""

    FLOODSUB = 0
    V1_0 = 1
    V1_1 = 2
    V1_2 = 3


class Verdict(IntEnum):
    """A validator's decision on a message."""

    ACCEPT = 0
    """Deliver and forward."""
    IGNORE = 1
    """Drop without blame; further copies are duplicates."""
    REJECT = 2
    """Drop and lower the score of every peer that forwarded it."""
    THROTTLED = 3
    """Drop because this node has no room: without blame, and a further copy may come through."""
    BAD_SIGNATURE = 4
    """Drop and lower the forwarder's score; the id is not marked seen, since a true copy may follow."""


Validator = Callable[[PeerId, RpcMessage], Verdict]
"""An inline validator: pure and fast. When it raises, the message is ignored and the error logged."""


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A peer that speaks our protocol is connected. Nothing is sent to it before :class:`StreamUp`.

    ``identity`` is its peer id as multihash bytes; ``outbound`` whether we dialed; ``ips`` its addresses for P6.
    """

    peer: PeerId
    identity: bytes
    version: Version = Version.V1_2
    outbound: bool = False
    ips: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The last connection to a peer is gone."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class StreamUp:
    """Our outbound stream to a peer is open (again): it gets our subscriptions and grafts."""

    peer: PeerId
    protocol: str = ""


@dataclass(frozen=True, slots=True)
class StreamDown:
    """Our outbound stream ended while the connection lives: the router asks for another, with growing pauses.

    Also said when opening it failed.
    """

    peer: PeerId


@dataclass(frozen=True, slots=True)
class StreamAccepted:
    """The peer opened a stream to us: what it said on an earlier one holds only if it says it again.

    ``says_hello``: this wire's nodes name all their topics on each new stream, also when there is none. Where that is
    not sure, earlier subscriptions are doubted from the first new one on.
    """

    peer: PeerId
    says_hello: bool = False


@dataclass(frozen=True, slots=True)
class RpcReceived:
    """A decoded RPC from a peer."""

    peer: PeerId
    rpc: Rpc


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes from a peer that are no RPC: it is punished (P7) and its stream is to be reset."""

    peer: PeerId
    detail: str


@dataclass(slots=True)  # not frozen: every publish makes one, and that takes three times as long
class Publish:
    """Publish ``data``. ``ref`` comes back in the :class:`~dep2p.gossipsub.effects.PublishAccepted` effect.

    ``if_no_peers``: "error" raises, "queue" waits for a first peer, "ignore" publishes to no peer (the message still
    gossips from the message cache).
    """

    topic: str
    data: bytes
    ref: int = 0
    if_no_peers: Literal["error", "queue", "ignore"] = "error"
    headers: MessageHeaders = NO_HEADERS


@dataclass(frozen=True, slots=True)
class Join:
    """Join a topic. With ``deliver`` false the node only forwards (a relay)."""

    topic: str
    deliver: bool = True


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave a topic."""

    topic: str


@dataclass(frozen=True, slots=True)
class JoinMatching:
    """Join the topics that match a pattern, those of now and those to come."""

    pattern: str


@dataclass(frozen=True, slots=True)
class LeaveMatching:
    """End that."""

    pattern: str


@dataclass(frozen=True, slots=True)
class TopicAppeared:
    """This node is about to publish to a topic: join it when a pattern of its own matches."""

    topic: str


@dataclass(frozen=True, slots=True)
class ConfigureTopic:
    """How messages of a topic are validated and scored, before or after joining it.

    ``inline`` runs in the router; ``external`` makes it emit `Validate` effects and wait for :class:`Validated`. The
    router raises ``ValueError`` for a malformed pattern.
    """

    topic: str
    inline: Validator | None = None
    external: bool = False
    score: TopicScoreParams | None = None


@dataclass(frozen=True, slots=True)
class Validated:
    """The verdict on a `Validate` effect."""

    ticket: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class SendDropped:
    """A peer's outbound queue had no room for this part of a `Send`."""

    peer: PeerId
    rpc: Rpc


@dataclass(frozen=True, slots=True)
class SetAppScore:
    """The app's own opinion of a peer (P5)."""

    peer: PeerId
    value: float


@dataclass(frozen=True, slots=True)
class SetDirect:
    """Make a peer direct: always sent to, never in a mesh, never scored down. Or end that."""

    peer: PeerId
    direct: bool = True


@dataclass(frozen=True, slots=True)
class SetBlacklist:
    """Take nothing from a peer, neither as neighbour nor as author (``identity``: multihash bytes). Or end that."""

    peer: PeerId
    identity: bytes
    blocked: bool = True


Event = (
    PeerUp
    | PeerDown
    | StreamUp
    | StreamDown
    | StreamAccepted
    | RpcReceived
    | Malformed
    | Publish
    | Join
    | Leave
    | JoinMatching
    | LeaveMatching
    | TopicAppeared
    | ConfigureTopic
    | Validated
    | SendDropped
    | SetAppScore
    | SetDirect
    | SetBlacklist
)
