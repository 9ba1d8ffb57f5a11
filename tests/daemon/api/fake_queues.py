"""The queues of a node without a network: a real engine over a store in memory, for tests of the control API."""

from dep2p.errors import PeerNotFoundError
from dep2p.queues.access import Access, Rights
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.service.realm_queues import LocalQueues
from dep2p.storage.memory import MemoryStore
from dep2p.types import PeerId


class FakeQueues:
    """Queues of this machine and of a realm. Whoever wants them to work runs `engine`."""

    def __init__(self) -> None:
        self.rights = Rights(Access(), "members")
        self.engine = QueueEngine(MemoryStore(), rights=self.rights)
        self.ownership = StoreOwnership(self.engine)

    def of(self) -> Queues:
        return LocalQueues(self.ownership, self.rights, "team")

    def select(self, realm: str | None, *peers: PeerId) -> Queues:
        if peers:
            raise PeerNotFoundError(f"no address of {' or '.join(peers)} is known")
        return LocalQueues(self.ownership, self.rights, realm or "")

    def distributed_values(self, realm: str) -> dict[str, int]:
        return {"queues": len(realm)}
