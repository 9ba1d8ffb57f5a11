"""A pooled stream that speaks frames, and the pool: one link per (peer, protocol), opened by the side that asks.

Links go one way (docs/decisions/0005-links-and-batching.md): the opener sends requests and notifies, the other side
only answers. So a side that pauses receiving never holds up the answers to its own requests.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import trio

from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    NotMemberError,
    ProtocolError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream, Connection
from dep2p.limits import Limits
from dep2p.links.writer import LinkOutput
from dep2p.protocols.wire.frame import Frame, FrameDecoder, encode_error
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId

logger = logging.getLogger("dep2p.io")

_PAUSED_BY_OUTPUT: Final = 1
PAUSED_BY_INBOX: Final = 2


class Link(ABC):
    """One end of a pooled stream: a frame decoder fed by pushed bytes, and a coalescing output.

    `run` is its writer; the link is over when that returns. The two ends differ in what they do with frames.
    """

    def __init__(
        self, stream: ByteStream, gate: RealmGate, limits: Limits, counters: Counter[str], *, payload_bytes_max: int
    ) -> None:
        self.stream = stream
        self.connection: Connection = stream.connection
        self.peer: PeerId = stream.connection.peer
        self.gate = gate
        self.limits = limits
        self.counters = counters
        self.out = LinkOutput(stream, limits, self._output_low)
        self.was_used = True
        """Set by every use, cleared by the idle check: no clock is read per frame."""
        self.error: Dep2pError | None = None
        """Why the link is over; None while it lives."""
        self._decoder = FrameDecoder(payload_bytes_max)
        self._paused = 0
        self._abort = False
        self._writing = trio.CancelScope()

    # What the two kinds of ends do

    @abstractmethod
    def receive(self, frames: list[Frame]) -> None:
        """Take a batch of frames. May call `violate`."""

    @abstractmethod
    def ended(self, error: Dep2pError) -> None:
        """The link is over: let go of everybody who waits for it. Called once."""

    @abstractmethod
    def peer_half_closed(self) -> None:
        """The peer will send nothing more."""

    @property
    def is_busy(self) -> bool:
        """Something waits to be sent or answered."""
        return bool(self.out.items)

    @abstractmethod
    def collect_counts(self) -> None:
        """Move what the core has counted into the common counters."""

    # Receiving

    def start(self) -> None:
        """Begin to receive."""
        self.stream.set_receiver(self._on_data, self._on_end)

    def _on_data(self, data: bytes | memoryview) -> None:
        if self.error is not None:
            return
        if not self.gate.is_verified(self.connection):
            self.lose_membership()
            return
        decoder = self._decoder
        skipped = decoder.skipped_frames
        frames = decoder.feed(data)
        if frames:
            try:
                self.receive(frames)
            except Exception:  # a fault of ours must not take the connection's reader down
                logger.exception("a link to %s failed", self.peer)
                self.counters["links_failed_internally"] += 1
                self.end(StreamClosedError("an internal error ended the link"), abort=True)
                return
        if decoder.skipped_frames != skipped:
            self.counters["frames_skipped_extension"] += decoder.skipped_frames - skipped
        if decoder.error is not None:
            self.violate(decoder.error, decoder.error_req_id)
        elif self.out.is_over_bounds:
            # The peer asks but does not read our answers: take no more from it until it does.
            self.pause(_PAUSED_BY_OUTPUT)

    def _on_end(self, error: BaseException | None) -> None:
        if error is not None:
            self.end(StreamClosedError(str(error)), abort=True)
        elif self.error is None:
            self.peer_half_closed()

    def pause(self, reason: int) -> None:
        """Stop receiving for this reason."""
        if not self._paused:
            self.stream.pause_receiving()
            self.counters["links_paused"] += 1
        self._paused |= reason

    def resume(self, reason: int) -> None:
        """This reason is over; receiving goes on when it was the last one."""
        if self._paused & reason:
            self._paused &= ~reason
            if not self._paused and self.error is None:
                self.stream.resume_receiving()

    def _output_low(self) -> None:
        if self._paused & _PAUSED_BY_OUTPUT:
            self.resume(_PAUSED_BY_OUTPUT)

    # Ending

    def violate(self, error: ProtocolError, req_id: int = 0) -> None:
        """The peer broke the protocol: say so, and end the link."""
        if self.error is not None:
            return
        self.counters[f"links_refused_{error.code.name.lower()}"] += 1
        logger.info("closing a link to %s: %s", self.peer, error)
        if req_id:
            self._last_word(error.code, str(error), req_id)
        # About the whole link, so that the peer opens another instead of sending into this one.
        self._last_word(error.code, str(error))
        self.end(error)

    def lose_membership(self) -> None:
        """The peer is no verified member at this moment: say so, and end the link."""
        if self.error is None:
            self.counters["links_refused_not_member"] += 1
            self._last_word(ErrorCode.NOT_MEMBER, "not a verified member of this realm")
            self.end(NotMemberError(f"{self.peer} is not a verified member of this realm"))

    def _last_word(self, code: ErrorCode, text: str, req_id: int = 0) -> None:
        if self.error is None:
            frame = encode_error(code, text, req_id=req_id, text_bytes_max=self.limits.error_text_bytes_max)
            self.out.put((frame,), len(frame))

    def end(self, error: Dep2pError, *, abort: bool = False) -> None:
        """The link is over. What waits is still sent unless ``abort``, for ``Limits.close_timeout_s``. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self._abort = abort
        if abort:
            self.out.discard()
            self._writing.cancel()
        else:
            # A peer that reads nothing must not make us keep what waits for it.
            self._writing.deadline = trio.current_time() + self.limits.close_timeout_s
        self.out.close(StreamClosedError(str(error)))
        self.ended(error)

    async def flush(self) -> None:
        """Wait until all that was put has been handed to the transport, or the link is over."""
        try:
            while self.error is None and (self.out.items or self.stream.unsent_bytes):
                await self.stream.drain()
                await trio.lowlevel.checkpoint()
        except StreamClosedError:
            self.end(StreamClosedError("the stream was closed"), abort=True)

    async def run(self) -> None:
        """Write until the link is over, then close the stream. Never raises for what the peer does."""
        try:
            with self._writing:
                await self.out.run()
            if self._writing.cancelled_caught:
                self._abort = True
                self.out.discard()
        except StreamClosedError as error:
            self.end(error, abort=True)
        finally:
            self.end(StreamClosedError("this side is closing"), abort=True)
            if self._abort:
                self.stream.reset()
            else:
                with trio.move_on_after(self.limits.close_timeout_s, shield=True) as scope:
                    await self._close_stream()
                if scope.cancelled_caught:
                    self.stream.reset()

    async def _close_stream(self) -> None:
        try:
            await self.stream.drain()
            await self.stream.close()
        except StreamClosedError:
            self.stream.reset()


L = TypeVar("L", bound=Link)


class _Opening(Generic[L]):
    """An attempt that several callers may wait for."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.scope = trio.CancelScope()
        self.waiting = 0
        self.link: L | None = None
        self.error: Dep2pError | None = None


class LinkPool(Generic[L]):
    """Outbound links of one protocol, one per peer: opened when asked for, reopened when they died."""

    def __init__(
        self,
        gate: RealmGate,
        protocol: str,
        limits: Limits,
        counters: Counter[str],
        make: Callable[[ByteStream], L],
    ) -> None:
        self._gate = gate
        self._protocol = protocol
        self._limits = limits
        self._counters = counters
        self._make = make
        self._links: dict[PeerId, L] = {}
        self._opening: dict[PeerId, _Opening[L]] = {}
        self._nursery: trio.Nursery | None = None

    def serve_in(self, nursery: trio.Nursery | None) -> None:
        """Where links and attempts to open them live; None: nothing is opened any more."""
        self._nursery = nursery

    @property
    def links(self) -> dict[PeerId, L]:
        """Those that live, by peer."""
        return self._links

    def ready(self, peer: PeerId) -> L | None:
        """The peer's link if there is one and the peer is verified on its connection at this moment."""
        link = self._links.get(peer)
        if link is None or link.error is not None:
            return None
        if not self._gate.is_verified(link.connection):
            link.lose_membership()
            return None
        return link

    async def get(self, peer: PeerId, deadline: float) -> L:
        """The peer's link, opened when needed; ``deadline`` in trio time.

        Raises PeerNotFoundError, NotMemberError, ProtocolNotSupportedError, StreamClosedError, RequestTimeoutError.
        """
        link = self.ready(peer)
        if link is not None:
            return link
        if self._nursery is None:
            raise StreamClosedError("messaging is not running")
        opening = self._opening.get(peer)
        if opening is None:
            opening = self._opening[peer] = _Opening()
            self._nursery.start_soon(self._open, peer, opening)
        opening.waiting += 1
        try:
            with trio.move_on_at(deadline):
                await opening.done.wait()
        finally:
            opening.waiting -= 1
            if not opening.waiting and not opening.done.is_set():
                opening.scope.cancel()
                self._opening.pop(peer, None)
        if opening.link is not None:
            return opening.link
        if opening.error is not None:
            raise copy.copy(opening.error)  # one instance per caller: each gets its own traceback
        raise RequestTimeoutError(f"no link to {peer} within the deadline")

    async def _open(self, peer: PeerId, opening: _Opening[L]) -> None:
        link: L | None = None
        try:
            with opening.scope:
                connection = await self._gate.connect(peer, timeout_s=self._limits.dial_timeout_s)
                stream = await connection.open_stream(self._protocol, timeout_s=self._limits.stream_open_timeout_s)
                link = opening.link = self._links[peer] = self._make(stream)
        except Dep2pError as error:
            opening.error = error
        except Exception:  # whatever a transport may raise: the callers get an error, the others go on
            logger.exception("opening a link to %s failed", peer)
            opening.error = StreamClosedError("opening the link failed by an internal error")
        finally:
            if self._opening.get(peer) is opening:
                del self._opening[peer]
            if link is None and opening.error is None:
                opening.error = StreamClosedError("opening the link was given up")
            opening.done.set()
        if link is None:
            self._counters["links_open_failed"] += 1
            return
        self._counters["links_opened"] += 1
        link.start()
        try:
            await link.run()
        finally:
            self.forget(link)

    def forget(self, link: L) -> None:
        """The link is over: the next call opens another."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]

    def close_idle(self) -> None:
        """End the links that were not used since the last check."""
        for link in list(self._links.values()):
            if link.was_used or link.is_busy:
                link.was_used = False
            else:
                self._counters["links_closed_idle"] += 1
                self.forget(link)
                link.end(StreamClosedError("the link was idle"))
