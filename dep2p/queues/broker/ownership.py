"""Whether this node keeps the queues of its store now: always, or in turn with other nodes that share the store.

Each turn (term) has an engine of its own: nothing of an earlier one can reach the store, or whoever is served now.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import trio

from dep2p.errors import Dep2pError, NotOwnerError, StoreError
from dep2p.protocols.queues.options import QueueOptions
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.client_metrics import FlowCounts
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.shared_store import OwnedStore, SharedStores, StoreOwner
from dep2p.tracing.event_log import TraceLog

logger = logging.getLogger("dep2p.queues")

_LOOK_S: Final = 1.0
"""So often a node that stands by looks who has the store."""
_RETRY_MAX_S: Final = 5.0

T = TypeVar("T")


class Keeping:
    """This node keeps them, always."""

    is_shared = False
    """Whether other nodes may keep them, too."""

    def __init__(self, engine: QueueEngine) -> None:
        self.defaults: QueueOptions = engine.defaults
        self.flows = FlowCounts()
        """The producers and consumers of this node's programs, wherever their queues are."""
        self._own = engine

    @property
    def engine(self) -> QueueEngine:
        """That of this term. Raises NotOwnerError while another node keeps the queues."""
        return self._own

    @property
    def engine_if_here(self) -> QueueEngine | None:
        """The same, or None."""
        return self._own

    @property
    def is_here(self) -> bool:
        """Whether this node keeps them now."""
        return self.engine_if_here is not None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Peer ids of those that share the store, this one too; empty when it is not shared."""
        return ()

    @property
    def owner(self) -> str:
        """Peer id of the node that keeps the queues, as last heard; empty when that is not known."""
        return ""

    @contextmanager
    def term(self) -> Generator[QueueEngine, None, None]:
        """For what takes a while: it is cancelled when the term ends. Raises NotOwnerError then, or at once."""
        yield self.engine

    async def here(self) -> None:
        """Wait until this node keeps them."""
        await trio.lowlevel.checkpoint()

    async def open(self) -> None:
        """Raises StoreError."""
        await self._own.open()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        await self._own.run(task_status=task_status)

    async def aclose(self) -> None:
        """Write what is left; whoever cancels, this is carried through."""
        await self._own.aclose()

    def trace_to(self, log: TraceLog | None) -> None:
        """See `QueueEngine`; over terms, too."""
        self._own.trace_to(log)

    def keepers(self) -> dict[str, Any]:
        """What other members are told: ``owner``, ``epoch``, and the ``nodes`` that share the store."""
        return {"owner": "", "epoch": 0, "nodes": []}

    def status(self) -> dict[str, Any]:
        """For people and programs: who keeps the queues."""
        return {"shared": False, "role": "owner", "store": self._own.store.place}


class SharedKeeping(Keeping):
    """One of several nodes on a store: it is the owner, or stands by."""

    is_shared = True

    def __init__(
        self, stores: SharedStores, own: str, make: Callable[[QueueStore], QueueEngine], defaults: QueueOptions
    ) -> None:
        """``own``: this node's peer id. ``make``: an engine on a store that is not open."""
        self.defaults = defaults
        self.flows = FlowCounts()
        self.counters: Counter[str] = Counter()
        self._stores = stores
        self._peer = own
        self._make = make
        self._engine: QueueEngine | None = None
        self._epoch = 0
        self._seen = StoreOwner()
        self._is_known = False
        self._problem = ""
        self._limiter = trio.CapacityLimiter(1)
        self._scopes: dict[trio.CancelScope, None] = {}
        self._arrived = trio.Event()
        self._log: TraceLog | None = None

    # For whoever serves

    @property
    def engine(self) -> QueueEngine:
        if self._engine is None:
            raise self._elsewhere()
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
    def epoch(self) -> int:
        """Of the owner's term."""
        return self._epoch if self._engine is not None else self._seen.epoch

    def _elsewhere(self) -> NotOwnerError:
        seen = self._seen
        if not seen.peer or seen.peer == self._peer:
            text = "no node keeps these queues just now: one of those that share the store takes over in a moment"
        else:
            text = f"the node {seen.peer} keeps these queues (term {seen.epoch}); this one stands by"
        return NotOwnerError(text, "" if seen.peer == self._peer else seen.peer, seen.epoch, self.nodes)

    @contextmanager
    def term(self) -> Generator[QueueEngine, None, None]:
        engine = self.engine
        with trio.CancelScope() as scope:
            self._scopes[scope] = None
            try:
                yield engine
            finally:
                del self._scopes[scope]
        if scope.cancelled_caught:
            raise self._elsewhere()

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
        await self._look()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take the store when it is free, and keep the queues until another node has it; until cancelled.

        ``task_status``: it is known who keeps them.
        """
        retry_s = _LOOK_S
        while True:
            try:
                await self._look()
                if self._seen.is_free:
                    await self._keep(task_status)
                retry_s = _LOOK_S
            except StoreError as error:
                self._say(str(error))
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
            self._started(task_status)
            await trio.sleep(retry_s)

    def _started(self, task_status: trio.TaskStatus[None]) -> None:
        if not self._is_known:
            self._is_known = True
            task_status.started()
            if self._engine is None:
                logger.warning(
                    "standing by: the node %s keeps the queues in %s (term %d)",
                    self._seen.peer or "(none)",
                    self._stores.place,
                    self._seen.epoch,
                )

    def _say(self, problem: str) -> None:
        if problem and problem != self._problem:
            logger.error("cannot see who keeps the queues: %s", problem)
        elif self._problem and not problem:
            logger.warning("the store can be seen again; the node %s keeps the queues", self._seen.peer or "(none)")
        if problem:
            self.counters["looks_failed"] += 1
        self._problem = problem

    async def _look(self) -> None:
        self._seen = await self._call(self._stores.look)
        self._say("")

    async def _call(self, function: Callable[[], T]) -> T:
        if not self._stores.blocks:
            await trio.lowlevel.checkpoint()
            return function()
        return await trio.to_thread.run_sync(function, limiter=self._limiter)

    async def _keep(self, task_status: trio.TaskStatus[None]) -> None:
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
            await engine.commits.abandon()  # if it has it, the next one need not wait for the lease
            raise
        lost: Dep2pError | None = None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(engine.run)
                self._begin(engine, store, before)
                self._started(task_status)
                nursery.start_soon(self._watch, engine)
        except* NotOwnerError as group:
            lost = _first(group)
        finally:
            if lost is not None:
                self._end(engine, lost)
            if self._engine is not engine:  # else `aclose` writes what is left
                await engine.commits.abandon()
        await self._look()

    async def _watch(self, engine: QueueEngine) -> None:
        """Who else is of the set, for those who ask."""
        while engine.lost is None:
            await trio.sleep(_RETRY_MAX_S)
            try:
                await self._look()
            except StoreError as error:
                self._say(str(error))

    def _begin(self, engine: QueueEngine, store: OwnedStore, before: StoreOwner) -> None:
        engine.trace_to(self._log)
        self._engine, self._epoch = engine, store.epoch
        self.counters["terms"] += 1
        if before.peer and before.peer != self._peer:
            self.counters["takeovers"] += 1
            logger.warning(
                "took the queues in %s over from the node %s, which was silent for %.1f s (its lease: %g s); term %d",
                self._stores.place,
                before.peer,
                before.silent_s,
                before.lease_s,
                store.epoch,
            )
        else:
            logger.info("this node keeps the queues in %s now (term %d)", self._stores.place, store.epoch)
        arrived, self._arrived = self._arrived, trio.Event()
        arrived.set()

    def _end(self, engine: QueueEngine, lost: Dep2pError) -> None:
        self._engine = None
        self.counters["terms_lost"] += 1
        logger.warning("this node keeps the queues in %s no more, and stands by: %s", self._stores.place, lost)
        if isinstance(lost, NotOwnerError):
            self._seen = StoreOwner(epoch=lost.epoch, peer=lost.owner, nodes=lost.nodes)
        for scope in list(self._scopes):
            scope.cancel()
        engine.lose(lost)

    async def aclose(self) -> None:
        engine = self._engine
        with trio.CancelScope(shield=True):
            if engine is not None:
                await engine.aclose()
            await self._call(self._stores.close)

    def keepers(self) -> dict[str, Any]:
        engine = self._engine
        owner = self.owner if engine is None or engine.is_held() else ""
        return {"owner": owner, "epoch": self.epoch, "nodes": list(self.nodes)}

    def status(self) -> dict[str, Any]:
        seen = self._seen
        return {
            "shared": True,
            "role": "owner" if self._engine is not None else "standby",
            "store": self._stores.place,
            "owner": self.owner,
            "term": self.epoch,
            "since_s": seen.since_unix_s,
            "silent_s": round(seen.silent_s, 3),
            "lease_s": seen.lease_s,
            "nodes": list(self.nodes),
            "problem": self._problem,
            **{name: self.counters[name] for name in ("terms", "takeovers", "terms_lost", "looks_failed")},
        }


def _first(group: BaseExceptionGroup[NotOwnerError]) -> NotOwnerError:
    first: object = group.exceptions[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, NotOwnerError)
    return first
