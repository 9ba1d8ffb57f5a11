"""Queues on several nodes whose controller is one of several on a store, and programs of a node that is on standby."""

import pytest
import trio
import trio.testing

from dep2p.errors import NotInFlightError, NotOwnerError, QueueAccessError
from dep2p.limits import Limits
from dep2p.protocols.queues.names import parse_message_id
from dep2p.queues.api.push_consumer import PushedMessage
from tests.queues.failover.nodes import set_of_nodes

Clock = trio.testing.MockClock
LIMITS = Limits(request_timeout_s=60.0)


async def _handled(queues: object, count: int) -> dict[str, list[int]]:
    """Collect the messages of a FIFO consumer, until it has so many."""
    found: dict[str, list[int]] = {}
    total = 0
    done = trio.Event()

    async def handle(message: PushedMessage) -> None:
        nonlocal total
        found.setdefault(message.key, []).append(int(message.body))
        total += 1
        if total == count:
            done.set()
        await trio.lowlevel.checkpoint()

    with trio.fail_after(300):
        async with queues.consumer("jobs", "g", handle, mode="fifo", from_start=True):  # type: ignore[attr-defined]  # pyright: ignore
            await done.wait()
    return found


async def test_a_distributed_queue_has_its_controller_and_its_partitions_at_the_next_owner(
    autojump_clock: Clock,
) -> None:
    async with set_of_nodes(2, 3, limits=LIMITS) as ([a, b], [shard, other, member]):
        await trio.sleep(10)  # each has heard of the other
        await a.queues.create("jobs", {"partitions": 4, "order": "strict"}, nodes=[a.peer, shard.peer])
        queues = member.at(a)
        for number in range(10):
            for key in range(8):
                await queues.publish("jobs", b"%d" % number, key=f"k{key}")
        a.die()
        await b.until_owner()
        for number in range(10, 20):
            for key in range(8):
                await queues.publish("jobs", b"%d" % number, key=f"k{key}")
        added = (
            await queues.expand("jobs", 6, nodes=[other.peer, b.peer])
        ).added  # the old shards obey the new controller
        assert len(added) == 2
        for number in range(20, 30):
            for key in range(8):
                await queues.publish("jobs", b"%d" % number, key=f"k{key}")
        found = await _handled(queues, 240)
        assert found == {f"k{key}": list(range(30)) for key in range(8)}
        route = await queues.route("jobs")
        assert {each.is_up for each in route.partitions} == {True}
        assert await queues.delete("jobs") == []
        assert await shard.queues.listing() == []
        assert await other.queues.listing() == []


async def test_what_was_received_of_a_distributed_queue_is_acknowledged_after_a_failover(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 2, limits=LIMITS) as ([a, b], [shard, member]):
        await trio.sleep(10)  # each has heard of the other
        await a.queues.create("jobs", {"partitions": 4}, nodes=[a.peer, shard.peer])
        consumer = member.at(a).simple_consumer("jobs", "c")
        ids = [await member.at(a).publish("jobs", b"%d" % number, key=f"k{number}") for number in range(30)]
        found = [
            *await consumer.receive(16, invisible_s=600),
            *await consumer.receive(invisible_s=600),
        ]
        assert sorted(each.id for each in found) == sorted(ids)
        places = (await member.at(a).info("jobs")).shards
        at_shard = {each.partition for each in places if each.node == shard.peer}
        kept = [each for each in found if parse_message_id(each.id)[0] in at_shard]
        assert 0 < len(kept) < 30
        a.die()
        await b.until_owner()
        await consumer.ack(*kept)
        # What was received from the node that died is delivered again by the one that has its messages now.
        again: list[str] = []
        while len(again) < 30 - len(kept):
            got = await consumer.receive(wait_s=20)
            again += [each.id for each in got]
            await consumer.ack(*got)
        assert sorted(again) == sorted({each.id for each in found} - {each.id for each in kept})
        with pytest.raises(NotInFlightError):
            await consumer.ack(*found)
        assert {each.messages for each in (await b.queues.route("jobs")).partitions} == {0}


async def test_programs_of_a_node_that_stands_by_receive_from_a_distributed_queue(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 2, limits=LIMITS) as ([a, b], [shard, _]):
        await trio.sleep(10)
        owner_only: dict[str, str] = {"publish": "owner", "consume": "owner", "administer": "owner"}
        await a.queues.create("jobs", {"partitions": 4}, nodes=[a.peer, shard.peer], access=owner_only)
        consumer = b.queues.simple_consumer("jobs", "c")
        for number in range(10):
            await b.queues.publish("jobs", b"%d" % number, key=f"k{number}")
        found = await consumer.receive(16)
        assert len(found) == 10
        assert await consumer.change_invisible(found[0], 0) == 0
        (again,) = await consumer.receive()
        await consumer.ack(again, *found[1:])
        await b.queues.publish("jobs", b"x")
        a.die()
        await b.until_owner()
        (last,) = await consumer.receive(wait_s=20)
        await consumer.ack(last)
        assert {each.messages for each in (await b.queues.route("jobs")).partitions} == {0}


async def test_shards_made_before_there_was_another_node_learn_of_it(autojump_clock: Clock) -> None:
    async with set_of_nodes(1, 1, limits=LIMITS) as ([a], [shard]):
        owner_only: dict[str, str] = {"publish": "owner", "consume": "owner", "administer": "owner"}
        await a.queues.create("jobs", {"partitions": 2}, nodes=[shard.peer], access=owner_only)
        (name, _) = [each.name for each in await shard.queues.listing()]
        assert (await shard.queues.info(name)).access.administer == (a.peer,)
        late = "12D3KooWGF3PZd2mXoURctJ2pECg78hdjPMWCm7uVyrATqJErX8h"
        a.server.nodes[late] = None
        await trio.sleep(20)
        access = (await shard.queues.info(name)).access
        for who in (access.administer, access.publish, access.consume):
            assert sorted(who) == sorted([a.peer, late])


async def test_programs_of_a_node_that_stands_by_are_served_by_the_owner(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 1, limits=LIMITS) as ([a, b], [member]):
        await trio.sleep(10)
        owner_only: dict[str, str] = {"publish": "owner", "consume": "owner", "administer": "owner"}
        await b.queues.create("jobs", access=owner_only)
        assert await b.queues.publish("jobs", b"1") == "0000010000000001"
        assert [each.name for each in await b.queues.listing()] == ["jobs"]
        async with b.queues.consume("jobs", "c") as messages:
            with trio.fail_after(30):
                message = await messages.__anext__()
                await message.finish(durable=True)
        assert (await a.queues.info("jobs")).messages == 0
        with pytest.raises(QueueAccessError):  # who is of no such set is a member like others
            await member.at(a).publish("jobs", b"2")
        async with b.queues.consume("jobs", "c") as messages:
            a.die()
            with (
                pytest.raises(NotOwnerError, match="this node is the broker of these queues itself now"),
                trio.fail_after(120),
            ):
                await messages.__anext__()
        await b.until_owner()
        await b.queues.publish("jobs", b"3")
        assert (await b.queues.info("jobs")).messages == 1
