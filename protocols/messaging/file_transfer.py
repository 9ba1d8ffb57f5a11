"""Sending one file over one dep2p stream, resumable and verified (docs/spec/file-transfer.md).

    sender                                 receiver
    OFFER name, size, sha256? ──────────▶
                              ◀──────────  ANSWER offset, sha256 of those first bytes      or  VERDICT not ok
    START offset              ──────────▶
    data items, exactly size - offset bytes ▶
    END sha256 of the whole   ──────────▶
                              ◀──────────  VERDICT ok, sha256                              (not ok: at any time)

Two pure cores, :class:`FileSender` and :class:`FileReceiver`: they check order, sizes and bounds, and know no file and
no stream. The shell compares digests, since only it has the bytes. Control items are CBOR maps; data items are raw
bytes, distinguished by the state alone.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from dep2p.errors import LocalProtocolError, ProtocolError
from dep2p.protocols.wire.headers import HeaderMap, decode_headers, encode_headers, headers_end

PROTOCOL_NAME: Final = "dep2p.file"
"""The stream name when the user gives none."""
VERSION: Final = 1
DATA_ITEM_BYTES_MAX: Final = 262_144
CONTROL_ITEM_BYTES_MAX: Final = 4_096
FILE_BYTES_MAX: Final = 1 << 60
NAME_BYTES_MAX: Final = 255
"""Bytes of a file name at most, as in common file systems."""
TEXT_BYTES_MAX: Final = 1_024
SHA256_BYTES: Final = 32


class FileVerdictCode(StrEnum):
    """The reason why a receiver did not take a file."""

    OK = "ok"
    EXISTS = "exists"
    """Another file has that name; the receiver does not overwrite."""
    BUSY = "busy"
    """The same file is being received at this moment."""
    NO_SPACE = "no_space"
    CHECKSUM = "checksum"
    """The received bytes have another hash than the sender's file."""
    BAD_NAME = "bad_name"
    REFUSED = "refused"
    FAILED = "failed"
    """The receiver could not write; ``text`` says why."""


@dataclass(frozen=True, slots=True)
class FileOffer:
    """The sender's first item. ``size`` in bytes; ``mtime_ns`` since 1970 or None; ``sha256`` of the whole or None."""

    name: str
    size: int
    mtime_ns: int | None = None
    sha256: bytes | None = None


@dataclass(frozen=True, slots=True)
class FileOfferAnswer:
    """The receiver holds the first ``offset`` bytes already, and ``sha256`` is their digest."""

    offset: int
    sha256: bytes


@dataclass(frozen=True, slots=True)
class FileStart:
    """The data that follows begins at ``offset``: the offered one, or 0 when the digests differed."""

    offset: int


@dataclass(frozen=True, slots=True)
class FileData:
    """The next bytes of the file."""

    data: bytes


@dataclass(frozen=True, slots=True)
class FileEnd:
    """All data was sent; ``sha256`` is the digest of the whole file."""

    sha256: bytes


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """The receiver's verdict. ``sha256`` of the whole file when ``code`` is OK, else None."""

    code: FileVerdictCode
    text: str = ""
    sha256: bytes | None = None

    @property
    def ok(self) -> bool:
        """Whether the whole file is verified and durable at the receiver."""
        return self.code is FileVerdictCode.OK


class _Step(Enum):
    OFFER = "the offer"
    ANSWER = "the answer"
    START = "the start"
    DATA = "data"
    END = "the end"
    VERDICT = "the verdict"
    DONE = "nothing more"


def check_file_name(name: str) -> str:
    """Return ``name`` when it is one plain, visible file name.

    Raises ``ValueError`` with a sentence for the user: path separators, ``..``, hidden names, control and invisible
    characters, and names too long for a file system are all refused, so that no sender chooses where a file lands.
    """
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a file name must be valid UTF-8") from None
    if not 0 < len(encoded) <= NAME_BYTES_MAX:
        raise ValueError(f"a file name has 1 to {NAME_BYTES_MAX} bytes, not {len(encoded)}")
    if "/" in name or "\\" in name:
        raise ValueError("a file name must not hold a path separator")
    if name.startswith("."):
        raise ValueError("a file name must not start with a dot")
    if not name.isprintable():
        raise ValueError("a file name must not hold control or invisible characters")
    if name != name.strip():
        raise ValueError("a file name must not start or end with a space")
    return name


class FileSender:
    """The sending side of one transfer."""

    __slots__ = ("_left", "_step", "offer")

    def __init__(self, offer: FileOffer) -> None:
        """Raises ``ValueError`` when the offer breaks a bound."""
        check_file_name(offer.name)
        if not 0 <= offer.size <= FILE_BYTES_MAX:
            raise ValueError(f"a file has 0 to {FILE_BYTES_MAX} bytes, not {offer.size}")
        self.offer: FileOffer = offer
        self._step = _Step.OFFER
        self._left = 0

    def first_item(self) -> bytes:
        """Return the OFFER item."""
        self._expect(_Step.OFFER)
        self._step = _Step.ANSWER
        fields: dict[str, object] = {"v": VERSION, "kind": "offer", "name": self.offer.name, "size": self.offer.size}
        if self.offer.mtime_ns is not None:
            fields["mtime_ns"] = self.offer.mtime_ns
        if self.offer.sha256 is not None:
            fields["sha256"] = self.offer.sha256
        return encode_headers({}, fields)

    def start_item(self, offset: int) -> bytes:
        """Return the START item; ``offset`` is the answer's, or 0."""
        self._expect(_Step.START)
        if not 0 <= offset <= self.offer.size:
            raise LocalProtocolError(f"start at {offset} of a file of {self.offer.size} bytes")
        self._left = self.offer.size - offset
        self._step = _Step.DATA if self._left else _Step.END
        return encode_headers({}, {"kind": "start", "offset": offset})

    def data_item(self, data: bytes) -> bytes:
        """Account for one data item and return it."""
        self._expect(_Step.DATA)
        if not 0 < len(data) <= min(DATA_ITEM_BYTES_MAX, self._left):
            raise LocalProtocolError(f"a data item of {len(data)} bytes with {self._left} bytes left")
        self._left -= len(data)
        if not self._left:
            self._step = _Step.END
        return data

    def end_item(self, sha256: bytes) -> bytes:
        """Return the END item; ``sha256`` of the whole file."""
        self._expect(_Step.END)
        self._step = _Step.VERDICT
        return encode_headers({}, {"kind": "end", "sha256": sha256})

    def on_item(self, item: bytes) -> FileOfferAnswer | FileVerdict:
        """Take one item from the receiver. Raises :class:`ProtocolError`."""
        if self._step in (_Step.OFFER, _Step.DONE):
            raise ProtocolError(f"file transfer: the receiver sent an item where {self._step.value} was due")
        kind, fields = _decode(item)
        if kind == "verdict":
            verdict = _verdict(fields)
            if verdict.ok and self._step is not _Step.VERDICT:
                raise ProtocolError("file transfer: the receiver confirmed a file that was not sent yet")
            self._step = _Step.DONE
            return verdict
        if kind != "answer" or self._step is not _Step.ANSWER:
            raise ProtocolError(f"file transfer: {kind!r} came where {self._step.value} was due")
        answer = FileOfferAnswer(_uint(fields, "offset", self.offer.size), _digest(fields))
        self._step = _Step.START
        return answer

    def _expect(self, step: _Step) -> None:
        if self._step is not step:
            raise LocalProtocolError(f"{step.value} is not due, {self._step.value} is")


class FileReceiver:
    """The receiving side of one transfer."""

    __slots__ = ("_answered", "_left", "_step", "offer")

    def __init__(self) -> None:
        self._step = _Step.OFFER
        self._answered = 0
        self._left = 0
        self.offer: FileOffer | None = None

    @property
    def finished(self) -> bool:
        """Whether the END item came: no more items are due."""
        return self._step in (_Step.VERDICT, _Step.DONE)

    def on_item(self, item: bytes) -> FileOffer | FileStart | FileData | FileEnd:
        """Take one item from the sender. Raises :class:`ProtocolError`."""
        step = self._step
        if step is _Step.DATA:
            if not 0 < len(item) <= min(DATA_ITEM_BYTES_MAX, self._left):
                raise ProtocolError(f"file transfer: a data item of {len(item)} bytes, {self._left} bytes are left")
            self._left -= len(item)
            if not self._left:
                self._step = _Step.END
            return FileData(item)
        if step not in (_Step.OFFER, _Step.START, _Step.END):
            raise ProtocolError(f"file transfer: the sender sent an item where {step.value} was due")
        kind, fields = _decode(item)
        if kind == "offer" and step is _Step.OFFER:
            self.offer = _offer(fields)
            self._step = _Step.ANSWER
            return self.offer
        if kind == "start" and step is _Step.START and self.offer is not None:
            offset = _uint(fields, "offset", self.offer.size)
            if offset not in (0, self._answered):
                raise ProtocolError(
                    f"file transfer: start at {offset}, neither 0 nor the {self._answered} of the answer"
                )
            self._left = self.offer.size - offset
            self._step = _Step.DATA if self._left else _Step.END
            return FileStart(offset)
        if kind == "end" and step is _Step.END:
            self._step = _Step.VERDICT
            return FileEnd(_digest(fields))
        raise ProtocolError(f"file transfer: {kind!r} came where {step.value} was due")

    def answer_item(self, offset: int, sha256: bytes) -> bytes:
        """Return the ANSWER item: ``sha256`` is the digest of the ``offset`` bytes held already."""
        if self._step is not _Step.ANSWER or self.offer is None:
            raise LocalProtocolError(f"the answer is not due, {self._step.value} is")
        if not 0 <= offset <= self.offer.size:
            raise LocalProtocolError(f"an answer of {offset} for a file of {self.offer.size} bytes")
        self._answered = offset
        self._step = _Step.START
        return encode_headers({}, {"kind": "answer", "offset": offset, "sha256": sha256})

    def verdict_item(self, verdict: FileVerdict) -> bytes:
        """Return the VERDICT item; a good one only after END, a bad one at any time."""
        if self._step is _Step.DONE or (verdict.ok and self._step is not _Step.VERDICT):
            raise LocalProtocolError(f"a verdict is not due, {self._step.value} is")
        self._step = _Step.DONE
        fields: dict[str, object] = {"kind": "verdict", "code": verdict.code.value}
        if verdict.text:
            fields["text"] = verdict.text.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore")
        if verdict.sha256 is not None:
            fields["sha256"] = verdict.sha256
        return encode_headers({}, fields)


def _decode(item: bytes) -> tuple[str, HeaderMap]:
    if len(item) > CONTROL_ITEM_BYTES_MAX:
        raise ProtocolError(f"file transfer: a control item of {len(item)} bytes is over {CONTROL_ITEM_BYTES_MAX}")
    if headers_end(item, 0, CONTROL_ITEM_BYTES_MAX) != len(item):
        raise ProtocolError("file transfer: bytes follow a control item")
    fields = decode_headers(item)
    kind = fields.get("kind")
    if not isinstance(kind, str):
        raise ProtocolError("file transfer: a control item names no kind")
    return kind[:32], fields


def _uint(fields: HeaderMap, key: str, most: int) -> int:
    value = fields.get(key)
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"file transfer: {key} is not a number from 0 to {most}")
    return value


def _digest(fields: HeaderMap) -> bytes:
    value = fields.get("sha256")
    if not isinstance(value, bytes) or len(value) != SHA256_BYTES:
        raise ProtocolError("file transfer: sha256 does not have 32 bytes")
    return value


def _offer(fields: HeaderMap) -> FileOffer:
    if fields.get("v") != VERSION:
        raise ProtocolError("file transfer: the sender speaks a version that this side does not know")
    name = fields.get("name")
    if not isinstance(name, str):
        raise ProtocolError("file transfer: the offer names no file")
    try:
        check_file_name(name)
    except ValueError as error:
        raise ProtocolError(f"file transfer: {error}") from None
    mtime_ns = _uint(fields, "mtime_ns", (1 << 63) - 1) if "mtime_ns" in fields else None
    return FileOffer(
        name, _uint(fields, "size", FILE_BYTES_MAX), mtime_ns, _digest(fields) if "sha256" in fields else None
    )


def _verdict(fields: HeaderMap) -> FileVerdict:
    try:
        code = FileVerdictCode(str(fields.get("code")))
    except ValueError:
        code = FileVerdictCode.FAILED  # a code of a later version: still a refusal
    text = fields.get("text", "")
    if not isinstance(text, str) or len(text) > TEXT_BYTES_MAX:
        raise ProtocolError("file transfer: the verdict's text is no text or too long")
    return FileVerdict(code, text, _digest(fields) if code is FileVerdictCode.OK else None)
