"""Order by key over a broker that ends without a word and starts again, on every store that outlives it."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from dep2p.protocols.queues.attributes import Attributes, decode_attributes, encode_attributes
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle, WireMessage
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.types import SubscribeOptions, new_messages
from tests.queues.nodes import running_engine
from tests.services import servers
from tests.storage.conftest import DURABLE, fresh_place

KEYS = 10


async def _publish(engine: QueueEngine, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await engine.publish(
            "",
            "jobs",
            new_messages(
                [WireMessage(encode_attributes(Attributes(f"k{key}")), b"%d" % number) for key in range(KEYS)]
            ),
        )


async def _handle(consumer: ExclusiveConsumer, done: dict[str, list[int]], count: int) -> None:
    """So many messages, each durably finished."""
    with trio.fail_after(120):
        while count:
            for delivery in await consumer.receive(count):
                await consumer.confirm([DeliveryResult(Settle.FINISH, delivery.partition, delivery.seq)])
                done[decode_attributes(delivery.attributes).key].append(int(delivery.body))
                count -= 1


@pytest.mark.parametrize("kind", DURABLE)
async def test_order_locks_and_epochs_outlive_the_broker(
    kind: str, tmp_path: Path, running_servers: Callable[[str], servers.Server]
) -> None:
    place = fresh_place(kind, tmp_path, running_servers)
    done: defaultdict[str, list[int]] = defaultdict(list)
    async with running_engine(place()) as engine:
        options = engine.options_from({"partitions": 2, "order": "strict", "lease_s": 1.0})
        await engine.create_queue("", "jobs", options)
        await _publish(engine, 1, 3)
        consumer = await engine.subscribe_exclusive("", "jobs", "c", SubscribeOptions(max_in_flight=16))
        await _handle(consumer, done, 14)
        await engine.expand("", "jobs", 4)
        await _publish(engine, 4, 5)
        await _handle(consumer, done, 11)
        held = await consumer.receive(3)  # in work when the process ends
        assert held
        before = {each.partition: each.epoch for each in (await engine.inspector.group("", "jobs", "c")).locks}
        route = await engine.inspector.route("", "jobs")
    async with running_engine(place()) as engine:
        again = await engine.inspector.route("", "jobs")
        assert (again.version, again.routes) == (route.version, route.routes)
        consumer = await engine.subscribe_exclusive("", "jobs", "c", SubscribeOptions(max_in_flight=16))
        await _publish(engine, 6, 7)
        await _handle(consumer, done, 7 * KEYS - 25)
        locks = (await engine.inspector.group("", "jobs", "c")).locks
        assert all(each.epoch > before.get(each.partition, 0) for each in locks)
        await consumer.aclose()
    assert dict(done) == {f"k{key}": list(range(1, 8)) for key in range(KEYS)}
