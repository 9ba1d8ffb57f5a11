"""Messages of simulated nodes: made, forged and checked without cryptography; and the codecs, when they are wanted."""

import hashlib
from typing import Final, Literal

from dep2p.gossipsub import reasons
from dep2p.gossipsub.codecs.interface import Codec
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.rpc import RpcMessage
from dep2p.gossipsub.signing.policy import Compose

GOOD_SIGNATURE: Final = b"\x01" * 64
FORGED_SIGNATURE: Final = b"\xff" * 64
"""A signature that stands for one that is not the author's. Nothing is really signed: a flag costs no time."""
FORGED_DATA: Final = b"forged"
"""The first bytes of forged messages, so that a delivery of one is noticed."""

WireName = Literal["none", "realm", "libp2p"]

_AUTHOR: Final = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20]) + bytes(32)


def authenticate(message: RpcMessage) -> str | None:
    """Return why a message is not its author's, as a codec does; None when it is."""
    return reasons.INVALID_SIGNATURE if message.signature == FORGED_SIGNATURE else None


def make_compose(wire: WireName, params: GossipParams, author: bytes, signature: bytes = GOOD_SIGNATURE) -> Compose:
    """Return the function that makes the messages of a node."""
    if wire != "none":
        return _make_codec(wire, params, author, signature).compose

    def compose(topic: str, data: bytes, seqno: bytes) -> RpcMessage:
        message_id = hashlib.sha256(author + seqno).digest()[:16]
        return RpcMessage(message_id, author, seqno, topic, data, signature)

    return compose


def forge(wire: WireName, params: GossipParams, author: bytes, topic: str, data: bytes, seqno: bytes) -> RpcMessage:
    """Make a message in another node's name."""
    return make_compose(wire, params, author, FORGED_SIGNATURE)(topic, data, seqno)


def make_wire(wire: WireName, params: GossipParams) -> Codec | None:
    """Make one codec for all nodes: encoding and decoding depend on no node's keys."""
    return None if wire == "none" else _make_codec(wire, params, _AUTHOR, GOOD_SIGNATURE)


def _make_codec(wire: WireName, params: GossipParams, author: bytes, signature: bytes) -> Codec:
    def sign(data: bytes) -> bytes:
        return signature

    # Imported only when wanted: they load libraries of cryptography.
    if wire == "realm":
        from dep2p.gossipsub.codecs.realm import RealmCodec

        return RealmCodec(author, sign, bytes(32), params)
    from dep2p.gossipsub.codecs.libp2p import Libp2pCodec
    from dep2p.gossipsub.messages.message_id import go_id

    return Libp2pCodec(author, sign, go_id, params)
