"""Checks of member records, for tests."""

from dep2p.protocols.realm.keys import RealmKeys
from dep2p.protocols.realm.member_record import SealedRecord, check_signature, check_times, open_envelope


def verify_record(envelope: bytes, keys: RealmKeys, now_ms: int) -> SealedRecord:
    """All checks: size, MAC, shape, times, signature. Raises :class:`ProtocolError`."""
    sealed, signature = open_envelope(envelope, keys)
    check_times(sealed.record, now_ms)
    check_signature(sealed, signature, keys.realm_id)
    return sealed
