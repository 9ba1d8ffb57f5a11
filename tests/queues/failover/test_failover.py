"""Nodes that share a store: one is the broker of the queues, the others are on standby and take over. In memory, in
virtual time."""

import logging

import pytest
import trio
import trio.testing

from dep2p.errors import NotOwnerError, StoreError
from dep2p.protocols.queues.wire.admin import parse_request
from tests.queues.failover.nodes import LEASE_S, set_of_nodes

Clock = trio.testing.MockClock


async def test_the_first_keeps_the_queues_and_the_others_name_it(autojump_clock: Clock) -> None:
    async with set_of_nodes(3, 0) as ([a, b, c], _):
        assert [each.is_owner for each in (a, b, c)] == [True, False, False]
        await a.queues.create("jobs")
        for other in (b, c):
            with pytest.raises(NotOwnerError, match=f"the node {a.peer} is the broker of these queues") as raised:
                other.ownership.engine.queue_names("")
            assert raised.value.owner == a.peer
            status = other.ownership.status()
            assert (status["role"], status["owner"], status["term"]) == ("standby", a.peer, 1)
        await trio.sleep(10 * LEASE_S)  # it renews with nothing to write
        assert a.is_owner
        assert a.ownership.status()["nodes"] == sorted([a.peer, b.peer, c.peer])


async def test_one_of_the_others_takes_over_when_the_owner_dies(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with set_of_nodes(2, 0) as ([a, b], _):
        await a.queues.create("jobs")
        await a.queues.publish("jobs", b"1")
        a.die()
        died_s = trio.current_time()
        await b.until_owner()
        assert LEASE_S - 4 < trio.current_time() - died_s < LEASE_S + 2
        assert [message.id for message in await b.queues.peek("jobs")] == ["0000010000000001"]
        status = b.ownership.status()
        assert (status["role"], status["owner"], status["term"], status["failovers"]) == ("owner", b.peer, 2, 1)
        assert f"took the queues in shared memory over from the node {a.peer}, which was silent for 1" in caplog.text


async def test_an_owner_that_leaves_in_good_order_is_followed_at_once(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 0) as ([a, b], _):
        await a.queues.create("jobs")
        a.scope.cancel()
        with trio.fail_after(2):
            await b.ownership.here()
        assert [each.name for each in await b.queues.listing()] == ["jobs"]
        assert b.ownership.status()["failovers"] == 0


async def test_an_owner_that_was_replaced_tells_all_who_wait_and_stands_by(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with set_of_nodes(2, 0) as ([a, b], _):
        await a.queues.create("jobs")
        told: list[str] = []

        async def publish() -> None:
            with pytest.raises((NotOwnerError, StoreError)):
                await a.queues.publish("jobs", b"too late")
            told.append("publisher")

        async def confirm() -> None:
            with pytest.raises((NotOwnerError, StoreError)):
                await a.queues.create("more")
            told.append("creator")

        async def consume(*, exclusive: bool) -> None:
            channel = f"c {exclusive}".replace(" ", "-")
            async with a.queues.consume("jobs", channel, exclusive=exclusive) as messages:
                subscribed.append(channel)
                with pytest.raises(NotOwnerError, match=f"{b.peer}'s by now"):
                    await messages.__anext__()
            told.append(channel)

        subscribed: list[str] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: consume(exclusive=False))
            nursery.start_soon(lambda: consume(exclusive=True))
            while len(subscribed) < 2:  # noqa: ASYNC110
                await trio.sleep(0.1)
            a.freeze()
            await b.until_owner()
            assert a.is_owner  # it does not know yet
            nursery.start_soon(publish)
            nursery.start_soon(confirm)
            await trio.sleep(0.1)
            a.thaw()
        assert sorted(told) == ["c-False", "c-True", "creator", "publisher"]
        with trio.fail_after(5):
            while a.is_owner:  # noqa: ASYNC110
                await trio.sleep(0.1)
        assert "this node serves the queues in shared memory no more, and is on standby" in caplog.text
        assert not [each for each in caplog.records if each.levelno > logging.ERROR]
        assert (await b.queues.info("jobs")).messages == 0  # nothing that was refused is there
        with pytest.raises(NotOwnerError) as raised:
            a.ownership.engine.queue_names("")
        assert raised.value.owner == b.peer
        b.die()
        await a.until_owner()  # and takes its turn again
        await a.queues.publish("jobs", b"in time")
        assert (await a.queues.info("jobs")).messages == 1
        assert (a.ownership.status()["term"], a.ownership.status()["terms"]) == (3, 2)


async def test_what_takes_a_while_is_broken_off_when_the_term_ends(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 0) as ([a, b], _):
        await a.queues.create("jobs")
        await a.queues.create_channel("jobs", "c")
        ended: list[str] = []

        async def receive() -> None:
            with pytest.raises(NotOwnerError):
                await a.queues.ask(parse_request({"op": "receive", "queue": "jobs", "channel": "c", "wait_s": 20.0}))
            ended.append("receive")

        async with trio.open_nursery() as nursery:
            a.freeze()
            await trio.sleep(LEASE_S - 5)
            nursery.start_soon(receive)
            await b.until_owner()
            a.thaw()
        assert ended == ["receive"]


async def test_while_the_server_is_away_nobody_takes_over_and_that_is_said(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with set_of_nodes(2, 0) as ([a, b], _):
        a.freeze()
        b.freeze()
        await trio.sleep(3 * LEASE_S)
        assert (a.is_owner, b.is_owner) == (True, False)
        assert b.ownership.status()["problem"]
        assert caplog.text.count("cannot see who is the broker of the queues") <= 4  # once for each node
        b.thaw()
        await b.until_owner()
        assert b.ownership.status()["problem"] == ""


async def test_an_owner_that_may_have_been_replaced_promises_no_lease(autojump_clock: Clock) -> None:
    async with set_of_nodes(2, 0) as ([a, _b], _):
        await a.queues.create("jobs")
        async with a.queues.consume("jobs", "c", exclusive=True) as messages:
            consumer = messages.consumer
            await a.queues.publish("jobs", b"1", key="k")
            message = await messages.__anext__()
            frozen_s = trio.current_time()
            a.freeze()
            await trio.sleep(2 * LEASE_S + 1)
            # 30 s, the lease of a consumer, after the last heartbeat that the owner of that time has answered.
            lease_end_s = consumer.core.lease_end  # type: ignore[attr-defined]
            assert lease_end_s <= frozen_s + LEASE_S + 30.0
            assert message is not None
