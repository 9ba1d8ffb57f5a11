"""libp2p's own tracer files, JSON lines or length-delimited protobuf (also gzipped), as events of our schema.

The formats: ``pb/trace.proto`` and the tracers of go-libp2p-pubsub.
"""

import base64
import binascii
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TypeGuard

import base58
import zstandard

from dep2p.encoding.protobuf import LENGTH, VARINT, ProtoReader
from dep2p.encoding.varint import find_varint
from dep2p.errors import ProtocolError
from dep2p.traces import schema
from dep2p.traces.files import FRAME_EVENTS, ZSTD_LEVEL, FileName, GrowingFile
from dep2p.traces.schema import SCHEMA_VERSION as V

_EVENT_BYTES_MAX: Final = 64 << 20
_LENGTH_BYTES_MAX: Final = 6
_STAMP_NS_END: Final = 2**63
"""Timestamps are int64 nanoseconds in libp2p's schema: they end in the year 2262."""
_PEER_BYTES: Final = 38
_NAMES: Final = (
    *("publishMessage", "rejectMessage", "duplicateMessage", "deliverMessage", "addPeer", "removePeer", "recvRPC"),
    *("sendRPC", "dropRPC", "join", "leave", "graft", "prune"),
)


Item = dict[str, object]
"""One event as the tracers write it: JSON's names and nesting."""


class TraceFormatError(ValueError):
    """The error for a file that is no tracer file of libp2p; the text says where."""


@dataclass(slots=True)
class ImportReport:
    """The result of an import. ``skipped``: events of unknown types or without what they need."""

    events: int = 0
    skipped: int = 0
    cut: list[str] = field(default_factory=list[str])
    paths: list[Path] = field(default_factory=list[Path])
    nodes: int = 0


def import_files(files: list[Path], out: Path) -> ImportReport:
    """Write the events of tracer files into ``out``, a file for each node.

    A file that ends within an event is taken up to there and named in ``cut``. Raises ``OSError``, `TraceFormatError`.
    """
    report = ImportReport()
    writers: dict[str, _NodeWriter] = {}
    for path in files:
        for item in _items(path, report):
            node = _peer(item.get("peerID"))
            stamp = item.get("timestamp")
            if node is None or type(stamp) is not int or not 0 <= stamp < _STAMP_NS_END:
                report.skipped += 1
                continue
            writer = writers.get(node)
            if writer is None:
                writer = writers[node] = _NodeWriter(node, stamp, out)
            event = _event(item, node, writer.seq, stamp // 1000)
            if event is None:
                report.skipped += 1
            else:
                writer.put(event)
                report.events += 1
    report.nodes = len(writers)
    report.paths = [writer.finish() for writer in writers.values()]
    return report


class _NodeWriter:
    def __init__(self, node: str, start_ns: int, out: Path) -> None:
        self.seq = 1
        self._node = node
        self._file = GrowingFile(out, FileName(node, start_ns, 0), start_ns // 1000)
        self._pending: list[schema.TraceEvent] = [schema.NodeStartEvent(V, node, 0, start_ns // 1000, "libp2p")]
        self._last_us = start_ns // 1000
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def put(self, event: schema.TraceEvent) -> None:
        self._pending.append(event)
        self.seq += 1
        self._last_us = max(self._last_us, event.t)
        if len(self._pending) >= FRAME_EVENTS:
            self._file.append(self._pending, self._compressor)
            self._pending.clear()

    def finish(self) -> Path:
        self.put(schema.NodeStopEvent(V, self._node, self.seq, self._last_us, "end of the imported trace"))
        if self._pending:
            self._file.append(self._pending, self._compressor)
        return self._file.finish()


# Events ---------------------------------------------------------------------------------------------------------------


def _event(item: Item, node: str, seq: int, t: int) -> schema.TraceEvent | None:
    number = item.get("type", 0)
    if not isinstance(number, int) or not 0 <= number < len(_NAMES):
        return None
    body = item.get(_NAMES[number])
    if not _is_item(body):
        return None
    topic = _text(body.get("topic"))
    if number in (6, 7, 8):
        return _rpc(number, body, node, seq, t)
    if number in (4, 5, 11, 12):
        peer = _peer(body.get("peerID"))
        if peer is None:
            return None
        if number == 4:
            return schema.AddPeerEvent(V, node, seq, t, peer, _text(body.get("proto")) or None)
        if number == 5:
            return schema.RemovePeerEvent(V, node, seq, t, peer)
        return (schema.GraftEvent if number == 11 else schema.PruneEvent)(V, node, seq, t, peer, topic)
    if number in (9, 10):
        return (schema.JoinEvent if number == 9 else schema.LeaveEvent)(V, node, seq, t, topic)
    msg = _bytes(body.get("messageID"))
    if msg is None:
        return None
    sender = _peer(body.get("receivedFrom"))
    if number == 0:
        return schema.PublishEvent(V, node, seq, t, msg, topic)
    if number == 1:
        return schema.RejectEvent(V, node, seq, t, msg, topic, sender, _text(body.get("reason")))
    if number == 2:
        return schema.DuplicateEvent(V, node, seq, t, msg, topic, sender)
    return schema.DeliverEvent(V, node, seq, t, msg, topic, sender if sender != node else None)


def _rpc(number: int, body: Item, node: str, seq: int, t: int) -> schema.TraceEvent | None:
    peer = _peer(body.get("receivedFrom" if number == 6 else "sendTo"))
    if peer is None:
        return None
    meta = _dict(body.get("meta"))
    control = _dict(meta.get("control"))
    messages = [
        schema.MessageRef(msg, _text(part.get("topic")))
        for part in _dicts(meta.get("messages"))
        if (msg := _bytes(part.get("messageID"))) is not None
    ]
    subscriptions = [
        schema.SubscriptionRef(_text(part.get("topic")), bool(part.get("subscribe")))
        for part in _dicts(meta.get("subscription"))
    ]
    ihave = [(_text(part.get("topic")), _ids(part)) for part in _dicts(control.get("ihave"))]
    iwant = [msg for part in _dicts(control.get("iwant")) for msg in _ids(part)]
    idontwant = [msg for part in _dicts(control.get("idontwant")) for msg in _ids(part)]
    grafts = [_text(part.get("topic")) for part in _dicts(control.get("graft"))]
    prunes = [(_text(part.get("topic")), len(_list(part.get("peers")))) for part in _dicts(control.get("prune"))]
    control_bytes = sum(len(part.topic.encode()) for part in subscriptions)
    control_bytes += sum(len(topic.encode()) + sum(map(len, ids)) for topic, ids in ihave)
    control_bytes += sum(map(len, iwant)) + sum(map(len, idontwant)) + sum(len(topic.encode()) for topic in grafts)
    control_bytes += sum(len(topic.encode()) + _PEER_BYTES * peers for topic, peers in prunes)
    kind = (schema.RecvRpcEvent, schema.SendRpcEvent, schema.DropRpcEvent)[number - 6]
    return kind(
        *(V, node, seq, t, peer, 0, control_bytes, None),
        messages=messages or None,
        subscriptions=subscriptions or None,
        ihave=[schema.IHaveRef(topic, len(ids)) for topic, ids in ihave] or None,
        iwant=iwant or None,
        idontwant=idontwant or None,
        grafts=grafts or None,
        prunes=[topic for topic, _ in prunes] or None,
    )


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _bytes(value: object) -> bytes | None:
    """Decode bytes of protobuf, or base64 of JSON; other text stays as it is."""
    if isinstance(value, bytes):
        return value or None
    if not isinstance(value, str) or not value:
        return None
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return value.encode()


def _peer(value: object) -> str | None:
    """Return a peer id as text: base58 of a multihash. Others, as in simulations, keep their text."""
    data = _bytes(value)
    if data is None:
        return None
    if len(data) > 2 and data[0] in (0x00, 0x12) and data[1] == len(data) - 2:
        return base58.b58encode(data).decode("ascii")
    if isinstance(value, str) and value.startswith(("12D3KooW", "Qm", "16Uiu2")):
        return value
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return data.hex()
    return text if text.isprintable() else data.hex()


def _is_item(value: object) -> TypeGuard[Item]:
    return isinstance(value, dict)


def _dict(value: object) -> Item:
    return value if _is_item(value) else {}


def _is_list(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list)


def _list(value: object) -> list[object]:
    return value if _is_list(value) else []


def _dicts(value: object) -> list[Item]:
    return [part for part in _list(value) if _is_item(part)]


def _ids(part: Item) -> list[bytes]:
    return [msg for item in _list(part.get("messageIDs")) if (msg := _bytes(item)) is not None]


# Files ----------------------------------------------------------------------------------------------------------------


def _items(path: Path, report: ImportReport) -> Iterator[Item]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        try:
            first = file.read(1)
            if not first:
                raise TraceFormatError(f"{path} is empty")
            if first in b"{ \n\t[":
                yield from _json_items(path, first, file, report)
            else:
                yield from _protobuf_items(path, first, file, report)
        except (EOFError, gzip.BadGzipFile):
            report.cut.append(str(path))


def _json_items(path: Path, first: bytes, file: BinaryIO | gzip.GzipFile, report: ImportReport) -> Iterator[Item]:
    good = 0
    rest = first
    for number, line in enumerate(iter(lambda: file.readline(_EVENT_BYTES_MAX), b"")):
        text = rest + line
        rest = b""
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            if not text.endswith(b"\n"):
                report.cut.append(str(path))
                return
            if not good:
                raise TraceFormatError(f"{path}, line {number + 1}: no JSON, so no trace of libp2p") from None
            report.skipped += 1
            continue
        if _is_item(value) and "peerID" in value:
            good += 1
            yield value
        elif not good:
            raise TraceFormatError(f"{path}, line {number + 1}: no trace event of libp2p, peerID is missing")
        else:
            report.skipped += 1


class _Field(NamedTuple):
    """A field of a message: its name, the fields of the message that it holds, whether it repeats."""

    name: str
    fields: "_Fields | None" = None
    repeats: bool = False


_Fields = dict[int, _Field]
"""By field number."""


def _texts(*names: str) -> _Fields:
    """Plain fields, numbered from 1."""
    return {number: _Field(name) for number, name in enumerate(names, 1)}


_IDS: Final = _Field("messageIDs", repeats=True)
_CONTROL: Final[_Fields] = {
    1: _Field("ihave", {1: _Field("topic"), 2: _IDS}, repeats=True),
    2: _Field("iwant", {1: _IDS}, repeats=True),
    3: _Field("graft", _texts("topic"), repeats=True),
    4: _Field("prune", {1: _Field("topic"), 2: _Field("peers", repeats=True)}, repeats=True),
    5: _Field("idontwant", {1: _IDS}, repeats=True),
}
_RPC_META: Final[_Fields] = {
    1: _Field("messages", _texts("messageID", "topic"), repeats=True),
    2: _Field("subscription", _texts("subscribe", "topic"), repeats=True),
    3: _Field("control", _CONTROL),
}
_EVENT: Final[_Fields] = {
    1: _Field("type"),
    2: _Field("peerID"),
    3: _Field("timestamp"),
    4: _Field("publishMessage", _texts("messageID", "topic")),
    5: _Field("rejectMessage", _texts("messageID", "receivedFrom", "reason", "topic")),
    6: _Field("duplicateMessage", _texts("messageID", "receivedFrom", "topic")),
    7: _Field("deliverMessage", _texts("messageID", "topic", "receivedFrom")),
    8: _Field("addPeer", _texts("peerID", "proto")),
    9: _Field("removePeer", _texts("peerID")),
    10: _Field("recvRPC", {1: _Field("receivedFrom"), 2: _Field("meta", _RPC_META)}),
    11: _Field("sendRPC", {1: _Field("sendTo"), 2: _Field("meta", _RPC_META)}),
    12: _Field("dropRPC", {1: _Field("sendTo"), 2: _Field("meta", _RPC_META)}),
    13: _Field("join", _texts("topic")),
    14: _Field("leave", {2: _Field("topic")}),
    15: _Field("graft", _texts("peerID", "topic")),
    16: _Field("prune", _texts("peerID", "topic")),
}
"""``TraceEvent`` of trace.proto."""


def _protobuf_items(path: Path, first: bytes, file: BinaryIO | gzip.GzipFile, report: ImportReport) -> Iterator[Item]:
    good = 0
    head = first
    while head:
        size = _length(head, file)
        if size > _EVENT_BYTES_MAX:
            raise TraceFormatError(f"{path}, event {good}: a length of {size} bytes, so no trace of libp2p")
        data = file.read(size)
        if len(data) < size:
            report.cut.append(str(path))
            return
        try:
            item = _message(ProtoReader(data, 0, len(data)), _EVENT)
        except ProtocolError:
            raise TraceFormatError(f"{path}, event {good}: no protobuf, so no trace of libp2p") from None
        good += 1
        yield item
        head = file.read(1)


def _length(head: bytes, file: BinaryIO | gzip.GzipFile) -> int:
    """The length that begins with ``head``; above `_EVENT_BYTES_MAX` for bytes that are none."""
    try:
        while (found := find_varint(head, 0, len(head), _LENGTH_BYTES_MAX)) is None:
            more = file.read(1)
            if not more:
                break
            head += more
    except ProtocolError:
        found = None
    return _EVENT_BYTES_MAX + 1 if found is None else found[0]


def _message(reader: ProtoReader, fields: _Fields) -> Item:
    single: Item = {}
    lists: dict[str, list[object]] = {}
    while reader.next():
        spec = fields.get(reader.number)
        value: object
        if spec is None:
            reader.skip()
            continue
        if reader.wire_type == VARINT:
            value = reader.uint()
        elif reader.wire_type != LENGTH:
            reader.skip()
            continue
        elif spec.fields is None:
            value = reader.bytes_(_EVENT_BYTES_MAX)
        else:
            value = _message(reader.sub(), spec.fields)
        if spec.repeats:
            lists.setdefault(spec.name, []).append(value)
        else:
            single[spec.name] = value
    return {**single, **lists}
