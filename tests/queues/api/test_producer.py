"""Producers: to one broker and to several, with places that are away, busy, or refuse."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import (
    Dep2pError,
    MessageTooLargeError,
    QueueFullError,
    QueueNotFoundError,
    RequestTimeoutError,
    StoreError,
    StreamClosedError,
)
from dep2p.protocols.queues.clients.settings import ProducerSettings
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.access import Rights
from dep2p.queues.api.producer import Producer
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.queues.service.realm_queues import LocalQueues
from tests.messaging.nodes import REALM
from tests.queues.nodes import exported, queue_sides

Clock = trio.testing.MockClock


class Shaky(LocalQueues):
    """A broker that fails as told: the errors, one for each publish, before it works."""

    def __init__(self, engine: QueueEngine, rights: Rights) -> None:
        super().__init__(StoreOwnership(engine), rights, REALM)
        self.errors: list[Dep2pError] = []
        self.batches: list[list[bytes]] = []
        self.times: list[float] = []

    async def publish_batch(
        self, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        self.batches.append([message.body for message in messages])
        self.times.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)
        return await super().publish_batch(name, messages, timeout_s)


@asynccontextmanager
async def shaky_brokers(count: int) -> AsyncGenerator[list[Shaky], None]:
    async with queue_sides(count) as sides:
        brokers = [Shaky(side.engine, side.rights) for side in sides]
        for broker in brokers:
            await broker.create("jobs")
        yield brokers


async def _bodies(broker: Queues) -> list[bytes]:
    return [message.body for message in await exported(broker, "jobs")]


async def test_a_publish_is_durable_when_it_returns(autojump_clock: Clock) -> None:
    async with queue_sides() as (side, asker):
        await side.queues.create("jobs")
        async with asker.at(side).producer("jobs") as producer:
            first = await producer.publish(b"a", headers={"h": 1})
            assert len(first) == 16
            assert await _bodies(side.queues) == [b"a"]


async def test_the_messages_of_a_key_are_in_the_order_of_the_calls(autojump_clock: Clock) -> None:
    async with queue_sides() as (side, asker):
        await side.queues.create("jobs", {"partitions": 4})
        async with asker.at(side).producer("jobs", order="strict") as producer:
            sendings = [await producer.send(b"%d" % n, key=f"k{n % 5}") for n in range(200)]
            await asker.cut(side)
            for sending in sendings:
                await sending.wait()
        numbers = [int(body) for body in await _bodies(side.queues)]
        assert sorted(numbers) == list(range(200))
        for key in range(5):
            of_key = [number for number in numbers if number % 5 == key]
            assert of_key == sorted(of_key)


async def test_a_strict_message_that_fails_stays_at_the_head(autojump_clock: Clock) -> None:
    async with shaky_brokers(2) as brokers:
        for broker in brokers:
            broker.errors = [StoreError("the disk is ill")] * 12
        async with brokers[0].producer("jobs", order="strict", other_brokers=brokers[1:]) as producer:
            sendings = [await producer.send(b"%d" % n, key="k") for n in range(5)]
            await sendings[0].wait()
            for sending in sendings:
                await sending.wait()
        used = [broker for broker in brokers if broker.batches]
        assert len(used) == 1, "a strict key went to another broker"
        assert used[0].batches[:13] == [used[0].batches[0]] * 13
        gaps = [round(later - sooner, 3) for sooner, later in zip(used[0].times, used[0].times[1:13], strict=False)]
        assert gaps == sorted(gaps), "the back-off does not grow"
        assert gaps[-1] == pytest.approx(5.0, abs=0.1)
        assert await _bodies(used[0]) == [b"%d" % n for n in range(5)]


async def test_26_a_busy_place_is_left_alone_and_another_one_is_used(autojump_clock: Clock) -> None:
    """(26: apache/rocketmq#2542) A busy broker failed the send instead of another one being tried."""
    async with shaky_brokers(2) as brokers:
        for broker in brokers:
            broker.errors = [QueueFullError("full")]
        async with brokers[0].producer("jobs", other_brokers=brokers[1:]) as producer:
            await producer.publish(b"a")
            assert producer.statistics()["failed_flow_control"] == 2
        assert [len(broker.batches) for broker in brokers] in ([2, 1], [1, 2])


async def test_a_best_effort_message_fails_after_its_attempts_and_the_key_goes_on(autojump_clock: Clock) -> None:
    async with shaky_brokers(1) as (broker,):
        async with broker.producer("jobs", max_attempts=3) as producer:
            await producer.publish(b"0")
            broker.errors = [StoreError("no")] * 3
            first = await producer.send(b"a", key="k")
            second = await producer.send(b"b", key="k")
            with pytest.raises(StoreError):
                await first.wait()
            await second.wait()
            assert producer.statistics()["left_key_queue"] == 1
        assert await _bodies(broker) == [b"0", b"b"]


async def test_a_transactional_message_has_one_try(autojump_clock: Clock) -> None:
    async with shaky_brokers(2) as brokers:
        for broker in brokers:
            broker.errors = [StoreError("no")]
        async with brokers[0].producer("jobs", other_brokers=brokers[1:]) as producer:
            with pytest.raises(StoreError):
                await producer.publish(b"a", transactional=True)
        assert sum(len(broker.batches) for broker in brokers) == 1


async def test_messages_without_a_key_go_to_all_places_in_turn(autojump_clock: Clock) -> None:
    async with shaky_brokers(3) as brokers:
        async with brokers[0].producer("jobs", other_brokers=brokers[1:]) as producer:
            for number in range(9):
                await producer.publish(b"%d" % number)
        assert [len(broker.batches) for broker in brokers] == [3, 3, 3]


async def test_a_refused_message_fails_alone(autojump_clock: Clock) -> None:
    async with queue_sides() as (side, asker):
        await side.queues.create("jobs", {"message_bytes_max": 10})
        async with asker.at(side).producer("jobs", order="strict") as producer:
            bodies = [b"a", b"b", b"too large for it", b"c"]
            sendings = [await producer.send(body, key="k") for body in bodies]
            for body, sending in zip(bodies, sendings, strict=True):
                if len(body) > 10:
                    with pytest.raises(MessageTooLargeError):
                        await sending.wait()
                else:
                    await sending.wait()
        assert await _bodies(side.queues) == [b"a", b"b", b"c"]


async def test_without_a_queue_a_send_fails_with_the_reason(autojump_clock: Clock) -> None:
    async with queue_sides() as (side, asker), asker.at(side).producer("nothing") as producer:
        with pytest.raises(QueueNotFoundError):
            await producer.publish(b"a")


async def test_a_publish_that_takes_too_long_says_why_and_is_tried_no_more(autojump_clock: Clock) -> None:
    async with shaky_brokers(1) as (broker,):
        broker.errors = [StoreError("the disk is ill")] * 1_000
        async with broker.producer("jobs", order="strict", close_timeout_s=0) as producer:
            with pytest.raises(RequestTimeoutError, match="the disk is ill"):
                await producer.publish(b"a", key="k", timeout_s=20)
            broker.errors.clear()
            await producer.publish(b"b", key="k")
        assert await _bodies(broker) == [b"b"]


async def test_a_producer_waits_for_room_and_for_what_is_under_way_at_its_end(autojump_clock: Clock) -> None:
    async with shaky_brokers(1) as (broker,):
        async with broker.producer("jobs", items_max=4, retry=Backoff(1.0, 1.0)) as producer:
            broker.errors = [StoreError("no")]
            sendings = [await producer.send(b"%d" % n) for n in range(30)]
            assert producer.statistics()["waiting"] <= 4
        assert all(sending.is_over for sending in sendings)
        assert len(await _bodies(broker)) == 30


async def test_what_was_not_taken_at_the_end_fails(autojump_clock: Clock) -> None:
    async with shaky_brokers(1) as (broker,):
        broker.errors = [StoreError("no")] * 1_000
        async with broker.producer("jobs", order="strict", close_timeout_s=3) as producer:
            sending = await producer.send(b"a", key="k")
        with pytest.raises(StreamClosedError):
            await sending.wait()
        assert producer.statistics()["failed_at_the_end"] == 1
        with pytest.raises(StreamClosedError):
            await producer.publish(b"b")


async def test_what_the_block_raises_comes_out_as_it_is(autojump_clock: Clock) -> None:
    async with shaky_brokers(1) as (broker,):
        with pytest.raises(ZeroDivisionError):
            async with broker.producer("jobs"):
                raise ZeroDivisionError


async def test_a_strict_message_with_a_key_has_no_delay(autojump_clock: Clock) -> None:
    async with shaky_brokers(1) as (broker,), broker.producer("jobs", order="strict") as producer:
        with pytest.raises(ValueError, match="delay"):
            await producer.send(b"a", key="k", delay_s=1.0)
        await producer.publish(b"b", delay_s=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("order", "any"),
        ("max_attempts", 0),
        ("send_timeout_s", 0.0),
        ("items_max", 0),
        ("bytes_max", 0),
        ("close_timeout_s", -1.0),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        ProducerSettings(**given)


def test_a_producer_that_does_not_run_says_so() -> None:
    async def main() -> None:
        with pytest.raises(StreamClosedError):
            await Producer([], "jobs", ProducerSettings()).send(b"a")

    trio.run(main)
