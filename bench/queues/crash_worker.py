"""Publishes and consumes until it is killed, and says what it was promised. Arguments: address of the store, mode.

``acked P S``: that message is durable. ``got P S``: it was delivered. ``ends P S``: it is acknowledged now, which may
or may not be written. ``done P S``: that is written.
"""

import sys
from pathlib import Path

import trio

from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.settings import QueueSettings
from dep2p.queues.types import SubscribeOptions

_PUBLISHERS = 4
_IN_FLIGHT = 50
_HELD = 20
"""Messages that the consumer holds whenever it is killed."""


def _say(what: str, keys: list[tuple[int, int]]) -> None:
    sys.stdout.write("".join([f"{what} {partition} {seq}\n" for partition, seq in keys]))
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
                _say("acked", await engine.publish("", "q", [NewMessage(b"x" * 100)] * 3))

        async def consume() -> None:
            keep = 0 if mode == "drain" else _HELD
            held: list[tuple[int, int]] = []
            turn = 0
            async with await engine.subscribe(
                "", "q", "c", SubscribeOptions(max_in_flight=_IN_FLIGHT, from_start=True)
            ) as consumer:
                while True:
                    got = [(each.partition, each.seq) for each in await consumer.receive(_HELD)]
                    _say("got", got)
                    held += got
                    ending, held = held[: max(0, len(held) - keep)], held[max(0, len(held) - keep) :]
                    if not ending:
                        continue
                    turn += 1
                    _say("ends", ending)
                    if turn % 2:
                        consumer.finish(ending)
                    else:
                        await consumer.confirm([DeliveryResult(Settle.FINISH, *key) for key in ending])
                        _say("done", ending)

        for _ in range(0 if mode == "drain" else _PUBLISHERS):
            nursery.start_soon(publish)
        nursery.start_soon(consume)


trio.run(main, sys.argv[1], sys.argv[2])
