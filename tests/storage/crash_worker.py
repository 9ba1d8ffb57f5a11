"""Publishes and consumes until it is killed, and says what it was promised. Arguments: address of the store, mode."""

import sys
from pathlib import Path

import trio

from dep2p.io.queue_engine import QueueEngine
from dep2p.io.queue_settings import QueueSettings
from dep2p.protocols.queue.message import NewMessage
from dep2p.protocols.queue.options import QueueOptions


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main(address: str, mode: str) -> None:
    engine = QueueEngine(QueueSettings(store=address).make_store(Path()))
    await engine.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        # No limit of deliveries: what is never finished would be a dead letter after five lives of this process.
        await engine.create_queue("", "q", QueueOptions(max_attempts=0))
        await engine.create_channel("", "q", "c", from_start=True)

        async def publish() -> None:
            while True:
                for partition, seq in await engine.publish("", "q", [NewMessage(b"x" * 100)] * 3):
                    _say("acked", partition, seq)

        async def consume() -> None:
            async with await engine.subscribe("", "q", "c", max_in_flight=50, from_start=True) as consumer:
                while True:
                    for each in await consumer.receive(20):
                        _say("got", each.partition, each.seq)
                        if mode == "drain" or each.seq % 3:
                            consumer.finish([(each.partition, each.seq)])

        for _ in range(0 if mode == "drain" else 4):
            nursery.start_soon(publish)
        nursery.start_soon(consume)


trio.run(main, sys.argv[1], sys.argv[2])
