"""Simple consumers (receive, ack, change_invisible) of a queue on several nodes, by its own name."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import (
    Dep2pError,
    NotInFlightError,
    QueueAccessError,
    QueueExistsError,
    QueueFullError,
)
from dep2p.protocols.queues.admin import Done, QueueRoute, ReceivedMessage
from dep2p.protocols.queues.names import logical_partition, message_id, parse_message_id
from dep2p.protocols.queues.wire.admin import parse_request
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker import receive as queue_simple
from tests.messaging.nodes import REALM
from tests.queues.distributed.test_distributed import cluster, key_at, make, shards
from tests.queues.nodes import QueueSide, queue_sides

Clock = trio.testing.MockClock


async def fill(queues: Queues, count: int) -> list[str]:
    return [await queues.publish("jobs", b"%d" % number, key=f"k{number}") for number in range(count)]


async def drain(queues: Queues, *, channel: str = "c", count: int = 16, wait_s: float = 0.0) -> list[ReceivedMessage]:
    """Receive until there is nothing."""
    consumer = queues.simple_consumer("jobs", channel)
    found: list[ReceivedMessage] = []
    while got := await consumer.receive(count, wait_s=wait_s):
        found += got
    return found


def held(side: QueueSide) -> int:
    """Messages in flight in all shards there."""
    queues = [side.engine.registry.queues[REALM, name] for name in shards(side)]
    return sum(
        len(consumer.held)
        for queue in queues
        for channel in queue.channels.values()
        for consumer in channel.consumers.values()
    )


def is_held(sides: list[QueueSide], count: int) -> bool:
    """Whether they have so many in flight."""
    return sum(map(held, sides)) == count


def waiting(side: QueueSide) -> int:
    """Receives that wait there."""
    return side.engine.simple.waiting


def partition_of(route: QueueRoute, key: str) -> int:
    """Where a key belongs."""
    logical = logical_partition(key)
    (found,) = [each.partition for each in route.routes if each.low <= logical < each.high]
    return found


async def until(condition: Any, limit_s: float = 60.0) -> None:
    with trio.fail_after(limit_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.05)


@pytest.mark.parametrize("asker", ["controller", "user"])
@pytest.mark.parametrize("count", [1, 3, 16, 32])
async def test_all_partitions_are_received_and_acknowledged(autojump_clock: Clock, asker: str, count: int) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [controller, one, two], 5)
        queues = controller.queues if asker == "controller" else user.at(controller)
        consumer = queues.simple_consumer("jobs", "c")
        ids = await fill(queues, 40)
        found: list[ReceivedMessage] = []
        while got := await consumer.receive(count, wait_s=0):
            assert len(got) <= count
            found += got
            # No message was taken that was not given.
            assert held(controller) + held(one) + held(two) == len(found)
        assert sorted(each.id for each in found) == sorted(ids)
        assert all(each.handle == f"{each.id}-1" for each in found)
        assert all(each.invisible_s == pytest.approx(60, abs=2) for each in found)
        await consumer.ack(*found)
        assert (await queues.info("jobs")).messages == 0
        assert sum(each.messages for each in (await queues.route("jobs")).partitions) == 0
        with pytest.raises(NotInFlightError, match=found[3].handle):
            await consumer.ack(found[3])


async def test_partitions_take_turns(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        await fill(user.at(controller), 200)
        consumer = user.at(controller).simple_consumer("jobs", "c")
        turns = Counter([parse_message_id((await consumer.receive(1))[0].id)[0] for _ in range(40)])
        assert set(turns.values()) == {10}


async def test_what_is_received_belongs_to_the_node_that_asked(autojump_clock: Clock) -> None:
    async with queue_sides(5) as [controller, one, two, user, other]:
        await make(controller.queues, [one, two], 4)
        await fill(user.at(controller), 8)
        found = await drain(user.at(controller))
        for queues in (other.at(controller), controller.queues, one.at(controller)):
            with pytest.raises(NotInFlightError, match=found[0].handle):
                await queues.simple_consumer("jobs", "c").ack(*found)
            with pytest.raises(NotInFlightError, match=found[0].handle):
                await queues.simple_consumer("jobs", "c").change_invisible(found[0], 5)
        await user.cut(one)
        await user.cut(two)
        await user.at(controller).simple_consumer("jobs", "c").ack(*found)


async def test_a_message_of_one_partition_is_worth_all_that_was_wanted(autojump_clock: Clock) -> None:
    """One key has everything: the partitions that are empty cost no room in the answer."""
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        await user.at(controller).publish_many("jobs", [b"%d" % number for number in range(30)], key="k")
        got = await user.at(controller).simple_consumer("jobs", "c").receive(16, wait_s=0)
        assert [int(each.body) for each in got] == list(range(16))


async def test_a_receive_waits_on_all_partitions_and_as_long_as_it_says(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        consumer = user.at(controller).simple_consumer("jobs", "c")
        for wait_s in (0, 7, 20):
            began_s = trio.current_time()
            assert await consumer.receive(wait_s=wait_s) == []
            assert trio.current_time() - began_s == pytest.approx(wait_s, abs=0.6)
        route = await user.at(controller).route("jobs")
        for side in (one, two):
            (key,) = key_at(route, side.peer)
            async with trio.open_nursery() as nursery:

                async def publish_later(key: str = key) -> None:
                    await trio.sleep(5)
                    await controller.queues.publish("jobs", b"x", key=key)

                nursery.start_soon(publish_later)
                began_s = trio.current_time()
                (message,) = await consumer.receive(wait_s=20)
                assert trio.current_time() - began_s == pytest.approx(5, abs=0.5)
                await consumer.ack(message)
        await until(lambda: waiting(one) == waiting(two) == 0, 2)


async def test_what_comes_of_another_partition_at_the_same_time_is_others_at_once(autojump_clock: Clock) -> None:
    async with queue_sides(5) as [controller, one, two, user, other]:
        await make(controller.queues, [one, two], 4, max_attempts=1)
        queues = user.at(controller)
        route = await queues.route("jobs")
        keys = [key_at(route, side.peer)[0] for side in (one, two)]
        got: list[ReceivedMessage] = []
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                got.extend(await queues.simple_consumer("jobs", "c").receive(1, wait_s=20, invisible_s=600))

            nursery.start_soon(receive)
            await until(lambda: waiting(one) == waiting(two) == 2)
            # From each node to its own shard, so that both come in the same moment.
            for side, key in zip((one, two), keys, strict=True):
                nursery.start_soon(partial(side.at(controller).publish, "jobs", key.encode(), key=key))
        assert len(got) == 1
        (rest,) = await other.at(controller).simple_consumer("jobs", "c").receive(16, wait_s=2)
        assert {got[0].body, rest.body} == {key.encode() for key in keys}
        assert rest.attempts == 1  # it was not tried: at the second try it would be a dead letter
        assert held(one) == held(two) == 1
        assert await queues.dead_letters("jobs", "c") == []


async def test_many_receives_at_once_lose_and_repeat_nothing(autojump_clock: Clock) -> None:
    async with queue_sides(5) as [controller, one, two, user, other]:
        await make(controller.queues, [one, two], 4)
        await controller.queues.create_channel("jobs", "c")
        got: list[ReceivedMessage] = []
        done = trio.Event()

        async def receive(queues: Queues, count: int) -> None:
            consumer = queues.simple_consumer("jobs", "c")
            while not done.is_set():
                found = await consumer.receive(count, wait_s=20, invisible_s=3_600)
                got.extend(found)
                if found:
                    await consumer.ack(*found)
                if len(got) >= 300:
                    done.set()
                    nursery.cancel_scope.cancel()

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                for count in (1, 2, 3, 16):
                    nursery.start_soon(receive, user.at(controller), count)
                    nursery.start_soon(receive, other.at(controller), count)
                for number in range(300):
                    await controller.queues.publish("jobs", b"%d" % number, key=f"k{number}")
        assert sorted(int(each.body) for each in got) == list(range(300))
        assert {each.attempts for each in got} == {1}
        assert user.count("receives_not_ended") == 0


@pytest.mark.parametrize("asker", ["controller", "user"])
async def test_a_new_channel_begins_in_all_partitions_with_the_first_receive(autojump_clock: Clock, asker: str) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        queues = controller.queues if asker == "controller" else user.at(controller)
        await fill(queues, 10)
        assert len(await drain(queues, channel="first")) == 10  # the first channel of a queue gets everything
        assert await queues.simple_consumer("jobs", "second").receive(1, wait_s=0) == []
        assert len(await queues.simple_consumer("jobs", "third").receive(32, wait_s=0, from_start=True)) == 10
        await fill(queues, 10)
        assert len(await drain(queues, channel="second")) == 10


async def test_exclusive_and_ephemeral_channels_are_refused(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        await controller.queues.create_channel("jobs", "ordered", exclusive=True)
        for queues in (controller.queues, user.at(controller)):
            with pytest.raises(QueueExistsError, match="exclusive"):
                await queues.simple_consumer("jobs", "ordered").receive(wait_s=0)
            with pytest.raises((ValueError, Dep2pError), match="goes with its last consumer"):
                await queues.simple_consumer("jobs", "x#ephemeral").receive(wait_s=0)
        assert await user.at(controller).simple_consumer("jobs", "c").receive(wait_s=0) == []
        await controller.queues.delete_channel("jobs", "c")
        await controller.queues.create_channel("jobs", "c", exclusive=True)
        with pytest.raises(QueueExistsError, match="exclusive"):
            await user.at(controller).simple_consumer("jobs", "c").receive(wait_s=0)
        assert {each.name for each in (await controller.queues.info("jobs")).channels} == {"c", "ordered"}


async def test_an_expansion_in_the_middle_is_seen_and_handles_stay(autojump_clock: Clock) -> None:
    async with queue_sides(5) as [controller, one, two, user, publisher]:
        await make(controller.queues, [one], 2)
        queues = user.at(controller)
        consumer = queues.simple_consumer("jobs", "c")
        await fill(queues, 4)
        old = await consumer.receive(4, invisible_s=600)
        got: list[ReceivedMessage] = []
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                got.extend(await consumer.receive(wait_s=20))

            nursery.start_soon(receive)
            await trio.sleep(1)
            added = (await controller.queues.expand("jobs", 4, nodes=[two.peer])).added
            (key,) = key_at(await publisher.at(controller).route("jobs"), two.peer)
            await publisher.at(controller).publish("jobs", b"new", key=key)
        assert [each.body for each in got] == [b"new"]
        assert parse_message_id(got[0].id)[0] in added
        await consumer.ack(*old, *got)
        # Of one that this node has not heard of: the table is asked for.
        await controller.queues.expand("jobs", 5, nodes=[controller.peer])
        with pytest.raises(NotInFlightError):
            await consumer.ack(f"{message_id(controller.engine.registry.queues[REALM, 'jobs'].partition_ids[-1], 1)}-1")
        await publisher.at(controller).publish(
            "jobs", b"newer", key=key_at(await queues.route("jobs"), controller.peer)[0]
        )
        # Also where no receive ever waits.
        newer: list[ReceivedMessage] = []
        with trio.fail_after(10):
            while not newer:
                newer = await consumer.receive(wait_s=0)
                await trio.sleep(0.5)
        assert [each.body for each in newer] == [b"newer"]
        assert held(controller) == 1


async def test_handles(autojump_clock: Clock) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 4, msg_timeout_max_s=600.0)
        consumer = user.at(controller).simple_consumer("jobs", "c")
        await fill(user.at(controller), 8)
        got = await drain(user.at(controller))
        for wrong in ("x", "0000010000000001", "zz-1", "0000010000000001-"):
            for call in (consumer.ack(got[0], wrong), consumer.change_invisible(wrong, 5)):
                with pytest.raises(ValueError, match="no receipt handle"):
                    await call
        for unknown in (message_id(99, 1) + "-1", message_id(0, 1) + "-1", got[0].id + "-2"):
            with pytest.raises(NotInFlightError, match=unknown):
                await consumer.ack(unknown)
            with pytest.raises(NotInFlightError, match=unknown):
                await consumer.change_invisible(unknown, 5)
        assert await consumer.change_invisible(got[1], 10_000) == pytest.approx(600, abs=5)
        assert await consumer.change_invisible(got[0], 0) == 0
        (again,) = await consumer.receive()
        assert (again.id, again.attempts) == (got[0].id, 2)
        # They are of the node, not of the process: nothing is remembered here.
        await nodes.kill(3)
        await nodes.restart(3)
        user = nodes.sides[3]
        consumer = user.at(controller).simple_consumer("jobs", "c")
        await consumer.ack(again, *got[1:])
        assert sum(each.messages for each in (await controller.queues.route("jobs")).partitions) == 0


async def test_what_is_not_acknowledged_in_time_comes_again(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        consumer = user.at(controller).simple_consumer("jobs", "c")
        await fill(user.at(controller), 8)
        first = await consumer.receive(8, invisible_s=30)
        assert await consumer.receive(wait_s=15) == []
        again: list[ReceivedMessage] = []
        while len(again) < 8:
            again += await consumer.receive(wait_s=20)
        assert {each.id for each in again} == {each.id for each in first}
        assert {each.attempts for each in again} == {2}


async def test_19_a_receive_whose_answer_was_lost_can_be_asked_again(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        consumer = user.at(controller).simple_consumer("jobs", "c")
        await fill(user.at(controller), 40)
        lost = await consumer.receive(8, attempt_id="call 1", invisible_s=300)
        assert len({parse_message_id(each.id)[0] for each in lost}) > 1
        for _ in range(5):
            await consumer.receive(2)
        again = await consumer.receive(8, attempt_id="call 1", invisible_s=300)
        assert [each.handle for each in again] == [each.handle for each in lost]
        assert [each.body for each in again] == [each.body for each in lost]
        await consumer.ack(*lost[:3])
        rest = await consumer.receive(8, attempt_id="call 1")
        assert [each.handle for each in rest] == [each.handle for each in lost[3:]]
        await consumer.ack(*lost[3:])
        other = await consumer.receive(8, attempt_id="call 1")
        assert not {each.id for each in other} & {each.id for each in lost}


async def test_rights_are_those_of_consuming(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        ask: dict[str, Any] = {"queue": "jobs", "options": {"partitions": 2}, "nodes": [one.peer, user.peer]}
        await controller.queues.ask(parse_request({"op": "create", **ask, "access": {"consume": [two.peer]}}))
        await controller.queues.create_channel("jobs", "c")
        await fill(controller.queues, 10)
        for side in (user, one):  # also where a shard is their own
            consumer = side.at(controller).simple_consumer("jobs", "c")
            with pytest.raises(QueueAccessError):
                await consumer.receive(wait_s=0)
        await user.at(controller).publish("jobs", b"x")  # it knows the table by now
        for partition in controller.engine.registry.queues[REALM, "jobs"].partition_ids:
            with pytest.raises(QueueAccessError):
                await user.at(controller).simple_consumer("jobs", "c").ack(f"{message_id(partition, 1)}-1")
        assert len(await drain(two.at(controller))) == 11
        await drain(controller.queues)


async def test_a_node_has_no_more_rights_at_its_own_shard_than_others(autojump_clock: Clock) -> None:
    async with queue_sides(2) as [controller, user]:
        ask: dict[str, Any] = {"queue": "jobs", "options": {"partitions": 1}, "nodes": [user.peer]}
        await controller.queues.ask(parse_request({"op": "create", **ask, "access": {"consume": "owner"}}))
        await controller.queues.publish("jobs", b"x")
        await controller.queues.create_channel("jobs", "c", from_start=True)
        await user.at(controller).publish("jobs", b"y")
        distributed = user.service.known_distributed(controller.peer, "jobs")
        assert distributed is not None

        async def allow(request: Any) -> Any:
            return Done()

        distributed.ask_controller = allow  # type: ignore[method-assign]
        with pytest.raises(QueueAccessError):
            await user.at(controller).simple_consumer("jobs", "c").receive(wait_s=0)
        assert len(await drain(controller.queues)) == 2


async def test_what_one_asker_holds_is_bounded_in_each_partition(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_simple, "HELD_ITEMS_MAX", 5)
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 2)
        consumer = user.at(controller).simple_consumer("jobs", "c")
        await fill(user.at(controller), 40)
        got: list[ReceivedMessage] = []
        with pytest.raises(QueueFullError, match="not acknowledged"):
            while True:
                got += await consumer.receive(16, wait_s=1, invisible_s=600)
        assert len(got) == 10
        await consumer.ack(*got)
        assert await consumer.receive()


async def test_more_partitions_on_a_node_than_may_be_waited_on_at_once(autojump_clock: Clock) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 50)
        queues = user.at(controller)
        assert await queues.simple_consumer("jobs", "c").receive(1, wait_s=0) == []
        route = await queues.route("jobs")
        keys = {partition_of(route, f"k{number}"): f"k{number}" for number in range(3_000)}
        for key in list(keys.values())[::7]:
            async with trio.open_nursery() as nursery:

                async def publish_later(key: str = key) -> None:
                    await trio.sleep(3)
                    await queues.publish("jobs", b"x", key=key)

                nursery.start_soon(publish_later)
                assert len(await queues.simple_consumer("jobs", "c").receive(1, wait_s=20)) == 1
        assert one.count("refused_overloaded") == 0


async def test_large_messages_fill_an_answer_only_so_far(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        for number in range(16):
            await user.at(controller).publish("jobs", bytes(300_000), key=f"k{number}")
        consumer = user.at(controller).simple_consumer("jobs", "c")
        got: list[ReceivedMessage] = []
        while len(got) < 16:
            found = await consumer.receive(16, invisible_s=600)
            assert 1 <= len(found) <= 4
            got += found
            await until(partial(is_held, [one, two], len(got)), 2)
        assert {each.attempts for each in got} == {1}
