"""The Noise XX handshake of libp2p without I/O: messages in, messages out, keys and the peer's identity at the end.

py-libp2p supplies the cryptographic state and the signed payloads; what is here bounds the messages and turns every way
in which a hostile one can fail into a ProtocolError.
"""

from dataclasses import dataclass
from typing import Any, cast

from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.peer.id import ID
from libp2p.security.noise.messages import NoiseHandshakePayload, verify_handshake_payload_sig
from libp2p.security.noise.patterns import PatternXX

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.host.noise.codec import KEY_BYTES

HANDSHAKE_BYTES_MAX = 8_192
"""One handshake message. An RSA-4096 identity with its signature takes about 1,200."""


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """Who the peer is, and the keys of both directions."""

    remote_peer: ID
    remote_public_key: PublicKey
    send_key: bytes
    receive_key: bytes


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
        self._state = cast(Any, self._pattern.create_noise_state())
        if is_initiator:
            self._state.set_as_initiator()
        else:
            self._state.set_as_responder()
        self._state.start_handshake()
        self._protocol: Any = self._state.noise_protocol
        self._handshake: Any = self._protocol.handshake_state
        self._received = 0

    def start(self) -> bytes:
        """The initiator's first message."""
        if not self.is_initiator:
            raise LocalProtocolError("the responder does not speak first")
        return bytes(self._state.write_message(b""))

    def receive(self, message: bytes) -> bytes | None:
        """Take the peer's next message; returns the answer to send, or None when there is none.

        Raises ProtocolError: malformed, forged, too long, or the identity of another peer than the expected one.
        """
        if self.result is not None:
            raise LocalProtocolError("the handshake is over")
        if len(message) > HANDSHAKE_BYTES_MAX:
            raise ProtocolError(f"a Noise handshake message of {len(message)} bytes is over {HANDSHAKE_BYTES_MAX}")
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
            _key_of(self._protocol.cipher_state_encrypt),
            _key_of(self._protocol.cipher_state_decrypt),
        )
        return answer

    def _write_payload(self) -> bytes:
        payload = self._pattern.make_handshake_payload().serialize()
        try:
            return bytes(self._state.write_message(payload))
        except ValueError as error:  # the exchange with a key of low order, such as all zeros
            raise ProtocolError("the peer's Noise key is of no use") from error

    def _verify(self, payload: bytes) -> tuple[ID, PublicKey]:
        try:
            signed = NoiseHandshakePayload.deserialize(payload)
            static_key = self._pattern._get_pubkey_from_noise_keypair(  # pyright: ignore[reportPrivateUsage]
                self._handshake.rs
            )
            is_genuine = verify_handshake_payload_sig(signed, static_key)
            peer = ID.from_pubkey(signed.id_pubkey)
        except Exception as error:  # protobuf, key and curve errors of hostile bytes
            raise ProtocolError(f"a malformed Noise handshake payload: {type(error).__name__}") from error
        if not is_genuine:
            raise ProtocolError("the peer's signature over its Noise key is wrong")
        if self._expected_peer is not None and peer != self._expected_peer:
            raise ProtocolError(f"the peer is {peer}, not {self._expected_peer} as expected")
        return peer, signed.id_pubkey


def _key_of(cipher_state: Any) -> bytes:
    """The key of a fresh cipher state of the noiseprotocol package."""
    key: object = cipher_state.k
    nonce: object = cipher_state.n
    if not isinstance(key, bytes) or len(key) != KEY_BYTES or nonce != 0:
        raise LocalProtocolError("the Noise handshake left no usable cipher key")
    return key
