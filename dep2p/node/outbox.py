"""The outbox of a node: `node.outbox` has the reliable messages that wait, and those that were lost."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from dep2p.arguments import checks_arguments
from dep2p.control_api.replies import OutboxList, OutboxMessage, RealmSummary
from dep2p.delivery.service import ReliableDelivery
from dep2p.delivery.types import OutboxItem
from dep2p.gossipsub.topic_types import Lagged
from dep2p.protocols.delivery.states import DeliveryStatus
from dep2p.realm.credentials import Realm, RealmChoice
from dep2p.types import PeerId

_STATUSES_BUFFER = 0


class HasDelivery(Protocol):
    """The part of a node that its outbox needs."""

    def realms(self) -> list[RealmSummary]: ...

    def realm(self, realm: RealmChoice = None) -> Realm: ...

    def delivery(self, realm: RealmChoice = None) -> ReliableDelivery: ...


@checks_arguments
class Outbox:
    """The reliable messages that wait in a node, and those that were lost; of one realm, or of all. Every call raises
    NotInRealmError for a realm that is not joined."""

    def __init__(self, node: HasDelivery) -> None:
        self._node = node

    def _chosen(self, realm: RealmChoice) -> list[tuple[str, ReliableDelivery]]:
        if realm is not None:
            return [(self._node.realm(realm).name, self._node.delivery(realm))]
        return [(each.name, self._node.delivery(each.realm_id)) for each in self._node.realms()]

    def listing(self, *, failed: bool = False, realm: RealmChoice = None) -> OutboxList:
        """The messages that wait, or with ``failed`` those that were lost, and whether the outbox is on disk; of one
        realm, or of all."""
        items: list[OutboxMessage] = []
        is_durable, lost = False, 0
        for name, delivery in self._chosen(realm):
            items += [_summary(item, name) for item in (delivery.lost() if failed else delivery.outbox())]
            stats = delivery.stats()
            is_durable, lost = stats.is_durable, lost + stats.lost_items
        return OutboxList(items=tuple(items), is_durable=is_durable, lost=lost)

    async def flush(self, *, timeout_s: float | None = None, realm: RealmChoice = None) -> int:
        """Try every receiver again, and wait until no message waits, at most ``timeout_s``. Returns how many messages
        remain."""
        chosen = [delivery for _name, delivery in self._chosen(realm)]
        for delivery in chosen:
            delivery.retry_now()
        with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
            for delivery in chosen:
                await delivery.flush()
        return sum(len(delivery.outbox()) for delivery in chosen)

    def drop(self, message_id: str | None = None, *, peer: PeerId | None = None, realm: RealmChoice = None) -> int:
        """Give up one message, all for a peer, or all; they end as failed. Returns how many."""
        return sum(delivery.drop(message_id, peer=peer) for _name, delivery in self._chosen(realm))

    def forget_lost(
        self, message_id: str | None = None, *, peer: PeerId | None = None, realm: RealmChoice = None
    ) -> int:
        """Forget a lost message, all for a peer, or all. Returns how many."""
        return sum(delivery.forget_lost(message_id, peer=peer) for _name, delivery in self._chosen(realm))

    async def replay(
        self, message_id: str | None = None, *, peer: PeerId | None = None, realm: RealmChoice = None
    ) -> int:
        """Send a lost message again, all for a peer, or all: each as a new message, with its time to live anew. Returns
        how many. Waits while the outbox is full. Raises StoreError."""
        replayed = 0
        for _name, delivery in self._chosen(realm):
            replayed += await delivery.replay(message_id, peer=peer)
        return replayed

    @asynccontextmanager
    async def statuses(
        self, *, realm: RealmChoice = None
    ) -> AsyncGenerator[AsyncIterator[DeliveryStatus | Lagged], None]:
        """Yield every change of a reliable message's state from now on, in order; of one realm, or of all that are
        joined now."""
        send, receive = trio.open_memory_channel[DeliveryStatus | Lagged](_STATUSES_BUFFER)
        async with trio.open_nursery() as nursery, receive:
            for _name, delivery in self._chosen(realm):
                await nursery.start(_feed, delivery, send.clone())
            await send.aclose()
            yield receive
            nursery.cancel_scope.cancel()


async def _feed(
    delivery: ReliableDelivery,
    send: trio.MemorySendChannel[DeliveryStatus | Lagged],
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    async with send, delivery.statuses() as statuses:
        task_status.started()
        async for status in statuses:  # the bounded buffer is the service's
            await send.send(status)


def _summary(item: OutboxItem, realm: str) -> OutboxMessage:
    return OutboxMessage(
        id=item.id,
        realm=realm,
        peer=item.peer,
        name=item.name,
        topic=item.topic or None,
        state=item.state.value,
        size_bytes=item.size_bytes,
        tries=item.tries,
        age_s=round(item.age_s, 3),
        last_error=item.last_error,
        may_have_been_taken=item.may_have_been_taken,
    )
