"""The member table on disk: a file of signed records, so that a restarted node knows whom to dial.

The file is trusted with little: every record is verified when it is loaded. Layout: a line that names the format, the
SHA-256 of the rest, then for each record a byte of flags, its length as a big-endian u32, and the envelope. Flags: 1
the member proved itself to this node; 2 and 4 the scope of the links that brought the record. Version 1 had no flags.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dep2p.protocols.addresses.dialable import AddressScope
from dep2p.protocols.realm.member_record import RECORD_BYTES_MAX
from dep2p.protocols.realm.record_store import StoredRecord

_FORMAT: Final = b"dep2p-members-v2\n"
_FORMAT_1: Final = b"dep2p-members-v1\n"
_IS_PROVED: Final = 1
_SCOPE_SHIFT: Final = 1
_HASH_BYTES: Final = 32
_LENGTH_BYTES: Final = 4

_logger = logging.getLogger("dep2p.realm")


def load_records(path: Path, *, records_max: int) -> list[StoredRecord]:
    """Return the records in the file; empty when there is none.

    A file that is damaged is moved aside to ``<name>.corrupt`` (replacing an earlier one) with a warning: members are
    found again without it.
    """
    bytes_max = len(_FORMAT) + _HASH_BYTES + records_max * (1 + _LENGTH_BYTES + RECORD_BYTES_MAX)
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        _logger.warning("cannot read the member records %s (%s): members are found anew", path, error.strerror)
        return []
    records = _parse(data, records_max) if len(data) <= bytes_max else None
    if records is None:
        aside = path.with_name(path.name + ".corrupt")
        _logger.warning("the member records %s are damaged: moved to %s, members are found anew", path, aside)
        try:
            os.replace(path, aside)
        except OSError as error:
            _logger.warning("cannot move %s aside: %s", path, error.strerror)
        return []
    return records


def save_records(path: Path, records: Sequence[StoredRecord]) -> None:
    """Write the file, mode 0600, complete or not at all. Raises ``OSError``."""
    body = b"".join(
        bytes([record.is_proved * _IS_PROVED | record.scope << _SCOPE_SHIFT])
        + len(record.envelope).to_bytes(_LENGTH_BYTES, "big")
        + record.envelope
        for record in records
    )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_FORMAT + hashlib.sha256(body).digest() + body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _parse(data: bytes, records_max: int) -> list[StoredRecord] | None:
    start = len(_FORMAT) + _HASH_BYTES
    name, body = data[: len(_FORMAT)], data[start:]
    if name not in (_FORMAT, _FORMAT_1) or data[len(_FORMAT) : start] != hashlib.sha256(body).digest():
        return None
    records: list[StoredRecord] = []
    position = 0
    # Version 1 said nothing of links: its addresses are dialed as they were before.
    is_proved, scope = False, AddressScope.LOOPBACK
    while position < len(body):
        if name == _FORMAT:
            flags = body[position]
            if flags >> _SCOPE_SHIFT not in tuple(AddressScope):
                return None
            is_proved, scope = bool(flags & _IS_PROVED), AddressScope(flags >> _SCOPE_SHIFT)
            position += 1
        length = int.from_bytes(body[position : position + _LENGTH_BYTES], "big")
        position += _LENGTH_BYTES
        if length > len(body) - position or len(records) == records_max:
            return None
        records.append(StoredRecord(body[position : position + length], is_proved, scope))
        position += length
    return records
