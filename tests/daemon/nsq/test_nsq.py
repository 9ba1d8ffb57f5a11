"""NSQ's V2 protocol on the queues of a node: what clients rely on, and what was reported against nsqd."""

import trio
import trio.testing

from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.storage.memory import MemoryStore
from tests.daemon.nsq.world import NsqWorld, nsq_world

Clock = trio.testing.MockClock


async def published(world: NsqWorld, *bodies: bytes, topic: str = "t") -> None:
    client = await world.client()
    for body in bodies:
        assert await client.ask(f"PUB {topic}", body) == "OK"
    await client.stream.aclose()


async def test_publish_subscribe_finish(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        answer = await client.identify(client_id="me")
        assert answer["max_rdy_count"] == 2500
        await published(world, b"one", b"two")
        await client.subscribe(ready=10)
        first, second = await client.message(), await client.message()
        assert [(each.body, each.attempts) for each in (first, second)] == [(b"one", 1), (b"two", 1)]
        assert first.message_id < second.message_id
        await client.finish(first)
        await client.finish(second)
        assert await client.silent(200)


async def test_a_topic_keeps_messages_for_its_first_channel_and_each_channel_has_a_copy(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"early")
        first = await world.client()
        await first.subscribe(channel="a")
        assert (await first.message()).body == b"early"
        second = await world.client()
        await second.subscribe(channel="b")
        await published(world, b"late")
        assert (await second.message()).body == b"late"


async def test_mpub_and_dpub(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.subscribe(ready=10)
        publisher = await world.client()
        assert await publisher.ask("DPUB t 5000", b"later") == "OK"
        assert await publisher.ask("MPUB t", b"\0\0\0\2\0\0\0\1a\0\0\0\1b") == "OK"
        started_s = trio.current_time()
        assert [(await client.message()).body for _ in range(3)] == [b"a", b"b", b"later"]
        assert 4.9 <= trio.current_time() - started_s <= 5.1


async def test_answers_come_in_the_order_of_their_commands(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.send("PUB t", b"a")
        await client.send("IDENTIFY", b"{}")
        await client.send("PUB t", b"b")
        await client.send("PUB !", b"c")
        assert [await client.response() for _ in range(3)] == ["OK"] * 3
        assert (await client.response()).startswith("E_BAD_TOPIC")
        assert await client.frame() is None


async def test_rdy_is_the_window_and_zero_pauses(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"1", b"2", b"3")
        client = await world.client()
        await client.subscribe(ready=2)
        first, _second = await client.message(), await client.message()
        assert await client.silent()
        await client.send("RDY 0")
        await client.finish(first)
        assert await client.silent()
        await client.send("RDY 2")
        assert (await client.message()).body == b"3"


async def test_requeue_at_once_and_with_a_delay(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"x")
        client = await world.client()
        await client.subscribe()
        message = await client.message()
        await client.send(f"REQ {message.message_id.decode()} 0")
        again = await client.message()
        assert (again.message_id, again.attempts) == (message.message_id, 2)
        started_s = trio.current_time()
        await client.send(f"REQ {message.message_id.decode()} 30000")
        assert (await client.message()).attempts == 3
        assert 29.9 <= trio.current_time() - started_s <= 30.1


async def test_a_message_timeout_of_the_clients_choice_and_touch(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        assert (await client.identify(msg_timeout=2000))["msg_timeout"] == 2000
        await published(world, b"x")
        await client.subscribe(ready=2)
        message = await client.message()
        for _ in range(3):
            assert await client.silent(1.5)
            await client.send(f"TOUCH {message.message_id.decode()}")
        started_s = trio.current_time()
        again = await client.message()
        assert (again.attempts, 1.9 <= trio.current_time() - started_s <= 2.1) == (2, True)


async def test_what_is_not_held_is_refused_without_ending_the_connection(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"x")
        client = await world.client()
        await client.subscribe()
        message = await client.message()
        await client.finish(message)
        text = message.message_id.decode()
        assert await client.ask(f"FIN {text}") == f"E_FIN_FAILED FIN {text} failed ID not in flight"
        assert await client.ask(f"REQ {text} 0") == f"E_REQ_FAILED REQ {text} failed ID not in flight"
        assert await client.ask(f"TOUCH {text}") == f"E_TOUCH_FAILED TOUCH {text} failed ID not in flight"
        assert (await client.ask(f"FIN {'z' * 16}")).startswith("E_FIN_FAILED")
        assert await client.ask("PUB t", b"y") == "OK"
        assert world.server.counts["errors_fin_failed"] == 2


async def test_no_one_settles_what_another_client_holds(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"x")
        holder, other = await world.client(), await world.client()
        await holder.subscribe()
        message = await holder.message()
        await other.subscribe()
        assert (await other.ask(f"FIN {message.message_id.decode()}")).startswith("E_FIN_FAILED")
        assert await holder.silent()


async def test_cls_lets_what_is_in_flight_finish(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"1", b"2")
        client = await world.client()
        await client.subscribe()
        message = await client.message()
        assert await client.ask("CLS") == "CLOSE_WAIT"
        await client.finish(message)
        assert await client.silent()
        other = await world.client()
        await other.subscribe()
        assert (await other.message()).body == b"2"


async def test_pause_delivers_nothing_and_loses_nothing(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.subscribe()
        await world.engine.pause("", "t", "c")
        await published(world, b"x")
        assert await client.silent(100)
        await world.engine.resume("", "t", "c")
        assert (await client.message()).body == b"x"


async def test_heartbeats_come_as_agreed_and_silence_ends_the_connection(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        answering, silent = await world.client(), await world.client()
        await answering.identify(heartbeat_interval=1000)
        await silent.identify(heartbeat_interval=1000)
        assert await answering.silent(10.5)
        assert 9 <= answering.heartbeats <= 11
        assert world.server.counts["connections_silent"] == 1
        assert await answering.ask("PUB t", b"x") == "OK"


async def test_a_client_that_takes_a_large_message_slowly_is_not_taken_for_a_silent_one(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"x" * 800_000)
        client = await world.client(is_lockstep=True)
        await client.identify(heartbeat_interval=1000)
        await client.subscribe()
        got = b""
        while len(got) < 800_000:  # 12 s, in which the client sends nothing
            await trio.sleep(0.9)
            got += bytes(await client.stream.receive_some(65_536))
        assert world.server.counts["connections_silent"] == 0
        assert world.server.counts["connections_broken"] == 0


async def test_a_client_that_leaves_without_reading_gives_all_back(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, *[b"x" * 400_000] * 4)
        stuck = await world.client()
        await stuck.subscribe(ready=100)
        other = await world.client()
        await other.subscribe(ready=100)
        await trio.sleep(1)
        await stuck.stream.aclose()
        bodies = [(await other.message()).body for _ in range(4)]
        assert bodies == [b"x" * 400_000] * 4


async def test_output_is_joined_up_to_the_agreed_size(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        assert (await client.identify(output_buffer_size=64))["output_buffer_size"] == 64
        await published(world, *[b"x" * 50] * 20)
        await client.subscribe(ready=100)
        assert [(await client.message()).body for _ in range(20)] == [b"x" * 50] * 20


async def test_a_sample_is_drawn_and_the_rest_is_done(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        assert (await client.identify(sample_rate=30))["sample_rate"] == 30
        await published(world, *[b"%d" % number for number in range(300)])
        await client.subscribe(ready=400)
        got = 0
        with trio.move_on_after(5):
            while True:
                await client.finish(await client.message())
                got += 1
        assert 40 <= got <= 150  # 90 are expected: six standard deviations
        assert world.server.counts["sampled_out"] == 300 - got
        assert (await world.engine.inspector.summary("", "t")).messages == 0


async def test_an_ephemeral_topic_goes_with_its_last_consumer(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.subscribe("t#ephemeral", "c#ephemeral")
        assert world.engine.queue_names("") == ["t#ephemeral"]
        await client.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert world.engine.queue_names("") == []


async def test_a_deleted_channel_closes_its_clients(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.subscribe()
        await world.engine.delete_channel("", "t", "c")
        assert await client.frame() is None


async def test_another_protocol_is_refused(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client(magic=b"GET / HTTP/1.1\r\n")
        assert await client.response() == "E_BAD_PROTOCOL"
        assert await client.frame() is None


async def test_too_large_for_the_queue(autojump_clock: Clock) -> None:
    async with nsq_world(limits=NsqLimits(), message_bytes_max=10) as world:
        client = await world.client()
        assert (await client.ask("PUB t", b"x" * 11)).startswith("E_BAD_MESSAGE PUB message too big")
        assert await client.frame() is None


async def test_a_full_topic_makes_publishers_wait_and_then_fail(autojump_clock: Clock) -> None:
    async with nsq_world(items_max=2) as world:
        await published(world, b"1", b"2")
        client = await world.client()
        await client.send("PUB t", b"3")
        assert await client.silent(10)
        consumer = await world.client()
        await consumer.subscribe()
        await consumer.finish(await consumer.message())
        assert await client.response() == "OK"
        assert (await client.ask("PUB t", b"4")).startswith("E_PUB_FAILED PUB failed")
        assert await client.frame() is None


async def test_many_publishes_on_their_way_are_bounded_and_answered(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.stream.send_all(b"".join(b"PUB t\n\0\0\0\1%d" % (number % 10) for number in range(2_000)))
        assert [await client.response() for _ in range(2_000)] == ["OK"] * 2_000
        assert (await world.engine.inspector.summary("", "t")).messages == 2_000


# Reports against nsqd and its clients (docs/reference/nsq.md)


async def test_nsq_137_a_dead_consumers_messages_are_delivered_at_once(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        await published(world, b"x")
        dying = await world.client()
        await dying.subscribe()
        message = await dying.message()
        other = await world.client()
        await other.subscribe()
        started_s = trio.current_time()
        await dying.stream.aclose()
        again = await other.message()
        assert (again.message_id, again.attempts) == (message.message_id, 2)
        assert trio.current_time() - started_s < 0.1


async def test_nsq_390_what_is_in_flight_expires_with_no_client_attached(autojump_clock: Clock) -> None:
    async with nsq_world(requeue_on_disconnect=False) as world:
        await published(world, b"x")
        client = await world.client()
        await client.subscribe()
        await client.message()
        await client.stream.aclose()
        await trio.sleep(61)
        other = await world.client()
        await other.subscribe()
        assert (await other.message()).attempts == 2


async def test_nsq_865_a_requeue_above_the_longest_delay_is_cut(autojump_clock: Clock) -> None:
    async with nsq_world(delay_max_s=60) as world:
        await published(world, b"x")
        client = await world.client()
        await client.subscribe()
        message = await client.message()
        started_s = trio.current_time()
        await client.send(f"REQ {message.message_id.decode()} 9999999999999")
        assert (await client.message()).attempts == 2
        assert 59 <= trio.current_time() - started_s <= 61


async def test_nsq_1107_a_deferred_message_keeps_its_time_over_a_restart(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with nsq_world(store=store) as world:
        client = await world.client()
        assert await client.ask("DPUB t 60000", b"later") == "OK"
        await client.subscribe()
        assert await client.silent(20)
    # The time of the day, by which the message is due, has hardly moved meanwhile: only trio's clock has jumped.
    async with nsq_world(store=store) as world:
        client = await world.client()
        await client.subscribe()
        started_s = trio.current_time()
        assert (await client.message()).body == b"later"
        assert 58 <= trio.current_time() - started_s <= 61


async def test_nsq_755_what_was_in_flight_comes_back_after_a_restart_with_its_attempts(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with nsq_world(store=store) as world:
        await published(world, b"x", b"y")
        client = await world.client()
        await client.subscribe(ready=2)
        first, _ = await client.message(), await client.message()
        await client.finish(first)
        await trio.testing.wait_all_tasks_blocked()
    async with nsq_world(store=store) as world:
        client = await world.client()
        await client.subscribe(ready=2)
        again = await client.message()
        assert (again.body, again.attempts) == (b"y", 2)
        assert await client.silent()


async def test_nsq_974_a_message_that_always_fails_becomes_a_dead_letter(autojump_clock: Clock) -> None:
    async with nsq_world(max_attempts=3) as world:
        await published(world, b"poison")
        client = await world.client()
        await client.subscribe()
        for attempts in (1, 2, 3):
            message = await client.message()
            assert message.attempts == attempts
            await client.send(f"REQ {message.message_id.decode()} 0")
        assert await client.silent()
        (dead,) = await world.engine.dead_letters.page("", "t", "c")
        assert (dead.attempts, dead.message.body) == (3, b"poison")


async def test_nsq_1389_equal_times_keep_the_order_of_publishing(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.stream.send_all(b"".join(b"DPUB t 1000\n\0\0\0\2%02d" % number for number in range(50)))
        assert [await client.response() for _ in range(50)] == ["OK"] * 50
        await client.subscribe(ready=100)
        assert [(await client.message()).body for _ in range(50)] == [b"%02d" % number for number in range(50)]
