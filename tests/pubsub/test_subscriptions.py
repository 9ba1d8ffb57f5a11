"""Full buffers, validators, races, and calls cancelled at every await."""

import pytest
import trio
import trio.testing

from dep2p import PublishRefusedError, SeqnoValidator, TopicMessage, Verdict
from tests.messaging.checkpoints import every_cancellation
from tests.pubsub.nodes import joined, pubsub_nodes, take, take_items, until

Clock = trio.testing.MockClock


async def settled() -> None:
    await trio.sleep(0.5)
    await trio.testing.wait_all_tasks_blocked()


async def test_a_full_buffer_drops_the_oldest_and_says_how_many(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe(buffer_items=3, on_full="drop_oldest") as messages:
            for number in range(5):
                await a.publish(b"%d" % number)
            await settled()
            assert await take_items(messages, 4) == [2, b"2", b"3", b"4"]
            assert messages.lagged_total == 2
        assert nodes[1].counters()["pubsub_messages_dropped_buffer_full_drop_oldest"] == 2


async def test_a_full_buffer_refuses_the_newest_and_says_where_the_gap_is(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe(buffer_items=2, on_full="drop_newest") as messages:
            for number in range(5):
                await a.publish(b"%d" % number)
            await settled()
            assert await take_items(messages, 3) == [b"0", b"1", 3]
            await a.publish(b"5")
            assert await take(messages, 1) == [b"5"]
        assert nodes[1].counters()["pubsub_messages_dropped_buffer_full_drop_newest"] == 3


async def test_a_buffer_is_bounded_in_bytes_too(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe(buffer_bytes=2_500) as messages:
            for _ in range(4):
                await a.publish(bytes(1_000))
            await settled()
            assert (len(messages), messages.buffered_bytes) == (2, 2_000)
            assert await take_items(messages, 3) == [2, bytes(1_000), bytes(1_000)]


async def test_a_pausing_buffer_holds_the_publisher_back_and_loses_nothing(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe(buffer_items=10, on_full="pause") as messages:
            for number in range(2_000):
                await a.publish(b"%d" % number + bytes(1_000))
            await settled()
            assert len(messages) < 1_100  # what was in flight already; the rest waits at the publisher
            got = await take(messages, 2_000)
            assert [int(data.rstrip(b"\0")) for data in got] == list(range(2_000))
        assert not nodes[1].pubsub().stats()["is_held"]


async def test_closing_a_pausing_subscription_lets_the_others_go_on(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            async with b.subscribe(buffer_items=1, on_full="pause"):
                for number in range(300):
                    await a.publish(b"%d" % number + bytes(2_000))
                await settled()
            assert len(await take(messages, 300)) == 300


async def test_every_subscription_of_a_topic_gets_every_message(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as first, b.subscribe() as second:
            await a.publish(b"x")
            assert await take(first, 1) == await take(second, 1) == [b"x"]


async def test_wrong_options_are_refused(autojump_clock: Clock) -> None:
    async with pubsub_nodes(1) as (node,):
        topic = await node.join("chat")
        with pytest.raises(ValueError, match="buffer_items"):
            topic.subscribe(buffer_items=0)
        with pytest.raises(ValueError, match="on_full"):
            topic.subscribe(on_full="explode")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="on_no_peers"):
            await topic.publish(b"", on_no_peers="wait")  # type: ignore[call-overload]  # pyright: ignore
        with pytest.raises(TypeError, match="bytes"):
            await topic.publish("text")  # type: ignore[call-overload]  # pyright: ignore
        with pytest.raises(RuntimeError, match="enter"):
            await anext(topic.subscribe())


# Validators


async def test_validators_sync_and_async_accept_ignore_and_reject(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)

        def no_spam(message: TopicMessage) -> bool:
            assert message.sender == nodes[0].peer_id
            return b"spam" not in message.body

        async def no_old(message: TopicMessage) -> Verdict:
            await trio.sleep(0.1)
            return Verdict.IGNORE if message.body.startswith(b"old") else Verdict.ACCEPT

        remove = b.add_validator(no_spam)
        b.add_validator(no_old)
        async with b.subscribe() as messages:
            for data in (b"spam", b"old", b"good"):
                await a.publish(data)
            assert await take(messages, 1) == [b"good"]
            await trio.sleep(2)
            assert b.scores()[nodes[0].peer_id] < a.scores()[nodes[1].peer_id]
            remove()
            await a.publish(b"spam now")
            assert await take(messages, 1) == [b"spam now"]
        counters = nodes[1].counters()
        assert counters["pubsub_router_rejected_validation_failed"] == 1
        assert counters["pubsub_router_rejected_validation_ignored"] == 1


async def test_the_seqno_validator_lets_growing_numbers_pass(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        a.add_validator(SeqnoValidator())
        b.add_validator(SeqnoValidator())
        async with b.subscribe() as messages:
            for number in range(3):
                await a.publish(b"%d" % number)
            assert await take(messages, 3) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("answer", [False, Verdict.IGNORE, Verdict.REJECT, ValueError("bug")])
async def test_what_an_own_validator_does_not_accept_is_not_published(
    autojump_clock: Clock, is_async: bool, answer: bool | Verdict | ValueError
) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        asked: list[TopicMessage] = []

        def judge(message: TopicMessage) -> bool | Verdict:
            asked.append(message)
            if message.body == b"good":
                return True
            if isinstance(answer, ValueError):
                raise answer
            return answer

        async def judge_later(message: TopicMessage) -> bool | Verdict:
            await trio.sleep(1)
            return judge(message)

        remove = a.add_validator(judge_later if is_async else judge)
        async with b.subscribe() as messages:
            with pytest.raises(PublishRefusedError, match="'chat'"):
                await a.publish(b"bad")
            await a.publish(b"good")
            assert await take(messages, 1) == [b"good"]
            remove()
            await a.publish(b"bad")
            assert await take(messages, 1) == [b"bad"]
        assert [(one.body, one.sender, one.seqno, one.id) for one in asked] == [
            (data, nodes[0].peer_id, None, b"") for data in (b"bad", b"good")
        ]
        assert nodes[0].counters()["pubsub_router_published"] == 2


async def test_a_failing_or_endless_validator_ignores_that_message_only(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)

        async def picky(message: TopicMessage) -> None:
            if message.body == b"crash":
                raise RuntimeError("no")
            if message.body == b"hang":
                await trio.sleep_forever()

        b.add_validator(picky, timeout_s=1)
        async with b.subscribe() as messages:
            for data in (b"crash", b"hang", b"fine"):
                await a.publish(data)
            assert await take(messages, 1) == [b"fine"]
            await trio.sleep(2)
        counters = nodes[1].counters()
        assert counters["pubsub_validators_failed"] == counters["pubsub_validations_timed_out"] == 1


async def test_a_throttled_validator_drops_what_is_too_much_and_counts_it(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)

        async def slow(_message: TopicMessage) -> None:
            await trio.sleep(1)

        b.add_validator(slow, concurrency=4)
        async with b.subscribe() as messages:
            for number in range(10):
                await a.publish(b"%d" % number)
            assert len(await take(messages, 4)) == 4
        assert nodes[1].counters()["pubsub_validations_throttled"] == 6


async def test_a_slow_validator_of_one_topic_does_not_delay_another_topic(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        other_a, other_b = await joined(nodes, "other")

        async def slow(_message: TopicMessage) -> None:
            await trio.sleep(5)

        b.add_validator(slow)
        async with other_b.subscribe() as messages:
            for _ in range(50):
                await a.publish(b"slow")
            await other_a.publish(b"fast")
            assert await take(messages, 1, within_s=0.5) == [b"fast"]


# Cancellation


async def test_a_publish_cancelled_at_any_await_was_made_or_not_and_the_next_one_works(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        async with b.subscribe() as messages:
            async for _ in every_cancellation(lambda: a.publish(bytes(70_000)), duration_s=0.002):
                pass
            await a.publish(b"last")
            seen: list[bytes] = []
            while b"last" not in seen:
                seen += await take(messages, 1)
            assert len(seen) > 1


async def test_a_wait_for_a_message_cancelled_at_any_await_loses_none(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        a, b = await joined(nodes)
        got: list[bytes] = []
        async with b.subscribe() as messages:

            async def one() -> None:
                item = await anext(messages)
                assert isinstance(item, TopicMessage)
                got.append(item.body)

            for number in range(200):
                await a.publish(b"%d" % number)
            await settled()
            async for _ in every_cancellation(one, step_s=0.001, duration_s=0.01):
                pass
            got += await take(messages, 200 - len(got))
        assert got == [b"%d" % number for number in range(200)]


async def test_join_and_leave_cancelled_at_any_await_leave_no_half_joined_topic(autojump_clock: Clock) -> None:
    async with pubsub_nodes(2) as nodes:
        await joined(nodes)

        async def visit() -> None:
            topic = await nodes[0].join("visit")
            await topic.leave()

        async for _ in every_cancellation(visit, duration_s=0.002):
            pass
        assert [status.topic for status in nodes[0].topics()] == ["chat"]
        await until(lambda: not nodes[1].pubsub().peers("visit"))
