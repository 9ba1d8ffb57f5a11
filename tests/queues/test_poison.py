"""One message that cannot be written or sent fails its owner, and no other: at the entrance, on disk and on a link."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import Dep2pError, MessageTooLargeError, StoreError
from dep2p.limits import Limits
from dep2p.protocols.queues.attributes import Attributes, encode_attributes
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.options import QueueOptions
from dep2p.protocols.queues.wire.frames import ATTRIBUTES_BYTES_MAX, WireMessage
from dep2p.protocols.wire.cbor import encode_canonical
from dep2p.storage.memory import MemoryStore
from dep2p.storage.sqlite.store import SqliteStore
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.nodes import REALM
from tests.queues.nodes import QueueSide, exported, queue_sides, running_engine

POISON = NewMessage(b"poison", attributes=encode_canonical({"t": ["x" * 40_000] * 2}))


@asynccontextmanager
async def broker_and_user(store: MemoryStore) -> AsyncGenerator[tuple[QueueSide, QueueSide], None]:
    """A broker and a member; with the same store, the broker after a restart."""
    network = MemoryNetwork()
    broker = QueueSide(network, Limits(), store=store)
    user = QueueSide(network, Limits())
    user.knows(broker)
    async with trio.open_nursery() as nursery:
        await nursery.start(broker.run)
        await nursery.start(user.run)
        yield broker, user
        nursery.cancel_scope.cancel()
    await broker.engine.aclose()


async def bodies(user: QueueSide, broker: QueueSide, count: int, *, exclusive: bool) -> list[bytes]:
    found: list[bytes] = []
    with trio.fail_after(1_000):
        async with user.at(broker).consume("jobs", "c", max_in_flight=10, exclusive=exclusive) as messages:
            async for message in messages:
                found.append(message.body)
                await message.finish(durable=True)
                if len(found) == count:
                    break
    return found


@pytest.mark.parametrize("exclusive", [False, True])
async def test_a_stored_message_that_no_frame_holds_becomes_a_dead_letter_and_stays_one_over_restarts(
    exclusive: bool, autojump_clock: trio.testing.MockClock
) -> None:
    store = MemoryStore()
    async with broker_and_user(store) as (broker, user):
        await broker.queues.create("jobs", QueueOptions(partitions=1))
        await broker.queues.create_channel("jobs", "c", exclusive=exclusive)
        # Earlier versions took such a message from programs of the broker's node.
        await broker.engine.publish(REALM, "jobs", [NewMessage(b"before"), POISON, NewMessage(b"behind")])
        assert await bodies(user, broker, 2, exclusive=exclusive) == [b"before", b"behind"]
        assert broker.count("messages_undeliverable") == 1
    for number in range(2):
        async with broker_and_user(store) as (broker, user):
            (dead,) = await broker.queues.dead_letters("jobs", "c")
            assert "cannot be sent to a member: 80010 bytes of attributes" in dead.reasons[-1]
            await broker.queues.publish("jobs", b"after %d" % number)
            assert await bodies(user, broker, 1, exclusive=exclusive) == [b"after %d" % number]


async def test_a_publish_that_the_store_cannot_write_fails_alone(tmp_path: Path) -> None:
    async with running_engine(SqliteStore(tmp_path / "queues.sqlite")) as engine:
        await engine.create_queue("", "jobs", QueueOptions())
        outcomes: dict[int, object] = {}

        async def publish(number: int, body: Any) -> None:
            try:
                outcomes[number] = await engine.publish("", "jobs", [NewMessage(body)])
            except Exception as error:
                outcomes[number] = error

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(publish, number, b"x")
                if number == 3:
                    nursery.start_soon(publish, 100, _Length())
        assert isinstance(outcomes.pop(100), StoreError)
        assert all(isinstance(outcome, list) for outcome in outcomes.values())
        assert await engine.publish("", "jobs", [NewMessage(b"after")])


class _Length:
    """A body that no store can write, and that passes every check of a length."""

    def __len__(self) -> int:
        return 1


async def test_an_error_in_what_one_waits_for_does_not_end_the_commits(autojump_clock: trio.testing.MockClock) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs", QueueOptions())

        def fail() -> None:
            raise RuntimeError("a fault of one who waits")

        engine.when_durable(fail)
        assert await engine.publish("", "jobs", [NewMessage(b"x")])
        await engine.flush()


async def test_a_refused_publish_to_a_queue_that_is_not_loaded_yet_leaves_the_broker_at_work(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = MemoryStore()
    async with broker_and_user(store) as (broker, _user):
        await broker.queues.create("jobs", QueueOptions(order="strict"))
    async with broker_and_user(store) as (broker, user):
        with pytest.raises(Dep2pError, match="keeps the order of keys"):
            await user.at(broker).publish("jobs", b"x", key="a", delay_s=5)
        assert await user.at(broker).publish("jobs", b"x", key="a")


WRONG_OPTIONS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"tags": ["x" * 9_000, "x" * 9_000]}, MessageTooLargeError),
    ({"headers": {"a": b"x" * 20_000}}, MessageTooLargeError),
    ({"key": "k" * 70_000}, MessageTooLargeError),
    ({"key": b"k"}, ValueError),
    ({"key": "\ud800"}, ValueError),
    ({"tags": ["t"] * 33}, ValueError),
    ({"tags": "abc"}, ValueError),
    ({"headers": {"a": object()}}, ValueError),
    ({"headers": {"a": "\ud800"}}, ValueError),
    ({"headers": {"a": 2**80}}, ValueError),
    ({"headers": {"a": [[[[[[1]]]]]]}}, ValueError),
    ({"priority": -1}, ValueError),
    ({"priority": 256}, ValueError),
    ({"delay_s": -1.0}, ValueError),
    ({"delay_s": float("inf")}, ValueError),
    ({"delay_s": float("nan")}, ValueError),
]


@pytest.mark.parametrize(("options", "kind"), WRONG_OPTIONS, ids=lambda each: str(each)[:30])
async def test_options_that_no_consumer_could_read_are_refused_at_the_entrance(
    autojump_clock: trio.testing.MockClock, options: dict[str, Any], kind: type[Exception]
) -> None:
    async with queue_sides() as [broker, user]:
        await broker.queues.create("jobs", QueueOptions())
        for queues in (broker.queues, user.at(broker)):
            with pytest.raises(kind):
                await queues.publish("jobs", b"x", **options)
            with pytest.raises(kind):
                await queues.queue("jobs").publish_many([b"x"], **options)
            async with queues.producer("jobs") as producer:
                with pytest.raises(kind):
                    await producer.publish(b"x", **options)
            assert await queues.publish("jobs", b"x")


async def test_batches_of_the_wrong_kind_and_wrong_names_are_refused_before_others_share_them(
    autojump_clock: trio.testing.MockClock,
) -> None:
    text: Any = "text"
    long = b"x" * (ATTRIBUTES_BYTES_MAX + 1)
    async with queue_sides() as [broker, user]:
        await broker.queues.create("jobs", QueueOptions())
        for queues in (broker.queues, user.at(broker)):
            with pytest.raises(ValueError, match="must be bytes"):
                await queues.publish_batch("jobs", [WireMessage(b"", text)], None)
            with pytest.raises(ValueError, match="must be bytes"):
                await queues.publish_sequenced("jobs", [WireMessage(text, b"")], (bytes(16), 1))
            with pytest.raises(MessageTooLargeError):
                await queues.publish_batch("jobs", [WireMessage(long, b"")], None)
            with pytest.raises(ValueError, match="name"):
                await queues.publish("x" * 300, b"x")
            assert await queues.publish("jobs", b"x")


async def test_results_with_extreme_values_settle_their_message_and_no_link_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    wrong: Any = "5"
    async with queue_sides() as [broker, user]:
        await broker.queues.create("jobs", QueueOptions(delay_max_s=1.0))
        for queues in (broker.queues, user.at(broker)):
            await broker.queues.empty_all("jobs")
            await broker.queues.publish("jobs", b"x")
            async with queues.consume("jobs", "c") as messages:
                for delay_s, reason in ((1e300, "\ud800"), (-1e300, "x" * 100_000), (float("inf"), "")):
                    message = await messages.__anext__()
                    with pytest.raises(ValueError, match="delay_s must be a number"):
                        await message.requeue(wrong)
                    await message.requeue(delay_s, reason)
        assert user.count("links_failed_internally") == 0


def test_attributes_at_the_bound_pass() -> None:
    assert len(encode_attributes(Attributes(key="k" * (ATTRIBUTES_BYTES_MAX - 10)))) <= ATTRIBUTES_BYTES_MAX


async def test_a_stored_message_with_unreadable_attributes_is_listed_with_the_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(1) as [broker]:
        await broker.queues.create("jobs", QueueOptions(partitions=1))
        await broker.engine.publish(REALM, "jobs", [NewMessage(b"one", attributes=b"\xff\xff"), NewMessage(b"two")])
        assert len(await broker.queues.peek("jobs")) == 2
        assert len(await exported(broker.queues, "jobs")) == 2
