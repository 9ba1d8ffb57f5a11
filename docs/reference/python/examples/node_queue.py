"""Put work into a durable queue, and take it (node).

Shows: Node.queues, Queues.create, QueueHandle.publish, QueueHandle.publish_many, QueueHandle.consume,
QueueMessage.finish, QueueMessage.requeue, QueueMessage.reject, QueueMessage.release, QueueMessage.touch,
QueueMessage.attempts, QueueHandle.info, QueueMessage.body, QueueMessage.is_redelivered, Queues.consume,
Queues.info, Queues.publish, Queues.publish_many, QueueMessage, QueueHandle, NodeQueues, Messages, MessageOptions,
ConsumeOptions, QueueOptions
"""

import trio

from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(1) as (node,):  # give Node.open a data_dir, and the queue is on disk
        jobs = await node.queues.create("jobs", {"max_attempts": 3, "msg_timeout_s": 30.0})
        await jobs.publish(b"a.jpg", key="a", headers={"size": 640})
        await jobs.publish_many([b"b.jpg", b"c.jpg", b"d.jpg"])
        async with jobs.consume("workers", max_in_flight=1, count=6) as messages:
            async for message in messages:
                if message.body == b"a.jpg":
                    await message.touch()  # more time to work
                    await message.finish()
                elif message.body == b"b.jpg":
                    await message.reject("not a picture")  # a dead letter
                elif message.attempts == 1 and message.body == b"c.jpg":
                    await message.requeue(delay_s=5, reason="try again later")
                elif message.body == b"d.jpg" and not message.is_redelivered:
                    await message.release()  # this attempt does not count
                else:
                    await message.finish(durable=True)
        print((await jobs.info()).dead)  # 1


trio.run(main)
