"""A frame's payload as headers and body, both ways: flags HEADERS and COMPRESSED (docs/spec/frame.md). Pure."""

from collections.abc import Mapping
from typing import Final

from dep2p.arguments import WrongTypeError
from dep2p.errors import ErrorCode, HeadersTooLargeError, MessageTooLargeError, ProtocolError
from dep2p.limits import Limits
from dep2p.protocols.wire.compression import Compression, Zstd, too_large
from dep2p.protocols.wire.frame import COMPRESSED, HEADERS, Frame
from dep2p.protocols.wire.headers import HeaderKey, HeaderMap, HeaderReader, encode_headers

_NO_HEADERS: Final[HeaderMap] = {}
NAME_BYTES_MAX: Final = 255
"""Bytes of the name of a request, notify or stream at most."""
_CACHE_MAX: Final = 512
_NAME: Final = int(HeaderKey.NAME)
TIMEOUT_MS_MAX: Final = 0xFFFF_FFFF


def payload_bytes_max(limits: Limits) -> int:
    """Return the cap of a frame's payload on the messaging protocols: headers and body, as they travel."""
    return limits.message_bytes_max + limits.headers_bytes_max


class PayloadReader:
    """Splits payloads of one link. ``zstd`` is None when the peer did not offer compression."""

    __slots__ = ("_body_bytes_max", "_headers", "_zstd")

    def __init__(self, limits: Limits, zstd: Zstd | None) -> None:
        self._body_bytes_max = limits.message_bytes_max
        self._headers = HeaderReader(limits.headers_bytes_max)
        self._zstd = zstd

    def split(self, frame: Frame) -> tuple[HeaderMap, bytes]:
        """Return the headers (shared: never change them) and the body as it came, compressed or not.

        Nothing is decompressed here: a few compressed bytes can stand for a megabyte, so callers queue bodies as they
        came, and ask `content_bytes` before they decompress one. Raises :class:`ProtocolError`.
        """
        flags = frame.flags
        if flags & ~(HEADERS | COMPRESSED):
            raise ProtocolError(f"flags 0x{flags:04x} are not allowed on frame type 0x{frame.type:02x}")
        headers, body = self._headers.split(frame.payload) if flags & HEADERS else (_NO_HEADERS, frame.payload)
        if flags & COMPRESSED:
            if self._zstd is None:
                raise ProtocolError("flag COMPRESSED without zstd having been offered")
        elif len(body) > self._body_bytes_max:
            raise too_large(self._body_bytes_max)
        return headers, body

    def content_bytes(self, flags: int, body: bytes) -> int:
        """Return how large the body is, or may become, decompressed. Raises :class:`ProtocolError`."""
        if flags & COMPRESSED and self._zstd is not None:
            return self._zstd.content_bytes(body)
        return len(body)

    def content(self, flags: int, body: bytes) -> bytes:
        """Return the body, decompressed when the flags say that it is compressed. Raises :class:`ProtocolError`."""
        if flags & COMPRESSED and self._zstd is not None:
            return self._zstd.decompress(body)
        return body

    def split_headers(self, payload: bytes) -> tuple[HeaderMap, bytes]:
        """Return the headers (shared: never change them) and the bytes behind them. Raises :class:`ProtocolError`."""
        return self._headers.split(payload)

    def check_body(self, body: bytes) -> None:
        """Raises :class:`ProtocolError` for a body that is too large."""
        if len(body) > self._body_bytes_max:
            raise too_large(self._body_bytes_max)

    def read(self, frame: Frame) -> tuple[HeaderMap, bytes]:
        """Return the headers (shared: never change them) and the decompressed body. Raises :class:`ProtocolError`."""
        if frame[1] == HEADERS and len(frame[3]) <= self._body_bytes_max:  # nearly all
            return self._headers.split(frame[3])
        headers, body = self.split(frame)
        return headers, self.content(frame.flags, body)

    def read_error(self, frame: Frame) -> tuple[HeaderMap, bytes]:
        """Return the headers and the body of an ERROR, which has no flag but HEADERS. Raises :class:`ProtocolError`.

        Its text is no message: where messages may be short, a longer text must not end the link.
        """
        return self._headers.split(frame.payload) if frame.flags & HEADERS else (_NO_HEADERS, frame.payload)


def check_name(name: object) -> None:
    """Check the name of a request, notify or stream. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(name, str):
        raise WrongTypeError(f"a name must be text, not {type(name).__name__}: {name!r:.80}")
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError(f"the name {name[:80]!r} must be text that UTF-8 can encode") from None
    if not 1 <= size <= NAME_BYTES_MAX:
        raise ValueError(f"the name {name[:80]!r} must have 1 to {NAME_BYTES_MAX} bytes")


class HeaderEncoder:
    """Encodes header maps, with a bounded memory of those that have no app headers: they repeat."""

    __slots__ = ("_bytes_max", "_known")

    def __init__(self, limits: Limits) -> None:
        self._bytes_max = limits.headers_bytes_max
        self._known: dict[tuple[str, int, bool], bytes] = {}

    def encode(
        self,
        name: str,
        timeout_ms: int = 0,
        idempotent: bool = False,
        app: Mapping[str, object] | None = None,
    ) -> bytes:
        """Encode the header map of a request, notify or stream; ``timeout_ms`` 0 and ``idempotent`` False are left out.

        Raises ``TypeError`` or ``ValueError`` for a name that no handler can have (sent, it would cost the link with
        all that is in flight on it), ``ValueError`` for headers that cannot be encoded, MessageTooLargeError for too
        many bytes.
        """
        key = (name, timeout_ms, idempotent)
        if not app and type(name) is str:
            known = self._known.get(key)
            if known is not None:
                return known
        check_name(name)
        own: dict[int, object] = {HeaderKey.NAME: name}
        if timeout_ms:
            own[HeaderKey.TIMEOUT_MS] = timeout_ms
        if idempotent:
            own[HeaderKey.IDEMPOTENT] = True
        encoded = encode_headers(own, app)
        if len(encoded) > self._bytes_max:
            raise HeadersTooLargeError(f"headers of {len(encoded)} bytes: at most {self._bytes_max} are allowed")
        if not app:
            if len(self._known) >= _CACHE_MAX:
                self._known.clear()
            self._known[key] = encoded
        return encoded


def retry_after_headers(retry_after_ms: int) -> bytes:
    """Return the header map of ERROR/RATE_LIMITED."""
    return encode_headers({HeaderKey.RETRY_AFTER_MS: min(max(0, retry_after_ms), TIMEOUT_MS_MAX)})


def compressed_body(compression: Compression | None, body: bytes | memoryview) -> tuple[int, bytes | memoryview]:
    """Return the flag to set and the body to send."""
    if compression is not None:
        compressed = compression.compress(body)
        if compressed is not None:
            return COMPRESSED, compressed
    return 0, body


def check_body(body: bytes, bytes_max: int) -> None:
    """Raises MessageTooLargeError for a body that must not be sent."""
    if len(body) > bytes_max:
        raise MessageTooLargeError(f"message of {len(body)} bytes: at most {bytes_max} are allowed")


def required_name(headers: HeaderMap) -> str:
    """Return the app's protocol name. Raises :class:`ProtocolError` when it is missing or no text."""
    name = headers.get(_NAME)
    if type(name) is not str or not name:
        raise ProtocolError("header NAME is missing or no text", ErrorCode.INVALID_REQUEST)
    return name
