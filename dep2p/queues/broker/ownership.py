"""Whether this node is the broker of the queues of its store now: always, or in turn with other nodes that share the
store.

Each turn (term) has an engine of its own: nothing of an earlier one can reach the store or the clients.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import trio

from dep2p.concurrency.exception_groups import first_error
from dep2p.errors import Dep2pError, NotOwnerError, StoreError
from dep2p.links.fairness import Fairness
from dep2p.protocols.queues.admin import FailoverGroupInfo
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.client_metrics import FlowCounts
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.shared_store import OwnedStore, SharedStores, StoreOwner
from dep2p.tracing.event_log import TraceLog

logger: logging.Logger = logging.getLogger("dep2p.queues")

_CHECK_S: Final = 1.0
"""Seconds between two looks at the owner of the store, on standby."""
_RETRY_MAX_S: Final = 5.0
_BACKOFF: Final = Backoff(2 * _CHECK_S, _RETRY_MAX_S)

T = TypeVar("T")


class StoreOwnership:
    """The ownership of a store that this node alone has: it is the broker, always."""

    is_shared = False
    """Whether other nodes may be the broker, too."""

    def __init__(self, engine: QueueEngine) -> None:
        self.defaults: QueueOptions = engine.defaults
        self.flows: FlowCounts = FlowCounts()
        """The producers and consumers of this node's programs, wherever their queues are."""
        self.fairness: Fairness = Fairness()
        """Quotas and turns of members; the node sets its own."""
        self._own = engine

    @property
    def engine(self) -> QueueEngine:
        """The engine of this term. Raises NotOwnerError while another node is the broker of the queues."""
        return self._own

    @property
    def engine_if_here(self) -> QueueEngine | None:
        """The engine of this term, or None."""
        return self._own

    @property
    def is_here(self) -> bool:
        """Whether this node is the broker now."""
        return self.engine_if_here is not None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The peer ids of the nodes that share the store, with this one; empty when it is not shared."""
        return ()

    @property
    def owner(self) -> str:
        """The peer id of the broker of the queues, as last heard; empty when that is not known."""
        return ""

    @contextmanager
    def during_term(self) -> Generator[QueueEngine, None, None]:
        """Run a block that takes a while: it is cancelled when the term ends. Raises NotOwnerError then, or at once."""
        yield self.engine

    async def here(self) -> None:
        """Wait until this node is the broker."""
        await trio.lowlevel.checkpoint()

    async def open(self) -> None:
        """Open the store. Raises StoreError."""
        await self._own.open()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        await self._own.run(task_status=task_status)

    async def aclose(self) -> None:
        """Write pending changes. A cancelled caller does not stop this step."""
        await self._own.aclose()

    def trace_to(self, log: TraceLog | None) -> None:
        """Write events to a trace, in later terms, too: see `QueueEngine`."""
        self._own.trace_to(log)

    def failover_group(self) -> FailoverGroupInfo:
        """Return what this node reports to other members about the failover group: its owner, term and nodes."""
        return FailoverGroupInfo(owner="", term=0, nodes=())

    def status(self) -> dict[str, Any]:
        """Return the present broker of the queues, for displays and programs."""
        return {"shared": False, "role": "owner", "store": self._own.store.location}


class LeasedStoreOwnership(StoreOwnership):
    """One of several nodes on a store: it is the owner, or is on standby."""

    is_shared = True

    def __init__(
        self, stores: SharedStores, own: str, make: Callable[[QueueStore], QueueEngine], defaults: QueueOptions
    ) -> None:
        """``own``: this node's peer id. ``make``: makes an engine on a store that is not open."""
        self.defaults = defaults
        self.flows: FlowCounts = FlowCounts()
        self.fairness: Fairness = Fairness()
        self.counters: Counter[str] = Counter()
        self._stores = stores
        self._peer = own
        self._make = make
        self._engine: QueueEngine | None = None
        self._term = 0
        self._seen = StoreOwner()
        self._is_known = False
        self._problem = ""
        self._limiter = trio.CapacityLimiter(1)
        self._scopes: dict[trio.CancelScope, None] = {}
        self._arrived = trio.Event()
        self._log: TraceLog | None = None

    # For the service

    @property
    def engine(self) -> QueueEngine:
        if self._engine is None:
            raise self._not_owner()
        return self._engine

    @property
    def engine_if_here(self) -> QueueEngine | None:
        return self._engine

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._seen.nodes or (self._peer,)

    @property
    def owner(self) -> str:
        return self._peer if self._engine is not None else self._seen.peer

    @property
    def term(self) -> int:
        """The number of the owner's term."""
        return self._term if self._engine is not None else self._seen.term

    def _not_owner(self) -> NotOwnerError:
        seen = self._seen
        if not seen.peer or seen.peer == self._peer:
            text = "no node is the broker of these queues just now: another one that shares the store takes over soon"
        else:
            text = f"the node {seen.peer} is the broker of these queues (term {seen.term}); this one is on standby"
        return NotOwnerError(text, "" if seen.peer == self._peer else seen.peer, seen.term, self.nodes)

    @contextmanager
    def during_term(self) -> Generator[QueueEngine, None, None]:
        engine = self.engine
        with trio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                yield engine
            finally:
                del self._scopes[scope]
        if scope.cancelled_caught:
            raise self._not_owner()

    async def here(self) -> None:
        while self._engine is None:
            await self._arrived.wait()
        await trio.lowlevel.checkpoint()

    def trace_to(self, log: TraceLog | None) -> None:
        self._log = log
        if self._engine is not None:
            self._engine.trace_to(log)

    # Life

    async def open(self) -> None:
        """Raises StoreError when the store cannot be reached."""
        await self._check_owner()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take the store when it is free, and be the broker until another node has it; until cancelled.

        ``task_status`` is started when the broker is known.
        """
        failures = 0
        while True:
            try:
                await self._check_owner()
                if self._seen.is_free:
                    await self._run_term(task_status)
                failures = 0
            except StoreError as error:
                self._say(str(error))
                failures += 1
            self._started(task_status)
            await trio.sleep(_BACKOFF.after(failures) if failures else _CHECK_S)

    def _started(self, task_status: trio.TaskStatus[None]) -> None:
        if not self._is_known:
            self._is_known = True
            task_status.started()
            if self._engine is None:
                logger.warning(
                    "standing by: the node %s keeps the queues in %s (term %d)",
                    self._seen.peer or "(none)",
                    self._stores.location,
                    self._seen.term,
                )

    def _say(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.error("cannot see who is the broker of the queues: %s", problem)
        elif self._problem and not problem:
            logger.warning(
                "the store can be seen again; the node %s is the broker of the queues", self._seen.peer or "(none)"
            )
        if problem:
            self.counters["owner_checks_failed"] += 1
        self._problem = problem

    async def _check_owner(self) -> None:
        self._seen = await self._call(self._stores.look)
        self._say("")

    async def _call(self, function: Callable[[], T]) -> T:
        if not self._stores.blocks:
            await trio.lowlevel.checkpoint()
            return function()
        return await trio.to_thread.run_sync(function, limiter=self._limiter)

    async def _run_term(self, task_status: trio.TaskStatus[None]) -> None:
        before = self._seen
        store = self._stores.store(before)
        engine = self._make(store)
        engine.is_held = store.is_held
        try:
            await engine.open()
        except NotOwnerError as error:
            logger.info("another node was first: %s", error)
            await engine.commits.abandon()
            return
        except BaseException:
            await engine.commits.abandon()  # if it has the store, the next owner need not wait for the lease
            raise
        lost: Dep2pError | None = None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
                self._begin(engine, store, before)
                self._started(task_status)
                nursery.start_soon(self._watch, engine)
        except* NotOwnerError as group:
            lost = first_error(group)
        finally:
            if lost is not None:
                self._end(engine, lost)
            if self._engine is not engine:  # otherwise `aclose` writes the pending changes
                await engine.commits.abandon()
        await self._check_owner()

    async def _watch(self, engine: QueueEngine) -> None:
        """Keep the list of nodes up to date while this node is the broker: members ask for it."""
        while engine.lost is None:
            await trio.sleep(_RETRY_MAX_S)
            try:
                await self._check_owner()
            except StoreError as error:
                self._say(str(error))

    def _begin(self, engine: QueueEngine, store: OwnedStore, before: StoreOwner) -> None:
        engine.trace_to(self._log)
        self._engine, self._term = engine, store.term
        self.counters["terms"] += 1
        if before.peer and before.peer != self._peer:
            self.counters["failovers"] += 1
            logger.warning(
                "took the queues in %s over from the node %s, which was silent for %.1f s (its lease: %g s); term %d",
                self._stores.location,
                before.peer,
                before.silent_s,
                before.lease_s,
                store.term,
            )
        else:
            logger.info("this node serves the queues in %s now (term %d)", self._stores.location, store.term)
        arrived, self._arrived = self._arrived, trio.Event()
        arrived.set()

    def _end(self, engine: QueueEngine, lost: Dep2pError) -> None:
        self._engine = None
        self.counters["terms_lost"] += 1
        logger.warning("this node serves the queues in %s no more, and is on standby: %s", self._stores.location, lost)
        if isinstance(lost, NotOwnerError):
            self._seen = StoreOwner(term=lost.term, peer=lost.owner, nodes=lost.nodes)
        for scope in list(self._scopes):
            scope.cancel()
        engine.lose(lost)

    async def aclose(self) -> None:
        engine = self._engine
        with trio.CancelScope(shield=True):
            if engine is not None:
                await engine.aclose()
            await self._call(self._stores.close)

    def failover_group(self) -> FailoverGroupInfo:
        engine = self._engine
        owner = self.owner if engine is None or engine.is_held() else ""
        return FailoverGroupInfo(owner=owner, term=self.term, nodes=tuple(self.nodes))

    def status(self) -> dict[str, Any]:
        seen = self._seen
        return {
            "shared": True,
            "role": "owner" if self._engine is not None else "standby",
            "store": self._stores.location,
            "owner": self.owner,
            "term": self.term,
            "since_s": seen.since_unix_s,
            "silent_s": round(seen.silent_s, 3),
            "lease_s": seen.lease_s,
            "nodes": list(self.nodes),
            "problem": self._problem,
            **{name: self.counters[name] for name in ("terms", "failovers", "terms_lost", "owner_checks_failed")},
        }
