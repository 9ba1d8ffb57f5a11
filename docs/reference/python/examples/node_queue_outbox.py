"""Publish inside your own transaction (node).

Shows: Queues.relay, OutboxRelay.wake, QueueHandle.publish_in, QueueHandle.consume, QueueMessage.body,
QueueMessage.finish, QueueMessage.key, Queues.consume, Queues.create, create_outbox, publish_in, OutboxRelay
"""

import sqlite3
import tempfile
from pathlib import Path

import trio

from dep2p import create_outbox, publish_in
from dep2p.testing import open_nodes


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "app.db"
        database = sqlite3.connect(path)
        create_outbox(database)
        database.execute("create table orders (id integer)")
        database.commit()

        database.execute("insert into orders values (7)")
        publish_in(database, "orders", b"created", key="customer 7")
        database.commit()  # both, or neither

        async with open_nodes(1) as (node,):
            orders = await node.queues.create("orders")
            async with node.queues.relay(path) as relay, orders.consume("billing", count=2) as messages:
                orders.publish_in(database, b"paid", key="customer 7")
                database.commit()
                relay.wake()  # look now, not in 0.2 s
                async for message in messages:
                    print(message.key, message.body)  # customer 7 b'created' | customer 7 b'paid'
                    await message.finish()
        database.close()


trio.run(main)
