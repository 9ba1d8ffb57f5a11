"""Put work into a durable queue, and take it (client).

Shows: Client.queues, ClientQueues.create, ClientQueues.publish_from, ClientQueueHandle.publish,
ClientQueueHandle.publish_many, ClientQueueHandle.consume, ClientQueueHandle.info, ClientQueueHandle.delete,
ClientQueueMessage.finish, ClientQueueMessage.reject, ClientQueueMessage.requeue, ClientQueueMessage.touch,
ClientQueueMessage.attempts, ClientQueueMessage.body, ClientQueues.consume, ClientQueues.delete, ClientQueues.info,
ClientQueues.publish, ClientQueues.publish_many, ClientQueueMessage, ClientQueueHandle, ClientQueues,
ClientMessages, QueuedMany
"""

import asyncio
from collections.abc import AsyncIterator

from dep2p.client import Client


async def photos() -> AsyncIterator[bytes]:
    yield b"d.jpg"


async def main() -> None:
    async with Client.open() as client:
        jobs = await client.queues.create("jobs", {"max_attempts": 3})
        await jobs.publish(b"a.jpg", key="a", headers={"size": 640})
        await jobs.publish_many([b"b.jpg", b"c.jpg"])
        print((await client.queues.publish_from("jobs", photos())).messages)  # 1
        async with jobs.consume("workers", count=5) as messages:
            async for message in messages:
                if message.body == b"a.jpg":
                    await message.touch()  # more time to work
                    await message.finish()
                elif message.body == b"b.jpg":
                    await message.reject("not a picture")  # a dead letter
                elif message.body == b"c.jpg" and message.attempts == 1:
                    await message.requeue(reason="try again")
                else:
                    await message.finish(durable=True)
        print((await jobs.info()).dead)  # 1
        await jobs.delete()


asyncio.run(main())
