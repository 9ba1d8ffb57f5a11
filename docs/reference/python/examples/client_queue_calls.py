"""Take messages of a queue by calls, and administer queues (client).

Shows: ClientQueueHandle.simple_consumer, ClientSimpleConsumer.receive, ClientSimpleConsumer.ack,
ClientSimpleConsumer.change_invisible, ClientQueues.listing, ClientQueues.info, ClientQueues.peek,
ClientQueues.create_channel, ClientQueues.pause, ClientQueues.resume, ClientQueues.empty_all,
ClientQueues.dead_letters, ClientQueues.delete, ClientQueues.of, ClientQueueHandle.publish_many,
ClientQueues.create, ClientQueues.publish_many, ClientQueues.simple_consumer, ClientSimpleConsumer
"""

import asyncio

from dep2p.client import Client


async def main() -> None:
    async with Client.open() as client:
        jobs = await client.queues.create("tasks")
        await jobs.publish_many([b"a", b"b"])
        consumer = jobs.simple_consumer("workers")
        first, second = await consumer.receive(10, wait_s=5, invisible_s=60)
        await consumer.ack(first)  # durable on return
        await consumer.change_invisible(second, 0)  # give it back at once

        print([queue.name for queue in await client.queues.listing()])  # ['tasks']
        print([message.body for message in await client.queues.peek("tasks", "workers")])  # [b'b']
        await client.queues.create_channel("tasks", "audit", from_start=True)
        await client.queues.pause("tasks", "audit")
        await client.queues.resume("tasks", "audit")
        print(sorted(channel.name for channel in (await client.queues.info("tasks")).channels))  # ['audit', 'workers']
        print(await client.queues.dead_letters("tasks", "workers"), await client.queues.of("team").listing())  # [] []
        await client.queues.empty_all("tasks")
        await client.queues.delete("tasks")


asyncio.run(main())
