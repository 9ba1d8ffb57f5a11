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
from dep2p.queues.api.simple_consumer import ReceivedMessage
from dep2p.queues.types import message_id, parse_message_id
from tests.io.queues_support import queue_sides
from tests.io.support import REALM
from tests.io.test_queue_placed import cluster, key_at, make, shares
from tests.io.test_queue_placed_simple import drain, fill, held, partition_of, until, waiting

Clock = trio.testing.MockClock


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_receive_that_is_left_hides_nothing(autojump_clock: Clock, moment: str) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 4, max_attempts=1)
        place = user.at(home)
        await home.queues.create_channel("jobs", "c")
        with trio.move_on_after(5) as scope:
            await place.simple_consumer("jobs", "c").receive(wait_s=20, invisible_duration_s=600)
        assert scope.cancelled_caught
        if moment == "after":
            await until(lambda: waiting(one) == waiting(two) == 0, 2)
        await fill(home.queues, 20)
        got: list[ReceivedMessage] = []
        with trio.fail_after(5):
            while len(got) < 20:
                got += await home.queues.simple_consumer("jobs", "c").receive()
        assert {each.attempts for each in got} == {1}


async def test_what_was_taken_already_goes_back_when_the_caller_leaves(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 2, max_attempts=1)
        place = user.at(home)
        await home.queues.create_channel("jobs", "c")
        await fill(place, 20)
        plain = two.service.administer
        asked = trio.Event()

        async def hang(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == "receive":
                asked.set()
                await trio.sleep(1)
            return await plain(peer, op, fields)

        monkeypatch.setattr(two.service, "administer", hang)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: place.simple_consumer("jobs", "c").receive(16, invisible_duration_s=600))
                await asked.wait()
                await until(lambda: held(one) > 0)
                scope.cancel()
        await until(lambda: held(one) == held(two) == 0, 5)
        await trio.sleep(5)
        assert held(one) == held(two) == 0  # nor what came after that
        monkeypatch.undo()
        assert {each.attempts for each in await drain(home.queues)} == {1}


async def test_an_answer_that_comes_late_is_others(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that answers after half a minute holds up nobody, and what it took for that answer goes back."""
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 2, max_attempts=1)
        place = user.at(home)
        await home.queues.create_channel("jobs", "c")
        route = await place.route("jobs")
        for side in (one, two):
            await place.publish("jobs", side.peer.encode(), order_key=key_at(route, side.peer)[0])
        plain = two.service.administer

        async def late(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            answer = await plain(peer, op, fields)
            if op == "receive":
                await trio.sleep(30)
            return answer

        monkeypatch.setattr(two.service, "administer", late)
        began_s = trio.current_time()
        (message,) = await place.simple_consumer("jobs", "c").receive(16, wait_s=0, invisible_duration_s=600)
        assert trio.current_time() - began_s < 3
        assert message.body == one.peer.encode()
        await until(lambda: held(two) == 0, 5)
        began_s = trio.current_time()
        assert await place.simple_consumer("jobs", "c").receive(16, wait_s=0) == []  # it is not asked first now
        assert trio.current_time() - began_s < 1
        monkeypatch.undo()
        (other,) = await home.queues.simple_consumer("jobs", "c").receive(16, wait_s=20)
        assert (other.body, other.attempts) == (two.peer.encode(), 1)


async def test_a_node_that_hangs_costs_a_moment_when_others_are_slow(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 2)
        await home.queues.create_channel("jobs", "c")
        plain = one.service.administer

        async def slow(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            await trio.sleep(2.5)
            return await plain(peer, op, fields)

        async def hang(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(one.service, "administer", slow)
        monkeypatch.setattr(two.service, "administer", hang)
        consumer = user.at(home).simple_consumer("jobs", "c")
        began_s = trio.current_time()
        assert await consumer.receive(wait_s=3) == []
        assert trio.current_time() - began_s < 8
        await home.queues.publish("jobs", b"x", order_key=key_at(await home.queues.route("jobs"), one.peer)[0])
        (message,) = await consumer.receive(wait_s=0)
        await consumer.ack(message)


async def test_a_node_that_is_away_stops_only_its_own_messages(autojump_clock: Clock) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one, two], 4)
        place = user.at(home)
        consumer = place.simple_consumer("jobs", "c")
        assert await consumer.receive(wait_s=0) == []
        await fill(place, 40)
        got = await consumer.receive(32, wait_s=0, invisible_duration_s=600)
        by_node = {each["partition"]: each["node"] for each in (await place.route("jobs"))["partitions"]}
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
            await consumer.change_invisible_duration(lost[0], 5)
        rest: list[ReceivedMessage] = []
        began_s = trio.current_time()
        while found := await consumer.receive(16, wait_s=0):
            rest += found
        assert trio.current_time() - began_s < 5
        route = await place.route("jobs")
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


async def test_the_home_may_be_away(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one, two], 4)
        place = user.at(home)
        consumer = place.simple_consumer("jobs", "c")
        await fill(place, 40)
        (first,) = await consumer.receive(1)

        async def hang(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(home.service, "administer", hang)
        await trio.sleep(10)
        for _ in range(3):  # also while its table is asked for
            began_s = trio.current_time()
            (message,) = await consumer.receive(1)
            await consumer.ack(message)
            assert trio.current_time() - began_s < 1
            await trio.sleep(6)
        await nodes.kill(0)
        assert len(await drain(place)) == 36
        await consumer.ack(first)


async def test_a_new_channel_is_not_made_while_a_node_is_away(autojump_clock: Clock) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one, two], 4)
        await nodes.kill(2)
        for place in (user.at(home), home.queues):
            with pytest.raises(Dep2pError, match=two.peer):
                await place.simple_consumer("jobs", "c").receive(wait_s=0)
        assert all(not one.engine.book.queues[REALM, name].channels for name in shares(one))
        await nodes.restart(2)
        await fill(user.at(home), 10)
        assert len(await drain(user.at(home))) == 10


async def test_a_channel_that_was_deleted_is_made_anew_everywhere(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 4)
        place = user.at(home)
        consumer = place.simple_consumer("jobs", "c")
        await fill(place, 10)
        (old, *_) = await consumer.receive()
        await home.queues.delete_channel("jobs", "c")
        with pytest.raises(ChannelNotFoundError):
            await consumer.ack(old)
        assert await consumer.receive(wait_s=0, from_start=True) != []
        assert [each["name"] for each in (await home.queues.info("jobs"))["channels"]] == ["c"]
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                with pytest.raises(QueueConsumerClosedError):
                    await place.simple_consumer("jobs", "d").receive(wait_s=20)

            nursery.start_soon(receive)
            await until(lambda: waiting(one) == waiting(two) == 2)
            await home.queues.delete_channel("jobs", "d")


@pytest.mark.parametrize("anew", ["plain", "placed", "gone"])
async def test_a_queue_that_was_deleted_is_not_what_is_there_now(autojump_clock: Clock, anew: str) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 2)
        place = user.at(home)
        consumer = place.simple_consumer("jobs", "c")
        await fill(place, 10)
        old = await consumer.receive(2)
        await home.queues.delete("jobs")
        if anew == "gone":
            for call in (consumer.receive(), consumer.ack(*old), consumer.change_invisible_duration(old[0], 5)):
                with pytest.raises(QueueNotFoundError):
                    await call
            return
        await (home.queues.create("jobs") if anew == "plain" else make(home.queues, [two, home], 3))
        await home.queues.create_channel("jobs", "c")
        with pytest.raises(NotInFlightError, match=old[0].handle):
            await consumer.ack(*old)
        with pytest.raises(NotInFlightError):
            await consumer.change_invisible_duration(old[0], 5)
        assert await consumer.receive(wait_s=0) == []
        ids = await fill(place, 10)
        assert sorted(each.id for each in await drain(place)) == sorted(ids)


async def test_a_receive_finds_by_itself_that_the_queue_was_made_anew(autojump_clock: Clock) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        place = user.at(home)
        for nodes in ([one, two], [two, home], [one]):
            await make(home.queues, nodes, 2)
            ids = await fill(home.queues, 10)
            assert sorted(each.id for each in await drain(place)) == sorted(ids)
            await home.queues.delete("jobs")


async def test_a_partition_that_its_node_has_lost_stops_only_itself(autojump_clock: Clock) -> None:
    """Its disk was replaced: the home still has it in its table."""
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 2)
        place = user.at(home)
        await home.queues.create_channel("jobs", "c")
        route = await place.route("jobs")
        for side in (one, two):
            await place.publish("jobs", side.peer.encode(), order_key=key_at(route, side.peer)[0])
        two.engine.book.delete(two.engine.book.queues[REALM, shares(two)[0]])
        for _ in range(2):
            (message,) = await place.simple_consumer("jobs", "c").receive(wait_s=1, invisible_duration_s=1)
            assert message.body == one.peer.encode()
            await trio.sleep(2)


async def test_a_receive_with_an_attempt_id_that_was_left_gives_its_messages_when_asked_again(
    autojump_clock: Clock,
) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 4)
        await home.queues.create_channel("jobs", "c")
        consumer = user.at(home).simple_consumer("jobs", "c")
        with trio.move_on_after(5):
            await consumer.receive(wait_s=20, attempt_id="a", invisible_duration_s=600)
        await fill(home.queues, 3)
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
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 2)
        place = user.at(home)
        consumer = place.simple_consumer("jobs", "c")
        await home.queues.create_channel("jobs", "c")

        async def answer(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            return {"messages": bad, "refused": bad if bad != [5] else 5, "invisible_s": None}

        monkeypatch.setattr(two.service, "administer", answer)
        await place.publish("jobs", b"x", order_key=key_at(await home.queues.route("jobs"), one.peer)[0])
        (message,) = await consumer.receive(wait_s=0)
        await consumer.ack(message)
        at_two = [
            each["partition"] for each in (await home.queues.route("jobs"))["partitions"] if each["node"] == two.peer
        ]
        with pytest.raises(Dep2pError, match=two.peer):
            await consumer.change_invisible_duration(f"{message_id(at_two[0], 1)}-1", 5)
        monkeypatch.setattr(one.service, "administer", answer)
        with pytest.raises(Dep2pError, match=f"{one.peer}|{two.peer}"):
            await consumer.receive(wait_s=0)
