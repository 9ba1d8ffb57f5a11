"""Publish inside your own transaction (client).

Shows: ClientQueues.relay, ClientOutboxRelay.wake, ClientOutboxRelay.flush, ClientQueueHandle.publish_in, create_outbox,
publish_in, ClientOutboxRelay
"""

import asyncio
import sqlite3
import tempfile
from pathlib import Path

from dep2p.client import Client, create_outbox, publish_in


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

        async with Client.open() as client:
            orders = await client.queues.create("orders")
            async with client.queues.relay(path) as relay:
                orders.publish_in(database, b"paid", key="customer 7")
                database.commit()
                relay.wake()  # look now, not in 0.2 s
                await relay.flush()
            print([message.body for message in await client.queues.peek("orders")])  # [b'created', b'paid']
            await orders.delete()
        database.close()


asyncio.run(main())
