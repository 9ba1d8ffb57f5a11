"""Work on orders: the steps of one order one after the other, different orders side by side, on any machine.

    python examples/workers.py produce                        # lines from standard input:  ORDER STEP
    python examples/workers.py work done.db                   # any number of workers, on this machine
    python examples/workers.py work done.db --broker PEER     # ... on other members; PEER is `dep2p id` on the first

The queue is on the disk of the producer's daemon. A step whose worker dies goes to another worker. So a step may be
worked on twice; the table of finished steps makes that harmless.
"""

import argparse
import asyncio
import sqlite3
import sys
from contextlib import closing, suppress

from dep2p import PeerId
from dep2p.client import (
    Client,
    ControlError,
    DaemonUnreachableError,
    Dep2pError,
    NotInFlightError,
    QueueOptions,
)

OPTIONS = QueueOptions(partitions=4, order="strict", lease_s=5.0)  # at most four workers have work at a time


async def produce() -> None:
    """Put each line into the queue, and print it when it is on disk there."""
    async with Client.open(call_reconnect_s=60) as client:
        orders = await client.queues.of().create("orders", OPTIONS)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order, _, step = line.strip().partition(" ")
            while True:
                try:
                    await orders.publish(step.encode(), key=order)
                    break
                except DaemonUnreachableError as error:
                    if not error.was_sent:  # the client has waited for the daemon in vain
                        raise
                    # It may be in the queue already. It may be there twice, as far as our workers care.
            print(f"put {order} {step}", flush=True)


def finish_step(database: sqlite3.Connection, order: str, step: str) -> None:
    """Do the work: a real one may write its own results in the same transaction."""
    with database:
        database.execute("insert or ignore into done (item, step) values (?, ?)", (order, step))


async def work(path: str, broker: str | None) -> None:
    """Take one step at a time. A worker that is alone takes all orders; with others each takes its share."""
    async with Client.open(call_reconnect_s=60) as client:
        with closing(sqlite3.connect(path)) as database:
            database.execute("create table if not exists done (item text, step text, primary key (item, step))")
            queues = client.queues.of() if broker is None else client.queues.at(PeerId(broker))
            async with queues.consume("orders", "workers", exclusive=True) as messages:
                print("working", flush=True)
                async for message in messages:
                    finish_step(database, message.key, message.body.decode())
                    with suppress(NotInFlightError):  # the connection was lost: the step comes again
                        await message.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Work on orders in their order.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("produce")
    working = commands.add_parser("work")
    working.add_argument("database")
    working.add_argument("--broker")
    arguments = parser.parse_args()
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(produce() if arguments.command == "produce" else work(arguments.database, arguments.broker))
    except Dep2pError as failed:
        hint = f" {failed.hint}" if isinstance(failed, ControlError) else ""
        sys.exit(f"workers: {failed}{hint}")
