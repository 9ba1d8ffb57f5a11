"""One live connection: its streams, their handlers, and its end, which happens exactly once."""

import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

import trio

from dep2p.errors import ProtocolError, ProtocolNotSupportedError, RequestTimeoutError, StreamClosedError
from dep2p.host.connections.circuit_limit import CircuitMeter
from dep2p.host.connections.protocol_gates import ProtocolGates
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, CircuitUse, Direction, Muxer, NamedStream, StreamHandler
from dep2p.host.multistream import respond, select
from dep2p.host.resources.ledger import ConnectionResources, Ledger
from dep2p.host.resources.turns import Turns
from dep2p.host.scopes import new_scope, shielded
from dep2p.limits import Limits
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

NEGOTIATING_MAX = 64
"""Inbound streams of one connection that agree on their protocol at a time; further ones wait, unacknowledged, in the
muxer: else a stranger that opens streams and never sends makes a task of each."""
NEGOTIATING_UNPROVEN_MAX = 4
"""The same of an unproven peer: of 128 such connections, all these tasks time out in one pass of the event loop, and
the garbage collector looks through their objects."""

_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Upgraded:
    """An authenticated connection that is ready to run."""

    muxer: Muxer
    peer: PeerId
    channel_binding: bytes
    meter: CircuitMeter | None = None
    """The relay that it goes through, and its limit."""
    listening_port: int | None = None
    """The port that this host listens on, where it has dialed from that one; None where it has dialed from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionContext:
    """The context that all connections of a host share.

    ``handlers``: the handlers of inbound streams, by protocol. ``on_end``: called once for each connection, with the
    reason.
    ``watch``: probes a connection whose muxer does not do so itself, and ends it when the peer is silent. ``ledger``:
    accounts for the memory that they hold. ``turns``: the order in which unproven peers do work.
    """

    limits: Limits
    counters: Counters
    handlers: Mapping[str, StreamHandler]
    gates: ProtocolGates
    on_end: Callable[["PeerConnection", str], None]
    watch: Callable[["PeerConnection"], Awaitable[None]]
    ledger: Ledger
    turns: Turns


class PeerConnection:
    """The host's `Connection`. Its tasks live in `run`, which ends with the connection."""

    def __init__(self, upgraded: Upgraded, direction: Direction, remote_addr: str, context: ConnectionContext) -> None:
        self.id: int = next(_ids)
        self.peer: PeerId = upgraded.peer
        self.direction: Direction = direction
        self.remote_addr = remote_addr
        self.channel_binding: bytes = upgraded.channel_binding
        self.opened_at_s: float = trio.current_time()
        self.end_reason: str = ""
        self.protected_by: dict[str, None] = {}
        """The names of the parts that need it: `protect`."""
        self.is_superseded: bool = False
        self.is_limited: bool = upgraded.meter is not None and upgraded.meter.limit.is_narrow
        self.listening_port: int | None = upgraded.listening_port
        self._meter = upgraded.meter
        self._muxer = upgraded.muxer
        self._limits = context.limits
        self._counters = context.counters
        self._handlers = context.handlers
        self._gates = context.gates
        self._on_end = context.on_end
        self._watch = context.watch
        self._ledger = context.ledger
        self.turns: Turns = context.turns
        self.resources: ConnectionResources = context.ledger.open_connection(
            upgraded.peer, remote_addr, is_inbound=direction == "inbound", end=self.evict, now_s=self.opened_at_s
        )
        self._scope = new_scope()
        self._nursery: trio.Nursery | None = None
        self._closed = False
        self._measured_rtt_s: float | None = None
        self._negotiating = 0
        self._negotiated = trio.Event()
        self._muxer.bind(self)

    def __repr__(self) -> str:
        return f"<connection {self.id} {self.direction} {self.peer[-6:]} {self.remote_addr}>"

    @property
    def rtt_s(self) -> float | None:
        return self._muxer.rtt_s if self._measured_rtt_s is None else self._measured_rtt_s

    def set_rtt(self, rtt_s: float) -> None:
        """Take the result of a probe that was made outside of the muxer."""
        self._measured_rtt_s = rtt_s

    @property
    def received_bytes(self) -> int:
        """Bytes that have come; 0 when the multiplexer does not count them."""
        return self._muxer.received_bytes

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def circuit(self) -> CircuitUse | None:
        return None if self._meter is None else self._meter.left(trio.current_time())

    @property
    def carried_bytes(self) -> int:
        """Bytes that the relay of the connection has carried for it, both ways; 0 for a direct one."""
        return 0 if self._meter is None else self._meter.sent_bytes + self._meter.received_bytes

    @property
    def limits(self) -> Limits:
        return self._limits

    def count(self, name: str) -> None:
        """Add one to the host's counter ``name``."""
        self._counters.add(name)

    def protect(self, by: str) -> None:
        """``by`` has verified the peer: the connection need not make room for another one, and may hold more memory."""
        self.protected_by[by] = None
        self._ledger.prove(self.resources)

    def unprotect(self, by: str) -> None:
        """Undo `protect`."""
        self.protected_by.pop(by, None)
        if not self.protected_by:
            self._ledger.unprove(self.resources)

    def keep_place(self, keeps: bool) -> None:
        """Whether others of its address block, and of this host, give way before it although its peer is unproven."""
        self.resources.account.keeps_place = keeps

    def muxer_counters(self) -> Mapping[str, int]:
        """Counts of the multiplexer while the connection lives; at the end they go into the host's counters."""
        return {} if self._closed else self._muxer.counters()

    def open_protocols(self) -> Collection[str]:
        """The protocols of the streams that are open."""
        return () if self._closed else self._muxer.open_protocols()

    async def run(self) -> None:
        """Carry the connection until it ends. Never raises for what the peer or a handler does."""
        reason = "the connection task was cancelled"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    if not self._muxer.probes_itself:
                        nursery.start_soon(self._watch, self)
                    reason = await self._muxer.run(self, nursery)
                    self.end(reason)
                    nursery.cancel_scope.cancel()  # the peer of these handlers is gone
        except Exception as error:
            self._counters.add("connection_crashed")
            logger.exception("connection %d to %s failed in an unexpected way", self.id, self.peer)
            reason = f"internal error: {error!r}"
        finally:
            self.end(reason)
            self._nursery = None  # else it and this keep each other
            with shielded(self._limits.close_timeout_s):
                await self._close_muxer()

    async def _close_muxer(self) -> None:
        try:
            await self._muxer.close()
        except Exception as error:
            self._counters.add("connection_close_failed")
            logger.debug("closing connection %d: %r", self.id, error)

    def end(self, reason: str) -> None:
        """Mark it closed and notify the host, once."""
        if not self._closed:
            for name, amount in self._muxer.counters().items():
                self._counters.add(f"mux_{name}", amount)
            self._closed = True
            spent = "" if self._meter is None else self._meter.spent(trio.current_time())
            if spent:
                self._counters.add("connections_ended_relay_limit")
                logger.info("the connection to %s over a relay has ended at the relay's limit: %s", self.peer, spent)
                reason = f"{spent} ({reason})"
            self.end_reason = reason
            self._ledger.close_connection(self.resources)
            self._on_end(self, reason)

    def abort(self, reason: str) -> None:
        """End it from a synchronous caller; `run` cleans up."""
        self.end(reason)
        self._scope.cancel()

    def evict(self, reason: str) -> None:
        """`abort`, and release the memory at once."""
        self.abort(reason)
        self._muxer.fail(reason)

    async def close(self) -> None:
        self.end("closed on this side")
        with shielded(self._limits.close_timeout_s):
            await self._close_muxer()
        self._scope.cancel()

    # Streams

    async def open_stream(self, protocol: str, *, timeout_s: float = 10.0) -> ByteStream:
        if self._closed:
            raise StreamClosedError(f"the connection to {self.peer} has ended: {self.end_reason}")
        deadline_s = trio.current_time() + timeout_s
        stream: NamedStream | None = None
        with trio.move_on_at(deadline_s):
            stream = await self._muxer.open()
        if stream is None:  # pyright: ignore[reportUnnecessaryComparison]  # it cannot see that the scope ends early
            raise RequestTimeoutError(f"no stream to {self.peer} could be opened within {timeout_s:g} s")
        agreed = False
        try:
            await select(stream, protocol, timeout_s=max(0.0, deadline_s - trio.current_time()))
            stream.set_protocol(protocol)
            agreed = True
        except ProtocolNotSupportedError:
            raise ProtocolNotSupportedError(f"{self.peer} does not speak {protocol}") from None
        except ProtocolError as error:
            raise StreamClosedError(f"{self.peer} answered the proposal of {protocol} wrongly: {error}") from None
        finally:
            if not agreed:
                stream.reset()
        return stream

    def serve(self, stream: NamedStream) -> None:
        """Negotiate and handle an inbound stream in a task of its own."""
        if self._nursery is None or self._closed:
            stream.reset()
            return
        self._negotiating += 1
        self._nursery.start_soon(self._serve, stream)

    async def negotiation_place(self) -> None:
        """Wait until another inbound stream may be handed to `serve`."""
        while self._negotiating >= (NEGOTIATING_MAX if self.resources.is_proven else NEGOTIATING_UNPROVEN_MAX):
            await self._negotiated.wait()

    def _give_negotiation_place(self) -> None:
        self._negotiating -= 1
        self._negotiated.set()
        self._negotiated = trio.Event()

    async def _serve(self, stream: NamedStream) -> None:
        timeout_s = self._limits.stream_open_timeout_s
        try:
            protocol = await respond(
                stream,
                self._gates.seen_by(self),
                timeout_s=timeout_s,
                before_refusal=lambda name: self._gates.wait(name, self),
            )
        except ProtocolError as error:
            self._refuse(stream, "inbound_stream_malformed_negotiation", str(error))
            return
        except RequestTimeoutError as error:
            self._refuse(stream, "inbound_stream_negotiation_timeout", str(error))
            return
        except StreamClosedError:
            self._refuse(stream, "inbound_stream_closed_in_negotiation", "closed")
            return
        finally:
            self._give_negotiation_place()
        handler = self._handlers.get(protocol)
        if handler is None:  # removed between the answer and now
            self._refuse(stream, "inbound_stream_handler_removed", protocol)
            return
        stream.set_protocol(protocol)
        was_proven = self.resources.is_proven
        if not self._ledger.enter_protocol(self.resources, protocol):
            self._refuse(stream, "inbound_stream_refused_protocol", protocol)
            return
        try:
            await handler(stream)
        except (ProtocolError, RequestTimeoutError, StreamClosedError) as error:
            # A peer can cause this at will: it is counted, and not written into the log at full length.
            self._refuse(stream, "stream_handler_gave_up", f"{protocol}: {error!r}")
        except Exception:
            self._counters.add("stream_handler_failed")
            logger.exception("the handler of %s failed for %s", protocol, self.peer)
            stream.reset()
        finally:
            if not was_proven:
                self._ledger.leave_protocol(protocol)

    def _refuse(self, stream: NamedStream, counter: str, detail: str) -> None:
        self._counters.add(counter)
        logger.debug("inbound stream of %s refused, %s: %s", self.peer, counter, detail)
        stream.reset()
