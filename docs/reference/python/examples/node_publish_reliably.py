"""Publish, and learn who has handled it (node).

Shows: Node.publish_reliably, Topic.critical_peers, TopicPublish.wait, TopicPublish.acknowledged_by,
TopicPublish.missing, Node.join, Node.subscribe, Topic.publish, Topic.subscribe, TopicPublish,
AcknowledgementOptions, DeliveryFailedError
"""

import trio

from dep2p import TopicMessage
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob), bob.subscribe("orders") as messages, trio.open_nursery() as nursery:

        async def read() -> None:
            async for message in messages:  # coming for the next one acknowledges this one
                if isinstance(message, TopicMessage):
                    print(message.body)  # b'sold out' | b'open'

        nursery.start_soon(read)
        sent = await ann.publish_reliably("orders", b"sold out", critical_peers=[bob.peer_id], ttl_s=60)
        await sent.wait()
        print(sent.acknowledged_by == (bob.peer_id,), sent.missing)  # True {}
        async with await ann.join("orders") as topic:
            topic.critical_peers = [bob.peer_id]  # for all publishes that follow
            receipt = await topic.publish(b"open", reliable=True)
            await receipt.wait()
        nursery.cancel_scope.cancel()


trio.run(main)
