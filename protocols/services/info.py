"""A member's words about the services that it offers, when another one asks (docs/spec/messaging.md §7). Pure."""

from collections import deque
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from dep2p.errors import ProtocolError
from dep2p.protocols.realm.statement import (
    GROUP_BYTES_MAX,
    SCHEMA_BYTES_MAX,
    SERVICE_NAME_BYTES_MAX,
    SERVICES_MAX,
    VERSION_BYTES_MAX,
)
from dep2p.protocols.timing.percentile import percentile

INFO_NAME: Final = "$dep2p/services"
"""The request by which members ask for it."""
RESERVED_PREFIX: Final = "$dep2p/"
INFO_BYTES_MAX: Final = 262_144
METADATA_MAX: Final = 16
METADATA_BYTES_MAX: Final = 2_048
_TIMES_MAX: Final = 512

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]


class ServiceInfo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One service of one member. All texts are the member's: show them through `dep2p.outside_text`."""

    name: Annotated[str, Meta(min_length=1, max_length=SERVICE_NAME_BYTES_MAX)]
    group: Annotated[str, Meta(min_length=1, max_length=GROUP_BYTES_MAX)]
    version: Annotated[str, Meta(max_length=VERSION_BYTES_MAX)] = ""
    schema: Annotated[str, Meta(max_length=SCHEMA_BYTES_MAX)] = ""
    metadata: Annotated[dict[str, str], Meta(max_length=METADATA_MAX)] = {}
    programs: _Count = 0
    """Handlers that share the requests: programs of a daemon, or functions of an app."""
    since_s: float = 0.0
    """Unix seconds since when the member offers it."""
    requests: _Count = 0
    """Requests that were given to a handler."""
    errors: _Count = 0
    """Those of them that failed."""
    in_flight: _Count = 0
    mean_ms: _Milliseconds = 0.0
    """The time of handlers that answered, of the last 512."""
    p99_ms: _Milliseconds = 0.0


class ServiceInfos(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The answer: the services of one member."""

    services: Annotated[tuple[ServiceInfo, ...], Meta(max_length=SERVICES_MAX)] = ()


def encode_infos(infos: ServiceInfos) -> bytes:
    """Encode the answer as JSON."""
    return msgspec.json.encode(infos)


def decode_infos(data: bytes) -> ServiceInfos:
    """Decode a member's answer. Raises :class:`ProtocolError`."""
    if len(data) > INFO_BYTES_MAX:
        raise ProtocolError(f"the member's list of services has {len(data)} bytes: at most {INFO_BYTES_MAX} are read")
    try:
        return msgspec.json.decode(data, type=ServiceInfos)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the member's list of services is malformed: {error}") from None


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises ``ValueError`` when a service may not have this metadata."""
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if len(metadata) > METADATA_MAX or size > METADATA_BYTES_MAX:
        raise ValueError(
            f"metadata of {len(metadata)} entries and {size} bytes: at most {METADATA_MAX} entries and "
            f"{METADATA_BYTES_MAX} bytes in all"
        )


class ServiceTimes:
    """Counts of the requests of one service, and the times of the last answers."""

    def __init__(self) -> None:
        self.requests: int = 0
        self.errors: int = 0
        self._times_s: deque[float] = deque(maxlen=_TIMES_MAX)

    def answered(self, took_s: float) -> None:
        """A handler answered."""
        self._times_s.append(took_s)

    @property
    def mean_ms(self) -> float:
        """The mean time of the last answers."""
        return 1000 * sum(self._times_s) / len(self._times_s) if self._times_s else 0.0

    @property
    def p99_ms(self) -> float:
        """The time within which 99 of 100 of the last answers were ready."""
        return 1000 * percentile(sorted(self._times_s), 0.99) if self._times_s else 0.0
