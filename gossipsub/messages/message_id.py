"""Message ids: one function per topic, the same on every node of a network.

The default functions of go, js and rust differ; nodes with different ones deliver, but neither gossip nor IDONTWANT
work between them. Golden values: tests/gossipsub/test_message_id.py.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Final

import base58

MessageIdFn = Callable[[bytes, bytes, str, bytes, bytes], bytes]
"""author (multihash bytes), seqno, topic, data, key (protobuf public key, often empty) → id."""

_IDENTITY_HASH: Final = 0x00
_BASE58_CACHE_MAX: Final = 1_024


def go_id(author: bytes, seqno: bytes, topic: str, data: bytes, key: bytes) -> bytes:
    """go and py: author ‖ seqno."""
    return author + seqno


def js_id(author: bytes, seqno: bytes, topic: str, data: bytes, key: bytes) -> bytes:
    """js under StrictSign: protobuf public key ‖ seqno. The key is inside an identity multihash, or in the message."""
    if not key and len(author) > 2 and author[0] == _IDENTITY_HASH:
        key = author[2:]
    return key + seqno


class RustId:
    """rust: the author's base58 text followed by the seqno in decimal. Keeps the texts of recent authors."""

    __slots__ = ("_texts",)

    def __init__(self) -> None:
        self._texts: dict[bytes, bytes] = {}

    def __call__(self, author: bytes, seqno: bytes, topic: str, data: bytes, key: bytes) -> bytes:
        text = self._texts.get(author)
        if text is None:
            if len(self._texts) >= _BASE58_CACHE_MAX:
                self._texts.clear()
            # An honest author has 34 to 40 bytes; base58 of a megabyte would take minutes.
            text = base58.b58encode(author[:128])
            self._texts[author] = text
        return text + b"%d" % int.from_bytes(seqno[:8], "big")


def sha256_id(author: bytes, seqno: bytes, topic: str, data: bytes, key: bytes) -> bytes:
    """SHA-256 of the data: same content, same message. js under StrictNoSign."""
    return hashlib.sha256(data).digest()


def realm_id(author: bytes, seqno: bytes, topic: str, data: bytes, key: bytes) -> bytes:
    """The realm wire: the first 16 bytes of SHA-256(author ‖ seqno)."""
    return hashlib.sha256(author + seqno).digest()[:16]


PROFILES: Final[Mapping[str, Callable[[], MessageIdFn]]] = {
    "go": lambda: go_id,
    "js": lambda: js_id,
    "rust": RustId,
    "sha256": lambda: sha256_id,
    "realm": lambda: realm_id,
}
"""Name → maker of an id function."""


def message_id_profile(profile: str | MessageIdFn) -> MessageIdFn:
    """The function of a profile name, or the function itself. Raises ``ValueError`` that lists the names."""
    if not isinstance(profile, str):
        return profile
    maker = PROFILES.get(profile)
    if maker is None:
        raise ValueError(f"no message id profile {profile!r}: there are {', '.join(PROFILES)}")
    return maker()


class MessageIds:
    """The id function of each topic, and one for all others."""

    __slots__ = ("_by_topic", "_default")

    def __init__(self, default: str | MessageIdFn, by_topic: Mapping[str, str | MessageIdFn] | None = None) -> None:
        self._default = message_id_profile(default)
        self._by_topic = {topic: message_id_profile(profile) for topic, profile in (by_topic or {}).items()}

    def __call__(self, author: bytes, seqno: bytes, topic: str, data: bytes, key: bytes) -> bytes:
        by_topic = self._by_topic
        function = by_topic.get(topic, self._default) if by_topic else self._default
        return function(author, seqno, topic, data, key)
