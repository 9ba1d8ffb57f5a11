"""Noise transport messages without I/O: plaintext to wire bytes and back.

After the handshake each direction is a sequence of messages: a big-endian u16 length, then that many bytes of
ChaCha20-Poly1305 ciphertext with a 16-byte tag. The nonce counts the messages (Noise specification, revision 34,
sections 5.1 and 12.3; libp2p's noise specification for the length prefix).
"""

from collections.abc import Callable
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dep2p.errors import ProtocolError

LENGTH_BYTES = 2
TAG_BYTES = 16
MESSAGE_BYTES_MAX = 65_535
PLAINTEXT_BYTES_MAX = MESSAGE_BYTES_MAX - TAG_BYTES
WIRE_BYTES_MAX = LENGTH_BYTES + MESSAGE_BYTES_MAX
"""Bytes of one message with its length, as sent."""
KEY_BYTES = 32
NONCE_MAX = 2**64 - 1
"""The nonce that the specification reserves; reaching it ends the connection."""

Readable: TypeAlias = bytes | bytearray | memoryview
OnPlaintext: TypeAlias = Callable[[memoryview], None]
"""Called with decrypted bytes, synchronously; the view is valid only during the call."""


class NoiseSealer:
    """Encrypts one direction. Every call uses the next nonce, so what it returns must be sent, whole and in order."""

    __slots__ = ("_cipher", "nonce")

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self.nonce: int = 0

    def seal(self, plaintext: Readable) -> bytes:
        """Return the wire bytes of any amount of plaintext; b"" for none.

        Raises ProtocolError when the nonces are used up.
        """
        if len(plaintext) <= PLAINTEXT_BYTES_MAX:
            if not plaintext:
                return b""
            nonce = self.nonce
            if nonce >= NONCE_MAX:
                raise ProtocolError("the connection has used up its nonces")
            self.nonce = nonce + 1
            message = self._cipher.encrypt((nonce << 32).to_bytes(12, "little"), plaintext, None)
            return len(message).to_bytes(LENGTH_BYTES, "big") + message
        view = memoryview(plaintext)
        return b"".join(
            self.seal(view[at : at + PLAINTEXT_BYTES_MAX]) for at in range(0, len(view), PLAINTEXT_BYTES_MAX)
        )

    def seal_into(self, plaintext: Readable, out: memoryview) -> int:
        """Write one message (at most PLAINTEXT_BYTES_MAX of plaintext) to the start of ``out``; return its wire bytes.

        Raises ProtocolError when the nonces are used up.
        """
        nonce = self.nonce
        if nonce >= NONCE_MAX:
            raise ProtocolError("the connection has used up its nonces")
        self.nonce = nonce + 1
        length = len(plaintext) + TAG_BYTES
        out[0] = length >> 8
        out[1] = length & 0xFF
        end = LENGTH_BYTES + length
        self._cipher.encrypt_into((nonce << 32).to_bytes(12, "little"), plaintext, None, out[LENGTH_BYTES:end])
        return end


class NoiseOpener:
    """Decrypts one direction. The same bytes give the same plaintext and the same error however they are split."""

    __slots__ = ("_cipher", "_rest", "nonce")

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._rest = bytearray()  # the start of a message whose end has not arrived; less than one message
        self.nonce: int = 0

    @property
    def is_between_messages(self) -> bool:
        """False when a message has arrived in part."""
        return not self._rest

    @property
    def incomplete_bytes(self) -> int:
        """Kept bytes of a message that has arrived in part."""
        return len(self._rest)

    def feed(self, data: memoryview, scratch: memoryview, on_plaintext: OnPlaintext) -> None:
        """Take wire bytes; the plaintext of each complete message goes through ``scratch`` to ``on_plaintext``.

        ``scratch`` holds PLAINTEXT_BYTES_MAX or more.

        Raises ProtocolError for a length or tag that is wrong, after everything before it was passed on. What
        ``on_plaintext`` raises passes through. The opener is of no use after an error.
        """
        position, end, filled = 0, len(data), 0
        rest = self._rest
        if rest:
            position = self._complete(rest, data)
            if position < 0:
                return
            with memoryview(rest) as message:
                filled = self._open(message[LENGTH_BYTES:], scratch)
            rest.clear()
        while end - position >= LENGTH_BYTES:
            length = data[position] << 8 | data[position + 1]
            stop = position + LENGTH_BYTES + length
            if length < TAG_BYTES:
                if filled:
                    on_plaintext(scratch[:filled])
                raise ProtocolError(f"a Noise message of {length} bytes is shorter than its tag")
            if stop > end:
                break
            if filled + length - TAG_BYTES > len(scratch):
                on_plaintext(scratch[:filled])
                filled = 0
            try:
                filled += self._open(data[position + LENGTH_BYTES : stop], scratch[filled:])
            except ProtocolError:
                if filled:
                    on_plaintext(scratch[:filled])
                raise
            position = stop
        if position < end:
            rest += data[position:]
        if filled:
            on_plaintext(scratch[:filled])

    def _complete(self, rest: bytearray, data: memoryview) -> int:
        """Append to ``rest`` until it is one message. Returns how far ``data`` is used, -1 when it does not suffice."""
        position = 0
        if len(rest) < LENGTH_BYTES:
            position = LENGTH_BYTES - len(rest)
            rest += data[:position]
            if len(rest) < LENGTH_BYTES:
                return -1
        length = rest[0] << 8 | rest[1]
        if length < TAG_BYTES:
            raise ProtocolError(f"a Noise message of {length} bytes is shorter than its tag")
        stop = position + LENGTH_BYTES + length - len(rest)
        rest += data[position:stop]
        return stop if stop <= len(data) else -1

    def _open(self, message: memoryview, out: memoryview) -> int:
        nonce = self.nonce
        if nonce >= NONCE_MAX:
            raise ProtocolError("the connection has used up its nonces")
        self.nonce = nonce + 1
        plain = len(message) - TAG_BYTES
        try:
            self._cipher.decrypt_into((nonce << 32).to_bytes(12, "little"), message, None, out[:plain])
        except InvalidTag:
            raise ProtocolError("a Noise message is forged or damaged") from None
        return plain
