"""Send so that nothing is lost (client).

Shows: Client.send, Client.outbox, ClientReceipt.wait, ClientOutbox.listing, Client.publish_reliably,
ClientTopicPublish.acknowledged_by, ClientTopicPublish.wait, ClientOutbox.flush, ClientOutbox.drop,
ClientOutbox.statuses, Client.on_notify, Client.subscribe, ClientReceipt.id, ClientReceipt, ClientOutbox
"""

import asyncio

from dep2p.client import Client, DeliveryStatus, Notification, TopicMessage


async def main() -> None:
    async with Client.open() as client, client.outbox.statuses() as statuses:

        @client.on_notify("orders")
        async def take(order: Notification) -> None:
            print(order.body)  # b'7'

        await client.handlers_ready()
        me = await client.peer_id()
        receipt = await client.send(me, "orders", b"7", reliable=True, ttl_s=3600)
        await receipt.wait()  # the handler has returned
        status = await anext(statuses)
        if isinstance(status, DeliveryStatus):
            print(status.id == receipt.id)  # True

        async with client.subscribe("orders") as messages:
            sent = await client.publish_reliably("orders", b"sold out", critical_peers=[me])
            message = await anext(messages)
            reading = asyncio.create_task(anext(messages))  # coming for the next one acknowledges this one
            await sent.wait()
            if isinstance(message, TopicMessage):
                print(message.body, sent.acknowledged_by == (me,))  # b'sold out' True
            reading.cancel()

        waiting = await client.send(me, "not served yet", b"8", reliable=True)
        print([each.name for each in (await client.outbox.listing()).items])  # ['not served yet']
        print(await client.outbox.flush(timeout_s=0.1), await client.outbox.drop(waiting.id))  # 1 1


asyncio.run(main())
