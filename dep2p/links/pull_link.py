"""The stream under an ordered session, at either end: a link whose output is pulled from the session's core."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio

from dep2p.errors import (
    Dep2pError,
    ProtocolError,
    StreamClosedError,
    error_from_wire,
)
from dep2p.host.interface import ByteStream
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.links.link import Link
from dep2p.links.writer import LinkOutput
from dep2p.protocols.wire.frame import Frame, FrameType, decode_error, encode_error
from dep2p.realm.interface import RealmGate

_ERROR: Final = int(FrameType.ERROR)
_WRITE_BYTES: Final = 131_072
"""About the bytes that are taken from the core for one write."""
_UNSENT_HIGH_BYTES: Final = 262_144
_UNSENT_LOW_BYTES: Final = 65_536
_FRAME_BYTES: Final = 65_536
_OVERHEAD_BYTES: Final = 1_024


class PulledOutput(LinkOutput):
    """An output that asks for frames when it can write, instead of queueing them.

    All pushes since the last write leave together, and each costs no more than being kept.
    """

    __slots__ = ("_collect", "_pulls")

    writes: int

    def __init__(
        self, stream: ByteStream, limits: Limits, collect: Callable[[int], list[bytes]], on_low: Callable[[], None]
    ) -> None:
        super().__init__(stream, limits, on_low)
        self._pulls = stream
        self._collect = collect

    def wake(self) -> None:
        """Wake the writer: there may be frames to collect."""
        if self._sleeper.task is not None:  # each push calls this, most of them while the writer works
            self._sleeper.wake()

    def write_now(self) -> None:
        """Write present frames from this very step; the writer writes the rest in its turn."""
        stream = self._pulls
        if self._pieces or self._closed is not None or stream.unsent_bytes:
            self.wake()
            return
        pieces = self._collect(_WRITE_BYTES)
        if pieces:
            self.writes += 1
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            try:
                stream.write_nowait(data, urgent=True)
            except StreamClosedError:
                return  # the writer meets it, too, and that ends the link
            if len(data) >= _WRITE_BYTES:
                self.wake()

    async def run(self) -> None:
        """Write until `close`, and until everything is handed over. Raises StreamClosedError when the stream ends."""
        stream = self._pulls
        while True:
            if self._pieces:
                await self._write_all()
            elif self._closed is not None:
                return
            else:
                pieces = self._collect(_WRITE_BYTES)
                if not pieces:
                    if self._closed is None:  # else collecting has ended the link
                        await self._sleeper.wait()
                    continue
                self.writes += 1
                stream.write_nowait(pieces[0] if len(pieces) == 1 else b"".join(pieces), urgent=True)
            if stream.unsent_bytes > _UNSENT_HIGH_BYTES:
                await stream.drain(_UNSENT_LOW_BYTES)
            else:
                await trio.lowlevel.checkpoint()
            if not self._pieces:
                self._on_low()


@dataclass(frozen=True, slots=True)
class LinkCalls:
    """Callbacks of the user of a `SessionLink`."""

    collect: Callable[[int], list[bytes]]
    """Return the bytes to write now, up to about so many."""
    on_frames: Callable[["SessionLink", list[Frame]], None]
    """Take received frames. May raise ProtocolError, which ends the link."""
    on_end: Callable[["SessionLink", Dep2pError], None]
    """Called once when the link is over."""


class SessionLink(Link):
    """One end of a link that asks its user for the bytes to write."""

    def __init__(
        self,
        stream: ByteStream,
        gate: RealmGate,
        limits: Limits,
        counters: Counter[str],
        calls: LinkCalls,
        *,
        payload_bytes_max: int = 0,
        fairness: Fairness | None = None,
    ) -> None:
        """``payload_bytes_max``: bytes of a frame; 0 for the size that sessions need."""
        bytes_max = payload_bytes_max or max(_FRAME_BYTES, limits.message_bytes_max) + _OVERHEAD_BYTES
        super().__init__(stream, gate, limits, counters, payload_bytes_max=bytes_max, fairness=fairness)
        self._on_frames = calls.on_frames
        self._on_link_end = calls.on_end
        self.refused_id: int = 0
        """The ``req_id`` of the ERROR by which the other end has closed the link: the message that it could not
        take."""
        self._flow = (0, 0)
        self.pulled: PulledOutput = PulledOutput(stream, limits, calls.collect, self._output_low)
        self.out: LinkOutput = self.pulled

    def flows(self) -> bool:
        """Whether bytes that wait here have left, or the peer has taken a good part of those that did, since the last
        call. The peer cannot have answered what is behind them.

        Bytes that leave without having waited are no sign of the peer: the kernel takes them for a dead one, too.
        """
        sent, granted = self._flow
        self._flow = self.stream.sent_bytes, self.stream.granted_bytes
        return self._flow[1] != granted or (self.stream.unsent_bytes > 0 and self._flow[0] != sent)

    def receive(self, frames: list[Frame]) -> None:
        for index, frame in enumerate(frames):
            if frame[0] == _ERROR:
                if index:
                    self._take(frames[:index])
                self._refused(frame)
                return
        self._take(frames)

    def _take(self, frames: list[Frame]) -> None:
        try:
            self._on_frames(self, frames)
        except ProtocolError as error:
            self.violate(error)

    def _refused(self, frame: Frame) -> None:
        """Act on the other end's refusal, which closes the link."""
        try:
            if frame.flags:
                raise ProtocolError(f"flags 0x{frame.flags:04x} on an ERROR")
            code, text = decode_error(frame.payload)
        except ProtocolError as error:
            self.violate(error)
            return
        self.counters["links_refused_by_peer"] += 1
        self.refused_id = frame.req_id
        self.end(error_from_wire(code, text), abort=True)

    def refuse(self, error: Dep2pError, code: int) -> None:
        """Close the link with an error for the other end."""
        if self.error is None:
            frame = encode_error(code, str(error), text_bytes_max=self.limits.error_text_bytes_max)
            self.out.put((frame,), len(frame))
            self.end(error)

    def wake(self) -> None:
        """Wake the writer: there may be bytes to write."""
        self.pulled.wake()

    def peer_half_closed(self) -> None:
        self.end(StreamClosedError("the peer closed the link"))

    def collect_counts(self) -> None:
        pass

    def ended(self, error: Dep2pError) -> None:
        self._on_link_end(self, error)
