"""The trace of a node: started and stopped while it runs, fed by all its parts, written to rolled files."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Protocol

import trio

from dep2p.delivery.service import ReliableDelivery
from dep2p.delivery.trace_events import TracedStatuses
from dep2p.errors import TraceError, TraceRunningError
from dep2p.host.interface import Host
from dep2p.limits import Limits
from dep2p.messaging.service import Messaging
from dep2p.node.services import RealmServices
from dep2p.protocols.timing.clock_sync import ClockExchange
from dep2p.pubsub.service import PubSub
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.traces import schema
from dep2p.traces.schema import SCHEMA_VERSION as V
from dep2p.traces.schema import Depth
from dep2p.tracing.clock_sync import Clocks
from dep2p.tracing.event_log import TraceLog
from dep2p.tracing.file_writer import TraceFiles
from dep2p.tracing.settings import TraceSettings
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.trace")

_FLUSH_S: Final = 1.0
"""The longest time of events that a kill loses, and the least time between two frames that are not full."""
_FIRST_CLOCK_S: Final = 2.0
_DEPTHS_MAX: Final = 1_024
"""Queues that are not empty in one snapshot at most: the fullest ones are written."""


class Traceable(Protocol):
    """A part that writes its own events to a trace."""

    def trace_to(self, log: TraceLog | None) -> None:
        """Write events to this trace from now on; None ends that."""
        ...


@dataclass(frozen=True, slots=True)
class TraceSources:
    """The sources of a trace. Each is called anew: realms come and go."""

    pubsubs: Callable[[], Iterable[PubSub]]
    apps: Callable[[], Iterable[tuple[Messaging, ReliableDelivery | None]]]
    """The messages of apps, of each realm."""
    parts: Callable[[], Iterable[Traceable]]
    """Sessions and queues."""
    clocks: Callable[[], Iterable[Clocks]]
    depths: Callable[[], Iterable[schema.Depth]]
    """Messages that wait outside of pub/sub."""
    connection_rtts: Callable[[], Iterable[tuple[PeerId, float]]]
    """Round trips in seconds, as the host knows them."""


@dataclass(frozen=True, slots=True)
class TraceStatus:
    """The state of the trace. Counts are of the run that is going on, or of the last one."""

    is_on: bool
    directory: str
    """Empty: nothing was traced yet."""
    settings: TraceSettings
    started_at_s: float
    """Unix time."""
    events: int
    bytes: int
    files: int
    """The number of complete files."""
    growing: str
    """The file that is being written, by the name that it will have."""
    dropped: dict[str, int]
    """Events that were not written, by reason."""
    files_removed: int
    files_salvaged: int
    error: str
    """Why the last write failed; empty when it did not."""


class _TraceRun:
    """One run of the trace, from a start to its stop."""

    def __init__(
        self, directory: Path, settings: TraceSettings, files: TraceFiles, started_ns: int, dropped: Counter[str]
    ) -> None:
        """``dropped``: the events that the log had dropped before."""
        self.directory = directory
        self.settings = settings
        self.files = files
        self.started_at_s = started_ns / 1e9
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.dropped_before = dropped
        self.reported = Counter(dropped)
        self.rtts: dict[PeerId, int] = {}
        self.statuses: dict[TracedStatuses, None] = {}


class Tracer:
    """Starts and stops the trace of one node. The node's parts write their events to ``log``."""

    def __init__(
        self, own: PeerId, items_max: int, sources: TraceSources, *, wall: Callable[[], float] = time.time
    ) -> None:
        """``items_max``: events that may wait to be written. ``wall``: seconds since the Unix epoch."""
        self.log: TraceLog = TraceLog(own, items_max, wall=wall)
        self._own = own
        self._sources = sources
        self._wall = wall
        self._run: _TraceRun | None = None
        self._last: _TraceRun | None = None
        self._changing = trio.Lock()
        self._wake = trio.Event()
        self.log.wake = lambda: self._wake.set()
        self._nursery: trio.Nursery | None = None
        self._past: Counter[str] = Counter()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write traces until cancelled; then complete the file."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    @property
    def is_on(self) -> bool:
        return self.log.is_on

    async def start(self, directory: Path, settings: TraceSettings) -> TraceStatus:
        """Begin a run in a directory, which it makes. It completes files of this node that a killed run left there.

        Raises TraceRunningError, or TraceError when the directory cannot be written.
        """
        async with self._changing:
            if self._run is not None:
                raise TraceRunningError(f"a trace is running already, in {self._run.directory}: stop it first")
            if self._nursery is None:
                raise TraceError("this node is closed")
            started_ns = int(self._wall() * 1e9)
            files = TraceFiles(directory, self._own, started_ns, settings)
            try:
                await trio.to_thread.run_sync(files.open, started_ns // 1000)
            except OSError as error:
                raise TraceError(f"cannot write a trace in {directory}: {error.strerror or error}") from None
            run = self._run = _TraceRun(directory, settings, files, started_ns, Counter(self.log.dropped))
            log = self.log
            log.start(rpcs=settings.rpcs, sample=settings.sample)
            sample = settings.sample if settings.sample < 1 else None
            log.put(schema.NodeStartEvent(V, self._own, 0, log.t_us(), metadata.version("dep2p"), sample=sample))
            for pubsub in self._sources.pubsubs():
                pubsub.trace_to(log)
            for messaging, delivery in self._sources.apps():
                self._attach_apps(messaging, delivery)
            for part in self._sources.parts():
                part.trace_to(log)
            await self._nursery.start(self._work, run)
            logger.info("tracing to %s", directory, extra={"rpcs": settings.rpcs})
            return self.status()

    def attach(self, pubsub: PubSub, messaging: Messaging, delivery: ReliableDelivery, sessions: Traceable) -> None:
        """Connect the parts of a realm that is joined while the trace may be running."""
        if self.is_on:
            pubsub.trace_to(self.log)
            self._attach_apps(messaging, delivery)
            sessions.trace_to(self.log)

    def _attach_apps(self, messaging: Messaging, delivery: ReliableDelivery | None) -> None:
        messaging.trace_to(self.log)
        if delivery is not None and self._run is not None:
            delivery.trace_to(self.log)
            statuses = delivery.traced(self.log)
            statuses.open()
            self._run.statuses[statuses] = None

    async def stop(self, reason: str) -> TraceStatus:
        """End the run: its last event says why, its file is completed. Nothing happens when none is going on."""
        async with self._changing:
            run = self._run
            if run is not None:
                self.log.put_last(schema.NodeStopEvent(V, self._own, 0, self.log.t_us(), reason))
                self._end(run)
                run.scope.cancel()
                with trio.CancelScope(shield=True):
                    await run.ended.wait()
        return self.status()

    def _end(self, run: _TraceRun) -> None:
        if self._run is run:
            self._run, self._last = None, run
            for pubsub in self._sources.pubsubs():
                pubsub.trace_to(None)
            for messaging, delivery in self._sources.apps():
                messaging.trace_to(None)
                if delivery is not None:
                    delivery.trace_to(None)
            for part in self._sources.parts():
                part.trace_to(None)
            for statuses in run.statuses:
                statuses.end()
            self.log.stop()

    # Work

    async def _work(self, run: _TraceRun, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with run.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_on, run)
                    if run.settings.snapshot_s:
                        nursery.start_soon(self._take_snapshots, run)
                    if run.settings.clock_s:
                        nursery.start_soon(self._read_clocks, run)
                    task_status.started()
        finally:
            if self._run is run:  # the node ends and has not stopped it
                self.log.put_last(schema.NodeStopEvent(V, self._own, 0, self.log.t_us(), "the node ended"))
                self._end(run)
            with trio.CancelScope(shield=True):
                await self._write(run)
                await trio.to_thread.run_sync(run.files.finish)
            self._past.update(run.files.counters)
            run.ended.set()
            logger.info("the trace in %s is complete: %d events", run.directory, run.files.events)

    async def _write_on(self, run: _TraceRun) -> None:
        while True:
            with trio.move_on_after(_FLUSH_S):
                await self._wake.wait()
            self._wake = trio.Event()
            with trio.CancelScope(shield=True):  # events that left the log reach the file
                await self._write(run)

    async def _write(self, run: _TraceRun) -> None:
        lost = self.log.dropped - run.reported
        run.reported.update(lost)
        events = self.log.take()
        await trio.to_thread.run_sync(run.files.write, events, lost, self.log.t_us())

    async def _take_snapshots(self, run: _TraceRun) -> None:
        while True:
            await trio.sleep(run.settings.snapshot_s)
            self._snapshot(run)

    def _snapshot(self, run: _TraceRun) -> None:
        log, own = self.log, self._own
        log.set_clock()
        t = log.t_us()
        depths: list[schema.Depth] = []
        for pubsub in self._sources.pubsubs():
            for topic in pubsub.topic_names():
                peers: list[str] = list(pubsub.mesh(topic))
                log.put(schema.MeshEvent(V, own, 0, t, topic, peers, len(pubsub.peers(topic))))
            scores = pubsub.scores()
            if scores:
                rated = [schema.PeerScore(peer, round(score, 3)) for peer, score in scores.items()]
                log.put(schema.ScoresEvent(V, own, 0, t, rated))
            depths += pubsub.depths()
        depths += self._sources.depths()
        if len(depths) > _DEPTHS_MAX:
            depths = sorted(depths, key=lambda depth: -depth.items)[:_DEPTHS_MAX]
        log.put(schema.DepthsEvent(V, own, 0, t, depths))
        rtts = {peer: int(rtt_s * 1e6) for peer, rtt_s in self._sources.connection_rtts()} | run.rtts
        if rtts:
            log.put(schema.RttsEvent(V, own, 0, t, [schema.PeerRtt(peer, rtt) for peer, rtt in rtts.items()]))

    async def _read_clocks(self, run: _TraceRun) -> None:
        log, own = self.log, self._own
        rtts: dict[PeerId, int] = {}

        def note(peer: PeerId, exchange: ClockExchange) -> None:
            rtts[peer] = exchange.rtt_us
            if run is self._run:
                log.put(schema.ClockEvent(V, own, 0, log.t_us(), peer, exchange.offset_us, exchange.error_us))

        await trio.sleep(min(_FIRST_CLOCK_S, run.settings.clock_s))
        while True:
            rtts.clear()
            for clocks in self._sources.clocks():
                await clocks.ask_all(note)
            run.rtts = dict(rtts)
            await trio.sleep(run.settings.clock_s)

    # Watching

    def status(self) -> TraceStatus:
        """Return the state of the run that is going on, or of the last one."""
        run = self._run or self._last
        if run is None:
            return TraceStatus(False, "", TraceSettings(), 0.0, 0, 0, 0, "", {}, 0, 0, "")
        counts = run.files.counters
        dropped = self.log.dropped - run.dropped_before
        if counts["events_dropped_write_failed"]:
            dropped["write failed"] = counts["events_dropped_write_failed"]
        return TraceStatus(
            self._run is run,
            str(run.directory),
            run.settings,
            round(run.started_at_s, 3),
            run.files.events,
            counts["bytes"],
            counts["files"],
            str(run.files.growing or "") if self._run is run else "",
            dict(dropped),
            counts["files_removed"],
            counts["files_salvaged"],
            run.files.error,
        )

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name, over all runs."""
        total = Counter(self._past)
        if self._run is not None:
            total.update(self._run.files.counters)
        for reason, count in self.log.dropped.items():
            total[f"events_dropped_{reason.replace(' ', '_')}"] += count
        return dict(total)


class Traced(Protocol):
    """The node, as a trace uses it."""

    @property
    def peer_id(self) -> PeerId: ...
    @property
    def host(self) -> Host: ...
    def all_pubsubs(self) -> Sequence[PubSub]: ...
    def all_apps(self) -> Sequence[tuple[Messaging, ReliableDelivery | None]]: ...
    def all_services(self) -> Sequence[RealmServices]: ...


def make_tracer(node: Traced, ownership: StoreOwnership, limits: Limits) -> Tracer:
    """Make the tracer of a node, which need not be in any realm yet."""
    sources = TraceSources(
        pubsubs=node.all_pubsubs,
        apps=node.all_apps,
        parts=lambda: [ownership, *(services.sessions for services in node.all_services())],
        clocks=lambda: [services.clocks for services in node.all_services()],
        depths=lambda: _depths(node, ownership),
        connection_rtts=lambda: [
            (connection.peer, connection.rtt_s)
            for connection in node.host.connections()
            if connection.rtt_s is not None
        ],
    )
    return Tracer(node.peer_id, limits.trace_items_max, sources)


def _depths(node: Traced, ownership: StoreOwnership) -> Iterator[Depth]:
    """Yield counts of messages that wait for acknowledgements, and of queues that are loaded."""
    for services in node.all_services():
        outbox = services.delivery.stats()
        if outbox.waiting_items:
            yield Depth(f"outbox:{services.delivery.realm_id}", outbox.waiting_items, outbox.waiting_bytes)
    engine = ownership.engine_if_here
    for queue in [] if engine is None else list(engine.registry.queues.values()):
        if queue.is_loaded and queue.items:
            yield Depth(f"queue:{queue.namespace}/{queue.name}", queue.items, queue.size_bytes)
