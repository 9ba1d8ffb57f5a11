"""The durable queues of a node: those that it keeps for its own programs, for a realm, and those of other members."""

from abc import ABC, abstractmethod
from typing import Any

from dep2p.node.messaging_api import RealmChoice
from dep2p.node.services import NodeServices, RealmServices
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.ownership import Keeping
from dep2p.queues.service.realm_queues import LocalQueues
from dep2p.realm.credentials import Realm
from dep2p.types import PeerId


class QueueVerbs(ABC):
    """Gives a node its `queues`."""

    _services: NodeServices

    @property
    @abstractmethod
    def peer_id(self) -> PeerId: ...

    @abstractmethod
    def realm(self, realm: RealmChoice = None) -> Realm: ...

    @abstractmethod
    def services(self, realm: RealmChoice = None) -> RealmServices: ...

    @property
    def queues(self) -> "NodeQueues":
        """Durable queues. Those reached directly are this process's own; see :class:`NodeQueues` for the others."""
        return NodeQueues(self, self._services)


class NodeQueues(LocalQueues):
    """The queues that only programs of this node reach: ``node.queues.create("jobs")``.

    ``node.queues.of("team")`` are the queues that this node keeps for the members of a realm, and
    ``node.queues.at(peer)`` those that another member keeps. All have the same verbs.
    """

    def __init__(self, node: QueueVerbs, services: NodeServices) -> None:
        super().__init__(services.queue_keeping, services.queue_rights, "")
        self._node = node

    def of(self, realm: RealmChoice = None) -> LocalQueues:
        """Those that this node keeps for a realm. Raises NotInRealmError."""
        return self._node.services(realm).queues.own()

    def at(self, peer: PeerId, *others: PeerId, realm: RealmChoice = None) -> Queues:
        """Those that a member of a realm keeps; this node's own for its own id. Raises NotInRealmError.

        ``others``: nodes that share its store, of which one may keep the queues now (docs/howto/takeover.md). They are
        heard of from it, too: name them so that they are found while it is away.
        """
        if peer == self._node.peer_id or peer in self._keeping.nodes:
            return self.of(realm)
        return self._node.services(realm).queues.at(peer, *others)

    def place(self, realm: RealmChoice, *peers: PeerId) -> Queues:
        """By what a caller names: neither, a realm, or peers as for `at` (in the only realm, when none is named)."""
        if peers:
            return self.at(*peers, realm=realm)
        return self if realm is None else self.of(realm)

    def all_namespaces(self) -> list[str]:
        """The realms (by id) for which queues are kept, and "" for this node's own."""
        return self._engine.namespaces()

    def placed_values(self, realm: RealmChoice) -> dict[str, int]:
        """Of queues on several members, in numbers: see `QueueService.placed_values`."""
        return self._node.services(realm).queues.placed_values()

    @property
    def keeping(self) -> Keeping:
        """Whether this node keeps the queues of its store now, with the engine, for services beside this one."""
        return self._keeping

    def keeper(self) -> dict[str, Any]:
        """Who keeps the queues: ``role`` is owner or standby; with the others when several nodes share the store."""
        return self._keeping.status()

    def statistics(self) -> dict[str, Any]:
        """Counts of the engine and of its store. Raises NotOwnerError while another node keeps the queues."""
        return self._engine.statistics()
