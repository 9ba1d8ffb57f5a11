"""Member records: a member's statements about itself, signed by its identity, MACed for the realm (docs/spec/realm.md
§4).

An envelope is the CBOR array [body, signature, mac]; the body is a canonical CBOR map with integer keys. The MAC covers
body and signature and is checked first: a stranger's record costs one HMAC. The signature covers the realm id too, so
that a member of two realms cannot carry another one's record from one to the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from dep2p.encoding.decoded import are_texts, is_array, is_array_of, is_map
from dep2p.errors import ProtocolError
from dep2p.identity import public_key_from_peer_id, verify
from dep2p.protocols.realm.keys import MAC_BYTES, RealmKeys, equal_in_constant_time, keyed_mac, length_prefixed
from dep2p.protocols.realm.statement import (
    STATEMENT_DEPTH_MAX,
    STATEMENT_ENTRIES_MAX,
    MemberStatement,
    decode_statement,
    encode_groups,
    encode_services,
)
from dep2p.protocols.wire.cbor import decode_bounded, encode_canonical
from dep2p.types import PeerId, RealmId, peer_id_bytes, peer_id_from_bytes

RECORD_BYTES_MAX: Final = 8_192
"""Bytes of a whole envelope at most."""
ADDRS_MAX: Final = 16
ADDR_BYTES_MAX: Final = 256
RECORD_FEATURES_MAX: Final = 16
RECORD_FEATURE_BYTES_MAX: Final = 32
SEQ_MAX: Final = 2**53 - 1
"""The highest sequence number, chosen so that every JSON reader keeps it exact."""
LIFE_MS: Final = 24 * 3_600_000
"""Milliseconds of life of a record that this implementation issues."""
LIFE_MS_MAX: Final = 7 * LIFE_MS
"""Milliseconds of life at most of a record that is accepted."""
SKEW_MS: Final = 120_000
"""Milliseconds that another node's clock may be off."""

_SIGN_PREFIX: Final = b"dep2p-member-record-v1"
_MAC_PREFIX: Final = b"dep2p-member-mac-v1"
_SIGNATURE_BYTES: Final = 64
_SEALING_BYTES: Final = _SIGNATURE_BYTES + MAC_BYTES + 16
"""Bytes of an envelope besides the body, at most."""

State = Literal["active", "left"]
_STATES: Final[tuple[State, ...]] = ("active", "left")

_PEER, _ADDRS, _SEQ, _ISSUED, _EXPIRES, _STATE, _FEATURES, _FIELDS, _SERVICES, _GROUPS = range(1, 11)


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member's statement about itself. Times are Unix milliseconds by its own clock."""

    peer: PeerId
    addrs: tuple[str, ...]
    """Multiaddrs as text."""
    seq: int
    """Rises with each record of this member; the higher one counts."""
    issued_ms: int
    expires_ms: int
    state: State = "active"
    features: tuple[str, ...] = ()
    statement: MemberStatement = field(default_factory=MemberStatement)
    """The member's words about itself, for programs."""


@dataclass(frozen=True, slots=True)
class SealedRecord:
    """A record with the envelope that proves it."""

    record: MemberRecord
    envelope: bytes


def seal_record(record: MemberRecord, keys: RealmKeys, sign: Callable[[bytes], bytes]) -> SealedRecord:
    """Sign with the owner's identity key and MAC. Raises ``ValueError`` when a bound is broken."""
    body = _encode_body(record)
    try:
        if _decode_body(body) != record:
            raise ValueError("the record does not survive its own encoding")
    except ProtocolError as error:
        raise ValueError(f"this record would be refused: {error}") from error
    signature = sign(_signed_bytes(keys.realm_id, body))
    mac = keyed_mac(keys.member_key, _MAC_PREFIX + length_prefixed(body) + signature)
    envelope = encode_canonical([body, signature, mac])
    if len(envelope) > RECORD_BYTES_MAX:
        raise ValueError(f"a member record of {len(envelope)} bytes: at most {RECORD_BYTES_MAX} are allowed")
    return SealedRecord(record, envelope)


def seal_fitting(record: MemberRecord, keys: RealmKeys, sign: Callable[[bytes], bytes]) -> SealedRecord:
    """As `seal_record`, with as many of the record's addresses as there is room for: the statement is worth more."""
    while len(_encode_body(record)) + _SEALING_BYTES > RECORD_BYTES_MAX and record.addrs:
        record = replace(record, addrs=record.addrs[:-1])
    return seal_record(record, keys, sign)


def open_envelope(envelope: bytes, keys: RealmKeys) -> tuple[SealedRecord, bytes]:
    """Check size, MAC and shape; return the record and its signature, **not yet verified**: see `check_signature`.

    Raises :class:`ProtocolError`.
    """
    if len(envelope) > RECORD_BYTES_MAX:
        raise ProtocolError(f"a member record of {len(envelope)} bytes: at most {RECORD_BYTES_MAX} are allowed")
    parts = decode_bounded(envelope, "member record", depth_max=1, entries_max=3)
    if not is_array_of(parts, 3):
        raise ProtocolError("a member record is not an array of three")
    body, signature, mac = parts
    if not isinstance(body, bytes) or not isinstance(signature, bytes) or not isinstance(mac, bytes):
        raise ProtocolError("a member record's parts are not byte strings")
    if len(signature) != _SIGNATURE_BYTES or len(mac) != MAC_BYTES:
        raise ProtocolError("a member record's signature or MAC has the wrong length")
    expected = keyed_mac(keys.member_key, _MAC_PREFIX + length_prefixed(body) + signature)
    if not equal_in_constant_time(mac, expected):
        raise ProtocolError("a member record is not of this realm (wrong MAC)")
    if encode_canonical([body, signature, mac]) != envelope:
        raise ProtocolError("a member record is not in canonical form")
    return SealedRecord(_decode_body(body), envelope), signature


def check_signature(sealed: SealedRecord, signature: bytes, realm_id: RealmId) -> None:
    """Check that the record's own peer signed it for this realm. Raises :class:`ProtocolError`."""
    if not verify(sealed.record.peer, _signed_bytes(realm_id, _encode_body(sealed.record)), signature):
        raise ProtocolError("a member record is not signed by the member that it names")


def check_times(record: MemberRecord, now_ms: int) -> None:
    """Check that the record is valid at ``now_ms`` (Unix). Raises :class:`ProtocolError`."""
    if record.issued_ms > now_ms + SKEW_MS:
        raise ProtocolError("a member record is from the future")
    if record.expires_ms + SKEW_MS <= now_ms:
        raise ProtocolError("a member record has expired")


def fitting_addrs(addrs: Sequence[str]) -> tuple[str, ...]:
    """Return the first addresses that a record may hold, without repeats."""
    return tuple(dict.fromkeys(addr for addr in addrs if _is_addr(addr)))[:ADDRS_MAX]


def _signed_bytes(realm_id: RealmId, body: bytes) -> bytes:
    return _SIGN_PREFIX + length_prefixed(realm_id.encode("ascii")) + body


def _encode_body(record: MemberRecord) -> bytes:
    fields: dict[int, object] = {
        _PEER: peer_id_bytes(record.peer),
        _ADDRS: list(record.addrs),
        _SEQ: record.seq,
        _ISSUED: record.issued_ms,
        _EXPIRES: record.expires_ms,
        _STATE: _STATES.index(record.state),
    }
    if record.features:
        fields[_FEATURES] = list(record.features)
    statement = record.statement
    if statement.fields:
        fields[_FIELDS] = dict(statement.fields)
    if statement.services:
        fields[_SERVICES] = encode_services(statement.services)
    if statement.groups:
        fields[_GROUPS] = encode_groups(statement.groups)
    return encode_canonical(fields)


def _decode_body(body: bytes) -> MemberRecord:
    decoded = decode_bounded(body, "member record", depth_max=STATEMENT_DEPTH_MAX, entries_max=STATEMENT_ENTRIES_MAX)
    if not is_map(decoded):
        raise ProtocolError("a member record's body is not a map")
    fields = decoded
    record = MemberRecord(
        peer=_peer(fields.get(_PEER)),
        addrs=_texts(fields.get(_ADDRS), "addresses", ADDRS_MAX, _is_addr),
        seq=_unsigned(fields.get(_SEQ), "seq"),
        issued_ms=_unsigned(fields.get(_ISSUED), "issued"),
        expires_ms=_unsigned(fields.get(_EXPIRES), "expires"),
        state=_state(fields.get(_STATE)),
        features=_texts(fields.get(_FEATURES, []), "features", RECORD_FEATURES_MAX, _is_feature),
        statement=decode_statement(fields.get(_FIELDS), fields.get(_SERVICES), fields.get(_GROUPS)),
    )
    if not record.issued_ms < record.expires_ms <= record.issued_ms + LIFE_MS_MAX:
        raise ProtocolError("a member record's life is not between 1 ms and 7 days")
    if record.state == "left" and record.statement:
        raise ProtocolError("the record of a member that left has a statement")
    # Also refuses unknown keys: what is not understood could not be checked by a later version's rules.
    if _encode_body(record) != body:
        raise ProtocolError("a member record's body is not in canonical form or has unknown fields")
    return record


def _peer(value: object) -> PeerId:
    if not isinstance(value, bytes) or len(value) > 64:
        raise ProtocolError("a member record names no peer")
    peer = peer_id_from_bytes(value)
    if public_key_from_peer_id(peer) is None:
        raise ProtocolError("a member record names a peer without an Ed25519 key")
    return peer


def _unsigned(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= SEQ_MAX:
        raise ProtocolError(f"a member record's {name} is no integer from 0 to 2^53-1")
    return value


def _state(value: object) -> State:
    if type(value) is not int or not 0 <= value < len(_STATES):
        raise ProtocolError("a member record's state is unknown")
    return _STATES[value]


def _texts(value: object, name: str, items_max: int, is_valid: Callable[[object], bool]) -> tuple[str, ...]:
    if not is_array(value):
        raise ProtocolError(f"a member record's {name} are not a list")
    if not are_texts(value, items_max, is_valid):
        raise ProtocolError(f"a member record's {name} are too many or malformed")
    return tuple(value)


def _is_addr(value: object) -> bool:
    """Whether this has the form of an address: what the text means is the host's affair."""
    return isinstance(value, str) and value.startswith("/") and len(value) <= ADDR_BYTES_MAX and _is_plain(value)


def _is_feature(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= RECORD_FEATURE_BYTES_MAX and _is_plain(value)


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()
