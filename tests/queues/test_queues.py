"""Queues between nodes in memory: publish, consume, settle, permissions, lost connections, full queues."""

import pytest
import trio
import trio.testing

from dep2p.errors import (
    ChannelNotFoundError,
    MessageTooLargeError,
    NotInFlightError,
    ProtocolError,
    QueueAccessError,
    QueueConsumerClosedError,
    QueueExistsError,
    QueueFullError,
    QueueNotFoundError,
)
from dep2p.limits import Limits
from dep2p.queues.consumer import Messages, QueueMessage
from tests.queues.nodes import exported, queue_sides


async def take(messages: Messages, count: int) -> list[QueueMessage]:
    found: list[QueueMessage] = []
    while len(found) < count:
        found.append(await messages.__anext__())
    return found


async def test_a_member_publishes_and_another_consumes(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [broker, publisher, consumer]:
        await broker.queues.create("jobs")
        await publisher.at(broker).publish("jobs", b"first", key="k", tags=["a", "b"], priority=3, headers={"h": 1})
        ids = await publisher.at(broker).publish_many("jobs", [b"%d" % number for number in range(500)])
        assert len(dict.fromkeys(ids)) == 500
        async with consumer.at(broker).consume("jobs", "workers", max_in_flight=50) as messages:
            [first] = await take(messages, 1)
            assert (first.body, first.key, first.tags, first.priority, first.headers) == (
                b"first",
                "k",
                ("a", "b"),
                3,
                {"h": 1},
            )
            await first.finish()
            for number in range(500):
                [message] = await take(messages, 1)
                assert (message.body, message.id, message.attempts) == (b"%d" % number, ids[number], 1)
                await message.finish(durable=number == 499)
        info = await publisher.at(broker).info("jobs")
        assert info.messages == 0
        assert info.channels[0].finished == 501


async def test_never_more_than_max_in_flight(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs")
        await broker.queues.publish_many("jobs", [b"x"] * 100)
        async with other.at(broker).consume("jobs", "c", max_in_flight=7) as messages:
            held = await take(messages, 7)
            with trio.move_on_after(10) as scope:
                await messages.__anext__()
            assert scope.cancelled_caught
            assert (await broker.queues.info("jobs")).in_flight == 7
            await held[0].finish()
            await take(messages, 1)
            messages.consumer.set_ready(9)
            await take(messages, 2)
            assert (await broker.queues.info("jobs")).in_flight == 9


async def test_requeue_release_reject_and_touch(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs", {"msg_timeout_s": 30.0})
        await broker.queues.publish_many("jobs", [b"requeue", b"release", b"reject", b"touch"])
        async with other.at(broker).consume("jobs", "c", max_in_flight=4) as messages:
            requeue, release, reject, touch = await take(messages, 4)
            began = trio.current_time()
            await requeue.requeue(5, "try again")
            await release.release()
            await reject.reject("never")
            await trio.sleep(20)
            assert abs(await touch.touch() - (trio.current_time() + 30)) < 0.1
            back = await take(messages, 2)
            assert [(each.body, each.attempts) for each in back] == [(b"release", 1), (b"requeue", 2)]
            assert back[1].is_redelivered and trio.current_time() - began >= 5
            await trio.sleep(25)
            await touch.finish()  # 45 s after its delivery
        dead = await other.at(broker).dead_letters("jobs", "c")
        assert [(each.id, each.reasons) for each in dead] == [(1, ("never",))]
        assert await other.at(broker).replay("jobs", "c", [1]) == 1
        async with other.at(broker).consume("jobs", "c", max_in_flight=4) as messages:
            bodies = sorted([message.body for message in await take(messages, 3)])
            assert bodies == [b"reject", b"release", b"requeue"]


async def test_a_message_that_has_timed_out_says_so(autojump_clock: trio.testing.MockClock) -> None:
    """go-nsq#172, #266, pynsq#205: a handler cannot know that its message has timed out."""
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs", {"msg_timeout_s": 2.0})
        await broker.queues.publish("jobs", b"slow")
        async with other.at(broker).consume("jobs", "c") as messages:
            [message] = await take(messages, 1)
            assert not message.expired
            with message.scope() as scope:
                await trio.sleep(60)
            assert scope.cancelled_caught
            assert trio.current_time() - message.deadline_s < 0.1
            assert message.expired
            with pytest.raises(NotInFlightError):
                await message.touch()
            [again] = await take(messages, 1)
            assert again.attempts == 2
            with again.scope() as scope:
                await trio.sleep(1.5)
                await again.touch()
                await trio.sleep(1.5)
            assert not scope.cancelled_caught
            await again.finish()


async def test_a_lost_connection_gives_messages_to_others_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """nsqio/nsq#137: in-flight messages of a dead consumer wait for their whole timeout."""
    async with queue_sides(3) as [broker, dying, other]:
        await broker.queues.create("jobs", {"msg_timeout_s": 600.0})
        await broker.queues.publish_many("jobs", [b"1", b"2"])
        async with dying.at(broker).consume("jobs", "c", max_in_flight=2) as first:
            held = await take(first, 2)
            first.consumer.set_ready(0)
            async with other.at(broker).consume("jobs", "c", max_in_flight=2) as second:
                began = trio.current_time()
                await dying.cut(broker)
                got = await take(second, 2)
                assert trio.current_time() - began < 1
                assert [(each.body, each.attempts) for each in got] == [(b"1", 2), (b"2", 2)]
                assert held[0].expired
                with pytest.raises(NotInFlightError):
                    await held[0].finish()
                for message in got:
                    await message.finish(durable=True)


async def test_consumers_and_publishers_come_back_by_themselves(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs")
        total = 200
        seen: dict[bytes, int] = {}

        async def publish() -> None:
            for number in range(total):
                await other.at(broker).publish("jobs", b"%d" % number, timeout_s=60)

        async def cut() -> None:
            for _ in range(10):
                await trio.sleep(0.2)
                await other.cut(broker)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            nursery.start_soon(cut)
            async with other.at(broker).consume("jobs", "c", max_in_flight=10) as messages:
                while len(seen) < total:
                    message = await messages.__anext__()
                    seen[message.body] = seen.get(message.body, 0) + 1
                    try:
                        await message.finish()
                    except NotInFlightError:
                        continue
                    await trio.sleep(0.01)
        assert (await broker.queues.info("jobs")).counts["published"] == total  # repeats were recognised


async def test_a_publish_whose_answer_was_lost_is_taken_once(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs")
        await other.at(broker).publish("jobs", b"warm")
        for _ in range(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other.at(broker).publish, "jobs", b"once")
                await trio.testing.wait_all_tasks_blocked()
                await other.cut(broker)
        assert (await broker.queues.info("jobs")).messages == 21


async def test_permissions_are_checked_for_each_operation(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3, create="owner") as [broker, friend, stranger]:
        await broker.queues.create(
            "jobs", access={"publish": [str(friend.peer)], "consume": "owner", "administer": "owner"}
        )
        theirs = stranger.at(broker)
        await friend.at(broker).publish("jobs", b"from a friend")
        with pytest.raises(QueueAccessError, match="publish"):
            await theirs.publish("jobs", b"from a stranger")
        for call in (
            lambda: theirs.pause_all("jobs"),
            lambda: theirs.empty_all("jobs"),
            lambda: theirs.delete("jobs"),
            lambda: theirs.peek("jobs"),
            lambda: theirs.dead_letters("jobs", "c"),
            lambda: theirs.create("jobs"),
            lambda: theirs.create("others"),
        ):
            with pytest.raises(QueueAccessError):
                await call()
        with pytest.raises(QueueAccessError):
            async with friend.at(broker).consume("jobs", "c"):
                pytest.fail("it was let in")
        assert [each.name for each in await theirs.listing()] == ["jobs"]
        assert (await theirs.info("jobs")).access.publish == (str(friend.peer),)
        [message] = await broker.queues.peek("jobs")
        assert message.id


async def test_a_full_queue_holds_its_publishers_and_no_others(autojump_clock: trio.testing.MockClock) -> None:
    """apache/rocketmq#2542: no second try when the broker was busy."""
    async with queue_sides() as [broker, other]:
        await broker.queues.create("small", {"items_max": 2})
        await broker.queues.create("large")
        await other.at(broker).publish_many("small", [b"1", b"2"])
        began = trio.current_time()
        with pytest.raises(QueueFullError):
            await other.at(broker).publish("small", b"3", timeout_s=0.5)
        assert trio.current_time() - began <= 2
        with pytest.raises(QueueFullError):
            await broker.queues.publish("small", b"3", timeout_s=1)
        await other.at(broker).publish("large", b"1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other.at(broker).publish, "small", b"3")
            nursery.start_soon(broker.queues.publish, "small", b"4")
            async with other.at(broker).consume("small", "c", max_in_flight=1) as messages:
                for _ in range(4):
                    [message] = await take(messages, 1)
                    await message.finish()


async def test_clear_errors(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(limits=Limits(message_bytes_max=1_000)) as [broker, other]:
        there = other.at(broker)
        with pytest.raises(QueueNotFoundError):
            await there.publish("none", b"")
        with pytest.raises(QueueNotFoundError):
            async with there.consume("none", "c"):
                pytest.fail("there is none")
        await there.create("jobs", {"max_attempts": 3})
        with pytest.raises(QueueExistsError, match="max_attempts"):
            await there.create("jobs", {"max_attempts": 4})
        with pytest.raises(Exception, match="not allowed"):
            await there.create("a name with spaces")
        with pytest.raises(Exception, match="no option"):
            await there.create("more", {"maximum": 1})
        with pytest.raises(MessageTooLargeError):
            await there.publish("jobs", bytes(1_001))
        with pytest.raises(ChannelNotFoundError):
            await there.dead_letters("jobs", "none")
        async with there.consume("jobs", "c") as messages:
            await broker.queues.delete("jobs")
            with pytest.raises(QueueConsumerClosedError, match="deleted"):
                await messages.__anext__()


async def test_pause_peek_empty_and_export(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        there = other.at(broker)
        await there.create("jobs")
        await there.pause_all("jobs")
        await there.publish_many("jobs", [b"%d" % number for number in range(600)])
        async with there.consume("jobs", "c", max_in_flight=5) as messages:
            with trio.move_on_after(5) as scope:
                await messages.__anext__()
            assert scope.cancelled_caught
            assert len(await there.peek("jobs", count=3)) == 3
            assert [each.id for each in await exported(there, "jobs")] == [
                each.id for each in await there.peek("jobs", count=600)
            ]
            await there.resume_all("jobs")
            [message] = await take(messages, 1)
            await message.finish(durable=True)
            assert await there.empty("jobs", "c") > 0
        assert (await there.info("jobs")).messages == 0


async def test_a_channel_with_a_filter_gets_what_it_asked_for(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, other]:
        await broker.queues.create("jobs")
        there = other.at(broker)
        await there.create_channel("jobs", "reds", filter="tag = red")
        for body, tag in ((b"1", "red"), (b"2", "blue"), (b"3", "red")):
            await there.publish("jobs", body, tags=[tag])
        async with (
            there.consume("jobs", "reds", max_in_flight=5, filter="tag = red") as reds,
            there.consume("jobs", "blues", max_in_flight=5, from_start=True, filter="not tag in (red)") as blues,
        ):
            assert [each.body for each in await take(reds, 2)] == [b"1", b"3"]
            [blue] = await take(blues, 1)
            assert blue.body == b"2"
            with pytest.raises(QueueExistsError, match="'tag = red': take another channel"):
                async with there.consume("jobs", "reds", filter="tag = blue"):
                    pass
        with pytest.raises(ProtocolError, match="wrong at 'tagged': expected tag or header"):
            async with there.consume("jobs", "new", filter="tagged = red"):
                pass
        with pytest.raises(ValueError, match="ends too early"):
            await broker.queues.create_channel("jobs", "new", filter="tag in (a")
        assert [each.name for each in (await there.info("jobs")).channels] == ["reds", "blues"]
