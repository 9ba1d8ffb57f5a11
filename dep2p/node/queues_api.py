"""The durable queues of a node: those that it keeps for its own programs, for a realm, and those of other members."""

from typing import Protocol

from dep2p.arguments import checks_arguments
from dep2p.node.services import NodeServices, RealmServices
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.service.realm_queues import LocalQueues
from dep2p.realm.credentials import RealmChoice
from dep2p.types import PeerId


class HasRealms(Protocol):
    """The part of a node that queues need."""

    @property
    def peer_id(self) -> PeerId: ...

    def services(self, realm: RealmChoice = None) -> RealmServices: ...


@checks_arguments
class NodeQueues(LocalQueues):
    """The queues that only programs of this node reach: ``node.queues.create("jobs")``.

    ``node.queues.of("team")`` are the queues that this node serves for the members of a realm, and
    ``node.queues.at(peer)`` those that another member keeps. All have the same calls.
    """

    def __init__(self, node: HasRealms, services: NodeServices) -> None:
        super().__init__(services.queue_ownership, services.queue_rights, "")
        self._node = node

    def of(self, realm: RealmChoice = None) -> LocalQueues:
        """The queues that this node serves for a realm. Raises NotInRealmError."""
        return self._node.services(realm).queues.own()

    def at(self, peer: PeerId, *others: PeerId, realm: RealmChoice = None) -> Queues:
        """The queues that a member of a realm keeps; for this node's own id its own. Raises NotInRealmError.

        ``others``: nodes that share its store, of which one may keep the queues now (docs/howto/failover.md). The
        member names them itself when it can be reached; name them here so that they are found while it is away.
        """
        if peer == self._node.peer_id or peer in self._ownership.nodes:
            return self.of(realm)
        return self._node.services(realm).queues.at(peer, *others)

    def select(self, realm: RealmChoice, *peers: PeerId) -> Queues:
        """The queues for a caller's choice: no argument, a realm, or peers as for `at` (in the only realm, when none is
        named)."""
        if peers:
            return self.at(*peers, realm=realm)
        return self if realm is None else self.of(realm)

    def distributed_values(self, realm: RealmChoice) -> dict[str, int]:
        """Return numbers on a realm's distributed queues: see `QueueService.distributed_values`."""
        return self._node.services(realm).queues.distributed_values()

    @property
    def ownership(self) -> StoreOwnership:
        """The ownership of this store's queues: which node is their broker now (``status()``), and the engine where it
        is this node."""
        return self._ownership
