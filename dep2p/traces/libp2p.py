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
from typing import Any, BinaryIO, Final, TypeGuard, cast

import base58
import zstandard

from dep2p.traces import schema
from dep2p.traces.files import FRAME_EVENTS, ZSTD_LEVEL, FileName, GrowingFile
from dep2p.traces.schema import SCHEMA_VERSION as V

_EVENT_BYTES_MAX: Final = 64 << 20
_PEER_BYTES: Final = 38
_NAMES: Final = (
    *("publishMessage", "rejectMessage", "duplicateMessage", "deliverMessage", "addPeer", "removePeer", "recvRPC"),
    *("sendRPC", "dropRPC", "join", "leave", "graft", "prune"),
)


class TraceFormatError(ValueError):
    """A file is no tracer file of libp2p; the text says where."""


@dataclass(slots=True)
class ImportReport:
    """What an import did. ``skipped``: events of unknown types or without what they need."""

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
            if node is None or not isinstance(stamp, int):
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
        self._pending: list[schema.Event] = [schema.NodeStart(V, node, 0, start_ns // 1000, "libp2p")]
        self._last_us = start_ns // 1000
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def put(self, event: schema.Event) -> None:
        self._pending.append(event)
        self.seq += 1
        self._last_us = max(self._last_us, event.t)
        if len(self._pending) >= FRAME_EVENTS:
            self._file.append(self._pending, self._compressor)
            self._pending.clear()

    def finish(self) -> Path:
        self.put(schema.NodeStop(V, self._node, self.seq, self._last_us, "end of the imported trace"))
        if self._pending:
            self._file.append(self._pending, self._compressor)
        return self._file.finish()


# Events ---------------------------------------------------------------------------------------------------------------


def _event(item: dict[str, Any], node: str, seq: int, t: int) -> schema.Event | None:
    number = item.get("type", 0)
    if not isinstance(number, int) or not 0 <= number < len(_NAMES):
        return None
    payload = item.get(_NAMES[number])
    if not isinstance(payload, dict):
        return None
    body = cast("dict[str, Any]", payload)
    topic = _text(body.get("topic"))
    if number in (6, 7, 8):
        return _rpc(number, body, node, seq, t)
    if number in (4, 5, 11, 12):
        peer = _peer(body.get("peerID"))
        if peer is None:
            return None
        if number == 4:
            return schema.AddPeer(V, node, seq, t, peer, _text(body.get("proto")) or None)
        if number == 5:
            return schema.RemovePeer(V, node, seq, t, peer)
        return (schema.Graft if number == 11 else schema.Prune)(V, node, seq, t, peer, topic)
    if number in (9, 10):
        return (schema.Join if number == 9 else schema.Leave)(V, node, seq, t, topic)
    msg = _bytes(body.get("messageID"))
    if msg is None:
        return None
    sender = _peer(body.get("receivedFrom"))
    if number == 0:
        return schema.Publish(V, node, seq, t, msg, topic)
    if number == 1:
        return schema.Reject(V, node, seq, t, msg, topic, sender, _text(body.get("reason")))
    if number == 2:
        return schema.Duplicate(V, node, seq, t, msg, topic, sender)
    return schema.Deliver(V, node, seq, t, msg, topic, sender if sender != node else None)


def _rpc(number: int, body: dict[str, Any], node: str, seq: int, t: int) -> schema.Event | None:
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
    kind = (schema.RecvRpc, schema.SendRpc, schema.DropRpc)[number - 6]
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
    """Bytes of protobuf, or base64 of JSON; other text stays what it is."""
    if isinstance(value, bytes):
        return value or None
    if not isinstance(value, str) or not value:
        return None
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return value.encode()


def _peer(value: object) -> str | None:
    """A peer id as text: base58 of a multihash; ids that are none, as in simulations, keep their text."""
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


def _dict(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _list(value: object) -> list[Any]:
    return value if _is_list(value) else []


def _dicts(value: object) -> list[dict[str, Any]]:
    return [cast("dict[str, Any]", part) for part in _list(value) if isinstance(part, dict)]


def _ids(part: dict[str, Any]) -> list[bytes]:
    return [msg for item in _list(part.get("messageIDs")) if (msg := _bytes(item)) is not None]


# Files ----------------------------------------------------------------------------------------------------------------


def _items(path: Path, report: ImportReport) -> Iterator[dict[str, Any]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
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


def _json_items(path: Path, first: bytes, file: BinaryIO, report: ImportReport) -> Iterator[dict[str, Any]]:
    good = 0
    rest = first
    for number, line in enumerate(file):
        text = rest + line
        rest = b""
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError:
            if not text.endswith(b"\n"):
                report.cut.append(str(path))
                return
            if not good:
                raise TraceFormatError(f"{path}, line {number + 1}: no JSON, so no trace of libp2p") from None
            report.skipped += 1
            continue
        if isinstance(value, dict) and "peerID" in value:
            good += 1
            yield cast("dict[str, Any]", value)
        elif not good:
            raise TraceFormatError(f"{path}, line {number + 1}: no trace event of libp2p, peerID is missing")
        else:
            report.skipped += 1


_RPC_META: Final[dict[int, Any]] = {
    1: ("messages", [{1: "messageID", 2: "topic"}]),
    2: ("subscription", [{1: "subscribe", 2: "topic"}]),
    3: (
        "control",
        {
            1: ("ihave", [{1: "topic", 2: ["messageIDs"]}]),
            2: ("iwant", [{1: ["messageIDs"]}]),
            3: ("graft", [{1: "topic"}]),
            4: ("prune", [{1: "topic", 2: ["peers"]}]),
            5: ("idontwant", [{1: ["messageIDs"]}]),
        },
    ),
}
_PROTO: Final[dict[int, Any]] = {
    1: "type",
    2: "peerID",
    3: "timestamp",
    4: ("publishMessage", {1: "messageID", 2: "topic"}),
    5: ("rejectMessage", {1: "messageID", 2: "receivedFrom", 3: "reason", 4: "topic"}),
    6: ("duplicateMessage", {1: "messageID", 2: "receivedFrom", 3: "topic"}),
    7: ("deliverMessage", {1: "messageID", 2: "topic", 3: "receivedFrom"}),
    8: ("addPeer", {1: "peerID", 2: "proto"}),
    9: ("removePeer", {1: "peerID"}),
    10: ("recvRPC", {1: "receivedFrom", 2: ("meta", _RPC_META)}),
    11: ("sendRPC", {1: "sendTo", 2: ("meta", _RPC_META)}),
    12: ("dropRPC", {1: "sendTo", 2: ("meta", _RPC_META)}),
    13: ("join", {1: "topic"}),
    14: ("leave", {2: "topic"}),
    15: ("graft", {1: "peerID", 2: "topic"}),
    16: ("prune", {1: "peerID", 2: "topic"}),
}
"""Field number → name; (name, fields) for a message, lists for what repeats."""


def _protobuf_items(path: Path, first: bytes, file: BinaryIO, report: ImportReport) -> Iterator[dict[str, Any]]:
    good = 0
    head = first
    while head:
        try:
            size = _length(head, file)
        except ValueError:
            size = _EVENT_BYTES_MAX + 1
        if size > _EVENT_BYTES_MAX:
            raise TraceFormatError(f"{path}, event {good}: a length of {size} bytes, so no trace of libp2p")
        data = file.read(size)
        if len(data) < size:
            report.cut.append(str(path))
            return
        try:
            item = _message(data, _PROTO)
        except (ValueError, IndexError):
            raise TraceFormatError(f"{path}, event {good}: no protobuf, so no trace of libp2p") from None
        good += 1
        yield item
        head = file.read(1)


def _length(head: bytes, file: BinaryIO) -> int:
    value, shift, byte = head[0] & 0x7F, 7, head[0]
    while byte & 0x80:
        more = file.read(1)
        if not more or shift > 35:
            raise ValueError("not a length")
        byte = more[0]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value


def _message(data: bytes, fields: dict[int, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value: Any
        if tag & 7 == 0:
            value, at = _varint(data, at)
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("a field ends outside its message")
            value, at = data[at : at + size], at + size
        elif tag & 7 in (1, 5):
            width = 8 if tag & 7 == 1 else 4
            value, at = None, at + width
        else:
            raise ValueError("a wire type that is none")
        _keep(result, fields.get(tag >> 3), value)
    return result


def _keep(result: dict[str, Any], spec: Any, value: Any) -> None:
    if isinstance(spec, str):
        result[spec] = value
    elif isinstance(spec, list):
        result.setdefault(cast("list[str]", spec)[0], []).append(value)
    elif isinstance(spec, tuple) and isinstance(value, bytes):
        name, inner = cast("tuple[str, Any]", spec)
        if isinstance(inner, list):
            result.setdefault(name, []).append(_message(value, cast("list[dict[int, Any]]", inner)[0]))
        else:
            result[name] = _message(value, inner)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
