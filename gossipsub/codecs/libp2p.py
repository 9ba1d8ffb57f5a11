"""libp2p's wire: the protobuf RPC of /meshsub/1.1.0 and /meshsub/1.2.0, byte for byte as go and js write it.

Signed are the bytes ``libp2p-pubsub:`` and the message without its signature and key. Fields are written in ascending
order; a message that came otherwise is written anew before it is judged, as go does.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dep2p.encoding.protobuf import ProtoReader, encode_field
from dep2p.encoding.varint import encode_varint
from dep2p.errors import MessageTooLargeError, ProtocolError
from dep2p.gossipsub import reasons
from dep2p.gossipsub.codecs.interface import DecodeLimits
from dep2p.gossipsub.codecs.split import SplitLimits, split_rpc
from dep2p.gossipsub.messages.message_id import MessageIdFn
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.signing.author_keys import AuthorKeys
from dep2p.gossipsub.signing.policy import SigningPolicy

LIBP2P_RPC_BYTES_MAX: Final = 1_048_576
"""A whole RPC, as go-libp2p-pubsub counts what it reads; a larger one ends the stream there."""
SIGN_PREFIX: Final = b"libp2p-pubsub:"

_FROM: Final = 1
_DATA: Final = 2
_SEQNO: Final = 3
_TOPIC: Final = 4
_SIGNATURE: Final = 5
_KEY: Final = 6
_SIGNATURE_FIELD_BYTES: Final = 66
"""An Ed25519 signature with its tag and length."""

Sign = Callable[[bytes], bytes]


class Libp2pCodec:
    """The codec of the public network at one node.

    ``author``: this node's peer id as multihash bytes; ``key``: its protobuf public key, empty when the peer id holds
    it (Ed25519); ``ids``: the id function, see :class:`~dep2p.gossipsub.messages.message_id.MessageIds`.
    """

    __slots__ = ("_author", "_ids", "_key", "_keys", "_limits", "_message_bytes_max", "_policy", "_sign", "_split")

    def __init__(
        self,
        author: bytes,
        sign: Sign,
        ids: MessageIdFn,
        params: GossipParams,
        *,
        policy: SigningPolicy = SigningPolicy.STRICT_SIGN,
        key: bytes = b"",
        limits: DecodeLimits | None = None,
    ) -> None:
        self._author = author
        self._sign = sign
        self._ids = ids
        self._policy = policy
        self._key = key
        self._keys = AuthorKeys()
        self._limits = limits or DecodeLimits(topic_bytes_max=params.topic_bytes_max)
        self._message_bytes_max = params.message_bytes_max
        self._split = replace(SplitLimits.of(params), rpc_bytes_max=min(params.rpc_bytes_max, LIBP2P_RPC_BYTES_MAX))

    # Own messages and those of others ---------------------------------------------------------------------------------

    def compose(self, topic: str, data: bytes, seqno: bytes) -> RpcMessage:
        """An own message: signed, or under StrictNoSign nothing but topic and data.

        Raises :class:`MessageTooLargeError` when its RPC would be larger than peers read.
        """
        if self._policy is SigningPolicy.STRICT_NO_SIGN:
            wire = encode_field(_DATA, data) + encode_field(_TOPIC, topic.encode("utf-8"))
            self._check_size(len(data), len(wire))
            message_id = self._ids(b"", b"", topic, data, b"")
            return RpcMessage(message_id, b"", b"", topic, data, wire=wire, signed_end=len(wire))
        signed = b"".join(
            (
                encode_field(_FROM, self._author),
                encode_field(_DATA, data),
                encode_field(_SEQNO, seqno),
                encode_field(_TOPIC, topic.encode("utf-8")),
            )
        )
        self._check_size(len(data), len(signed) + _SIGNATURE_FIELD_BYTES + (len(self._key) + 4 if self._key else 0))
        signature = self._sign(SIGN_PREFIX + signed)
        wire = signed + encode_field(_SIGNATURE, signature) + (encode_field(_KEY, self._key) if self._key else b"")
        message_id = self._ids(self._author, seqno, topic, data, self._key)
        return RpcMessage(
            message_id, self._author, seqno, topic, data, signature, self._key, b"", b"", wire, 0, len(signed)
        )

    def _check_size(self, data_bytes: int, message_bytes: int) -> None:
        rpc_bytes = 1 + len(encode_varint(message_bytes)) + message_bytes
        most = self._split.rpc_bytes_max
        if rpc_bytes > most:
            raise MessageTooLargeError(
                f"a message of {data_bytes} bytes makes an RPC of {rpc_bytes}: peers read at most {most}, which leaves "
                f"{most - rpc_bytes + data_bytes} for the message"
            )

    def authenticate(self, message: RpcMessage) -> str | None:
        """Under StrictNoSign there is nothing to check here; the policy itself is the router's."""
        if self._policy is SigningPolicy.STRICT_NO_SIGN:
            return None
        signed = SIGN_PREFIX + message.wire[message.signed_start : message.signed_end]
        if self._keys.verify(message.author, message.key, signed, message.signature):
            return None
        return reasons.INVALID_SIGNATURE

    # Encoding --------------------------------------------------------------------------------------------------------

    def encode(self, rpc: Rpc) -> list[bytes]:
        """Payloads without their length in front (see `delimit`), none above the parameters' sizes."""
        return [_encode_one(part) for part in split_rpc(rpc, self._split)]

    # Decoding --------------------------------------------------------------------------------------------------------

    def decode(self, payload: bytes) -> Rpc:
        """One payload. Unknown fields are passed over. Raises :class:`ProtocolError`."""
        reader = ProtoReader(payload, 0, len(payload))
        limits = self._limits
        subscriptions: list[SubscriptionChange] = []
        messages: list[RpcMessage] = []
        control: _Control | None = None
        while reader.next():
            if reader.number == 2:
                if len(messages) >= limits.messages_max:
                    raise ProtocolError(f"an RPC with more than {limits.messages_max} messages")
                start, end = reader.span(len(payload))
                message = self._message(payload, start, end)
                if message is not None:
                    messages.append(message)
            elif reader.number == 1:
                if len(subscriptions) >= limits.subscriptions_max:
                    raise ProtocolError(f"an RPC with more than {limits.subscriptions_max} subscriptions")
                subscriptions.append(_subscription(reader.sub(), limits))
            elif reader.number == 3:
                control = control or _Control(limits)
                control.read(reader.sub())
            else:
                reader.skip()
        if control is None:
            return Rpc(tuple(messages), tuple(subscriptions))
        return Rpc(
            tuple(messages),
            tuple(subscriptions),
            tuple(control.ihave),
            tuple(control.iwant),
            tuple(control.graft),
            tuple(control.prune),
            tuple(control.idontwant),
        )

    def _message(self, payload: bytes, start: int, end: int) -> RpcMessage | None:
        """None for a message without a topic: it belongs nowhere."""
        reader = ProtoReader(payload, start, end)
        limits = self._limits
        fields: list[bytes | None] = [None] * 7
        topic = ""
        is_plain = True
        last = 0
        signed_end = end
        while True:
            field_start = reader.position
            if not reader.next():
                break
            number = reader.number
            if number > _KEY:
                reader.skip()
                is_plain = False
                continue
            if number <= last:
                is_plain = False
            last = number
            if number == _SIGNATURE:
                signed_end = field_start
                fields[number] = reader.bytes_(limits.signature_bytes_max)
            elif number == _DATA:
                fields[number] = reader.bytes_(self._message_bytes_max)
            elif number == _TOPIC:
                topic = reader.text(limits.topic_bytes_max)
                fields[number] = topic.encode("utf-8")
            elif number == _KEY:
                signed_end = min(signed_end, field_start)
                fields[number] = reader.bytes_(limits.key_bytes_max)
            else:
                fields[number] = reader.bytes_(limits.author_bytes_max)
        if not topic:
            return None
        if is_plain and reader.is_canonical:
            wire = payload[start:end]
            signed_bytes = signed_end - start
        else:
            signed = b"".join([encode_field(n, value) for n, value in enumerate(fields[:5]) if value is not None])
            signed_bytes = len(signed)
            rest = [encode_field(n, value) for n, value in enumerate(fields) if n > _TOPIC and value is not None]
            wire = b"".join((signed, *rest))
        author, data, seqno = fields[_FROM] or b"", fields[_DATA] or b"", fields[_SEQNO] or b""
        signature, key = fields[_SIGNATURE] or b"", fields[_KEY] or b""
        message_id = self._ids(author, seqno, topic, data, key)
        return RpcMessage(message_id, author, seqno, topic, data, signature, key, b"", b"", wire, 0, signed_bytes)


def _subscription(reader: ProtoReader, limits: DecodeLimits) -> SubscriptionChange:
    topic, subscribe = "", False
    while reader.next():
        if reader.number == 1:
            subscribe = bool(reader.uint())
        elif reader.number == 2:
            topic = reader.text(limits.topic_bytes_max)
        else:
            reader.skip()
    return SubscriptionChange(topic, subscribe)


class _Control:
    """The control part of an RPC; more than one adds up, within the limits."""

    __slots__ = ("_ids_left", "_limits", "_px_left", "graft", "idontwant", "ihave", "iwant", "prune")

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._ids_left = limits.ids_max
        self._px_left = limits.px_peers_max
        self.ihave: list[IHave] = []
        self.iwant: list[bytes] = []
        self.graft: list[str] = []
        self.prune: list[Prune] = []
        self.idontwant: list[bytes] = []

    def read(self, reader: ProtoReader) -> None:
        limits = self._limits
        while reader.next():
            number = reader.number
            if number == 1:
                if len(self.ihave) >= limits.subscriptions_max:
                    raise ProtocolError(f"an RPC with more than {limits.subscriptions_max} IHAVE")
                topic, ids = self._topic_and_ids(reader.sub(), 1, 2)
                self.ihave.append(IHave(topic, tuple(ids)))
            elif number == 2:
                self.iwant += self._topic_and_ids(reader.sub(), 0, 1)[1]
            elif number == 3:
                if len(self.graft) >= limits.grafts_max:
                    raise ProtocolError(f"an RPC with more than {limits.grafts_max} GRAFT")
                self.graft.append(self._topic_and_ids(reader.sub(), 1, 0)[0])
            elif number == 4:
                if len(self.prune) >= limits.prunes_max:
                    raise ProtocolError(f"an RPC with more than {limits.prunes_max} PRUNE")
                self.prune.append(self._prune(reader.sub()))
            elif number == 5:
                self.idontwant += self._topic_and_ids(reader.sub(), 0, 1)[1]
            else:
                reader.skip()

    def _topic_and_ids(self, reader: ProtoReader, topic_field: int, ids_field: int) -> tuple[str, list[bytes]]:
        limits = self._limits
        topic = ""
        ids: list[bytes] = []
        while reader.next():
            if reader.number == topic_field:
                topic = reader.text(limits.topic_bytes_max)
            elif reader.number == ids_field:
                self._ids_left -= 1
                if self._ids_left < 0:
                    raise ProtocolError(f"an RPC with more than {limits.ids_max} message ids")
                ids.append(reader.bytes_(limits.id_bytes_max))
            else:
                reader.skip()
        return topic, ids

    def _prune(self, reader: ProtoReader) -> Prune:
        topic, backoff_s = "", 0
        peers: list[PeerInfo] = []
        while reader.next():
            if reader.number == 1:
                topic = reader.text(self._limits.topic_bytes_max)
            elif reader.number == 2:
                self._px_left -= 1
                if self._px_left < 0:
                    raise ProtocolError(f"an RPC that names more than {self._limits.px_peers_max} peers")
                peers.append(self._peer_info(reader.sub()))
            elif reader.number == 3:
                backoff_s = reader.uint()
            else:
                reader.skip()
        return Prune(topic, backoff_s, tuple(peers))

    def _peer_info(self, reader: ProtoReader) -> PeerInfo:
        peer = record = b""
        while reader.next():
            if reader.number == 1:
                peer = reader.bytes_(self._limits.author_bytes_max)
            elif reader.number == 2:
                record = reader.bytes_(self._limits.record_bytes_max)
            else:
                reader.skip()
        return PeerInfo(peer, record)


def _encode_one(rpc: Rpc) -> bytes:
    parts: list[bytes] = []
    for subscription in rpc.subscriptions:
        flag = b"\x08\x01" if subscription.subscribe else b"\x08\x00"
        parts.append(encode_field(1, flag + encode_field(2, subscription.topic.encode("utf-8"))))
    for message in rpc.messages:
        parts.append(encode_field(2, message.wire))
    control: list[bytes] = []
    for item in rpc.ihave:
        control.append(encode_field(1, encode_field(1, item.topic.encode("utf-8")) + _encode_ids(2, item.ids)))
    if rpc.iwant:
        control.append(encode_field(2, _encode_ids(1, rpc.iwant)))
    for topic in rpc.graft:
        control.append(encode_field(3, encode_field(1, topic.encode("utf-8"))))
    for prune in rpc.prune:
        control.append(encode_field(4, _encode_prune(prune)))
    if rpc.idontwant:
        control.append(encode_field(5, _encode_ids(1, rpc.idontwant)))
    if control:
        parts.append(encode_field(3, b"".join(control)))
    return b"".join(parts)


def _encode_ids(number: int, ids: tuple[bytes, ...]) -> bytes:
    return b"".join([encode_field(number, message_id) for message_id in ids])


def _encode_prune(prune: Prune) -> bytes:
    parts = [encode_field(1, prune.topic.encode("utf-8"))]
    for info in prune.peers:
        record = encode_field(2, info.record) if info.record else b""
        parts.append(encode_field(2, encode_field(1, info.peer) + record))
    if prune.backoff_s:
        parts.append(b"\x18" + encode_varint(prune.backoff_s))
    return b"".join(parts)
