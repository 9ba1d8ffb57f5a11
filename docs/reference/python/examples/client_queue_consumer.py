"""A function for each message (client).

Shows: ClientQueueHandle.consumer, ClientQueues.consumer, ClientPushConsumer.statistics, ClientPushConsumer.running,
ClientPushConsumer.cached, ClientPushConsumer.is_over, ClientPushedMessage.attempts, ClientPushedMessage.expired,
ClientPushedMessage.is_redelivered, ClientPushConsumer, ClientPushedMessage, RetryMessage, RejectMessage, Backoff,
ConsumerOptions
"""

import asyncio

from dep2p.client import Backoff, Client, ClientPushedMessage, RejectMessage, RetryMessage


async def main() -> None:
    async with Client.open() as client:
        orders = await client.queues.create("orders", {"partitions": 4})
        done = asyncio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            if message.body == b"unknown":
                raise RejectMessage("no such customer")
            if not message.is_redelivered:
                raise RetryMessage("closed", delay_s=0.5)
            print(message.key, message.body, message.attempts, message.expired)  # customer 7 b'paid' 2 False
            done.set()

        async with orders.consumer("billing", handle, mode="fifo", concurrency=8, retry=Backoff(0.1, 5)) as consumer:
            await orders.publish(b"unknown", key="customer 6")
            await orders.publish(b"paid", key="customer 7")
            await done.wait()
            print(consumer.statistics()["tried_again"])  # 1
        print(consumer.running, consumer.cached, consumer.is_over)  # 0 0 True
        (dead,) = await client.queues.dead_letters("orders", "billing")
        print(dead.body, dead.reasons)  # b'unknown' ('no such customer',)
        await orders.delete()


asyncio.run(main())
