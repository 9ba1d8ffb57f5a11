"""The home of placed queues as one of several nodes on a store: any of them may be it, as the shares' nodes know."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from dep2p.protocols.queues.options import options_as_dict
from dep2p.protocols.queues.ordering.placement import Place
from dep2p.protocols.queues.queue import Queue
from dep2p.queues.access import Who
from dep2p.queues.broker.ownership import Keeping
from dep2p.queues.distributed.shard_client import Shares
from dep2p.types import PeerId, RealmId

_LOOK_S: Final = 5.0
"""Between two looks whether there is another node on the store, or a node of a share is back."""


def nodes_of_set(keeping: Keeping, own: PeerId) -> list[str]:
    """This node, and those that may be the home instead of it."""
    return [*dict.fromkeys([own, *keeping.nodes])]


def who_of(who: Who, nodes: list[str]) -> object:
    """The same people, seen from the node of a share; ``nodes``: those of the set."""
    if who == "members":
        return who
    return nodes if isinstance(who, str) else [*dict.fromkeys([*nodes, *who])]


class SetTold:
    """Which queues' shares know the nodes of the set."""

    def __init__(
        self,
        keeping: Keeping,
        realm_id: RealmId,
        own: PeerId,
        shares: Shares,
        alone: Callable[[str], AbstractAsyncContextManager[None]],
        access: Callable[[Queue, str], dict[str, object]],
    ) -> None:
        """``alone``: nothing else changes the queue of that name meanwhile. ``access``: of its share at a node."""
        self._keeping = keeping
        self._realm_id = realm_id
        self._own = own
        self._shares = shares
        self._alone = alone
        self._access = access

    async def run(self) -> None:
        """Tell them again when there is another node; in one term."""
        told: dict[str, list[str]] = {}
        while True:
            nodes = nodes_of_set(self._keeping, self._own)
            book = self._keeping.engine.book
            for (realm_id, name), queue in list(book.queues.items()):
                if realm_id == self._realm_id and queue.places and told.get(name) != nodes:
                    async with self._alone(name):
                        if not queue.is_deleted and not queue.growing and await self._tell(queue, nodes):
                            told[name] = nodes
            await trio.sleep(_LOOK_S)

    async def _tell(self, queue: Queue, nodes: list[str]) -> bool:
        options = {**options_as_dict(queue.options), "partitions": 1}

        def fields(place: Place) -> Mapping[str, object]:
            return {"options": options, "access": self._access(queue, place.node)}

        found = await self._shares.ask_all(queue, "create", fields, is_needed=False)
        return all(each in found for each, place in queue.places.items() if place.node not in nodes)
