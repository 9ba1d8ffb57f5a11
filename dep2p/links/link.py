"""A pooled stream that speaks frames, and the pool: one link per (peer, protocol), opened by the side that asks.

Links go one way (docs/decisions/0005-links-and-batching.md): the opener sends requests and notifies, the other side
only answers. So a side that pauses receiving never holds up the answers to its own requests.
"""

import copy
import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
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
from dep2p.links.fairness import Fairness
from dep2p.links.writer import LinkOutput
from dep2p.protocols.wire.frame import Frame, FrameDecoder, FrameType, encode_error
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_PAUSED_BY_OUTPUT: Final = 1
PAUSED_BY_INBOX: Final = 2
_LEAVE_CHECK_S: Final = 0.1
_PAUSED_BY_TURN: Final = 4
_NOTIFY: Final = int(FrameType.NOTIFY)
_UNITS_PER_FRAME: Final = 4
"""Work of a frame, in the units of turns: a notification is 1,"""
_UNITS_SHIFT: Final = 12
"""and each 4 KiB are one more."""


def _units_of(frame: Frame) -> int:
    return (1 if frame[0] == _NOTIFY else _UNITS_PER_FRAME) + (len(frame[3]) >> _UNITS_SHIFT)


class Link(ABC):
    """One end of a pooled stream: a frame decoder fed by pushed bytes, and a coalescing output.

    `run` is its writer; the link is over when that returns. The two ends differ in what they do with frames.
    """

    def __init__(
        self,
        stream: ByteStream,
        gate: RealmGate,
        limits: Limits,
        counters: Counter[str],
        *,
        payload_bytes_max: int,
        fairness: Fairness | None = None,
    ) -> None:
        """``fairness``: gives the peer its turns among others; without it all that comes is taken at once."""
        self.stream = stream
        self._fairness = fairness
        self._waiting_frames: deque[Frame] = deque()
        """Frames that wait for their member's turn; the link receives nothing meanwhile."""
        self._is_in_line = False
        self._is_half_closing = False
        self.connection: Connection = stream.connection
        self.peer: PeerId = stream.connection.peer
        self.gate = gate
        self.limits = limits
        self.counters = counters
        self.out: LinkOutput = LinkOutput(stream, limits, self._output_low)
        self.was_used = True
        """Whether the link was used since the last idle check, which clears it: no clock is read per frame."""
        self.error: Dep2pError | None = None
        """Why the link is over; None while it lives."""
        self._decoder = FrameDecoder(payload_bytes_max)
        self._paused = 0
        self._abort = False
        self._writing = trio.CancelScope()

    # For the two kinds of ends

    @abstractmethod
    def receive(self, frames: list[Frame]) -> None:
        """Take a batch of frames. May call `violate`."""

    @abstractmethod
    def ended(self, error: Dep2pError) -> None:
        """Wake every caller that waits: the link is over. Called once."""

    @abstractmethod
    def peer_half_closed(self) -> None:
        """Act on the peer's half-close: it sends nothing more."""

    @property
    def is_busy(self) -> bool:
        """Whether frames wait to be sent or answered."""
        return bool(self.out.items)

    @abstractmethod
    def collect_counts(self) -> None:
        """Move the core's counts into the common counters."""

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
        if decoder.skipped_frames != skipped:
            self.counters["frames_skipped_extension"] += decoder.skipped_frames - skipped
        if frames:
            fairness = self._fairness
            if fairness is not None and (
                self._waiting_frames or not fairness.admits(self.peer, _units_of(frames[0]) * len(frames))
            ):
                self._wait_for_turn(fairness, frames)
                return
            if not self._receive_safely(frames):
                return
        self._after_frames()

    def _receive_safely(self, frames: list[Frame]) -> bool:
        """Whether the link is still alive, but for what the decoder found behind the frames."""
        try:
            self.receive(frames)
        except Exception:  # a fault of ours must not take the connection's reader down
            logger.exception("a link to %s failed", self.peer)
            self.counters["links_failed_internally"] += 1
            self.end(StreamClosedError("an internal error ended the link"), abort=True)
            return False
        return True

    def _after_frames(self) -> None:
        if self._decoder.error is not None:
            self.violate(self._decoder.error, self._decoder.error_req_id)
        elif self.out.is_over_bounds:
            # The peer asks but does not read our answers: take no more from it until it reads them.
            self.pause(_PAUSED_BY_OUTPUT)

    def _wait_for_turn(self, fairness: Fairness, frames: list[Frame]) -> None:
        """More than the peer's share of this moment: the rest waits, and the peer with it."""
        if not self._waiting_frames:
            self.counters["links_waited_for_turn"] += 1
        self._waiting_frames.extend(frames)
        self.pause(_PAUSED_BY_TURN)
        self.want_turn(fairness)

    def want_turn(self, fairness: Fairness) -> None:
        """Stand in the peer's line, unless the link stands there."""
        if not self._is_in_line:
            self._is_in_line = True
            fairness.add(self.peer, self)

    def take_turn(self, units: int) -> bool:
        """See `TurnTaker`."""
        self._is_in_line = True  # until it is known whether there is more: resuming may bring more at once
        self._is_in_line = has_more = self.work_for(units)
        return has_more

    def work_for(self, units: int) -> bool:
        """Take frames that wait; whether there is more to do now."""
        waiting = self._waiting_frames
        if not waiting or self._paused != _PAUSED_BY_TURN:
            return False  # `resume` comes back to what waits
        if units <= 0:
            return True
        frames: list[Frame] = []
        while waiting and units > 0:
            frames.append(waiting.popleft())
            units -= _units_of(frames[-1])
        if self._receive_safely(frames) and not waiting:
            self._after_frames()
        if self.error is not None:
            return False
        if waiting:
            return self._paused == _PAUSED_BY_TURN
        self.resume(_PAUSED_BY_TURN)
        if waiting:
            return self._paused == _PAUSED_BY_TURN
        if self._is_half_closing and self.error is None:
            self.peer_half_closed()
        return False

    def _on_end(self, error: BaseException | None) -> None:
        if error is not None:
            self.end(StreamClosedError(str(error)), abort=True)
        elif self._waiting_frames:
            self._is_half_closing = True
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
            if self.error is not None:
                return
            if not self._paused:
                self.stream.resume_receiving()
            elif self._fairness is not None and self._waiting_frames:
                self.want_turn(self._fairness)

    def _output_low(self) -> None:
        if self._paused & _PAUSED_BY_OUTPUT:
            self.resume(_PAUSED_BY_OUTPUT)

    # Ending

    def violate(self, error: ProtocolError, req_id: int = 0) -> None:
        """End the link and tell the peer: it broke the protocol."""
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
        """End the link and tell the peer: it is not a verified member at this moment."""
        if self.error is None:
            self.counters["links_refused_not_member"] += 1
            self._last_word(ErrorCode.NOT_MEMBER, "not a verified member of this realm")
            self.end(NotMemberError(f"{self.peer} is not a verified member of this realm"))

    def _last_word(self, code: ErrorCode, text: str, req_id: int = 0) -> None:
        if self.error is None:
            frame = encode_error(code, text, req_id=req_id, text_bytes_max=self.limits.error_text_bytes_max)
            self.out.put((frame,), len(frame))

    def end(self, error: Dep2pError, *, abort: bool = False) -> None:
        """End the link. Waiting frames are still sent unless ``abort``, for ``Limits.close_timeout_s``. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        self._waiting_frames.clear()
        self._abort = abort
        if abort:
            self.out.discard()
            self._writing.cancel()
        else:
            # A peer that reads nothing must not make us keep frames for it.
            self._writing.deadline = trio.current_time() + self.limits.close_timeout_s
        self.out.close(StreamClosedError(str(error)))
        self.ended(error)

    async def flush(self) -> None:
        """Wait until all frames have gone to the transport, or the link is over."""
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
        except Exception:  # a frame that could not be written ends this link, and no other
            logger.exception("writing to a link to %s failed", self.peer)
            self.counters["links_failed_internally"] += 1
            self.end(StreamClosedError("an internal error ended the link"), abort=True)
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
        """Set the nursery of links and attempts to open them; with None no link is opened any more."""
        self._nursery = nursery

    @property
    def links(self) -> dict[PeerId, L]:
        """The live links, by peer."""
        return self._links

    def ready(self, peer: PeerId) -> L | None:
        """Return the peer's link if there is one and the peer is verified on its connection at this moment."""
        link = self._links.get(peer)
        if link is None or link.error is not None:
            return None
        if not self._gate.is_verified(link.connection):
            link.lose_membership()
            return None
        if link.connection.is_superseded:
            connection = self._gate.verified_connection(peer)
            if connection is not None and connection.id != link.connection.id:
                self._leave(link)
                return None
        return link

    def _leave(self, link: L) -> None:
        """There is a newer connection: new calls go there. What is under way here ends here, or with the connection."""
        self._counters["links_moved"] += 1
        self.forget(link)
        if self._nursery is not None:
            self._nursery.start_soon(self._end_when_idle, link)

    async def _end_when_idle(self, link: L) -> None:
        while link.error is None and link.is_busy:  # noqa: ASYNC110  (rare: the peer has two connections)
            await trio.sleep(_LEAVE_CHECK_S)
        link.end(StreamClosedError("the peer has a newer connection"))

    async def get(self, peer: PeerId, deadline: float) -> L:
        """Return the peer's link, opened when needed; ``deadline`` in trio time.

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
        except Exception:  # any error of a transport: its callers get it, and other attempts go on
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
        """Forget a link that is over: the next call opens another."""
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
