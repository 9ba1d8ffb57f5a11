"""A function for each message, and a producer that retries (node).

Shows: QueueHandle.consumer, QueueHandle.producer, Producer.publish, Producer.send, PendingSend.wait,
Queues.dead_letters, Queues.replay, PushConsumer.statistics, PushedMessage.attempts, QueueMessage.attempts,
QueueMessage.body, QueueMessage.key, Queues.consumer, Queues.create, Queues.producer, PendingSend, Producer,
PushConsumer, PushedMessage, RetryMessage, RejectMessage, DeadLetterInfo, Backoff, ConsumerOptions, ProducerOptions
"""

import trio

from dep2p import PushedMessage, RejectMessage, RetryMessage
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(1) as (node,):
        orders = await node.queues.create("orders", {"partitions": 4})
        done = trio.Event()

        async def handle(message: PushedMessage) -> None:
            if message.body == b"unknown":
                raise RejectMessage("no such customer")
            if message.attempts == 1:
                raise RetryMessage("closed", delay_s=2)
            print(message.key, message.body, message.attempts)  # customer 7 b'paid' 2
            done.set()

        async with (
            orders.consumer("billing", handle, mode="fifo", concurrency=8) as consumer,
            orders.producer(order="strict") as producer,
        ):
            await producer.publish(b"unknown", key="customer 6")
            pending = await producer.send(b"paid", key="customer 7")  # returns when there is room for it
            print(len(await pending.wait()))  # 16
            await done.wait()
            print(consumer.statistics()["tried_again"])  # 1

        (dead,) = await node.queues.dead_letters("orders", "billing")
        print(dead.body, dead.reasons)  # b'unknown' ('no such customer',)
        print(await node.queues.replay("orders", "billing", [dead.id]))  # 1


trio.run(main)
