"""The mutual realm handshake: both sides prove that they hold the realm's secret (docs/spec/realm.md §3).

::

    initiator                                         responder
      REQUEST  req_id 1: nonce_i ‖ tag              ->
                                                    <-  RESPONSE req_id 1: nonce_r ‖ proof_R
      REQUEST  req_id 2: proof_I                    ->
                                                    <-  RESPONSE req_id 2: (empty)

Each proof covers both peer ids as the transport authenticated them, and the channel binding of the connection. So
neither a relayed nor a reflected proof is worth anything, even if a transport should mistake one peer for another.

The handshake is *blinded*: no message names the realm. The tag is a MAC that members recognise and that is random to
others. A responder that recognises none goes on with a decoy: keys that no peer has. So a peer without the secret
sees the same steps, sizes and random bytes from every node, whatever realms it is in. A node that it dials gives it no
proof against which it could guess a passphrase.
Pure: bytes and time come in as events, bytes and the verdict come out as effects.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dep2p.encoding.decoded import are_texts, is_array
from dep2p.errors import (
    ErrorCode,
    LocalProtocolError,
    NotMemberError,
    OverloadedError,
    ProtocolError,
    RateLimitedError,
    RequestTimeoutError,
    WireError,
)
from dep2p.protocols.realm.keys import (
    CHANNEL_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    TAG_BYTES,
    ProofContext,
    RealmKeys,
    Side,
    equal_in_constant_time,
    handshake_proof,
    hello_tag,
)
from dep2p.protocols.wire.frame import HEADERS, Frame, FrameDecoder, FrameType, decode_error, encode_error, encode_frame
from dep2p.protocols.wire.headers import HeaderKey, HeaderMap, decode_headers, encode_headers, header_uint, headers_end
from dep2p.types import PeerId, RealmId, Rng, peer_id_bytes

HANDSHAKE_PAYLOAD_BYTES_MAX: Final = 2_048
"""Cap of a handshake frame's payload: headers, or an error's text, and 64 bytes."""
HANDSHAKE_HEADERS_BYTES_MAX: Final = 1_024
FEATURES_MAX: Final = 16
FEATURE_BYTES_MAX: Final = 32

_FIRST: Final = 1
_SECOND: Final = 2


AUTH_PROTOCOL: Final = "/dep2p/realm/auth/3.0.0"
"""The protocol id of the handshake of all realms."""
REALMS_PADDING: Final = 16
"""A responder computes tags for a multiple of so many realms, so that its time does not count its realms."""


@dataclass(frozen=True, slots=True)
class HandshakeBytes:
    """Bytes arrived on the handshake's stream."""

    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class HandshakeStreamEnded:
    """No more bytes will come."""


@dataclass(frozen=True, slots=True)
class SendBytes:
    """Write these bytes to the stream."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PeerAuthenticated:
    """The peer holds the realm's secret. Always the last effect."""

    realm_id: RealmId
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """The handshake is over without a proof. Always the last effect.

    ``by_peer`` tells whether the peer's bytes are to blame (false for a timeout, an end of stream, or its ERROR).
    """

    error: WireError
    by_peer: bool


HandshakeEvent = HandshakeBytes | HandshakeStreamEnded
HandshakeEffect = SendBytes | PeerAuthenticated | HandshakeFailed


def check_features(features: Sequence[str]) -> tuple[str, ...]:
    """Features as they may be offered. Raises ``ValueError`` for too many, too long, or non-printable ones."""
    if len(features) > FEATURES_MAX:
        raise ValueError(f"{len(features)} features: at most {FEATURES_MAX} can be offered")
    for feature in features:
        if not _is_feature(feature):
            raise ValueError(f"feature {feature!r}: 1 to {FEATURE_BYTES_MAX} printable ASCII characters")
    return tuple(features)


def _is_feature(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= FEATURE_BYTES_MAX and value.isascii() and value.isprintable()


@dataclass(frozen=True, slots=True)
class HandshakeChannel:
    """The connection under a handshake, as the transport authenticated it: both ends, and 32 bytes of channel binding.

    Raises ``ValueError`` for equal ids and for a binding of another length.
    """

    own: PeerId
    peer: PeerId
    binding: bytes

    def __post_init__(self) -> None:
        if self.own == self.peer:
            raise ValueError("a node does not shake hands with itself")
        if len(self.binding) != CHANNEL_BYTES:
            raise ValueError(f"a channel binding has {CHANNEL_BYTES} bytes, not {len(self.binding)}")


class _Handshake(ABC):
    """The common part of both sides: framing, the deadline, the verdict."""

    __slots__ = (
        "_channel",
        "_deadline",
        "_decoder",
        "_is_over",
        "_keys",
        "_nonce",
        "_own",
        "_own_headers",
        "_peer",
        "_peer_features",
    )

    def __init__(
        self,
        keys: RealmKeys,
        channel: HandshakeChannel,
        *,
        features: Sequence[str],
        rng: Rng,
        now: float,
        timeout_s: float,
    ) -> None:
        """``features``: what this side offers. The handshake fails ``timeout_s`` after ``now``."""
        self._channel = channel.binding
        self._keys = keys
        self._own = peer_id_bytes(channel.own)
        self._peer = peer_id_bytes(channel.peer)
        self._own_headers = encode_headers({HeaderKey.FEATURES: list(check_features(features))}) if features else b""
        self._peer_features: tuple[str, ...] = ()
        self._nonce = rng.randbytes(NONCE_BYTES)
        self._decoder = FrameDecoder(HANDSHAKE_PAYLOAD_BYTES_MAX)
        self._deadline = now + timeout_s
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether there was a verdict; later events are ignored."""
        return self._is_over

    def next_deadline(self) -> float | None:
        """When `on_deadline` is due; None after the verdict."""
        return None if self._is_over else self._deadline

    def on_deadline(self, now: float) -> list[HandshakeEffect]:
        """Fail the handshake when its time is over."""
        if self._is_over or now < self._deadline:
            return []
        return self._fail(RequestTimeoutError("the realm handshake took too long"), by_peer=False)

    def abandon(self, error: WireError) -> list[HandshakeEffect]:
        """End it for a reason of this side's own, and name the reason to the peer."""
        if self._is_over:
            return []
        return [SendBytes(encode_error(error.code, str(error))), *self._fail(error, by_peer=False)]

    def handle(self, event: HandshakeEvent, now: float) -> list[HandshakeEffect]:
        """Take one event, give what is to be done."""
        if self._is_over:
            return []
        if now >= self._deadline:
            return self.on_deadline(now)
        if isinstance(event, HandshakeStreamEnded):
            return self._fail(ProtocolError("the peer ended the realm handshake early"), by_peer=False)
        effects: list[HandshakeEffect] = []
        for frame in self._decoder.feed(event.data):
            try:
                effects += self._take(frame)
            except ProtocolError as error:
                effects += self._refuse(error)
            if self._is_over:
                return effects
        if self._decoder.error is not None:
            effects += self._refuse(self._decoder.error)
        return effects

    def _take(self, frame: Frame) -> list[HandshakeEffect]:
        if frame.flags & ~HEADERS:
            raise ProtocolError(f"frame flags 0x{frame.flags:04x} in a realm handshake")
        body = frame.payload
        headers: HeaderMap = {}
        if frame.flags & HEADERS:
            end = headers_end(body, 0, HANDSHAKE_HEADERS_BYTES_MAX)
            headers, body = decode_headers(body[:end]), body[end:]
        if frame.type == FrameType.ERROR:
            return self._fail(_peer_error(body, headers), by_peer=False)
        self._take_features(headers)
        return self._take_message(frame, body)

    @abstractmethod
    def _take_message(self, frame: Frame, body: bytes) -> list[HandshakeEffect]:
        """Take a message of the handshake that is no ERROR."""

    def _take_features(self, headers: HeaderMap) -> None:
        offered = headers.get(HeaderKey.FEATURES)
        if offered is None:
            return
        if not is_array(offered):
            raise ProtocolError("header FEATURES is not a list")
        if not are_texts(offered, FEATURES_MAX, _is_feature):
            raise ProtocolError("header FEATURES holds too many or malformed features")
        self._peer_features = tuple(offered)

    def _message(self, type_: FrameType, req_id: int, body: bytes, headers: bytes = b"") -> SendBytes:
        return SendBytes(encode_frame(type_, headers + body, flags=HEADERS if headers else 0, req_id=req_id))

    def _succeed(self) -> PeerAuthenticated:
        self._is_over = True
        return PeerAuthenticated(self._keys.realm_id, self._peer_features)

    def _refuse(self, error: WireError) -> list[HandshakeEffect]:
        """The peer is to blame: tell it, and end."""
        return [SendBytes(encode_error(error.code, str(error))), *self._fail(error, by_peer=True)]

    def _fail(self, error: WireError, *, by_peer: bool) -> list[HandshakeEffect]:
        self._is_over = True
        return [HandshakeFailed(error, by_peer)]


class HandshakeInitiator(_Handshake):
    """The side that opened the stream."""

    __slots__ = ("_nonce_r", "_state")

    def __init__(
        self,
        keys: RealmKeys,
        channel: HandshakeChannel,
        *,
        features: Sequence[str],
        rng: Rng,
        now: float,
        timeout_s: float,
    ) -> None:
        super().__init__(keys, channel, features=features, rng=rng, now=now, timeout_s=timeout_s)
        self._state = 0
        self._nonce_r = b""

    def start(self) -> list[HandshakeEffect]:
        """The first message. Raises :class:`LocalProtocolError` when called twice."""
        if self._state != 0:
            raise LocalProtocolError("a handshake starts once")
        self._state = _FIRST
        tag = hello_tag(self._keys.hello_key, self._own, self._peer, self._channel, self._nonce)
        return [self._message(FrameType.REQUEST, _FIRST, self._nonce + tag, self._own_headers)]

    def _take_message(self, frame: Frame, body: bytes) -> list[HandshakeEffect]:
        if frame.type != FrameType.RESPONSE or frame.req_id != self._state:
            raise ProtocolError(f"frame type 0x{frame.type:02x} with req_id {frame.req_id} in a realm handshake")
        if self._state == _SECOND:
            if body:
                raise ProtocolError("the end of a realm handshake carries bytes")
            return [self._succeed()]
        if len(body) != NONCE_BYTES + PROOF_BYTES:
            raise ProtocolError(f"a realm proof of {len(body)} bytes instead of {NONCE_BYTES + PROOF_BYTES}")
        nonce_r, proof = body[:NONCE_BYTES], body[NONCE_BYTES:]
        if equal_in_constant_time(nonce_r, self._nonce):
            raise ProtocolError("the peer sent our own nonce back")
        if not equal_in_constant_time(proof, self._proof("R", nonce_r)):
            return self._refuse(NotMemberError("the peer does not hold this realm's secret"))
        self._state = _SECOND
        return [self._message(FrameType.REQUEST, _SECOND, self._proof("I", nonce_r))]

    def _proof(self, side: Side, nonce_r: bytes) -> bytes:
        keys = self._keys
        context = ProofContext(self._own, self._peer, keys.realm_id, self._channel, self._nonce, nonce_r)
        return handshake_proof(keys.auth_key, side, context)


@dataclass(frozen=True, slots=True)
class ResponderKeys:
    """The realms that a responder recognises, and a decoy: keys of a random secret that no peer has."""

    realms: tuple[RealmKeys, ...]
    decoy: RealmKeys


class HandshakeResponder(_Handshake):
    """The side that accepted the stream, for any number of realms."""

    __slots__ = ("_nonce_i", "_realms")

    def __init__(
        self,
        keys: ResponderKeys,
        channel: HandshakeChannel,
        *,
        features: Sequence[str],
        rng: Rng,
        now: float,
        timeout_s: float,
    ) -> None:
        super().__init__(keys.decoy, channel, features=features, rng=rng, now=now, timeout_s=timeout_s)
        padding = -len(keys.realms) % REALMS_PADDING if keys.realms else REALMS_PADDING
        self._realms = [*keys.realms, *[keys.decoy] * padding]
        self._nonce_i = b""

    def _take_message(self, frame: Frame, body: bytes) -> list[HandshakeEffect]:
        expected = _SECOND if self._nonce_i else _FIRST
        if frame.type != FrameType.REQUEST or frame.req_id != expected:
            raise ProtocolError(f"frame type 0x{frame.type:02x} with req_id {frame.req_id} in a realm handshake")
        if expected == _FIRST:
            if len(body) != NONCE_BYTES + TAG_BYTES:
                raise ProtocolError(f"a first message of {len(body)} bytes instead of {NONCE_BYTES + TAG_BYTES}")
            self._nonce_i = body[:NONCE_BYTES]
            self._recognise(body[NONCE_BYTES:])
            answer = self._nonce + self._proof("R")
            return [self._message(FrameType.RESPONSE, _FIRST, answer, self._own_headers)]
        if not equal_in_constant_time(body, self._proof("I")):
            return self._refuse(NotMemberError("the peer proved membership of none of this node's realms"))
        return [self._message(FrameType.RESPONSE, _SECOND, b""), self._succeed()]

    def _recognise(self, tag: bytes) -> None:
        """Take the keys of the realm that the tag is of. All tags are computed and compared, whichever it is."""
        for keys in self._realms:
            expected = hello_tag(keys.hello_key, self._peer, self._own, self._channel, self._nonce_i)
            if equal_in_constant_time(tag, expected):
                self._keys = keys

    def _proof(self, side: Side) -> bytes:
        keys = self._keys
        context = ProofContext(self._peer, self._own, keys.realm_id, self._channel, self._nonce_i, self._nonce)
        return handshake_proof(keys.auth_key, side, context)


def _peer_error(body: bytes, headers: HeaderMap) -> WireError:
    """Turn the peer's ERROR into an exception. Only verdicts that a handshake can end with keep their own type."""
    code, text = decode_error(body)
    if code == ErrorCode.NOT_MEMBER:
        return NotMemberError(f"the peer refused the realm handshake: {text!r}")
    if code == ErrorCode.RATE_LIMITED:
        return RateLimitedError(
            "the peer takes no handshakes from this node for now, after failed ones",
            header_uint(headers, HeaderKey.RETRY_AFTER_MS) or 0,
        )
    if code == ErrorCode.OVERLOADED:
        return OverloadedError("the peer has too many handshakes at work")
    return ProtocolError(f"the peer ended the realm handshake with error {code}: {text!r}")
