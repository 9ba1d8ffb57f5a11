"""A producer that retries and keeps order (client).

Shows: ClientQueueHandle.producer, ClientQueues.producer, ClientProducer.publish, ClientProducer.send,
ClientProducer.withdraw, ClientProducer.statistics, ClientProducer.is_over, ClientPendingSend.wait,
ClientPendingSend.is_over, ClientPendingSend.tries, ClientProducer, ClientPendingSend, ProducerOptions
"""

import asyncio

from dep2p.client import Client


async def main() -> None:
    async with Client.open() as client:
        orders = await client.queues.create("orders", {"partitions": 4})
        async with orders.producer(order="strict", items_max=1_000) as producer:
            print(len(await producer.publish(b"paid", key="customer 7", timeout_s=10)))  # 16
            pending = await producer.send(b"sent", key="customer 7")  # returns when there is room for it
            print(len(await pending.wait()), pending.is_over, pending.tries)  # 16 True 0
            producer.withdraw(pending)  # too late: it was taken
            print(producer.statistics()["taken"])  # 2
        print(producer.is_over)  # True
        await orders.delete()


asyncio.run(main())
