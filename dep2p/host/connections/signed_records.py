"""Signed peer records: addresses of a peer, signed by it.

Format: https://github.com/libp2p/specs/blob/master/RFC/0002-signed-envelopes.md and 0003-routing-records.md there.
py-libp2p's reader is not used: it takes RSA private keys, and does not compare the signer with the peer of the record.
"""

from dataclasses import dataclass
from typing import Final

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dep2p.encoding.length_prefixed import encode_length_prefixed
from dep2p.encoding.protobuf import ProtoReader
from dep2p.errors import ProtocolError
from dep2p.host.addresses import parse_address
from dep2p.public_keys import KEY_BYTES_MAX, SIGNATURE_BYTES_MAX, parse_public_key
from dep2p.types import PeerId, peer_id_bytes

SIGNED_RECORD_BYTES_MAX: Final = 4_096
"""Bytes of the longest envelope that is read."""
_ADDRS_MAX: Final = 32
_ADDR_BYTES_MAX: Final = 512
_DOMAIN: Final = b"libp2p-peer-record"
_PAYLOAD_TYPE: Final = b"\x03\x01"


@dataclass(frozen=True, slots=True)
class SignedPeerRecord:
    """A record whose signature holds.

    ``seq``: grows with each record of its peer. ``addrs``: multiaddrs as text; those that this host cannot use are left
    out.
    """

    peer: PeerId
    seq: int
    addrs: tuple[str, ...]


def open_signed_record(envelope: bytes, peer: PeerId) -> SignedPeerRecord:
    """Read the record of ``peer`` out of its envelope.

    Raises :class:`ProtocolError`: malformed, over a bound, of another peer, or not signed by it.
    """
    if len(envelope) > SIGNED_RECORD_BYTES_MAX:
        raise ProtocolError(f"a signed record of {len(envelope)} bytes is over {SIGNED_RECORD_BYTES_MAX}")
    encoded_key = payload_type = payload = signature = b""
    reader = ProtoReader(envelope, 0, len(envelope))
    while reader.next():
        match reader.number:
            case 1:
                encoded_key = reader.bytes_(KEY_BYTES_MAX)
            case 2:
                payload_type = reader.bytes_(16)
            case 3:
                payload = reader.bytes_(SIGNED_RECORD_BYTES_MAX)
            case 5:
                signature = reader.bytes_(SIGNATURE_BYTES_MAX)
            case _:
                reader.skip()
    if payload_type != _PAYLOAD_TYPE:
        raise ProtocolError("an envelope of something else than a peer record")
    owner, seq, addrs = _read_record(payload)
    key = parse_public_key(encoded_key)
    if owner != peer_id_bytes(peer) or key.peer_id_bytes != owner:
        raise ProtocolError(f"a signed record of another peer than {peer}")
    signed = b"".join(map(encode_length_prefixed, (_DOMAIN, payload_type, payload)))
    if not key.verify(signed, signature):
        raise ProtocolError(f"a record of {peer} whose signature is wrong")
    return SignedPeerRecord(peer, seq, tuple(text for raw in addrs if (text := _usable(raw)) is not None))


def _read_record(payload: bytes) -> tuple[bytes, int, list[bytes]]:
    owner, seq = b"", 0
    addrs: list[bytes] = []
    reader = ProtoReader(payload, 0, len(payload))
    while reader.next():
        match reader.number:
            case 1:
                owner = reader.bytes_(64)
            case 2:
                seq = reader.uint()
            case 3:
                info = reader.sub()
                while info.next():
                    if info.number == 1 and len(addrs) < _ADDRS_MAX:
                        addrs.append(info.bytes_(_ADDR_BYTES_MAX))
                    else:
                        info.skip()
            case _:
                reader.skip()
    return owner, seq, addrs


def _usable(raw: bytes) -> str | None:
    try:
        return parse_address(str(Multiaddr(raw))).text
    except (ValueError, TypeError, KeyError, MultiaddrError):  # not an offence: others speak other transports
        return None
