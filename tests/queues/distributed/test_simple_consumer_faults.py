"""Simple consumers of a queue on several nodes that are away, hang, or are made anew, and callers that leave."""

from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import (
    ChannelNotFoundError,
    Dep2pError,
    NotInFlightError,
    QueueConsumerClosedError,
    QueueNotFoundError,
)
from dep2p.protocols.queues.admin import ReceivedMessage, operation_of
from dep2p.protocols.queues.names import message_id, parse_message_id
from tests.messaging.nodes import REALM
from tests.queues.distributed.test_distributed import cluster, key_at, make, shards
from tests.queues.distributed.test_simple_consumer import drain, fill, held, partition_of, until, waiting
from tests.queues.nodes import queue_sides

Clock = trio.testing.MockClock


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_receive_that_is_left_hides_nothing(autojump_clock: Clock, moment: str) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4, max_attempts=1)
        queues = user.at(controller)
        await controller.queues.create_channel("jobs", "c")
        with trio.move_on_after(5) as scope:
            await queues.simple_consumer("jobs", "c").receive(wait_s=20, invisible_s=600)
        assert scope.cancelled_caught
        if moment == "after":
            await until(lambda: waiting(one) == waiting(two) == 0, 2)
        await fill(controller.queues, 20)
        got: list[ReceivedMessage] = []
        with trio.fail_after(5):
            while len(got) < 20:
                got += await controller.queues.simple_consumer("jobs", "c").receive()
        assert {each.attempts for each in got} == {1}


async def test_what_was_taken_already_goes_back_when_the_caller_leaves(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 2, max_attempts=1)
        queues = user.at(controller)
        await controller.queues.create_channel("jobs", "c")
        await fill(queues, 20)
        plain = two.service.administer
        asked = trio.Event()

        async def hang(peer: Any, request: Any) -> Any:
            if operation_of(request) == "receive":
                asked.set()
                await trio.sleep(1)
            return await plain(peer, request)

        monkeypatch.setattr(two.service, "administer", hang)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: queues.simple_consumer("jobs", "c").receive(16, invisible_s=600))
                await asked.wait()
                await until(lambda: held(one) > 0)
                scope.cancel()
        await until(lambda: held(one) == held(two) == 0, 5)
        await trio.sleep(5)
        assert held(one) == held(two) == 0  # nor what came after that
        monkeypatch.undo()
        assert {each.attempts for each in await drain(controller.queues)} == {1}


async def test_an_answer_that_comes_late_is_others(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that answers after half a minute holds up nobody, and what it took for that answer goes back."""
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 2, max_attempts=1)
        queues = user.at(controller)
        await controller.queues.create_channel("jobs", "c")
        route = await queues.route("jobs")
        for side in (one, two):
            await queues.publish("jobs", side.peer.encode(), key=key_at(route, side.peer)[0])
        plain = two.service.administer

        async def late(peer: Any, request: Any) -> Any:
            answer = await plain(peer, request)
            if operation_of(request) == "receive":
                await trio.sleep(30)
            return answer

        monkeypatch.setattr(two.service, "administer", late)
        began_s = trio.current_time()
        (message,) = await queues.simple_consumer("jobs", "c").receive(16, wait_s=0, invisible_s=600)
        assert trio.current_time() - began_s < 3
        assert message.body == one.peer.encode()
        await until(lambda: held(two) == 0, 5)
        began_s = trio.current_time()
        assert await queues.simple_consumer("jobs", "c").receive(16, wait_s=0) == []  # it is not asked first now
        assert trio.current_time() - began_s < 1
        monkeypatch.undo()
        (other,) = await controller.queues.simple_consumer("jobs", "c").receive(16, wait_s=20)
        assert (other.body, other.attempts) == (two.peer.encode(), 1)


async def test_a_node_that_hangs_costs_a_moment_when_others_are_slow(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 2)
        await controller.queues.create_channel("jobs", "c")
        plain = one.service.administer

        async def slow(peer: Any, request: Any) -> Any:
            await trio.sleep(2.5)
            return await plain(peer, request)

        async def hang(peer: Any, request: Any) -> Any:
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(one.service, "administer", slow)
        monkeypatch.setattr(two.service, "administer", hang)
        consumer = user.at(controller).simple_consumer("jobs", "c")
        began_s = trio.current_time()
        assert await consumer.receive(wait_s=3) == []
        assert trio.current_time() - began_s < 8
        await controller.queues.publish("jobs", b"x", key=key_at(await controller.queues.route("jobs"), one.peer)[0])
        (message,) = await consumer.receive(wait_s=0)
        await consumer.ack(message)


async def test_a_node_that_is_away_stops_only_its_own_messages(autojump_clock: Clock) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 4)
        queues = user.at(controller)
        consumer = queues.simple_consumer("jobs", "c")
        assert await consumer.receive(wait_s=0) == []
        await fill(queues, 40)
        got = await consumer.receive(32, wait_s=0, invisible_s=600)
        by_node = {each.partition: each.node for each in (await queues.route("jobs")).partitions}
        kept = [each for each in got if by_node[parse_message_id(each.id)[0]] == one.peer]
        lost = [each for each in got if each not in kept]
        assert kept and lost
        await nodes.kill(2)
        at_two = [each for each, node in by_node.items() if node == two.peer]
        with pytest.raises(Dep2pError, match=rf"partition ({'|'.join(map(str, at_two))}) .*{two.peer}") as raised:
            await consumer.ack(*got)
        assert all(each.handle in str(raised.value) for each in lost)
        with pytest.raises(NotInFlightError):  # those of the other node are done all the same
            await consumer.ack(*kept)
        with pytest.raises(Dep2pError, match=f"partition .*{two.peer}"):
            await consumer.change_invisible(lost[0], 5)
        rest: list[ReceivedMessage] = []
        began_s = trio.current_time()
        while found := await consumer.receive(16, wait_s=0):
            rest += found
        assert trio.current_time() - began_s < 5
        route = await queues.route("jobs")
        nodes_of = [by_node[partition_of(route, f"k{number}")] for number in range(40)]
        assert len(kept) + len(rest) == nodes_of.count(one.peer)
        began_s = trio.current_time()
        assert await consumer.receive(wait_s=10) == []
        assert trio.current_time() - began_s == pytest.approx(10, abs=1.5)
        # While it waits, the node comes back.
        async with trio.open_nursery() as nursery:

            async def restart() -> None:
                await trio.sleep(5)
                await nodes.restart(2)

            nursery.start_soon(restart)
            assert await consumer.receive(wait_s=20)
        await nodes.kill(1)
        await nodes.kill(2)
        with pytest.raises(Dep2pError, match=f"partition .*({one.peer}|{two.peer})"):
            await consumer.receive(wait_s=20)


async def test_the_controller_may_be_away(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 4)
        queues = user.at(controller)
        consumer = queues.simple_consumer("jobs", "c")
        await fill(queues, 40)
        (first,) = await consumer.receive(1)

        async def hang(peer: Any, request: Any) -> Any:
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(controller.service, "administer", hang)
        await trio.sleep(10)
        for _ in range(3):  # also while its table is asked for
            began_s = trio.current_time()
            (message,) = await consumer.receive(1)
            await consumer.ack(message)
            assert trio.current_time() - began_s < 1
            await trio.sleep(6)
        await nodes.kill(0)
        assert len(await drain(queues)) == 36
        await consumer.ack(first)


async def test_a_new_channel_is_not_made_while_a_node_is_away(autojump_clock: Clock) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 4)
        await nodes.kill(2)
        for queues in (user.at(controller), controller.queues):
            with pytest.raises(Dep2pError, match=two.peer):
                await queues.simple_consumer("jobs", "c").receive(wait_s=0)
        assert all(not one.engine.registry.queues[REALM, name].channels for name in shards(one))
        await nodes.restart(2)
        await fill(user.at(controller), 10)
        assert len(await drain(user.at(controller))) == 10


async def test_a_channel_that_was_deleted_is_made_anew_everywhere(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        queues = user.at(controller)
        consumer = queues.simple_consumer("jobs", "c")
        await fill(queues, 10)
        (old, *_) = await consumer.receive()
        await controller.queues.delete_channel("jobs", "c")
        with pytest.raises(ChannelNotFoundError):
            await consumer.ack(old)
        assert await consumer.receive(wait_s=0, from_start=True) != []
        assert [each.name for each in (await controller.queues.info("jobs")).channels] == ["c"]
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(QueueConsumerClosedError):
                    await queues.simple_consumer("jobs", "d").receive(wait_s=20)

            nursery.start_soon(receive)
            await until(lambda: waiting(one) == waiting(two) == 2)
            await controller.queues.delete_channel("jobs", "d")


@pytest.mark.parametrize("anew", ["plain", "placed", "gone"])
async def test_a_queue_that_was_deleted_is_not_what_is_there_now(autojump_clock: Clock, anew: str) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 2)
        queues = user.at(controller)
        consumer = queues.simple_consumer("jobs", "c")
        await fill(queues, 10)
        old = await consumer.receive(2)
        await controller.queues.delete("jobs")
        if anew == "gone":
            for call in (consumer.receive(), consumer.ack(*old), consumer.change_invisible(old[0], 5)):
                with pytest.raises(QueueNotFoundError):
                    await call
            return
        await (controller.queues.create("jobs") if anew == "plain" else make(controller.queues, [two, controller], 3))
        await controller.queues.create_channel("jobs", "c")
        with pytest.raises(NotInFlightError, match=old[0].handle):
            await consumer.ack(*old)
        with pytest.raises(NotInFlightError):
            await consumer.change_invisible(old[0], 5)
        assert await consumer.receive(wait_s=0) == []
        ids = await fill(queues, 10)
        assert sorted(each.id for each in await drain(queues)) == sorted(ids)


async def test_a_receive_finds_by_itself_that_the_queue_was_made_anew(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        queues = user.at(controller)
        for nodes in ([one, two], [two, controller], [one]):
            await make(controller.queues, nodes, 2)
            ids = await fill(controller.queues, 10)
            assert sorted(each.id for each in await drain(queues)) == sorted(ids)
            await controller.queues.delete("jobs")


async def test_a_partition_that_its_node_has_lost_stops_only_itself(autojump_clock: Clock) -> None:
    """Its disk was replaced: the controller still has it in its table."""
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 2)
        queues = user.at(controller)
        await controller.queues.create_channel("jobs", "c")
        route = await queues.route("jobs")
        for side in (one, two):
            await queues.publish("jobs", side.peer.encode(), key=key_at(route, side.peer)[0])
        two.engine.registry.delete(two.engine.registry.queues[REALM, shards(two)[0]])
        for _ in range(2):
            (message,) = await queues.simple_consumer("jobs", "c").receive(wait_s=1, invisible_s=1)
            assert message.body == one.peer.encode()
            await trio.sleep(2)


async def test_a_receive_with_an_attempt_id_that_was_left_gives_its_messages_when_asked_again(
    autojump_clock: Clock,
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        await controller.queues.create_channel("jobs", "c")
        consumer = user.at(controller).simple_consumer("jobs", "c")
        with trio.move_on_after(5):
            await consumer.receive(wait_s=20, attempt_id="a", invisible_s=600)
        await fill(controller.queues, 3)
        got: list[ReceivedMessage] = []
        with trio.fail_after(5):
            while len(got) < 3:
                got += await consumer.receive(wait_s=20, attempt_id=f"a{len(got)}")
        assert {each.attempts for each in got} == {1}


ROW: dict[str, object] = {
    "id": message_id(1, 1),
    "handle": f"{message_id(1, 1)}-1",
    "published_s": 1.0,
    "invisible_s": 60.0,
    "attempts": 1,
    "data": "",
    "encoding": "base64",
}
BAD: list[object] = [
    None,
    5,
    [5],
    [{**ROW, "handle": "x"}],
    [{**ROW, "handle": None}],
    [{**ROW, "published_s": "now"}],
    [{**ROW, "invisible_s": None}],
    [{**ROW, "attempts": True}],
    [{**ROW, "data": 5}],
    [ROW] * 33,
]


@pytest.mark.parametrize("bad", BAD, ids=lambda each: str(each)[:40])
async def test_a_node_that_answers_nonsense_is_named_and_stops_only_itself(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, bad: object
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 2)
        queues = user.at(controller)
        consumer = queues.simple_consumer("jobs", "c")
        await controller.queues.create_channel("jobs", "c")

        async def answer(peer: Any, request: Any) -> Any:
            return {"messages": bad, "refused": bad if bad != [5] else 5, "invisible_s": None}

        monkeypatch.setattr(two.service, "administer", answer)
        await queues.publish("jobs", b"x", key=key_at(await controller.queues.route("jobs"), one.peer)[0])
        (message,) = await consumer.receive(wait_s=0)
        await consumer.ack(message)
        at_two = [
            each.partition for each in (await controller.queues.route("jobs")).partitions if each.node == two.peer
        ]
        with pytest.raises(Dep2pError, match=two.peer):
            await consumer.change_invisible(f"{message_id(at_two[0], 1)}-1", 5)
        monkeypatch.setattr(one.service, "administer", answer)
        with pytest.raises(Dep2pError, match=f"{one.peer}|{two.peer}"):
            await consumer.receive(wait_s=0)
