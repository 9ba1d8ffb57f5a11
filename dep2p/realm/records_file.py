"""The member table on disk: a file of signed records, so that a restarted node knows whom to dial.

The file is trusted with nothing: every record is verified when it is loaded. Layout: a line that names the format, the
SHA-256 of the rest, then each envelope behind its length as a big-endian u32.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dep2p.protocols.realm.member_record import RECORD_BYTES_MAX

_FORMAT: Final = b"dep2p-members-v1\n"
_HASH_BYTES: Final = 32
_LENGTH_BYTES: Final = 4

_logger = logging.getLogger("dep2p.realm")


def load_records(path: Path, *, records_max: int) -> list[bytes]:
    """The envelopes in the file; empty when there is none.

    A file that is damaged is moved aside to ``<name>.corrupt`` (replacing an earlier one) with a warning: members are
    found again without it.
    """
    bytes_max = len(_FORMAT) + _HASH_BYTES + records_max * (_LENGTH_BYTES + RECORD_BYTES_MAX)
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        _logger.warning("cannot read the member records %s (%s): members are found anew", path, error.strerror)
        return []
    envelopes = _parse(data, records_max) if len(data) <= bytes_max else None
    if envelopes is None:
        aside = path.with_name(path.name + ".corrupt")
        _logger.warning("the member records %s are damaged: moved to %s, members are found anew", path, aside)
        try:
            os.replace(path, aside)
        except OSError as error:
            _logger.warning("cannot move %s aside: %s", path, error.strerror)
        return []
    return envelopes


def save_records(path: Path, envelopes: Sequence[bytes]) -> None:
    """Write the file, mode 0600, complete or not at all. Raises ``OSError``."""
    body = b"".join(len(envelope).to_bytes(_LENGTH_BYTES, "big") + envelope for envelope in envelopes)
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


def _parse(data: bytes, records_max: int) -> list[bytes] | None:
    start = len(_FORMAT) + _HASH_BYTES
    body = data[start:]
    if data[: len(_FORMAT)] != _FORMAT or data[len(_FORMAT) : start] != hashlib.sha256(body).digest():
        return None
    envelopes: list[bytes] = []
    position = 0
    while position < len(body):
        length = int.from_bytes(body[position : position + _LENGTH_BYTES], "big")
        position += _LENGTH_BYTES
        if length > len(body) - position or len(envelopes) == records_max:
            return None
        envelopes.append(body[position : position + length])
        position += length
    return envelopes
