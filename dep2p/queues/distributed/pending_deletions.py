"""What the home of placed queues has to remove from nodes that were away: remembered on disk until it is done."""

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final

import trio

from dep2p.errors import ChannelNotFoundError, Dep2pError, QueueNotFoundError
from dep2p.protocols.queues.ordering.placement import Place
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import Keeping
from dep2p.queues.distributed.shard_client import LOOK_S, Shares
from dep2p.types import RealmId

logger = logging.getLogger("dep2p.queues")

_TRY_S: Final = 15.0
"""Between two tries at a node."""
_LEFT_MAX: Final = 10_000
"""Above it the oldest is forgotten: the owner of its node can remove it (`dep2p queue rm`)."""


class Left:
    """Shares of deleted queues, and channels of shares that were not made everywhere."""

    def __init__(
        self,
        keeping: Keeping,
        realm_id: RealmId,
        shares: Shares,
        alone: Callable[[str], AbstractAsyncContextManager[None]],
    ) -> None:
        """``alone``: nothing else changes the queue of that name meanwhile."""
        self._keeping = keeping
        self._realm_id = realm_id
        self._shares = shares
        self._alone = alone
        self._wake = trio.Event()

    @property
    def _engine(self) -> QueueEngine:
        """Raises NotOwnerError while another node keeps the queues."""
        return self._keeping.engine

    def remember(self, places: Iterable[Place], channel: str = "") -> None:
        """They are to be removed. Durable with what is committed next."""
        book = self._engine.book
        for place in places:
            while len(book.left) >= _LEFT_MAX:
                oldest = next(iter(book.left))
                logger.warning("too much is to be removed from nodes that are away: %r is left for good", oldest[1])
                book.leave(*oldest, None)
            book.leave(self._realm_id, place.share, channel, place.node)
            self._engine.changed()
            self._wake.set()

    def forget(self, places: Iterable[Place], channel: str = "") -> None:
        """They may be there again."""
        for place in places:
            self._engine.book.leave(self._realm_id, place.share, channel, None)
        self._engine.changed()

    def _by_node(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for (namespace, share, channel), node in self._engine.book.left.items():
            if namespace == self._realm_id:
                found.setdefault(node, []).append((share, channel))
        return found

    @property
    def items(self) -> int:
        """How many are to be removed."""
        return sum(map(len, self._by_node().values()))

    async def run(self) -> None:
        """Remove them, whenever their node is there."""
        while True:
            self._wake = trio.Event()
            by_node = self._by_node()
            async with trio.open_nursery() as nursery:
                for node, each in by_node.items():
                    nursery.start_soon(self._remove_all, node, each)
            if by_node:
                await trio.sleep(_TRY_S)
            else:
                await self._wake.wait()

    async def _remove_all(self, node: str, left: list[tuple[str, str]]) -> None:
        for share, channel in left:
            try:
                await self._remove(node, share, channel)
            except (QueueNotFoundError, ChannelNotFoundError):
                pass  # removed by others
            except (Dep2pError, trio.TooSlowError) as error:
                logger.debug("%r is still at %s: %s", share, node, error)
                return  # also for the others: the node is away
            except Exception:
                logger.exception("the share %r cannot be removed from %s; it is tried again", share, node)
                return
            self._engine.book.leave(self._realm_id, share, channel, None)
            self._engine.changed()

    async def _remove(self, node: str, share: str, channel: str) -> None:
        if not channel:  # its name never comes again
            await self._shares.ask(node, "delete", {"queue": share})
            logger.info("the share %r was removed from %s: its queue is gone", share, node)
            return
        async with self._alone(share.rsplit(".", 2)[0]):
            if (self._realm_id, share, channel) in self._engine.book.left:  # else it is wanted again
                with trio.fail_after(LOOK_S):
                    await self._shares.ask(node, "delete_channel", {"queue": share, "channel": channel})
