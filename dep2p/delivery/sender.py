"""The sending end of reliable delivery: the messages for one receiver, and the link to it."""

import logging
from typing import Final

import trio

from dep2p.delivery.context import DeliveryContext
from dep2p.delivery.receipts import Receipt
from dep2p.errors import Dep2pError, ProtocolError, StreamClosedError
from dep2p.links.pull_link import LinkCalls, SessionLink
from dep2p.protocols.delivery.sender import SendWindow
from dep2p.protocols.delivery.wire import decode_ack, encode_batch, encode_hello, fits_batch
from dep2p.protocols.timing.backoff import Backoff
from dep2p.protocols.wire.compression import Compression
from dep2p.protocols.wire.frame import HEADER, VERSION, Frame, FrameType
from dep2p.protocols.wire.payload import compressed_body
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.io")

_ACK: Final = int(FrameType.ACK)
_ACK_REQUEST: Final = int(FrameType.ACK_REQUEST)
_BACKOFF: Final = Backoff(first_s=0.2, max_s=30.0)
_NEVER: Final = float("inf")
_BATCH_ITEMS: Final = 64
"""Messages of one write at most."""
_SMALL_BYTES: Final = 4_096
"""Bytes of a message from which on it has a frame of its own."""
_MOMENT_S: Final = 0.005
"""Seconds for which an app that waits for room may wait for more room, and its messages for more messages."""


class PeerSender:
    """All messages for one receiver, and the link that carries them; a link is open while something is unsettled."""

    def __init__(self, context: DeliveryContext, peer: PeerId, core: SendWindow[Receipt]) -> None:
        self.armed_at = _NEVER
        self.peer = peer
        self.core = core
        self.link: SessionLink | None = None
        self.last_error: str = ""
        self._context = context
        self._counters = context.counts
        self._compression: Compression | None = None
        self._is_kept = False
        self._link_needed = trio.Event()
        self._write_items = max(1, min(_BATCH_ITEMS, context.limits.delivery_queue_items_max // 2))
        self.unsent_for_added: int = 0
        """The number of unsent messages from which on `added` has work to do."""
        self._freed = 0
        self._held_until = 0.0
        """The time until which the app is expected to fill its outbox again, and to write itself; 0: nothing is
        expected."""

    # The app's side

    def add(self, receipt: Receipt) -> None:
        """Accept a message: it goes out with other waiting ones."""
        self.core.add(receipt)
        self.added()

    def added(self) -> None:
        """Act on a new message in the core."""
        link = self.link
        if link is not None:
            if not self._held_until:
                link.pulled.wake()
            elif len(self.core.unsent) >= self._write_items:
                link.pulled.write_now()
        elif not self._is_kept:
            self.resume()
        if self.core.expiry_s < self.armed_at:
            self._context.due.schedule(self)

    def write_now(self) -> None:
        """Send waiting messages before the app waits for room."""
        self._hold(0.0)
        if self.link is not None and self.core.has_unsent:
            self.link.pulled.write_now()

    def _hold(self, until: float) -> None:
        self._held_until = until
        self.unsent_for_added = self._write_items if until else 0

    def resume(self) -> None:
        """Send the messages of an earlier run."""
        if self.core.unsettled and not self._is_kept:
            self._is_kept = True
            self._context.start(self._keep_linked)
            self._context.due.schedule(self)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and there is no link."""
        return self.core.is_settled and self.link is None and not self._is_kept

    def peer_came(self) -> None:
        """Try at once: the peer can be reached now."""
        self._link_needed.set()

    # The link

    async def _keep_linked(self) -> None:
        failures = 0
        try:
            while self.core.unsettled:
                self._link_needed = trio.Event()
                try:
                    await self._one_link()
                    failures = 0
                except Dep2pError as error:
                    self.last_error = str(error)
                    self._counters["links_open_failed"] += 1
                    logger.debug("no delivery link to %s: %s", self.peer, error)
                if not self.core.unsettled:
                    return
                failures += 1
                with trio.move_on_after(_BACKOFF.jittered(failures, self._context.rng)):
                    await self._link_needed.wait()
        finally:
            self._is_kept = False

    async def _one_link(self) -> None:
        """Open a link and stay until it is over."""
        context = self._context
        limits = context.limits
        connection = await context.gate.connect(self.peer, timeout_s=limits.dial_timeout_s)
        stream = await connection.open_stream(context.protocol, timeout_s=limits.stream_open_timeout_s)
        zstd = context.zstd_for(connection)
        self._compression = None if zstd is None else Compression(zstd, limits.compress_bytes_min)
        link = context.make_link(stream, LinkCalls(self._collect, self._on_frames, self._on_end))
        self.core.link_up(trio.current_time())
        self.link = link
        self._counters["links_opened"] += 1
        link.start()
        link.pulled.wake()
        context.due.schedule(self)
        await link.run()
        if link.error is not None:
            self.last_error = str(link.error)

    def close_if_idle(self) -> None:
        """End the link when nothing is unsettled: the next message opens another."""
        if self.link is not None and not self.core.unsettled:
            self.link.end(StreamClosedError("the link was idle"))

    def _collect(self, bytes_max: int) -> list[bytes]:
        core = self.core
        if not core.has_unsent:
            return []
        now = trio.current_time()
        hello, messages = core.take(now, bytes_max)
        pieces = [] if hello is None else [encode_hello(hello)]
        for start in range(0, len(messages), _BATCH_ITEMS):
            part = messages[start : start + _BATCH_ITEMS]
            pieces += self._together(part) or self._one_by_one(part)
        self._counters["messages_sent"] += len(messages)
        self._note_flow(now)
        if messages and self.armed_at > now + self._context.limits.delivery_ack_timeout_s:
            self._context.due.schedule(self)
        return pieces

    def _together(self, messages: list[Receipt]) -> list[bytes] | None:
        """Encode messages as one frame, when they are alike and follow each other; else return None."""
        first = messages[0]
        bodies = [message.body for message in messages]
        compress_min = self._context.limits.compress_bytes_min if self._compression is not None else _NEVER
        if (
            len({message.head for message in messages}) == 1
            and first.is_whole
            and max(map(len, bodies)) < min(compress_min, _SMALL_BYTES)
            and fits_batch(first.head, bodies)
            and [message.number for message in messages] == list(range(first.number, first.number + len(messages)))
        ):
            return encode_batch(first.number, first.head, bodies)
        return None

    def _one_by_one(self, messages: list[Receipt]) -> list[bytes]:
        pieces: list[bytes] = []
        pack = HEADER.pack
        compression, compress_min = self._compression, self._context.limits.compress_bytes_min
        for message in messages:
            body = message.body_of_try()
            flags = message.flags
            if compression is not None and len(body) >= compress_min:
                compressed, smaller = compressed_body(compression, body)
                flags |= compressed
                body = bytes(smaller)
            head = message.head
            pieces += (pack(VERSION, _ACK_REQUEST, flags, message.number, len(head) + len(body)), head, body)
        return pieces

    def _on_frames(self, link: SessionLink, frames: list[Frame]) -> None:
        now = trio.current_time()
        core = self.core
        before = len(core.unsettled)
        for frame in frames:
            if frame[0] != _ACK:
                raise ProtocolError(f"frame type 0x{frame[0]:02x} from a receiver")
            core.on_ack(decode_ack(frame), now)
        if core.has_unsent:
            link.pulled.wake()
        self._admit(before - len(core.unsettled), now)

    def _admit(self, freed: int, now: float) -> None:
        """Note that so many places are free. Admit waiting tasks when that fills a write, else a moment later.

        Otherwise an outbox that is full all the time would send in ever smaller batches: each ACK frees as much as the
        batch it answers, and a batch that was split stays split.
        """
        context = self._context
        quota = context.quota
        if not quota.waiting or context.journal.is_durable:
            quota.admit()
            return
        self._freed += freed
        if self._freed < _BATCH_ITEMS and self._freed * 2 < len(self.core.unsettled):
            if quota.admit_soon(now + _MOMENT_S):
                context.due.schedule(quota)
            return
        self._freed = 0
        if not self._held_until:
            self._hold(now + _MOMENT_S)
            if self._held_until < self.armed_at:
                context.due.schedule(self)
        quota.admit()

    def _on_end(self, link: SessionLink, error: Dep2pError) -> None:
        if self.link is link:
            self.link = None
            self._hold(0.0)
            self.core.link_down()
            # Sent again, the message would end the next link too, and hold up later ones until it is too old.
            if link.refused_id and self.core.drop(link.refused_id, f"rejected: {error}", is_refused=True):
                self._context.quota.admit()

    # Time

    def _note_flow(self, now: float) -> None:
        if self.link is not None and self.link.flows():
            self.core.note_flow(now)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the messages, and of messages that are held back."""
        at = self.core.next_deadline()
        if self._held_until and (at is None or self._held_until < at):
            return self._held_until
        return at

    def on_deadline(self, now: float) -> None:
        """Something is too old, or was not heard of."""
        before = self._counters["messages_retried"]
        if self._held_until <= now:
            self._hold(0.0)
        self._note_flow(now)
        self.core.on_deadline(now)
        if self.core.has_unsent and self.link is not None:
            self.link.pulled.wake()
        if self._counters["messages_retried"] != before:
            logger.info("%s has not acknowledged in time: sent again", self.peer)
        self._context.quota.admit()
