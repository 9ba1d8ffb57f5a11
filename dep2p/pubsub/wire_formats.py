"""The two wires of pub/sub: how RPCs become bytes on a stream, and how messages are proved."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from dep2p.encoding.length_prefixed import LengthPrefixedDecoder, encode_length_prefixed
from dep2p.errors import ErrorCode, ProtocolError, WireError, error_from_wire
from dep2p.gossipsub.codecs.interface import Codec
from dep2p.gossipsub.codecs.libp2p import LIBP2P_RPC_BYTES_MAX, Libp2pCodec
from dep2p.gossipsub.codecs.realm import RealmCodec, derive_pubsub_key
from dep2p.gossipsub.events import Version
from dep2p.gossipsub.messages.message_id import MessageIdFn, MessageIds
from dep2p.gossipsub.options import SubscriptionFilter
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import RpcMessage
from dep2p.gossipsub.scoring.params import ScoreParams
from dep2p.gossipsub.scoring.peer_gater import GaterParams
from dep2p.gossipsub.signing.policy import ComposeWithHeaders, SigningPolicy
from dep2p.identity import Identity
from dep2p.protocols.wire.frame import FrameDecoder, FrameType, decode_error, encode_error, encode_header
from dep2p.types import RealmId, peer_id_bytes

_GOSSIP: Final = int(FrameType.GOSSIP)
_ERROR: Final = int(FrameType.ERROR)

MESHSUB_1_1: Final = "/meshsub/1.1.0"
MESHSUB_1_2: Final = "/meshsub/1.2.0"

Check = Callable[[RpcMessage], str | None]
"""Returns why a message is refused, or None."""


def pubsub_protocol(realm_id: RealmId) -> str:
    """The protocol id of a realm's pub/sub streams."""
    return f"/dep2p/app/{realm_id}/pubsub/1.0.0"


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast messages go to one peer: ``messages`` at once, and as many again after each ``interval_s``.

    go-libp2p-pubsub has 32 places for messages that wait for their check, and drops further ones without a word: a
    burst of 1,000 lost 75 to 90 %. At this pace a peer that is not starved of processor time drops none. What a busy
    one drops is announced to it again, see `PeerQueue.take_burst`.
    """

    messages: int = 8
    interval_s: float = 0.005

    def __post_init__(self) -> None:
        if self.messages < 1 or self.interval_s <= 0:
            raise ValueError("a pace has at least 1 message and an interval above 0")


class RpcDecoder(Protocol):
    """Cuts one inbound stream into RPC payloads."""

    error: ProtocolError | None
    """Set by `feed` when the bytes break the wire's rules; feed no more then."""
    refusal: WireError | None
    """The peer's error for the whole stream, which comes before its end."""

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Take bytes; return the payloads that they complete."""
        ...


class Wire(Protocol):
    """One wire of one node."""

    protocols: Mapping[str, Version]
    """Protocol ids, the one to try first in front."""
    codec: Codec
    policy: SigningPolicy
    half_close_ends: bool
    """Whether a peer that half-closes the stream that we opened has ended it."""
    pace: Pace | None
    """The pace at which peers take messages; None where they hold their writers back themselves."""
    says_hello: bool
    """Whether every node of this wire names all its topics on each stream that it opens."""

    def frame(self, payload: bytes) -> bytes:
        """Return a payload in the form of the stream."""
        ...

    def decoder(self) -> RpcDecoder: ...

    def refuse(self, code: ErrorCode, text: str) -> bytes:
        """Return last words for a peer whose stream is refused; empty where the wire has none."""
        ...

    def check_now(self, message: RpcMessage, /) -> str | None:
        """Do the cheap half of authentication; return why the message is refused, or None."""
        ...

    def check_signature(self, message: RpcMessage, /) -> str | None:
        """Do the other half: check the signature."""
        ...

    @property
    def has_signatures(self) -> bool: ...

    @property
    def compose_with_headers(self) -> ComposeWithHeaders | None:
        """Makes messages with headers; None where the wire has no place for them."""
        ...


class _GossipFrames:
    """Frames of type GOSSIP, and ERROR as a last word; anything else is a violation."""

    __slots__ = ("_frames", "error", "refusal")

    def __init__(self, payload_bytes_max: int) -> None:
        self._frames = FrameDecoder(payload_bytes_max)
        self.error: ProtocolError | None = None
        self.refusal: WireError | None = None

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        payloads: list[bytes] = []
        for frame in self._frames.feed(data):
            if frame.type == _GOSSIP and not frame.flags and not frame.req_id:
                payloads.append(frame.payload)
            elif frame.type == _ERROR and not frame.flags:
                try:
                    self.refusal = error_from_wire(*decode_error(frame.payload))
                except ProtocolError as error:
                    self.error = error
                return payloads
            else:
                self.error = ProtocolError(f"a frame of type 0x{frame.type:02x} on a pub/sub stream, or with flags")
                return payloads
        self.error = self._frames.error
        return payloads


class RealmWire:
    """GOSSIP frames of one realm."""

    def __init__(self, identity: Identity, psk: bytes, realm_id: RealmId, params: GossipParams) -> None:
        self.protocols: Mapping[str, Version] = {pubsub_protocol(realm_id): Version.V1_2}
        self.policy = SigningPolicy.STRICT_SIGN
        self.half_close_ends = True
        self.says_hello = True
        self.pace: Pace | None = None
        self.has_signatures = True
        mac_key = derive_pubsub_key(psk, realm_id)
        codec = RealmCodec(
            peer_id_bytes(identity.peer_id), identity.sign, mac_key, params, sign_batch_max=params.sign_batch_max
        )
        self.codec: Codec = codec
        self.compose_with_headers: ComposeWithHeaders | None = codec.compose_with_headers
        self.check_now: Check = codec.check_mac
        self.check_signature: Check = codec.check_signature
        self._payload_bytes_max = params.rpc_bytes_max

    def frame(self, payload: bytes) -> bytes:
        return encode_header(_GOSSIP, len(payload)) + payload

    def decoder(self) -> RpcDecoder:
        return _GossipFrames(self._payload_bytes_max)

    def refuse(self, code: ErrorCode, text: str) -> bytes:
        return encode_error(code, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPubSub:
    """Options of public pub/sub; all nodes of one network must agree on them."""

    policy: SigningPolicy = SigningPolicy.STRICT_SIGN
    message_ids: str | MessageIdFn | None = None
    """Profile of topics without their own: "go", "js", "rust", "sha256" or a function. None: "go" for a network that
    signs, "sha256" for one that does not."""
    message_ids_by_topic: Mapping[str, str | MessageIdFn] = field(default_factory=dict[str, str | MessageIdFn])
    protocols: tuple[str, ...] = (MESHSUB_1_2, MESHSUB_1_1)
    """The protocols that this node offers, the preferred one first."""
    pace: Pace | None = Pace()
    """How fast messages go to one peer; None: as fast as it reads."""
    params: GossipParams | None = None
    """None: the node's."""
    scores: ScoreParams | None = None
    """None: the node's."""
    gater: GaterParams | None = None
    """Drops messages at random while validation is overloaded, of peers that waste it. None: never."""
    subscription_filter: SubscriptionFilter | None = None
    """Remember peers' subscriptions to these topics only: a function of the topic's name, for example
    :func:`~dep2p.gossipsub.subscriptions.allow_topics`. None: all, within the caps for one peer."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.protocols if name not in _VERSIONS]
        if unknown or not self.protocols:
            raise ValueError(f"protocols must be out of {', '.join(_VERSIONS)}, not {', '.join(self.protocols)}")
        self.id_function()

    def id_function(self) -> MessageIds:
        """The id function of each topic. Raises ``ValueError`` for an unknown profile."""
        default = self.message_ids
        if default is None:
            default = "go" if self.policy is SigningPolicy.STRICT_SIGN else "sha256"
        return MessageIds(default, self.message_ids_by_topic)


_VERSIONS: Final[Mapping[str, Version]] = {MESHSUB_1_2: Version.V1_2, MESHSUB_1_1: Version.V1_1}


class _Delimited:
    """RPCs behind their lengths."""

    __slots__ = ("_payloads", "error", "refusal")

    def __init__(self, payload_bytes_max: int) -> None:
        self._payloads = LengthPrefixedDecoder(payload_bytes_max)
        self.error: ProtocolError | None = None
        self.refusal: WireError | None = None

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        payloads = self._payloads.feed(data)
        self.error = self._payloads.error
        return payloads


class PublicWire:
    """libp2p's wire."""

    def __init__(self, identity: Identity, options: PublicPubSub, params: GossipParams) -> None:
        self.protocols: Mapping[str, Version] = {name: _VERSIONS[name] for name in options.protocols}
        self.policy: SigningPolicy = options.policy
        self.half_close_ends = False
        self.says_hello = False
        self.pace: Pace | None = options.pace
        self.has_signatures: bool = options.policy is SigningPolicy.STRICT_SIGN
        self.codec: Codec = Libp2pCodec(
            peer_id_bytes(identity.peer_id), identity.sign, options.id_function(), params, policy=options.policy
        )
        self.check_signature: Check = self.codec.authenticate
        self.compose_with_headers: ComposeWithHeaders | None = None
        self._payload_bytes_max = min(params.rpc_bytes_max, LIBP2P_RPC_BYTES_MAX)

    def frame(self, payload: bytes) -> bytes:
        return encode_length_prefixed(payload)

    def decoder(self) -> RpcDecoder:
        return _Delimited(self._payload_bytes_max)

    def refuse(self, code: ErrorCode, text: str) -> bytes:
        return b""

    def check_now(self, message: RpcMessage) -> str | None:
        return None


def count_refusal(counters: Counter[str], refusal: WireError) -> None:
    """Count a peer's last word by its code."""
    counters[f"streams_refused_by_peer_{refusal.code.name.lower()}"] += 1
