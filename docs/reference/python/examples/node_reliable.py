"""Send so that nothing is lost (node).

Shows: Node.send, Node.outbox, Outbox.statuses, Outbox.listing, Outbox.flush, Outbox.drop, Outbox.replay,
Outbox.forget_lost, Receipt.wait, Receipt.id, Receipt.has_ended, Node.on_notify, Receipt, DeliveryState,
DeliveryStatus, OutboxList, OutboxMessage, SendOptions, DeliveryExpiredError
"""

import trio

from dep2p import DeliveryExpiredError, DeliveryStatus, Notification
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):

        @ann.on_notify("orders")
        async def take(order: Notification) -> None:
            print(order.body, order.is_reliable)  # b'7' True

        async with bob.outbox.statuses() as statuses:
            receipt = await bob.send(ann.peer_id, "orders", b"7", reliable=True, ttl_s=3600)
            await receipt.wait()  # ann's handler has returned; raises DeliveryFailedError when it did not
            first = await anext(statuses)
            if isinstance(first, DeliveryStatus):
                print(first.id == receipt.id, receipt.has_ended)  # True True

        waiting = await bob.send(ann.peer_id, "not served yet", b"8", reliable=True)
        print([each.name for each in bob.outbox.listing().items])  # ['not served yet']
        print(await bob.outbox.flush(timeout_s=1), bob.outbox.drop(waiting.id))  # 1 1

        late = await bob.send(ann.peer_id, "not served yet", b"9", reliable=True, ttl_s=1)
        try:
            await late.wait()
        except DeliveryExpiredError:
            print([each.state for each in bob.outbox.listing(failed=True).items])  # ['expired']
        print(await bob.outbox.replay(late.id), bob.outbox.forget_lost())  # 1 0


trio.run(main)
