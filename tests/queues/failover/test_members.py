"""Members whose broker is one of several nodes on a store: they follow it, lose nothing, and keep each key's order."""

from collections import defaultdict

import pytest
import trio
import trio.testing

from dep2p.errors import (
    NotOwnerError,
    PeerNotFoundError,
    QueueNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.limits import Limits
from dep2p.protocols.queues.records import StoreBatch
from dep2p.queues.api.push_consumer import PushedMessage
from tests.queues.failover.nodes import LEASE_S, SetSide, set_of_nodes

Clock = trio.testing.MockClock
LIMITS = Limits(request_timeout_s=60.0)


async def test_a_member_is_sent_on_by_a_node_that_stands_by(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 1) as ([a, b], [member]):
        await a.queues.create("jobs")
        queues = member.at(b)
        await queues.publish("jobs", b"1", key="k")
        assert [each.name for each in await queues.listing()] == ["jobs"]
        for exclusive in (False, True):
            async with queues.consume("jobs", f"c{exclusive:d}", exclusive=exclusive, from_start=True) as messages:
                await queues.publish("jobs", b"2", key="k")
                with trio.fail_after(60):
                    message = await messages.__anext__()
                    assert message.body == (b"2" if exclusive else b"1")
                    await message.finish(durable=True)
        assert member.count("redirects") >= 1
        with pytest.raises(QueueNotFoundError):
            await queues.info("none")


async def _until_known(member: object, a: SetSide) -> None:
    broker_directory = member.service._broker_directory  # type: ignore[attr-defined]  # pyright: ignore
    with trio.fail_after(10):
        while not broker_directory.to(a.peer).is_set:  # noqa: ASYNC110
            await trio.sleep(0.1)


@pytest.mark.parametrize("how", ["die", "freeze", "leave"])
async def test_what_a_member_publishes_and_consumes_goes_on_at_the_next_owner(autojump_clock: Clock, how: str) -> None:
    """It named the first node, and hears of the others from it."""
    handled: dict[str, list[int]] = defaultdict(list)
    keys, count = 5, 60
    async with set_of_nodes(3, 3, limits=LIMITS) as ([a, b, c], [publisher, one, two]):
        await a.queues.create("jobs", {"partitions": 2, "order": "strict", "max_attempts": 0})
        published = 0
        under_way = trio.Event()
        done = trio.Event()

        async def publish() -> None:
            nonlocal published
            for number in range(count):
                for key in range(keys):
                    await publisher.at(a).publish("jobs", b"%d" % number, key=f"k{key}")
                    published += 1
                if number == count // 3:
                    under_way.set()

        async def handle(message: PushedMessage) -> None:
            await trio.sleep(0.01)
            numbers = handled[message.key]
            number = int(message.body)
            if numbers and numbers[-1] == number:
                return  # a repeat of the current one
            numbers.append(number)
            if sum(map(len, handled.values())) == keys * count:
                done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            async with (
                one.at(a).consumer("jobs", "g", handle, mode="fifo", concurrency=8),
                two.at(a).consumer("jobs", "g", handle, mode="fifo", concurrency=8),
            ):
                await under_way.wait()
                await _until_known(publisher, a)
                if how == "leave":
                    a.scope.cancel()
                elif how == "die":
                    a.die()
                else:
                    a.freeze()
                with trio.fail_after(60):
                    while not (b.is_owner or c.is_owner):  # noqa: ASYNC110
                        await trio.sleep(0.1)
                if how == "freeze":
                    await trio.sleep(3)
                    a.thaw()
                with trio.fail_after(600):
                    await done.wait()
        assert handled == {f"k{key}": list(range(count)) for key in range(keys)}
        owner = b if b.is_owner else c
        info = await owner.queues.info("jobs")
        assert (info.messages, published) == (0, keys * count)
        assert (await publisher.at(a).info("jobs")).messages == 0


async def test_a_publish_whose_answer_was_lost_with_the_owner_is_taken_once(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 1, limits=LIMITS) as ([a, b], [member]):
        await a.queues.create("jobs")
        queues = member.at(a)
        await queues.publish("jobs", b"0")
        await _until_known(member, a)
        commit = a.server.content.commit

        def commit_and_die(batch: StoreBatch) -> None:
            commit(batch)
            if any(row.body == b"1" for row in batch.appends):
                a.die()

        a.server.content.commit = commit_and_die  # type: ignore[method-assign]
        assert await queues.publish("jobs", b"1") == "0000010000000002"
        assert b.is_owner
        assert await queues.publish("jobs", b"2") == "0000010000000003"
        assert (await b.queues.info("jobs")).messages == 3


async def test_a_member_that_begins_while_the_first_node_is_away_finds_the_others_that_it_names(
    autojump_clock: Clock,
) -> None:
    async with set_of_nodes(2, 1, limits=LIMITS) as ([a, b], [member]):
        await a.queues.create("jobs")
        a.die()
        queues = member.service.at(a.peer, b.peer)
        with trio.fail_after(60):
            await queues.publish("jobs", b"1")
            async with queues.consume("jobs", "c") as messages:
                assert (await messages.__anext__()).body == b"1"
        assert b.is_owner


async def test_while_nobody_keeps_them_a_request_waits_and_ends_with_its_time(autojump_clock: Clock) -> None:
    limits = Limits(request_timeout_s=5.0)
    async with set_of_nodes(2, 1, limits=limits) as ([a, b], [member]):
        await a.queues.create("jobs")
        queues = member.at(a)
        await queues.info("jobs")
        await _until_known(member, a)
        a.die()
        with pytest.raises(StreamClosedError):  # what was sent is not sent again by itself
            await queues.info("jobs")
        with pytest.raises((NotOwnerError, RequestTimeoutError, PeerNotFoundError)), trio.fail_after(6):
            await queues.info("jobs")
        with pytest.raises((NotOwnerError, RequestTimeoutError)), trio.fail_after(6):
            await queues.publish("jobs", b"x")
        await b.until_owner()
        with trio.fail_after(2 * LEASE_S):
            assert (await queues.info("jobs")).messages <= 1
            await queues.publish("jobs", b"x")


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_consumer_goes_on_at_the_next_owner_though_its_link_to_the_one_before_lives(
    autojump_clock: Clock, exclusive: bool, comes_back: bool
) -> None:
    """One that cannot reach the server any more, and one that comes back and ends the subscription."""
    async with set_of_nodes(2, 1, limits=LIMITS) as ([a, b], [member]):
        await a.queues.create("jobs", {"lease_s": 3.0})
        queues = member.at(a)
        async with queues.consume("jobs", "c", exclusive=exclusive) as messages:
            await _until_known(member, a)
            a.freeze()
            await b.until_owner()
            if comes_back:
                a.thaw()
            await b.queues.publish("jobs", b"1", key="k")
            with trio.fail_after(30):
                message = await messages.__anext__()
                await message.finish(durable=True)
        assert (await b.queues.info("jobs")).messages == 0


async def test_a_subscription_that_the_owner_ends_is_made_again_at_the_next_one(autojump_clock: Clock) -> None:
    """It hears of its loss before the member has looked."""
    async with set_of_nodes(2, 1, limits=LIMITS) as ([a, b], [member]):
        await a.queues.create("jobs")
        queues = member.at(a)
        async with queues.consume("jobs", "c") as messages:
            await _until_known(member, a)
            a.server.term, a.server.holder = 2, b.peer
            lost = a.server.other()
            a.server.holder = ""  # the other one takes it in a moment
            a.ownership.engine.lose(lost)
            await b.until_owner()
            await b.queues.publish("jobs", b"1")
            with trio.fail_after(30):
                message = await messages.__anext__()
                await message.finish(durable=True)
        assert member.count("consumers_reconnecting") >= 1


async def test_a_node_of_no_set_is_asked_once_for_others(autojump_clock: Clock) -> None:
    async with set_of_nodes(1, 2) as (_, [broker, member]):
        await broker.queues.create("jobs")
        await member.at(broker).info("jobs")
        await trio.sleep(120)
        broker_route = member.service._broker_directory.to(broker.peer)  # pyright: ignore[reportPrivateUsage]
        assert not broker_route.is_set
        assert broker_route.asked is not None
