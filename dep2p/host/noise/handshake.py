"""The Noise XX handshake of libp2p without I/O: messages in, messages out, keys and the peer's identity at the end.

py-libp2p supplies the cryptographic state and our own signed payload. The peer's payload is read here: py-libp2p also
takes private keys and tests their primes, which costs seconds (docs/explanation/py-libp2p-traps.md).
"""

from dataclasses import dataclass
from typing import Protocol, cast

from google.protobuf.message import DecodeError
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer.id import ID
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.noise.pb.noise_pb2 import NoiseHandshakePayload

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.host.noise.codec import KEY_BYTES
from dep2p.public_keys import parse_public_key

HANDSHAKE_BYTES_MAX = 8_192
"""Bytes of one handshake message at most. An RSA-4096 identity with its signature takes about 1,200."""

SIGNED_PREFIX = b"noise-libp2p-static-key:"


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """The peer's identity, and the keys of both directions."""

    remote_peer: ID
    remote_public_key: PublicKey
    handshake_hash: bytes
    """A hash that is equal at both ends and on no other connection: data bound to it cannot be moved to another
    channel."""
    send_key: bytes
    receive_key: bytes


class BothDialedError(ProtocolError):
    """The peer has dialed as well, at the same time, from and to the same ports: both are initiators."""


class _CipherState(Protocol):
    """This and the next: classes of the noiseprotocol package, which has no types."""

    k: object
    n: object


class _RemoteKey(Protocol):
    public_bytes: object


class _HandshakeState(Protocol):
    rs: _RemoteKey


class _NoiseProtocol(Protocol):
    handshake_state: _HandshakeState
    handshake_hash: bytes
    cipher_state_encrypt: _CipherState
    cipher_state_decrypt: _CipherState


class _NoiseState(Protocol):
    noise_protocol: _NoiseProtocol

    def set_as_initiator(self) -> None: ...
    def set_as_responder(self) -> None: ...
    def start_handshake(self) -> None: ...
    def write_message(self, payload: bytes) -> bytearray: ...
    def read_message(self, data: bytes) -> bytearray: ...


class NoiseHandshake:
    """One side of one handshake.

    The initiator sends `start()` and then the answer of each `receive`; the responder only answers. A message arrives
    without its u16 length. ``result`` is set once `receive` has taken the last message, or given it.
    """

    def __init__(
        self, key_pair: KeyPair, static_key: PrivateKey, *, is_initiator: bool, expected_peer: ID | None = None
    ) -> None:
        self.is_initiator = is_initiator
        self.result: HandshakeResult | None = None
        self._expected_peer = expected_peer
        self._pattern = PatternXX(ID.from_pubkey(key_pair.public_key), key_pair.private_key, static_key)
        self._state = cast(_NoiseState, self._pattern.create_noise_state())
        if is_initiator:
            self._state.set_as_initiator()
        else:
            self._state.set_as_responder()
        self._state.start_handshake()
        self._protocol = self._state.noise_protocol
        self._handshake = self._protocol.handshake_state
        self._received = 0

    def start(self) -> bytes:
        """Return the initiator's first message."""
        if not self.is_initiator:
            raise LocalProtocolError("the responder does not speak first")
        return bytes(self._state.write_message(b""))

    def receive(self, message: bytes) -> bytes | None:
        """Take the peer's next message; return the answer to send, or None when there is none.

        Raises ProtocolError: malformed, forged, too long, or the identity of another peer than the expected one;
        BothDialedError: the peer is an initiator, too.
        """
        if self.result is not None:
            raise LocalProtocolError("the handshake is over")
        if len(message) > HANDSHAKE_BYTES_MAX:
            raise ProtocolError(f"a Noise handshake message of {len(message)} bytes is over {HANDSHAKE_BYTES_MAX}")
        if self.is_initiator and len(message) == KEY_BYTES:  # a responder's answer has its static key besides
            raise BothDialedError("both sides have dialed, and one connection came of it")
        try:
            payload = bytes(self._state.read_message(message))
        except Exception as error:  # whatever the cipher, curve and state objects raise for hostile bytes
            raise ProtocolError(f"a malformed Noise handshake message: {type(error).__name__}") from error
        self._received += 1
        if not self.is_initiator and self._received == 1:
            return self._write_payload()
        peer, public_key = self._verify(payload)
        answer = self._write_payload() if self.is_initiator else None
        self.result = HandshakeResult(
            peer,
            public_key,
            bytes(self._protocol.handshake_hash),
            _key_of(self._protocol.cipher_state_encrypt),
            _key_of(self._protocol.cipher_state_decrypt),
        )
        vars(self._state).clear()  # it holds a method of itself, and so all of this until the garbage collector comes
        return answer

    def _write_payload(self) -> bytes:
        payload = self._pattern.make_handshake_payload().serialize()
        try:
            return bytes(self._state.write_message(payload))
        except ValueError as error:  # the exchange with a key of low order, such as all zeros
            raise ProtocolError("the peer's Noise key is of no use") from error

    def _verify(self, payload: bytes) -> tuple[ID, PublicKey]:
        try:
            message = NoiseHandshakePayload.FromString(payload)
        except DecodeError as error:
            raise ProtocolError("a malformed Noise handshake payload") from error
        public_key = parse_public_key(message.identity_key)
        static_key: object = self._handshake.rs.public_bytes
        if not isinstance(static_key, bytes):
            raise LocalProtocolError("the Noise handshake has not received the peer's static key")
        if not public_key.verify(SIGNED_PREFIX + static_key, message.identity_sig):
            raise ProtocolError("the peer's signature over its Noise key is wrong")
        peer = ID(public_key.peer_id_bytes)
        if self._expected_peer is not None and peer != self._expected_peer:
            raise ProtocolError(f"the peer is {peer}, not {self._expected_peer} as expected")
        try:
            return peer, deserialize_public_key(message.identity_key)
        except Exception as error:  # a key that the specification allows and py-libp2p cannot hold
            raise ProtocolError(f"a public key that py-libp2p does not know: {type(error).__name__}") from error


def _key_of(cipher_state: _CipherState) -> bytes:
    """Return the key of a fresh cipher state."""
    key: object = cipher_state.k
    nonce: object = cipher_state.n
    if not isinstance(key, bytes) or len(key) != KEY_BYTES or nonce != 0:
        raise LocalProtocolError("the Noise handshake left no usable cipher key")
    return key
