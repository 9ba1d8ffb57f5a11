"""The streams of one pub/sub network: opened to every neighbour, accepted from every neighbour, reopened when lost."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from dep2p.errors import Dep2pError, ErrorCode, ProtocolNotSupportedError, StreamClosedError
from dep2p.gossipsub.events import Event, PeerDown, PeerUp, StreamAccepted, StreamDown, StreamUp, Version
from dep2p.gossipsub.rpc import Rpc
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import Limits
from dep2p.links.fairness import Fairness
from dep2p.pubsub.peer_link import INBOUND_PER_PEER_MAX, QUICK_END_S, InboundStream, Neighbour, ReceiveRpc
from dep2p.pubsub.peers import Neighbours
from dep2p.pubsub.send_queue import PeerQueue
from dep2p.pubsub.wire_formats import Wire, count_refusal
from dep2p.types import PeerId, peer_id_bytes

logger: logging.Logger = logging.getLogger("dep2p.io")

_SAY_INTERVAL_S: Final = 60.0
_PROBLEMS_MAX: Final = 8
_DIALING_MAX = 64
"""Peers that pub/sub dials at the same time: direct ones, and those that neighbours named."""


@dataclass(frozen=True, slots=True)
class NeighbourStats:
    """One neighbour at this moment."""

    peer: PeerId
    is_writable: bool
    """Whether our stream to it is open."""
    streams_in: int
    is_slow: bool
    queued_items: int
    queued_bytes: int
    held_back_items: int
    """RPCs of the neighbour that wait until this node takes more."""


class LinksOwner(Protocol):
    """The pub/sub that the streams belong to."""

    def handle(self, event: Event) -> None: ...

    def receive(self, peer: PeerId, payload: bytes, *, is_old: bool) -> int:
        """One RPC; ``is_old``: on a stream that another one has replaced. Returns its cost, see `Rpc.work`."""
        ...

    def received_all(self) -> None: ...

    def malformed(self, peer: PeerId, detail: str) -> None: ...

    def gossip_dropped(self, peer: PeerId, rpc: Rpc) -> None: ...

    def space_found(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerTurns:
    """Turns of a network's peers. ``line``: the one in which all peers wait for their turn; None: each in its own."""

    fairness: Fairness
    line: PeerId | None


class PubSubLinks:
    """Knows neighbours and their streams; reports them to the router, through its owner."""

    def __init__(
        self,
        owner: LinksOwner,
        host: Host,
        neighbours: Neighbours,
        wire: Wire,
        limits: Limits,
        counters: Counter[str],
        turns: PeerTurns,
    ) -> None:
        self._owner = owner
        self._host = host
        self.neighbours = neighbours
        self.wire = wire
        self._limits = limits
        self.counters = counters
        self.fairness: Fairness = turns.fairness
        self._line = turns.line
        self.is_held = False
        self.held_peers: dict[PeerId, None] = {}
        """Neighbours of which nothing is taken for now."""
        self._say_at_s = float("-inf")
        self.pressed: dict[PeerQueue, None] = {}
        """Queues that publishers have to check."""
        self.bytes_since_yield = 0
        self._known: dict[PeerId, Neighbour] = {}
        self._nursery: trio.Nursery | None = None
        self._dialing: dict[PeerId, None] = {}
        self._writes = 0
        self._items_written = 0
        self._paced = 0
        self.receive: ReceiveRpc = owner.receive
        self.received_all: Callable[[], None] = owner.received_all
        self.malformed: Callable[[PeerId, str], None] = owner.malformed

    async def run(self, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None]) -> None:
        """Run until cancelled."""
        self._nursery = nursery
        unwatch = self.neighbours.watch(self._on_connection, self._on_connection_lost)
        for protocol in self.wire.protocols:
            self._host.set_stream_handler(protocol, self._accept)
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self._nursery = None
            for protocol in self.wire.protocols:
                self._host.remove_stream_handler(protocol)
            unwatch()
            for known in self._known.values():
                for inbound in list(known.inbound):
                    inbound.reset()
                if known.stream is not None:
                    known.stream.reset()

    # Neighbours

    def _on_connection(self, connection: Connection) -> None:
        known = self._known.get(connection.peer)
        if known is None:
            known = self._add(connection)
        if known.opening is None:
            self.open(connection.peer)
        else:
            self._move(known)

    def _move(self, known: Neighbour) -> None:
        """Take our stream to the connection that is to be used now: the one that carries it may be silently dead."""
        best = self.neighbours.connection(known.peer)
        if best is None or known.opening is None or known.opening_on in (None, best.id):
            return
        self.counters["streams_moved"] += 1
        known.is_moving = True
        known.opening.cancel()

    def _add(self, connection: Connection) -> Neighbour:
        peer = connection.peer
        queue = PeerQueue(peer, self._limits, self._owner.gossip_dropped, self._on_low, self.wire.pace)
        known = self._known[peer] = Neighbour(peer, queue)
        return known

    def _on_connection_lost(self, connection: Connection) -> None:
        known = self._known.get(connection.peer)
        if known is None:
            return
        for inbound in list(known.inbound):
            if inbound.stream.connection.id == connection.id:
                if connection.is_closed:
                    inbound.reset()
                else:
                    inbound.refuse()
        if self.neighbours.connection(connection.peer) is not None:
            if known.stream is not None and known.stream.connection.id == connection.id:
                known.stream.reset()
            return
        self._known.pop(connection.peer)
        if known.opening is not None:
            known.opening.cancel()
        for inbound in list(known.inbound):
            inbound.reset()
        self.counters["messages_dropped_peer_gone"] += known.queue.clear()
        self._forget_queue(known.queue)
        self._owner.handle(PeerDown(connection.peer))

    def _forget_queue(self, queue: PeerQueue) -> None:
        self._writes += queue.writes
        self._items_written += queue.items_written
        self._paced += queue.paced
        if self.pressed.pop(queue, None) is None:
            return
        self._owner.space_found()

    def queue_of(self, peer: PeerId) -> PeerQueue | None:
        """Return the send queue of a neighbour."""
        known = self._known.get(peer)
        return known.queue if known is not None else None

    def _on_low(self, queue: PeerQueue) -> None:
        if not queue.is_pressed:
            self.pressed.pop(queue, None)
        self._owner.space_found()

    # Our streams

    def open(self, peer: PeerId) -> None:
        """Open our stream to a neighbour, in the background."""
        known = self._known.get(peer)
        if known is None or self._nursery is None or known.opening is not None:
            return
        known.opening = trio.CancelScope()
        self._nursery.start_soon(self._keep, known, known.opening)

    async def _keep(self, known: Neighbour, scope: trio.CancelScope) -> None:
        peer = known.peer
        is_known_to_router = False
        supported = True
        opened_s = trio.current_time()
        try:
            with scope:
                await trio.sleep(known.reopen_pause_s)
                stream = await self._open(known)
                opened_s = trio.current_time()
                is_known_to_router = True
                known.stream = stream
                self.counters["streams_opened"] += 1
                self._watch_words(known, stream)
                self._owner.handle(self._peer_up(stream, self.wire.protocols[stream.protocol]))
                self._owner.handle(StreamUp(peer, stream.protocol))
                await known.queue.write_to(stream)
        except ProtocolNotSupportedError:
            supported = False
            self.counters["streams_not_supported"] += 1
        except (Dep2pError, TimeoutError) as error:
            self.counters["streams_lost" if is_known_to_router else "streams_open_failed"] += 1
            logger.debug("pub/sub stream to %s: %s", peer, error)
        except Exception:  # any error of a transport ends this stream only
            logger.exception("a pub/sub stream to %s failed", peer)
            self.counters["streams_failed_internally"] += 1
        finally:
            stream_or_none, known.stream = known.stream, None
            if stream_or_none is not None:
                self._end(stream_or_none, is_moving=known.is_moving)
            known.opening = known.opening_on = None
            is_moving, known.is_moving = known.is_moving, False
        if self._known.get(peer) is not known or self._nursery is None:
            return
        known.queue.clear(keep_messages=True)
        if is_moving:
            # No StreamDown: the peer stays in the meshes, and the new stream starts with a hello and grafts.
            self.open(peer)
            return
        lived_s = trio.current_time() - opened_s if is_known_to_router else 0.0
        known.quick_ends = known.quick_ends + 1 if lived_s < QUICK_END_S else 0
        if supported or known.inbound:
            self._owner.handle(StreamDown(peer))

    def _end(self, stream: ByteStream, *, is_moving: bool) -> None:
        """End our stream. When it moves from a connection that still works, what was written arrives."""
        if is_moving and self._nursery is not None and not stream.connection.is_closed:
            self._nursery.start_soon(self._close, stream)
        else:
            stream.reset()

    async def _close(self, stream: ByteStream) -> None:
        try:
            with trio.move_on_after(self._limits.close_timeout_s):
                await stream.drain()
                await stream.close()
                return
        except StreamClosedError:
            self.counters["streams_moved_from_dead"] += 1
        stream.reset()

    async def _open(self, known: Neighbour) -> ByteStream:
        connection = self.neighbours.connection(known.peer)
        if connection is None:
            raise StreamClosedError(f"no connection to {known.peer}")
        known.opening_on = connection.id
        *first, last = self.wire.protocols
        for protocol in first:
            try:
                return await connection.open_stream(protocol, timeout_s=self._limits.stream_open_timeout_s)
            except ProtocolNotSupportedError:
                continue
        return await connection.open_stream(last, timeout_s=self._limits.stream_open_timeout_s)

    def _peer_up(self, stream: ByteStream, version: Version) -> PeerUp:
        connection = stream.connection
        parts = connection.remote_addr.split("/")
        ips = (parts[2],) if len(parts) > 2 and parts[1] in ("ip4", "ip6") else ()
        return PeerUp(connection.peer, peer_id_bytes(connection.peer), version, connection.direction == "outbound", ips)

    def _watch_words(self, known: Neighbour, stream: ByteStream) -> None:
        """Read our stream, on which only a last word can come; its end is the stream's end."""
        decoder = self.wire.decoder()

        def on_data(data: bytes | memoryview) -> None:
            if decoder.error is not None:
                return
            payloads = decoder.feed(data)
            if decoder.refusal is not None:
                count_refusal(self.counters, decoder.refusal)
                stream.reset()
            elif payloads or decoder.error is not None:
                self.counters["streams_reset_unexpected_data"] += 1
                stream.reset()

        def on_end(error: BaseException | None) -> None:
            # libp2p's nodes close the half that they do not use: there only an error is the end.
            if error is not None or self.wire.half_close_ends:
                stream.reset()
            if known.stream is stream and known.opening is not None and stream.is_write_closed:
                known.opening.cancel()

        stream.set_receiver(on_data, on_end)

    # Their streams

    async def _accept(self, stream: ByteStream) -> None:
        if self._nursery is None:
            stream.reset()
            return
        connection = stream.connection
        if connection.is_limited:
            self.counters["streams_refused_limited_relay"] += 1
            stream.reset()
            return
        if not self.neighbours.is_admitted(connection):
            self.counters["streams_refused_not_member"] += 1
            words = self.wire.refuse(ErrorCode.NOT_MEMBER, "not a verified member of this realm")
            if words:
                await stream.write(words)
                await stream.close()
            else:
                stream.reset()
            return
        known = self._known.get(connection.peer) or self._add(connection)
        while len(known.inbound) >= INBOUND_PER_PEER_MAX:
            self.counters["streams_replaced"] += 1
            next(iter(known.inbound)).reset()
        for earlier in known.inbound:
            earlier.is_replaced = True
        self._owner.handle(self._peer_up(stream, self.wire.protocols[stream.protocol]))
        self._owner.handle(StreamAccepted(connection.peer, says_hello=self.wire.says_hello))
        inbound = InboundStream(self, stream)
        known.inbound[inbound] = None
        self.counters["streams_accepted"] += 1
        inbound.start()
        self._on_connection(connection)

    def inbound_ended(self, stream: InboundStream) -> None:
        """Act on the end of an inbound stream."""
        known = self._known.get(stream.peer)
        if known is not None:
            known.inbound.pop(stream, None)

    def reset_inbound(self, peer: PeerId) -> None:
        """Reset the streams of a peer whose data cannot be parsed any further."""
        known = self._known.get(peer)
        if known is not None:
            for inbound in list(known.inbound):
                inbound.reset()

    def line_of(self, peer: PeerId) -> PeerId:
        """Return the member in whose line the peer waits for its turn."""
        return peer if self._line is None else self._line

    def hold_for(self, peer: PeerId, seconds: float) -> None:
        """Take nothing of a peer for so long: it sends more control messages than its rate."""
        if self._nursery is None or peer in self.held_peers:
            return
        self.held_peers[peer] = None
        self._nursery.start_soon(self._release_after, peer, seconds)
        now = trio.current_time()
        if now >= self._say_at_s:
            self._say_at_s = now + _SAY_INTERVAL_S
            logger.info(
                "%s sends more control messages than its share: the node reads nothing of it meanwhile; counted as "
                "pubsub_peers_held_control_rate, logged once in %.0f s",
                peer,
                _SAY_INTERVAL_S,
            )

    async def _release_after(self, peer: PeerId, seconds: float) -> None:
        await trio.sleep(seconds)
        del self.held_peers[peer]
        known = self._known.get(peer)
        for inbound in () if known is None else list(known.inbound):
            inbound.process()

    def problems(self) -> tuple[str, ...]:
        """Say of which neighbours nothing is read for now; at most eight."""
        return tuple(
            f"{peer} sends more control messages to pub/sub than its share: it is held back"
            for peer in itertools.islice(self.held_peers, _PROBLEMS_MAX)
        )

    def process_waiting(self) -> None:
        """Process waiting RPCs: the owner takes more again."""
        for known in list(self._known.values()):
            for inbound in list(known.inbound):
                if self.is_held:
                    return
                inbound.process()

    def take_bursts(self) -> list[tuple[PeerId, dict[str, list[bytes]]]]:
        """Ids by topic that neighbours may have dropped; see `PeerQueue.take_burst`. Called once in a heartbeat."""
        if self.wire.pace is None:
            return []
        bursts = [(peer, known.queue.take_burst()) for peer, known in self._known.items()]
        return [burst for burst in bursts if burst[1]]

    def disconnect(self, peer: PeerId) -> None:
        """Close the connections of a peer that misuses pub/sub, as far as no other part of the node needs them."""
        if self._nursery is None:
            return
        for connection in self.neighbours.useless(peer):
            self.counters["connections_closed_misuse"] += 1
            self._nursery.start_soon(connection.close)

    # Dialing

    def dial(self, peer: PeerId) -> None:
        """Connect to a peer in the background; failures are counted."""
        if self._nursery is None or peer in self._dialing:
            return
        if len(self._dialing) >= _DIALING_MAX:
            self.counters["dials_dropped_busy"] += 1
        else:
            self._dialing[peer] = None
            self._nursery.start_soon(self._dial, peer)

    async def _dial(self, peer: PeerId) -> None:
        try:
            await self.neighbours.dial(peer)
        except (Dep2pError, TimeoutError):
            self.counters["dials_failed"] += 1
        finally:
            self._dialing.pop(peer, None)

    # Watching

    @property
    def is_running(self) -> bool:
        """Whether streams are opened and accepted."""
        return self._nursery is not None

    @property
    def has_unsent(self) -> bool:
        """Whether RPCs wait for the transport."""
        return any(
            known.stream is not None
            and not known.queue.is_slow
            and (known.queue.waiting_bytes or known.stream.unsent_bytes)
            for known in self._known.values()
        )

    def write_counts(self) -> dict[str, int]:
        """Count writes and the RPCs in them: their ratio shows how well coalescing works."""
        queues = [known.queue for known in self._known.values()]
        return {
            "writes": self._writes + sum(queue.writes for queue in queues),
            "rpcs_written": self._items_written + sum(queue.items_written for queue in queues),
            "writes_paced": self._paced + sum(queue.paced for queue in queues),
        }

    def stats(self) -> list[NeighbourStats]:
        """Each neighbour."""
        return [
            NeighbourStats(
                known.peer,
                known.stream is not None,
                len(known.inbound),
                known.queue.is_slow,
                known.queue.items,
                known.queue.waiting_bytes,
                sum(inbound.waiting_items for inbound in known.inbound),
            )
            for known in self._known.values()
        ]
