"""An engine on a disk that fails when its test says so (see test_disk_faults.py). Arguments: the queues' file, and the
folder in which a file ``fsync`` or ``full`` makes the trouble. Says what came of each step."""

import sys
from pathlib import Path

import trio

from dep2p.errors import StoreError
from dep2p.protocols.queues.message import NewMessage
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.sqlite.store import SqliteStore

PUBLISHER = bytes(16)


async def _publish(engine: QueueEngine, number: int) -> None:
    try:
        [point] = await engine.publish("", "jobs", [NewMessage(b"%d" % number)], publisher=(PUBLISHER, number))
    except StoreError as error:
        print(f"publish {number}: {type(error).__name__}")
    else:
        print(f"publish {number}: {point[0]} {point[1]}")


async def main(path: Path, trouble: Path) -> None:
    engine = QueueEngine(SqliteStore(path))
    await engine.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await engine.create_queue("", "jobs")
        await engine.create_channel("", "jobs", "c")
        for number, what in ((1, ""), (3, "fsync"), (5, "full")):
            if what:
                (trouble / what).touch()
            await _publish(engine, number)
            if what:
                try:
                    await engine.flush()
                except StoreError as error:
                    print(f"flush: {type(error).__name__}")
                (trouble / what).unlink()
            await _publish(engine, number)  # again, with the same number
            await _publish(engine, number + 1)
        async with await engine.subscribe("", "jobs", "c", SubscribeOptions(max_in_flight=9)) as consumer:
            (trouble / "full").touch()
            with trio.move_on_after(0.5):
                await consumer.receive()
                print("a delivery came before its attempt was written")
            (trouble / "full").unlink()
            bodies: list[bytes] = []
            while len(bodies) < 6:
                got = await consumer.receive()
                bodies += [each.body for each in got]
                consumer.finish([(each.partition, each.seq) for each in got])
            await engine.flush()
            print("got " + b" ".join(bodies).decode())
        nursery.cancel_scope.cancel()
    await engine.aclose()


trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]))
