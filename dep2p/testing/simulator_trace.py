"""The trace of a simulation: the events that a live node writes, as NDJSON in the form of libp2p's JSON tracer.

One file for all nodes, in the order of virtual time; ``peerID`` says whose event a line is.
"""

import base64
import json
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from dep2p.gossipsub.rpc import Rpc
from dep2p.gossipsub.trace import (
    DeliverMessage,
    DuplicateMessage,
    RecvRpc,
    SendRpc,
    Trace,
    rpc_meta,
    trace_to_json,
)
from dep2p.types import PeerId, peer_id_bytes

TRACE_EPOCH_NS: Final = 1_577_836_800 * 1_000_000_000
"""Virtual time 0 in traces: 2020-01-01T00:00:00Z, the same for all runs."""
FILE_NAME: Final = "trace.ndjson"

_FLUSH_BYTES: Final = 1 << 20
_META_MAX: Final = 4_096


class TraceFile:
    """Writes ``trace.ndjson`` (with ``compress`` ``trace.ndjson.zst``) into a directory, which is made.

    It appears under its name when it is complete: use it as a context manager. With ``rpcs`` False the events of
    sent, received and dropped RPCs are left out, which are nine tenths of the bytes. Raises ``OSError``.
    """

    def __init__(self, directory: Path, *, rpcs: bool = True, compress: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / (FILE_NAME + ".zst" if compress else FILE_NAME)
        self.rpcs = rpcs
        self.lines = 0
        self._partial = directory / f".{self.path.name}.partial"
        self._file: BinaryIO = self._partial.open("wb")
        self._compressor = None
        if compress:
            import zstandard

            self._compressor = zstandard.ZstdCompressor(level=3).compressobj()
        self._pending: list[str] = []
        self._pending_bytes = 0
        self._peers: dict[PeerId, str] = {}
        self._metas: dict[int, tuple[Rpc, str]] = {}
        """The JSON of recent RPCs, by identity: each is sent to some and received by all of them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._write_out()
        if self._compressor is not None:
            self._file.write(self._compressor.flush())
        self._file.close()
        if kind is None:
            os.replace(self._partial, self.path)
        else:
            self._partial.unlink(missing_ok=True)

    def write(self, trace: Trace, own: PeerId, now: float) -> None:
        """One event of a node."""
        timestamp = TRACE_EPOCH_NS + round(now * 1e9)
        if isinstance(trace, SendRpc | RecvRpc):
            if self.rpcs:
                self._write_rpc(trace, own, timestamp)
            return
        if isinstance(trace, DuplicateMessage | DeliverMessage):
            self._write_copy(trace, own, timestamp)
            return
        for line in trace_to_json(trace, own, timestamp):
            if self.rpcs or line["type"] != 8:
                self._put(json.dumps(line, separators=(",", ":")))

    # The four frequent kinds are put together from parts; a test compares them with `trace_to_json`.

    def _write_rpc(self, trace: SendRpc | RecvRpc, own: PeerId, timestamp: int) -> None:
        meta = self._meta(trace.rpc)
        if isinstance(trace, RecvRpc):
            head = f'{{"type":6,"peerID":"{self._peer(own)}","timestamp":{timestamp},"recvRPC":{{"receivedFrom":"'
            self._put(f'{head}{self._peer(trace.received_from)}","meta":{meta}}}}}')
            return
        head = f'{{"type":7,"peerID":"{self._peer(own)}","timestamp":{timestamp},"sendRPC":{{"sendTo":"'
        for peer in trace.send_to:
            self._put(f'{head}{self._peer(peer)}","meta":{meta}}}}}')

    def _write_copy(self, trace: DuplicateMessage | DeliverMessage, own: PeerId, timestamp: int) -> None:
        message = trace.message
        sender = trace.received_from
        number, name = (2, "duplicateMessage") if isinstance(trace, DuplicateMessage) else (3, "deliverMessage")
        source = f',"receivedFrom":"{self._peer(sender)}"' if sender is not None else ""
        self._put(
            f'{{"type":{number},"peerID":"{self._peer(own)}","timestamp":{timestamp},"{name}":{{"messageID":"'
            f'{base64.b64encode(message.id).decode("ascii")}","topic":{json.dumps(message.topic)}{source}}}}}'
        )

    def _peer(self, peer: PeerId) -> str:
        text = self._peers.get(peer)
        if text is None:
            text = self._peers[peer] = base64.b64encode(peer_id_bytes(peer)).decode("ascii")
        return text

    def _meta(self, rpc: Rpc) -> str:
        known = self._metas.get(id(rpc))
        if known is not None and known[0] is rpc:
            return known[1]
        if len(self._metas) >= _META_MAX:
            self._metas.clear()
        text = json.dumps(rpc_meta(rpc), separators=(",", ":"))
        self._metas[id(rpc)] = (rpc, text)
        return text

    def _put(self, line: str) -> None:
        self.lines += 1
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes >= _FLUSH_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        if not self._pending:
            return
        data = ("\n".join(self._pending) + "\n").encode("utf-8")
        self._pending.clear()
        self._pending_bytes = 0
        self._file.write(self._compressor.compress(data) if self._compressor is not None else data)
