"""Compressed payloads: the flag COMPRESSED means that the body, after the headers, is one zstd frame. Pure."""

from typing import Final

import zstandard

from dep2p.errors import ErrorCode, ProtocolError

FEATURE: Final = "zstd"
"""The feature by which a peer offers compression in its realm handshake."""

_LEVEL: Final = 1
_SKIP_MAX: Final = 63
_WINDOW_BYTES_MIN: Final = 1 << 20


class Zstd:
    """Compression contexts, shared by all links of a node's realm: one costs about a megabyte."""

    __slots__ = ("_body_bytes_max", "_compressor", "_decompressor")

    def __init__(self, body_bytes_max: int) -> None:
        """``body_bytes_max``: bytes of a decompressed body at most."""
        self._body_bytes_max = body_bytes_max
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        # The window is memory that the sender chooses: never more than the largest body needs.
        window = max(_WINDOW_BYTES_MIN, 1 << max(0, body_bytes_max - 1).bit_length())
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=window)

    def compress(self, body: bytes | memoryview) -> bytes:
        """Compress a body into one zstd frame that names its content's size."""
        # A copy: the library's result keeps the memory of the worst case, a megabyte for a hundred bytes.
        return bytes(memoryview(self._compressor.compress(body)))

    def content_bytes(self, body: bytes) -> int:
        """Return the most bytes that decompressing gives: the size that the frame names, else the cap.

        Raises :class:`ProtocolError`, also when that is over the cap.
        """
        try:
            declared = zstandard.frame_content_size(body)
        except zstandard.ZstdError:
            raise ProtocolError("compressed payload is not one whole zstd frame") from None
        if declared > self._body_bytes_max:
            raise too_large(self._body_bytes_max)
        return declared if declared >= 0 else self._body_bytes_max

    def decompress(self, body: bytes) -> bytes:
        """Decompress exactly one zstd frame.

        A frame that names a size over the cap is refused before anything is decompressed; one that names none is
        decompressed up to the cap and no further. Raises :class:`ProtocolError`.
        """
        self.content_bytes(body)
        try:
            if zstandard.frame_content_size(body) >= 0:
                content = self._decompressor.decompress(body, allow_extra_data=False)
            else:
                content = self._decompress_unsized(body, self._body_bytes_max)
        except (zstandard.ZstdError, MemoryError):
            raise ProtocolError("compressed payload is not one whole zstd frame") from None
        return content

    def _decompress_unsized(self, body: bytes, bytes_max: int) -> bytes:
        one_frame = self._decompressor.decompressobj()
        parts: list[bytes] = []
        size = 0
        # Four bytes can mean a block of 128 KiB: small inputs keep one step's output near 2 MiB at most.
        for start in range(0, len(body), 64):
            part = one_frame.decompress(body[start : start + 64])
            size += len(part)
            if size > bytes_max:
                raise too_large(bytes_max)
            parts.append(part)
            if one_frame.eof:
                if one_frame.unused_data or start + 64 < len(body):
                    raise ProtocolError("bytes follow the compressed payload")
                return b"".join(parts)
        raise ProtocolError("compressed payload is cut off")


def too_large(bytes_max: int) -> ProtocolError:
    """Return the violation of a body over its cap."""
    return ProtocolError(f"a body over {bytes_max} bytes is not taken here", ErrorCode.MESSAGE_TOO_LARGE)


class Compression:
    """Decides for one link which bodies to compress: those from ``bytes_min`` on, and only while it pays.

    After a body that did not shrink the next ones are sent as they are: 1, 3, 7 … at most 63 of them.
    """

    __slots__ = ("_bytes_min", "_misses", "_skip", "_zstd")

    def __init__(self, zstd: Zstd, bytes_min: int) -> None:
        """``bytes_min`` 0 turns compression off."""
        self._zstd = zstd
        self._bytes_min = bytes_min
        self._misses = 0
        self._skip = 0

    def compress(self, body: bytes | memoryview) -> bytes | None:
        """Return the compressed body, or None when it is better sent as it is."""
        size = len(body)
        if not self._bytes_min or size < self._bytes_min:
            return None
        if self._skip:
            self._skip -= 1
            return None
        compressed = self._zstd.compress(body)
        if len(compressed) < size - size // 16:
            self._misses = 0
            return compressed
        self._skip = min(_SKIP_MAX, 2 * self._misses + 1)
        self._misses = self._skip
        return compressed if len(compressed) < size else None
