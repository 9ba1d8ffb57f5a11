"""Simple consumers: receive, ack, change_invisible, of this node's queues and of another one's."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    NotInFlightError,
    QueueAccessError,
    QueueConsumerClosedError,
    QueueFullError,
    QueueNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.protocols.queues.admin import operation_of
from dep2p.protocols.queues.consumer import ChannelDelivery
from dep2p.protocols.queues.message import NewMessage
from dep2p.protocols.queues.wire.admin import parse_request
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker import receive as queue_simple
from dep2p.queues.broker.receive import parse_handle
from tests.queues.nodes import QueueSide, queue_sides, running_engine

Clock = trio.testing.MockClock


class QueuesSetup:
    """The queues of a node, as it sees them itself or another member does."""

    def __init__(self, queues: Queues, broker: QueueSide, others: list[QueueSide]) -> None:
        self.queues = queues
        self.broker = broker
        self.others = others


@pytest.fixture(params=["local", "remote"])
async def setup(request: pytest.FixtureRequest) -> AsyncGenerator[QueuesSetup, None]:
    async with queue_sides(3) as (broker, *others):
        queues: Queues = broker.queues if request.param == "local" else others[0].at(broker)
        await queues.create("jobs", {"msg_timeout_max_s": 600.0, "max_attempts": 3})
        yield QueuesSetup(queues, broker, others)


async def _publish(setup: QueuesSetup, count: int) -> None:
    await setup.queues.publish_many("jobs", [b"%d" % n for n in range(count)], headers={"h": 7}, key="k")


async def test_what_is_received_and_acknowledged_is_gone(setup: QueuesSetup, autojump_clock: Clock) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 5)
    got = await consumer.receive(3)
    assert [message.body for message in got] == [b"0", b"1", b"2"]
    assert (got[0].attempts, got[0].key, got[0].headers) == (1, "k", {"h": 7})
    assert got[0].invisible_s == pytest.approx(60, abs=1)
    await consumer.ack(*got)
    rest = await consumer.receive()
    assert [message.body for message in rest] == [b"3", b"4"]
    await consumer.ack(rest[0].handle, rest[1])
    (channel,) = (await setup.queues.info("jobs")).channels
    assert (channel.ready, channel.in_flight) == (0, 0)


async def test_what_one_asker_holds_is_bounded(
    setup: QueuesSetup, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_simple, "HELD_ITEMS_MAX", 5)
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 9)
    got = [*await consumer.receive(3), *await consumer.receive(3)]
    assert [message.body for message in got] == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(QueueFullError, match=r"5 received messages of 5 bytes are not acknowledged"):
        await consumer.receive(3)
    await consumer.ack(*got[:2])
    assert [message.body for message in await consumer.receive(3)] == [b"5", b"6"]


async def test_a_receive_waits_for_a_message_as_long_as_it_says(setup: QueuesSetup, autojump_clock: Clock) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    began = trio.current_time()
    assert await consumer.receive(wait_s=7) == []
    assert trio.current_time() - began == pytest.approx(7, abs=0.5)

    async with trio.open_nursery() as nursery:

        async def publish_later() -> None:
            await trio.sleep(5)
            await _publish(setup, 1)

        nursery.start_soon(publish_later)
        assert len(await consumer.receive(wait_s=20)) == 1


async def test_the_invisible_duration_is_kept_then_it_is_delivered_again(
    setup: QueuesSetup, autojump_clock: Clock
) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 1)
    (first,) = await consumer.receive(invisible_s=30)
    assert await consumer.receive(wait_s=15) == []
    (again,) = await consumer.receive(wait_s=20)
    assert (again.id, again.attempts) == (first.id, 2)
    with pytest.raises(NotInFlightError, match=first.handle):
        await consumer.ack(first)  # the handle is of the first delivery
    await consumer.ack(again)


async def test_each_message_has_its_own_duration(setup: QueuesSetup, autojump_clock: Clock) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 3)
    for seconds in (300, 40, 100):
        await consumer.receive(1, invisible_s=seconds)
    began = trio.current_time()
    order: list[tuple[bytes, int]] = []
    while len(order) < 3:
        for message in await consumer.receive(wait_s=20, invisible_s=599):
            order.append((message.body, round((trio.current_time() - began) / 10)))
    assert order == [(b"1", 4), (b"2", 10), (b"0", 30)]


async def test_the_duration_can_be_changed(setup: QueuesSetup, autojump_clock: Clock) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 2)
    longer, sooner = await consumer.receive(invisible_s=30)
    assert await consumer.change_invisible(longer, 500) == pytest.approx(500, abs=1)
    assert await consumer.change_invisible(sooner.handle, 0) == 0
    (again,) = await consumer.receive()
    assert (again.id, again.attempts) == (sooner.id, 2)
    await trio.sleep(400)
    await consumer.ack(longer)
    with pytest.raises(NotInFlightError):
        await consumer.change_invisible(longer, 10)


async def test_no_message_is_held_for_longer_than_the_queue_allows(setup: QueuesSetup, autojump_clock: Clock) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 1)
    (message,) = await consumer.receive(invisible_s=10_000)
    assert message.invisible_s == pytest.approx(600, abs=1)
    await trio.sleep(500)
    assert await consumer.change_invisible(message, 500) == pytest.approx(100, abs=1)


async def test_after_the_last_attempt_it_is_a_dead_letter(setup: QueuesSetup, autojump_clock: Clock) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 1)
    for _ in range(3):
        (message,) = await consumer.receive(wait_s=20)
        await consumer.change_invisible(message, 0)
    assert await consumer.receive(wait_s=1) == []
    assert len(await setup.queues.dead_letters("jobs", "work")) == 1


async def test_19_a_receive_whose_answer_was_lost_can_be_asked_again(setup: QueuesSetup, autojump_clock: Clock) -> None:
    """(19: apache/rocketmq-clients#708, apache/rocketmq#6690) The messages of a lost answer were away until their time
    was over: asked again with the same attempt id, they come."""
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 4)
    lost = await consumer.receive(2, attempt_id="call 1", invisible_s=300)
    again = await consumer.receive(2, attempt_id="call 1", invisible_s=300)
    assert [message.handle for message in again] == [message.handle for message in lost]
    assert [message.body for message in again] == [b"0", b"1"]
    await consumer.ack(again[0])
    assert [m.body for m in await consumer.receive(2, attempt_id="call 1")] == [b"1"]
    assert [m.body for m in await consumer.receive(2, attempt_id="call 2")] == [b"2", b"3"]


async def test_32_one_call_gives_what_was_not_acknowledged_in_time_and_what_is_new(
    setup: QueuesSetup, autojump_clock: Clock
) -> None:
    """(32: redis/redis#14402) Claiming what was left over needed another command than reading what is new."""
    consumer = setup.queues.simple_consumer("jobs", "work")
    await _publish(setup, 1)
    await consumer.receive(invisible_s=10)
    await trio.sleep(11)
    await _publish(setup, 1)
    got: list[int] = []
    while len(got) < 2:
        got += [message.attempts for message in await consumer.receive()]
    assert sorted(got) == [1, 2]


async def test_waiting_receives_share_what_comes_and_take_no_more_than_they_asked_for(
    setup: QueuesSetup, autojump_clock: Clock
) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    got: list[list[bytes]] = []

    async def receive() -> None:
        got.append([message.body for message in await consumer.receive(2, wait_s=20)])

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        await _publish(setup, 20)
    assert all(1 <= len(each) <= 2 for each in got)
    bodies = [body for each in got for body in each]
    assert len(set(bodies)) == len(bodies)
    # What came for nobody went back untried.
    rest: list[int] = []
    while len(rest) < 20 - len(bodies):
        rest += [message.attempts for message in await consumer.receive(32)]
    assert rest == [1] * (20 - len(bodies))


async def _rest(setup: QueuesSetup, count: int) -> list[int]:
    """The attempts of so many messages, as somebody else receives them within a few seconds."""
    consumer = setup.others[1].at(setup.broker).simple_consumer("jobs", "work")
    found: list[int] = []
    with trio.fail_after(5):
        while len(found) < count:
            found += [message.attempts for message in await consumer.receive(wait_s=5)]
    return found


def _waiting(setup: QueuesSetup) -> int:
    return setup.broker.engine.simple.waiting


@pytest.mark.parametrize("moment", ["while it waits", "when it was told", "at once"])
async def test_a_receive_that_was_left_hides_nothing(setup: QueuesSetup, autojump_clock: Clock, moment: str) -> None:
    """The far end had gone on with it, and held what it got for nobody until the invisible duration was over."""
    consumer = setup.queues.simple_consumer("jobs", "work")
    await setup.queues.create_channel("jobs", "work")
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: consumer.receive(wait_s=20, invisible_s=600))
            with trio.fail_after(5):
                while not _waiting(setup):  # noqa: ASYNC110
                    await trio.sleep(0.01)
            if moment == "at once":
                await setup.broker.queues.publish_many("jobs", [b"x"] * 5)
            scope.cancel()
    if moment == "when it was told":
        with trio.fail_after(5):
            while _waiting(setup):  # noqa: ASYNC110
                await trio.sleep(0.01)
    if moment != "at once":
        await setup.broker.queues.publish_many("jobs", [b"x"] * 5)
    assert await _rest(setup, 5) == [1] * 5


@pytest.mark.parametrize("end", ["the link is cut", "no answer in time"])
async def test_what_an_answer_had_that_was_lost_on_its_way_is_others(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    async with queue_sides(3, limits=Limits(request_timeout_s=5.0)) as (broker, asker, other):
        await broker.queues.create("jobs", {"max_attempts": 1})
        await broker.queues.create_channel("jobs", "work")
        await broker.queues.publish_many("jobs", [b"x"] * 5)
        plain = broker.service.administer
        took = trio.Event()

        async def late(peer: Any, request: Any) -> Any:
            answer = await plain(peer, request)
            if operation_of(request) == "receive":
                took.set()
                await trio.sleep(30)
            return answer

        monkeypatch.setattr(broker.service, "administer", late)

        async def receive() -> None:
            with pytest.raises((StreamClosedError, RequestTimeoutError)):
                await asker.at(broker).simple_consumer("jobs", "work").receive(wait_s=0, invisible_s=600)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await took.wait()
            if end == "the link is cut":
                await asker.cut(broker)
        monkeypatch.undo()
        assert await _rest(QueuesSetup(broker.queues, broker, [asker, other]), 5) == [1] * 5
        assert (asker.count("receives_ended"), asker.count("receives_not_ended")) == (1, 0)


async def test_a_receive_with_an_attempt_id_is_kept_for_who_asks_again(autojump_clock: Clock) -> None:
    async with queue_sides(2) as (broker, asker):
        await broker.queues.create("jobs")
        await broker.queues.create_channel("jobs", "work")
        consumer = asker.at(broker).simple_consumer("jobs", "work")
        with trio.move_on_after(5):
            await consumer.receive(wait_s=20, attempt_id="a", invisible_s=600)
        await broker.queues.publish("jobs", b"x")
        await trio.sleep(1)
        assert [message.body for message in await consumer.receive(wait_s=1, attempt_id="a")] == [b"x"]


async def test_a_receive_may_be_ended_before_it_comes(autojump_clock: Clock) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        receiver = await engine.simple.receiver("", "jobs", "work", "peer", from_start=False)
        receiver.end("a")
        await engine.publish("", "jobs", [NewMessage(b"x")])
        began_s = trio.current_time()
        assert await receiver.receive(1, 20.0, 60.0, "a") == []
        assert trio.current_time() == began_s
        assert receiver.is_idle
        # A thousand others do no harm, and are not kept forever.
        for number in range(1_000):
            receiver.end(f"b{number}")
        (got,) = await receiver.receive(1, 20.0, 60.0, "c")
        assert got.delivery.attempts == 1
        receiver.end("c")
        (again,) = await receiver.receive(1, 20.0, 60.0, "d")
        assert again.delivery.attempts == 1
        receiver.end("c")  # it is another one's now
        assert not receiver.is_idle
        assert await receiver.receive(1, 0.0, 60.0, "e", only_again=True) == []
        assert [each.handle for each in await receiver.receive(1, 0.0, 60.0, "d", only_again=True)] == [again.handle]


async def test_a_receive_may_be_ended_before_it_knows_of_what_it_got(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        receiver = await engine.simple.receiver("", "jobs", "work", "peer", from_start=False)
        await engine.publish("", "jobs", [NewMessage(b"x")])
        deliver = receiver.core.on_deliver

        def deliver_and_end(deliveries: list[ChannelDelivery]) -> None:
            deliver(deliveries)
            receiver.end("a")

        monkeypatch.setattr(receiver.core, "on_deliver", deliver_and_end)
        assert await receiver.receive(1, 20.0, 600.0, "a") == []
        monkeypatch.undo()
        (got,) = await receiver.receive(1, 20.0, 600.0, "b")
        assert got.delivery.attempts == 1


@pytest.mark.parametrize("attempt_id", [None, "", 7, "x" * 65])
async def test_the_end_of_no_receive_is_refused(setup: QueuesSetup, autojump_clock: Clock, attempt_id: object) -> None:
    await setup.queues.create_channel("jobs", "work")
    with pytest.raises((ValueError, Dep2pError)):
        await setup.queues.ask(
            parse_request({"op": "end_receive", "queue": "jobs", "channel": "work", "attempt_id": attempt_id})
        )
    with pytest.raises(ChannelNotFoundError):
        await setup.queues.ask(
            parse_request({"op": "end_receive", "queue": "jobs", "channel": "other", "attempt_id": "a"})
        )


async def test_what_one_member_received_no_other_one_settles(autojump_clock: Clock) -> None:
    async with queue_sides(3) as (broker, first, second):
        await broker.queues.create("jobs")
        await broker.queues.publish("jobs", b"a")
        (message,) = await first.at(broker).simple_consumer("jobs", "work").receive()
        for other in (second.at(broker), broker.queues):
            with pytest.raises(NotInFlightError):
                await other.simple_consumer("jobs", "work").ack(message)
        await first.cut(broker)  # it stays its own: it belongs to the member, not to a connection
        await first.at(broker).simple_consumer("jobs", "work").ack(message)


async def test_who_may_not_consume_receives_nothing(autojump_clock: Clock) -> None:
    async with queue_sides() as (broker, asker):
        await broker.queues.create("jobs", access={"consume": "owner"})
        consumer = asker.at(broker).simple_consumer("jobs", "work")
        with pytest.raises(QueueAccessError):
            await consumer.receive()
        with pytest.raises(QueueAccessError):
            await consumer.ack("0000010000000001-1")


async def test_a_deleted_channel_ends_a_receive_that_waits(setup: QueuesSetup, autojump_clock: Clock) -> None:
    consumer = setup.queues.simple_consumer("jobs", "work")
    await setup.queues.create_channel("jobs", "work")
    async with trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(QueueConsumerClosedError):
                await consumer.receive(wait_s=20)

        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        await setup.queues.delete_channel("jobs", "work")
    with pytest.raises(QueueNotFoundError):
        await setup.queues.simple_consumer("nothing", "work").receive()


@pytest.mark.parametrize(
    "fields",
    [
        {"count": 0},
        {"count": 33},
        {"wait_s": 21},
        {"wait_s": "now"},
        {"invisible_s": 0},
        {"invisible_s": -1},
        {"attempt_id": "x" * 65},
        {"attempt_id": 7},
        {"channel": "#"},
        {"channel": "work#ephemeral"},
    ],
)
async def test_a_malformed_receive_is_refused(
    setup: QueuesSetup, autojump_clock: Clock, fields: dict[str, object]
) -> None:
    with pytest.raises((ValueError, Dep2pError)):
        await setup.queues.ask(parse_request({"op": "receive", "queue": "jobs", "channel": "work", **fields}))


@pytest.mark.parametrize(
    "handles", [[], ["x"], ["0000010000000001"], ["0000010000000001-"], ["zz-1"], "a", [1], ["a-1"] * 257]
)
async def test_malformed_handles_are_refused(setup: QueuesSetup, autojump_clock: Clock, handles: object) -> None:
    await setup.queues.create_channel("jobs", "work")
    with pytest.raises((ValueError, Dep2pError)):
        await setup.queues.ask(parse_request({"op": "ack", "queue": "jobs", "channel": "work", "handles": handles}))


def test_a_handle_names_a_message_and_an_attempt() -> None:
    assert parse_handle("0000010000000003-2") == ((1, 3), 2)


async def test_a_message_of_the_largest_size_can_be_received(autojump_clock: Clock) -> None:
    """Its answer is a third longer in base64 than the largest message."""
    async with queue_sides() as (broker, asker):
        await broker.queues.create("jobs")
        await asker.at(broker).publish("jobs", bytes(1_048_576))
        (message,) = await asker.at(broker).simple_consumer("jobs", "work").receive()
        assert len(message.body) == 1_048_576
        assert len((await asker.at(broker).peek("jobs"))[0].body) == 1_048_576


async def test_askers_that_hold_nothing_are_forgotten(autojump_clock: Clock) -> None:
    async with running_engine() as engine:
        await engine.create_queue("", "jobs")
        for number in range(50):
            receiver = await engine.simple.receiver("", "jobs", "work", f"peer {number}", from_start=False)
            assert await receiver.receive(1, 0.0, 1.0, "") == []
        assert len(engine.simple) == 1
        assert len(engine.registry.find("", "jobs").channel("work").consumers) == 1
