"""Settings of a node's queues: the store, and defaults for queues whose maker sets none."""

from dataclasses import dataclass, field
from pathlib import Path

from dep2p.protocols.queues.options import QueueOptions
from dep2p.queues.access import Access, Who
from dep2p.storage.factory import open_shared, open_url
from dep2p.storage.memory import MemoryStore
from dep2p.storage.queue_store import QueueStore
from dep2p.storage.shared_store import SharedStores
from dep2p.storage.sqlite.store import SqliteStore, Sync


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The queues of one node; ``Node.open(queues=…)``."""

    store: str = "auto"
    """``auto``: SQLite in ``queues.sqlite`` of the data directory, in memory without one; ``memory``; the path of a
    file; or ``postgresql://…``, ``redis://…`` (extras ``dep2p[postgres]``, ``dep2p[redis]``)."""
    sync: Sync = "always"
    """When a publish is acknowledged: on the disk, or sooner."""
    defaults: QueueOptions = field(default_factory=QueueOptions)
    """Options of a queue whose maker gives no other."""
    access: Access = field(default_factory=Access)
    """Access to a realm's queue whose maker names no other."""
    create: Who = "members"
    """The peers that may make queues of a realm on this node."""

    standby: bool = False
    """The store, in PostgreSQL, is shared with other nodes that are set up so, too: one of them is the broker of the
    queues, and another one takes over when it is gone. See docs/howto/failover.md."""

    def shared_stores(self, peer: str) -> SharedStores:
        """The store of a failover group, as this one sees it. Raises ``ValueError`` unless it is in PostgreSQL."""
        return open_shared(self.store, self.sync, peer)

    def make_store(self, data_dir: Path | None) -> QueueStore:
        """Make the store, which is not opened yet. Raises ``ValueError`` for an address that no backend knows,
        StoreError without its driver."""
        if self.store == "memory" or (self.store == "auto" and data_dir is None):
            return MemoryStore()
        if self.store == "auto" and data_dir is not None:
            return SqliteStore(data_dir / "queues.sqlite", sync=self.sync)
        if "://" not in self.store:
            return SqliteStore(Path(self.store).expanduser(), sync=self.sync)
        return open_url(self.store, self.sync)
