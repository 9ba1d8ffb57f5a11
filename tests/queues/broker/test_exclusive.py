"""Exclusive channels between nodes in memory: order per key, handover, lost links and leases, expansion, refusals."""

import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from dep2p.errors import (
    LockLostError,
    NotInFlightError,
    ProtocolError,
    QueueConsumerClosedError,
    QueueExistsError,
    StreamClosedError,
)
from dep2p.protocols.queues.admin import OptionValue
from dep2p.protocols.queues.attributes import Attributes, encode_attributes
from dep2p.protocols.queues.names import parse_message_id
from dep2p.protocols.queues.wire import frames as wire
from dep2p.protocols.queues.wire.admin import parse_request
from dep2p.protocols.queues.wire.frames import DeliveryResult, Settle, Settled, WireMessage
from dep2p.protocols.wire.cbor import encode_canonical
from dep2p.protocols.wire.frame import encode_frame
from dep2p.queues.api.queues import Queues
from dep2p.queues.consumer import Messages, QueueMessage
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from dep2p.queues.types import SubscribeOptions
from dep2p.storage.sqlite.store import SqliteStore
from tests.queues.nodes import QueueSide, queue_sides, running_engine

LEASE_S = 30.0


class Seen:
    """The messages that handlers have seen, in their order, by key."""

    def __init__(self) -> None:
        self.numbers: defaultdict[str, list[int]] = defaultdict(list)
        self.by: defaultdict[str, list[str]] = defaultdict(list)
        self.count = 0
        self._changed = trio.Event()

    def add(self, message: QueueMessage, by: str = "") -> None:
        self.numbers[message.key].append(int(message.body))
        self.by[message.key].append(by)
        self.count += 1
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, count: int) -> None:
        with trio.fail_after(600):
            while self.count < count:
                await self._changed.wait()


async def put(queues: Queues, keys: int, first: int, last: int, name: str = "jobs") -> None:
    """Numbers of each key, in their order."""
    for number in range(first, last + 1):
        await queues.publish_batch(
            name,
            [WireMessage(encode_attributes(Attributes(f"k{key}")), b"%d" % number) for key in range(keys)],
            None,
        )


async def consume_all(
    queues: Queues,
    seen: Seen,
    name: str,
    *,
    started: trio.Event | None = None,
    ending: trio.Event | None = None,
    work_s: float = 0.0,
) -> None:
    """Until ``ending``, then in good order."""
    async with queues.consume("jobs", "c", exclusive=True, max_in_flight=64) as messages:
        if started is not None:
            await until_held(messages)
            started.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_handle_all, messages, seen, name, work_s)
            if ending is None:
                await trio.sleep_forever()
            else:
                await ending.wait()
            nursery.cancel_scope.cancel()


async def _handle_all(messages: Messages, seen: Seen, name: str, work_s: float) -> None:
    async for message in messages:
        with message.scope() as scope:
            await trio.sleep(work_s)
        if not scope.cancelled_caught:
            seen.add(message, name)
            await message.finish()


def exclusive(messages: Messages) -> ExclusiveConsumer:
    consumer = messages.consumer
    assert isinstance(consumer, ExclusiveConsumer)
    return consumer


async def until_held(messages: Messages, count: int = 1) -> None:
    await until(lambda: len(exclusive(messages).partitions()) >= count)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(600):
        while not condition():  # noqa: ASYNC110  (of states that nobody tells)
            await trio.sleep(0.01)


async def take(messages: Messages, count: int) -> list[QueueMessage]:
    with trio.fail_after(300):
        return [await messages.__anext__() for _ in range(count)]


def in_order(seen: Seen, keys: int, last: int) -> None:
    expected = list(range(1, last + 1))
    assert {f"k{key}": seen.numbers[f"k{key}"] for key in range(keys)} == {f"k{key}": expected for key in range(keys)}


async def make(side: QueueSide, partitions: int = 4, **options: OptionValue) -> None:
    await side.queues.create("jobs", {"partitions": partitions, "order": "strict", "lease_s": LEASE_S, **options})


async def test_order_per_key_over_consumers_that_come_and_go_and_expansion(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """(alibaba/rocketmq#401) Scaling reorders nothing."""
    async with queue_sides(4) as [broker, one, two, publisher]:
        await make(broker, 2)
        seen = Seen()
        ending = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consume_all, one.at(broker), seen, "one")
            await put(publisher.at(broker), 40, 1, 5)
            await seen.until(100)
            nursery.start_soon(lambda: consume_all(two.at(broker), seen, "two", ending=ending))
            nursery.start_soon(consume_all, broker.queues, seen, "here")
            await put(publisher.at(broker), 40, 6, 10)
            assert len((await publisher.at(broker).expand("jobs", 6)).added) == 4
            await put(publisher.at(broker), 40, 11, 15)
            await seen.until(450)
            ending.set()
            await put(publisher.at(broker), 40, 16, 20)
            await seen.until(800)
            nursery.cancel_scope.cancel()
        in_order(seen, 40, 20)
        assert {name for names in seen.by.values() for name in names} == {"one", "two", "here"}
        route = await publisher.at(broker).route("jobs")
        assert (route.version, len(route.partitions), len(route.routes)) == (2, 6, 6)
        assert all(not each.after for each in route.routes)  # everything old is done


async def test_a_clean_leave_hands_over_at_once_and_nothing_is_tried_in_vain(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """(rocketmq-client-go#1220) The lock is released at the handover: the next one starts in less than a second."""
    async with queue_sides(3) as [broker, one, two]:
        await make(broker, 2)
        async with two.at(broker).consume("jobs", "c", exclusive=True, max_in_flight=64) as rest:
            async with one.at(broker).consume("jobs", "c", exclusive=True, max_in_flight=64) as messages:
                await until_held(messages)
                await until(lambda: len(exclusive(rest).partitions()) == 1)
                [mine] = exclusive(messages).partitions()
                await put(one.at(broker), 30, 1, 1)
                [first] = await take(messages, 1)
            left_s = trio.current_time()
            await until_held(rest, 2)
            assert trio.current_time() - left_s < 1.0
            held = await take(rest, 30)
            attempts = {message.id: message.attempts for message in held}
            assert attempts.pop(first.id) == 2  # the block ended while it was held
            assert set(attempts.values()) == {1}
            assert exclusive(rest).partitions()[mine].epoch == 3


async def test_a_partition_is_handed_over_when_its_handlers_have_finished(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [broker, one, two]:
        await make(broker, 2)
        revoked: list[int] = []
        async with one.at(broker).consume("jobs", "c", exclusive=True, max_in_flight=64) as messages:
            exclusive(messages).on_revoke = revoked.append
            await until_held(messages, 2)
            await put(one.at(broker), 30, 1, 2)
            held = await take(messages, 20)
            async with two.at(broker).consume("jobs", "c", exclusive=True, max_in_flight=64) as rest:
                await until(lambda: bool(revoked))
                await trio.sleep(3.0)
                [draining] = [each for each in exclusive(messages).partitions().values() if each.is_draining]
                assert exclusive(rest).partitions() == {}
                moved = [message for message in held if parse_message_id(message.id)[0] == draining.partition]
                assert moved
                for message in moved[:-1]:
                    await message.finish()
                await trio.sleep(1.0)
                assert exclusive(rest).partitions() == {}
                await moved[-1].finish()
                await until_held(rest)
                assert [*exclusive(rest).partitions()] == [draining.partition]
                [after] = await take(rest, 1)
                assert after.attempts == 1  # what was not started was released


async def test_surplus_consumers_wait_with_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [broker, one, two]:
        await make(broker, 1)
        async with two.at(broker).consume("jobs", "c", exclusive=True) as waiting:
            await until_held(waiting)
            async with one.at(broker).consume("jobs", "c", exclusive=True) as surplus:
                await trio.sleep(20)
                assert exclusive(surplus).partitions() == {}
                assert exclusive(surplus).lease_s_left() > 20
                consumers = (await one.at(broker).consumers("jobs", "c")).consumers
                assert sorted(len(each.partitions) for each in consumers) == [0, 1]
                [lock] = (await one.at(broker).locks("jobs", "c")).locks
                assert (lock.epoch, str(two.peer) in lock.consumer) == (1, True)
                assert lock.member == exclusive(waiting).member.hex()[:8]  # all of it would let others speak for it


async def test_a_link_that_comes_back_within_the_lease_costs_no_partition(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [broker, one, two]:
        await make(broker, 1)
        async with one.at(broker).consume("jobs", "c", exclusive=True, max_in_flight=2) as messages:
            await until_held(messages)
            await put(one.at(broker), 1, 1, 3)
            [first] = await take(messages, 1)
            async with two.at(broker).consume("jobs", "c", exclusive=True) as waiting:
                await one.cut(broker)
                await trio.sleep(1.0)
                await first.finish()  # it was handled meanwhile, and counts
                [second] = await take(messages, 1)
                assert (second.body, second.attempts) == (b"2", 1)
                await second.finish(durable=True)
                assert exclusive(waiting).partitions() == {}
                assert exclusive(messages).partitions()[1].epoch == 2
        assert (await broker.queues.info("jobs")).messages <= 1


async def test_a_lease_that_ends_stops_the_handler_and_its_result_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [broker, one, two]:
        await make(broker, 1)
        async with one.at(broker).consume("jobs", "c", exclusive=True) as messages:
            await until_held(messages)
            await put(one.at(broker), 1, 1, 1)
            [first] = await take(messages, 1)
            one.network.partition(one.peer, broker.peer)
            started_s = trio.current_time()
            async with two.at(broker).consume("jobs", "c", exclusive=True) as rest:
                with first.scope() as scope:
                    await trio.sleep(1_000)
                assert scope.cancelled_caught
                stopped_s = trio.current_time() - started_s
                assert LEASE_S - 6 < stopped_s <= LEASE_S
                assert exclusive(rest).partitions() == {}
                await until_held(rest)
                assert stopped_s < trio.current_time() - started_s < LEASE_S + 2
                with pytest.raises(NotInFlightError):
                    await first.finish()
                [again] = await take(rest, 1)
                assert (again.body, again.attempts, exclusive(rest).partitions()[1].epoch) == (b"1", 2, 2)
                await again.finish()


async def test_a_channel_is_exclusive_or_shared_for_good(autojump_clock: trio.testing.MockClock) -> None:
    """(rocketmq-clients#754, #1092, #599) Nothing is delivered in the wrong mode: it is known before."""
    async with queue_sides() as [broker, other]:
        await make(broker)
        await broker.queues.create_channel("jobs", "ordered", exclusive=True)
        await broker.queues.create_channel("jobs", "shared")
        await put(broker.queues, 5, 1, 1)
        for queues in (broker.queues, other.at(broker)):
            with pytest.raises(QueueExistsError, match="exclusive"):
                async with queues.consume("jobs", "ordered"):
                    pass
            with pytest.raises(QueueExistsError, match="shared"):
                async with queues.consume("jobs", "shared", exclusive=True):
                    pass
            with pytest.raises(QueueExistsError, match="shared"):
                await queues.create_channel("jobs", "shared", exclusive=True)
            with pytest.raises(QueueExistsError, match="exclusive"):
                await queues.ask(parse_request({"op": "receive", "queue": "jobs", "channel": "ordered", "wait_s": 0.0}))
        channels = {each.name: each for each in (await broker.queues.info("jobs")).channels}
        assert (channels["ordered"].exclusive, channels["shared"].exclusive) == (True, False)
        assert channels["ordered"].delivered == channels["shared"].delivered == 0


async def test_a_message_that_fails_comes_again_before_the_next_of_its_key(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides() as [broker, other]:
        await make(broker, max_attempts=3)
        await put(broker.queues, 2, 1, 3)
        seen: list[tuple[str, int]] = []
        async with other.at(broker).consume("jobs", "c", exclusive=True, max_in_flight=10) as messages:
            with trio.fail_after(120):
                while len(seen) < 8:
                    message = await messages.__anext__()
                    seen.append((message.key, int(message.body)))
                    if (message.key, message.body) == ("k0", b"2"):
                        await message.requeue(reason="never works")
                    else:
                        await message.finish()
        assert [number for key, number in seen if key == "k0"] == [1, 2, 2, 2, 3]
        assert [number for key, number in seen if key == "k1"] == [1, 2, 3]
        [letter] = await broker.queues.dead_letters("jobs", "c")
        assert (letter.key, letter.attempts) == ("k0", 3)


async def test_confirmed_results_and_touch(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await make(broker, 2, msg_timeout_s=10.0)
        await put(broker.queues, 20, 1, 1)
        for queues in (broker.queues, other.at(broker)):
            async with queues.consume("jobs", "c", exclusive=True, max_in_flight=10) as messages:
                held = await take(messages, 10)
                await trio.sleep(6)
                for message in held:
                    assert await message.touch() == pytest.approx(trio.current_time() + 10, abs=0.5)
                await trio.sleep(6)
                assert not held[0].expired
                answer = await messages.consumer.confirm(
                    [DeliveryResult(Settle.FINISH, *parse_message_id(m.id)) for m in held]
                )
                assert answer.refused == []
        assert (await broker.queues.info("jobs")).messages == 0


async def test_a_deleted_channel_ends_its_consumers(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await make(broker)
        for queues in (broker.queues, other.at(broker)):
            async with queues.consume("jobs", "c", exclusive=True) as messages:
                await until_held(messages)
                await broker.queues.delete_channel("jobs", "c")
                with pytest.raises(QueueConsumerClosedError):
                    await messages.__anext__()
        with pytest.raises(ValueError, match="only get more"):
            await broker.queues.expand("jobs", 1)
        with pytest.raises(ProtocolError, match="only get more"):
            await other.at(broker).expand("jobs", 1)


async def test_order_and_locks_survive_a_restart_of_the_broker(
    autojump_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    """A consumer that held a partition before may still work: others wait for its lease; epochs go on."""
    path = tmp_path / "queues.sqlite"
    async with running_engine(SqliteStore(path)) as engine:
        await engine.create_queue("", "jobs", engine.options_from({"partitions": 2, "order": "strict"}))
        await engine.expand("", "jobs", 3)
        consumer = await engine.subscribe_exclusive("", "jobs", "c", SubscribeOptions(max_in_flight=4))
        await until(lambda: len(consumer.partitions()) == 3)
        before = await engine.inspector.group("", "jobs", "c")
        route = await engine.inspector.route("", "jobs")
        # The process ends without a word.
    async with running_engine(SqliteStore(path)) as engine:
        assert await engine.inspector.route("", "jobs") == route
        again = await engine.inspector.group("", "jobs", "c")
        assert again.exclusive
        started_s = trio.current_time()
        consumer = await engine.subscribe_exclusive("", "jobs", "c", SubscribeOptions(max_in_flight=4))
        await until(lambda: len(consumer.partitions()) == 3)
        assert trio.current_time() - started_s > 25
        epochs = {each.partition: each.epoch for each in consumer.partitions().values()}
        assert epochs == {each.partition: each.epoch + 1 for each in before.locks}
        await consumer.aclose()


async def test_batches_with_keys_arrive_in_their_order_though_one_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A full queue refuses one; those that were sent behind it must not overtake it."""
    async with queue_sides() as [broker, other]:
        await make(broker, 1, items_max=100)
        seen = Seen()
        bodies = [b"%d" % number for number in range(1, 161)]
        await broker.queues.publish_many("jobs", bodies[:60], key="k0")
        queues = other.at(broker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: queues.publish_many("jobs", bodies[60:140], key="k0"))  # no room
            await until(lambda: other.count("publishes_held_back") > 0)
            nursery.start_soon(lambda: queues.publish_many("jobs", bodies[140:], key="k0"))  # for this there is
            await until(lambda: other.count("publishes_held_back") > 80)
            nursery.start_soon(consume_all, broker.queues, seen, "here")
            await seen.until(160)
            nursery.cancel_scope.cancel()
        in_order(seen, 1, 160)


@pytest.mark.parametrize(
    "wrong",
    [
        wire.encode_settle(1, 0, [DeliveryResult(Settle.FINISH, 1, 1)]),
        encode_frame(0x50, b"", req_id=1),
        encode_frame(0x52, b"12345", req_id=1),
        encode_frame(0x53, bytes(16), req_id=1),
        encode_frame(0x51, bytes(32), req_id=1),
        encode_frame(
            wire.SUBSCRIBE, encode_canonical({"q": "jobs", "c": "c", "n": 1, "b": 1, "x": b"short"}), req_id=2
        ),
    ],
    ids=["settle", "heartbeat", "unlock", "fenced", "lease", "member"],
)
async def test_malformed_frames_end_the_link_and_nothing_else(
    autojump_clock: trio.testing.MockClock, wrong: bytes
) -> None:
    async with queue_sides(3) as [broker, hostile, other]:
        await make(broker, 1)
        subscribe = encode_canonical({"q": "jobs", "c": "c", "n": 1, "b": 1_000, "x": bytes(16)})
        connection = await hostile.gate.connect(broker.peer)
        stream = await connection.open_stream(hostile.service.protocol)
        await stream.write(encode_frame(wire.SUBSCRIBE, subscribe, req_id=1))
        await stream.read()
        await stream.write(wrong)
        with trio.fail_after(60), contextlib.suppress(StreamClosedError):
            while await stream.read():
                pass
        async with other.at(broker).consume("jobs", "c", exclusive=True) as messages:
            await until_held(messages)


async def test_results_with_an_old_epoch_are_refused_over_the_wire(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await make(broker, 1)
        await put(broker.queues, 1, 1, 1)
        async with other.at(broker).consume("jobs", "c", exclusive=True) as messages:
            [message] = await take(messages, 1)
            consumer = exclusive(messages)
            answers: list[Settled | None] = []
            port = consumer._port  # pyright: ignore[reportPrivateUsage]
            result = DeliveryResult(Settle.FINISH, *parse_message_id(message.id))
            assert port.send_results(99, [result], answers.append)
            await until(lambda: bool(answers))
            assert answers[0] is not None
            assert answers[0].refused == [(1, 1, 15)]
            assert not message.expired
            await message.finish(durable=True)


def test_the_public_exception_of_a_lost_lock() -> None:
    from dep2p.queues.wire_errors import code_of, error_of

    assert code_of(LockLostError("x")) == 15
    assert isinstance(error_of(15, "x"), LockLostError)
    assert issubclass(LockLostError, NotInFlightError)
