"""The realm wire (docs/spec/pubsub.md): an RPC as a CBOR map, the payload of one GOSSIP frame.

A message is ``[[from, seqno, topic, data], signature, mac]``; signature and MAC cover the bytes of the inner list. Own
messages that are published together share one signature; each has a fourth item then, the proof that it is covered.
A message with headers has them as a fifth item of the inner list, and goes under a key of its own, which nodes that do
not know headers skip.
"""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import nacl.bindings
import nacl.exceptions
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dep2p.encoding.cbor import ARRAY, MAP, UINT, CborReader, encode_bytes, encode_text, head
from dep2p.errors import ProtocolError
from dep2p.gossipsub import reasons
from dep2p.gossipsub.codecs.interface import DecodeLimits
from dep2p.gossipsub.codecs.split import SplitLimits, split_rpc
from dep2p.gossipsub.headers import NO_HEADERS, MessageHeaders, read_headers
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.signing.merkle_batch import PROOF_BYTES_MAX, VerifiedBatches, is_proof, make_proofs, root_of
from dep2p.types import RealmId

SIGN_PREFIX: Final = b"dep2p-pubsub:"
BATCH_SIGN_PREFIX: Final = b"dep2p-pubsub-batch:"
SIGNATURE_BYTES: Final = 64
MAC_BYTES: Final = 16

_KEY_SALT: Final = b"dep2p-pubsub-key-v1"
_SUBSCRIPTIONS: Final = 1
_MESSAGES: Final = 2
_IHAVE: Final = 3
_IWANT: Final = 4
_GRAFT: Final = 5
_PRUNE: Final = 6
_IDONTWANT: Final = 7
_MESSAGES_WITH_HEADERS: Final = 8
_KEYS_MAX: Final = 64
_SIGN_BATCH_BYTES_MAX: Final = 262_144
"""Own messages that wait for their signature are signed at this many bytes, since they are held twice until then."""
_TRUE: Final = b"\xf5"
_FALSE: Final = b"\xf4"
# An Ed25519 peer id: identity multihash of 36 bytes, protobuf PublicKey{Ed25519, 32 bytes}.
_AUTHOR_PREFIX: Final = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_AUTHOR_BYTES: Final = 38
_SIGNATURE_START: Final = b"\x58\x40"
_MAC_START: Final = b"\x50"
_SHORT_SEQNO: Final = b"\x00\x00\x00\x00\xff\xff\xff\xff"
"""The highest number that CBOR writes in less than eight bytes."""
_SIGNED_START: Final = b"\x84\x58\x26" + _AUTHOR_PREFIX
"""A list of four, the first a byte string of 38 bytes."""

Sign = Callable[[bytes], bytes]
"""Makes the 64-byte Ed25519 signature of some bytes by this node."""


def derive_pubsub_key(psk: bytes, realm_id: RealmId) -> bytes:
    """Return the 32-byte key of message MACs. Raises ``ValueError`` unless the PSK has 32 bytes."""
    if len(psk) != 32:
        raise ValueError(f"a realm's PSK has 32 bytes, not {len(psk)}")
    return HKDF(algorithm=SHA256(), length=32, salt=_KEY_SALT, info=realm_id.encode("ascii")).derive(psk)


class RealmCodec:
    """The codec of one realm at one node.

    ``author``: this node's peer id as multihash bytes; ``sign``: its signature; ``mac_key``: see
    :func:`derive_pubsub_key`.
    """

    __slots__ = (
        "_author",
        "_author_item",
        "_limits",
        "_mac_key",
        "_message_bytes_max",
        "_sign",
        "_sign_batch_max",
        "_split",
        "_unsigned",
        "_unsigned_bytes",
        "_verified",
    )

    def __init__(
        self,
        author: bytes,
        sign: Sign,
        mac_key: bytes,
        params: GossipParams,
        limits: DecodeLimits | None = None,
        *,
        sign_batch_max: int = 1,
    ) -> None:
        """``sign_batch_max``: own messages that may share a signature, with 1 each is signed in `compose`."""
        if len(author) != _AUTHOR_BYTES or not author.startswith(_AUTHOR_PREFIX):
            raise ValueError("the realm wire needs an Ed25519 peer id")
        self._author = author
        self._author_item = encode_bytes(author)
        self._sign = sign
        self._mac_key = mac_key
        self._limits = limits or DecodeLimits(topic_bytes_max=params.topic_bytes_max)
        self._message_bytes_max = params.message_bytes_max
        self._split = SplitLimits.of(params)
        self._sign_batch_max = sign_batch_max
        self._unsigned: list[tuple[RpcMessage, bytes]] = []
        """Own messages that wait for company under one signature, and their signed bytes."""
        self._unsigned_bytes = 0
        self._verified = VerifiedBatches()

    # Own messages and those of others ---------------------------------------------------------------------------------

    def compose(self, topic: str, data: bytes, seqno: bytes) -> RpcMessage:
        """Make a message of this node. ``seqno``: 8 bytes.

        It is signed when ``sign_batch_max`` or 256 KiB wait, or when `encode` first meets one of them: until then its
        ``wire`` is empty.
        """
        number = b"\x1b" + seqno if seqno > _SHORT_SEQNO else head(UINT, int.from_bytes(seqno, "big"))
        signed = b"".join((b"\x84", self._author_item, number, encode_text(topic), head(2, len(data)), data))
        message = RpcMessage(hashlib.sha256(self._author + seqno).digest()[:16], self._author, seqno, topic, data)
        self._unsigned.append((message, signed))
        self._unsigned_bytes += len(signed)
        if len(self._unsigned) >= self._sign_batch_max or self._unsigned_bytes >= _SIGN_BATCH_BYTES_MAX:
            self.sign_waiting()
        return message

    def compose_with_headers(self, topic: str, data: bytes, seqno: bytes, headers: MessageHeaders) -> RpcMessage:
        """Make a message of this node that has headers; see `compose`. Raises ``ValueError`` for no headers."""
        if headers is NO_HEADERS:
            raise ValueError("a message without headers has another form")
        number = head(UINT, int.from_bytes(seqno, "big"))
        parts = (b"\x85", self._author_item, number, encode_text(topic), head(2, len(data)), data, headers.encoded)
        message_id = hashlib.sha256(self._author + seqno).digest()[:16]
        return self._composed(
            RpcMessage(message_id, self._author, seqno, topic, data, headers=headers), b"".join(parts)
        )

    def _composed(self, message: RpcMessage, signed: bytes) -> RpcMessage:
        self._unsigned.append((message, signed))
        self._unsigned_bytes += len(signed)
        if len(self._unsigned) >= self._sign_batch_max or self._unsigned_bytes >= _SIGN_BATCH_BYTES_MAX:
            self.sign_waiting()
        return message

    def sign_waiting(self) -> None:
        """Sign the own messages that wait for it."""
        unsigned, self._unsigned, self._unsigned_bytes = self._unsigned, [], 0
        covered = [SIGN_PREFIX + signed for _, signed in unsigned]
        proofs = [b""]
        if len(unsigned) == 1:
            signature = self._sign(covered[0])
        elif unsigned:
            root, proofs = make_proofs(covered)
            signature = self._sign(BATCH_SIGN_PREFIX + root)
        else:
            return
        for (message, signed), one, proof in zip(unsigned, covered, proofs, strict=True):
            mac = hmac.digest(self._mac_key, one, "sha256")[:MAC_BYTES]
            head_byte, tail = (b"\x84", encode_bytes(proof)) if proof else (b"\x83", b"")
            message.signature = signature
            message.mac = mac
            message.proof = proof
            message.signed_start = 1
            message.signed_end = 1 + len(signed)
            message.wire = b"".join((head_byte, signed, b"\x58\x40", signature, b"\x50", mac, tail))

    def authenticate(self, message: RpcMessage) -> str | None:
        """Return why a message is not its author's; None when it is. The MAC is cheap and checked first, so that a
        stranger costs no signature check."""
        return self.check_mac(message) or self.check_signature(message)

    def check_mac(self, message: RpcMessage) -> str | None:
        """Do the first half of `authenticate`: it takes microseconds, so that a shell can do it at once."""
        covered = SIGN_PREFIX + message.wire[message.signed_start : message.signed_end]
        mac = hmac.digest(self._mac_key, covered, "sha256")[:MAC_BYTES]
        return None if hmac.compare_digest(mac, message.mac) else reasons.INVALID_MAC

    def check_signature(self, message: RpcMessage) -> str | None:
        """Do the second half of `authenticate`: some 60 µs, better done in batches; microseconds when its batch was
        verified before."""
        covered = SIGN_PREFIX + message.wire[message.signed_start : message.signed_end]
        signature, author, proof = message.signature, message.author, message.proof
        batch = b""
        if proof:
            root = root_of(covered, proof)
            batch = author + signature + root
            if batch in self._verified:
                return None
            covered = BATCH_SIGN_PREFIX + root
        try:
            nacl.bindings.crypto_sign_open(signature + covered, author[len(_AUTHOR_PREFIX) :])
        except nacl.exceptions.BadSignatureError:
            return reasons.INVALID_SIGNATURE
        if batch:
            self._verified.add(batch)
        return None

    # Encoding --------------------------------------------------------------------------------------------------------

    def encode(self, rpc: Rpc) -> list[bytes]:
        """Encode the RPC as payloads of GOSSIP frames, none above the parameters' sizes."""
        for message in rpc.messages:
            if not message.wire:
                self.sign_waiting()
                break
        if len(rpc.messages) == 1 and not _has_control(rpc):
            message = rpc.messages[0]
            return [(b"\xa1\x02\x81" if message.headers is NO_HEADERS else b"\xa1\x08\x81") + message.wire]
        if any([message.headers is not NO_HEADERS for message in rpc.messages]):
            return self._encode_with_headers(rpc)
        return [_encode_one(part) for part in split_rpc(rpc, self._split)]

    def _encode_with_headers(self, rpc: Rpc) -> list[bytes]:
        """Encode messages with and without headers in their order: a run of each as an RPC of its own. Control goes
        first."""
        runs: list[list[RpcMessage]] = []
        for message in rpc.messages:
            if not runs or (runs[-1][0].headers is NO_HEADERS) != (message.headers is NO_HEADERS):
                runs.append([])
            runs[-1].append(message)
        parts = [replace(rpc, messages=())] if _has_control(rpc) else []
        parts += [Rpc(messages=tuple(run)) for run in runs]
        return [_encode_one(one) for part in parts for one in split_rpc(part, self._split)]

    # Decoding --------------------------------------------------------------------------------------------------------

    def decode(self, payload: bytes) -> Rpc:
        """Decode the payload of one GOSSIP frame. Unknown keys are skipped. Raises :class:`ProtocolError`."""
        reader = CborReader(payload)
        if payload[:2] == b"\xa1\x02":
            # Nothing but messages: by far the most frequent.
            reader.position = 2
            messages = self._messages(reader)
            reader.finish()
            return Rpc(messages)
        return self._decode_map(reader)

    def _decode_map(self, reader: CborReader) -> Rpc:
        last = -1
        ids = _Budget(self._limits.ids_max)
        messages: tuple[RpcMessage, ...] = ()
        subscriptions: tuple[SubscriptionChange, ...] = ()
        ihave: tuple[IHave, ...] = ()
        iwant: tuple[bytes, ...] = ()
        graft: tuple[str, ...] = ()
        prune: tuple[Prune, ...] = ()
        idontwant: tuple[bytes, ...] = ()
        for _ in range(reader.map(_KEYS_MAX)):
            key = reader.uint()
            if key <= last:
                raise ProtocolError("the RPC's keys are not in order")
            last = key
            if key == _MESSAGES:
                messages = self._messages(reader)
            elif key == _SUBSCRIPTIONS:
                subscriptions = self._subscriptions(reader)
            elif key == _IHAVE:
                ihave = self._ihave(reader, ids)
            elif key == _IWANT:
                iwant = self._ids(reader, ids)
            elif key == _GRAFT:
                count = reader.array(self._limits.grafts_max)
                graft = tuple([reader.text(self._limits.topic_bytes_max) for _ in range(count)])
            elif key == _PRUNE:
                prune = self._prunes(reader)
            elif key == _IDONTWANT:
                idontwant = self._ids(reader, ids)
            elif key == _MESSAGES_WITH_HEADERS:
                messages += self._messages_with_headers(reader, self._limits.messages_max - len(messages))
            else:
                reader.skip()
        reader.finish()
        return Rpc(messages, subscriptions, ihave, iwant, graft, prune, idontwant)

    def _messages(self, reader: CborReader) -> tuple[RpcMessage, ...]:
        found: list[RpcMessage] = []
        topic_bytes_max = self._limits.topic_bytes_max
        data_bytes_max = self._message_bytes_max
        payload = reader.data
        for _ in range(reader.array(self._limits.messages_max)):
            start = reader.position
            parts = reader.array(4)
            if parts < 3:
                raise ProtocolError("a message has too few parts")
            signed_start = reader.position
            seqno_start = signed_start + 3 + _AUTHOR_BYTES
            if (
                payload.startswith(_SIGNED_START, signed_start)
                and payload[seqno_start : seqno_start + 1] == b"\x1b"
                and payload[seqno_start + 1 : seqno_start + 2] > b"\x00"
            ):
                # The head of nearly all messages, taken at once: an Ed25519 author, a seqno of a clock's size.
                author = payload[signed_start + 3 : seqno_start]
                seqno = payload[seqno_start + 1 : seqno_start + 9]
                reader.position = seqno_start + 9
                if len(seqno) != 8:
                    raise ProtocolError("the RPC is cut off")
            else:
                reader.exact_array(4)
                author = reader.bytes_(_AUTHOR_BYTES)
                seqno = reader.uint().to_bytes(8, "big")
            topic = reader.text(topic_bytes_max)
            data = reader.bytes_(data_bytes_max)
            signed_end = reader.position
            mac_start = signed_end + 2 + SIGNATURE_BYTES + 1
            if (
                payload.startswith(_SIGNATURE_START, signed_end)
                and payload.startswith(_MAC_START, mac_start - 1)
                and mac_start + MAC_BYTES <= len(payload)
            ):  # at once, as the head
                signature = payload[signed_end + 2 : mac_start - 1]
                reader.position = mac_start + MAC_BYTES
                mac = payload[mac_start : reader.position]
            else:
                signature = reader.bytes_(SIGNATURE_BYTES)
                mac = reader.bytes_(MAC_BYTES)
            proof = b""
            if parts == 4:
                proof = reader.bytes_(PROOF_BYTES_MAX)
                if not is_proof(proof):
                    raise ProtocolError("a message's proof has another form")
            if len(signature) != SIGNATURE_BYTES or len(mac) != MAC_BYTES:
                raise ProtocolError("a message's signature or MAC is too short")
            if not topic or len(author) != _AUTHOR_BYTES or not author.startswith(_AUTHOR_PREFIX):
                raise ProtocolError("a message has no topic, or an author that is no Ed25519 peer id")
            message_id = hashlib.sha256(author + seqno).digest()[:16]
            wire = payload[start : reader.position]
            found.append(
                RpcMessage(
                    message_id,
                    author,
                    seqno,
                    topic,
                    data,
                    signature,
                    b"",
                    mac,
                    proof,
                    wire,
                    signed_start - start,
                    signed_end - start,
                )
            )
        return tuple(found)

    def _messages_with_headers(self, reader: CborReader, messages_max: int) -> tuple[RpcMessage, ...]:
        found: list[RpcMessage] = []
        payload = reader.data
        for _ in range(reader.array(messages_max)):
            start = reader.position
            parts = reader.array(4)
            if parts < 3:
                raise ProtocolError("a message has too few parts")
            signed_start = reader.position
            reader.exact_array(5)
            author = reader.bytes_(_AUTHOR_BYTES)
            seqno = reader.uint().to_bytes(8, "big")
            topic = reader.text(self._limits.topic_bytes_max)
            data = reader.bytes_(self._message_bytes_max)
            headers = read_headers(reader)
            signed_end = reader.position
            signature = reader.bytes_(SIGNATURE_BYTES)
            mac = reader.bytes_(MAC_BYTES)
            proof = b""
            if parts == 4:
                proof = reader.bytes_(PROOF_BYTES_MAX)
                if not is_proof(proof):
                    raise ProtocolError("a message's proof has another form")
            if len(signature) != SIGNATURE_BYTES or len(mac) != MAC_BYTES:
                raise ProtocolError("a message's signature or MAC is too short")
            if not topic or len(author) != _AUTHOR_BYTES or not author.startswith(_AUTHOR_PREFIX):
                raise ProtocolError("a message has no topic, or an author that is no Ed25519 peer id")
            if len(data) + headers.size_bytes > self._message_bytes_max:
                raise ProtocolError(f"a message and its headers of over {self._message_bytes_max} bytes together")
            message_id = hashlib.sha256(author + seqno).digest()[:16]
            message = RpcMessage(message_id, author, seqno, topic, data, signature, b"", mac, proof, headers=headers)
            message.wire = payload[start : reader.position]
            message.signed_start = signed_start - start
            message.signed_end = signed_end - start
            found.append(message)
        return tuple(found)

    def _subscriptions(self, reader: CborReader) -> tuple[SubscriptionChange, ...]:
        found: list[SubscriptionChange] = []
        for _ in range(reader.array(self._limits.subscriptions_max)):
            reader.exact_array(2)
            topic = reader.text(self._limits.topic_bytes_max)
            found.append(SubscriptionChange(topic, reader.boolean()))
        return tuple(found)

    def _ids(self, reader: CborReader, budget: "_Budget") -> tuple[bytes, ...]:
        count = reader.array(budget.left)
        budget.left -= count
        id_bytes_max = self._limits.id_bytes_max
        return tuple([reader.bytes_(id_bytes_max) for _ in range(count)])

    def _ihave(self, reader: CborReader, budget: "_Budget") -> tuple[IHave, ...]:
        found: list[IHave] = []
        for _ in range(reader.array(self._limits.subscriptions_max)):
            reader.exact_array(2)
            topic = reader.text(self._limits.topic_bytes_max)
            found.append(IHave(topic, self._ids(reader, budget)))
        return tuple(found)

    def _prunes(self, reader: CborReader) -> tuple[Prune, ...]:
        found: list[Prune] = []
        left = self._limits.px_peers_max
        for _ in range(reader.array(self._limits.prunes_max)):
            reader.exact_array(3)
            topic = reader.text(self._limits.topic_bytes_max)
            backoff_s = reader.uint()
            count = reader.array(left)
            left -= count
            peers: list[PeerInfo] = []
            for _ in range(count):
                reader.exact_array(2)
                name = reader.bytes_(self._limits.author_bytes_max)
                peers.append(PeerInfo(name, reader.bytes_(self._limits.record_bytes_max)))
            found.append(Prune(topic, backoff_s, tuple(peers)))
        return tuple(found)


class _Budget:
    """How many more items of one kind an RPC may hold."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


def _has_control(rpc: Rpc) -> bool:
    return bool(rpc.subscriptions or rpc.ihave or rpc.iwant or rpc.graft or rpc.prune or rpc.idontwant)


def _encode_ids(ids: tuple[bytes, ...]) -> bytes:
    return head(ARRAY, len(ids)) + b"".join([encode_bytes(message_id) for message_id in ids])


def _encode_prune(prune: Prune) -> bytes:
    peers = [b"\x82" + encode_bytes(info.peer) + encode_bytes(info.record) for info in prune.peers]
    parts = (b"\x83", encode_text(prune.topic), head(UINT, prune.backoff_s), head(ARRAY, len(peers)), *peers)
    return b"".join(parts)


def _encode_one(rpc: Rpc) -> bytes:
    parts: list[bytes] = []
    if rpc.subscriptions:
        items = [
            b"\x82" + encode_text(item.topic) + (_TRUE if item.subscribe else _FALSE) for item in rpc.subscriptions
        ]
        parts.append(b"\x01" + head(ARRAY, len(items)) + b"".join(items))
    has_headers = bool(rpc.messages) and rpc.messages[0].headers is not NO_HEADERS  # then all of them do
    if rpc.messages and not has_headers:
        parts.append(b"\x02" + head(ARRAY, len(rpc.messages)) + b"".join([message.wire for message in rpc.messages]))
    if rpc.ihave:
        items = [b"\x82" + encode_text(item.topic) + _encode_ids(item.ids) for item in rpc.ihave]
        parts.append(b"\x03" + head(ARRAY, len(items)) + b"".join(items))
    if rpc.iwant:
        parts.append(b"\x04" + _encode_ids(rpc.iwant))
    if rpc.graft:
        parts.append(b"\x05" + head(ARRAY, len(rpc.graft)) + b"".join([encode_text(topic) for topic in rpc.graft]))
    if rpc.prune:
        parts.append(b"\x06" + head(ARRAY, len(rpc.prune)) + b"".join([_encode_prune(item) for item in rpc.prune]))
    if rpc.idontwant:
        parts.append(b"\x07" + _encode_ids(rpc.idontwant))
    if has_headers:
        parts.append(b"\x08" + head(ARRAY, len(rpc.messages)) + b"".join([message.wire for message in rpc.messages]))
    return head(MAP, len(parts)) + b"".join(parts)
