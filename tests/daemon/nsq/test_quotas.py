"""One NSQ connection takes neither all places, nor all publishes, nor memory by not reading."""

import struct

import pytest
import trio
import trio.testing

from dep2p.config.nsq import NsqConfig
from dep2p.daemon.nsq.connection import ANSWER_BYTES_MAX, OUT_BYTES_MAX
from dep2p.daemon.nsq.quotas import TOPICS_BURST, SharedPool
from dep2p.protocols.nsq.limits import NsqLimits
from tests.daemon.nsq.world import nsq_world

Clock = trio.testing.MockClock
ID = "0123456789abcdef"


def mpub(count: int, body: bytes = b"x") -> bytes:
    return struct.pack(">i", count) + (struct.pack(">i", len(body)) + body) * count


def test_a_holder_gets_seven_of_eight_places_and_another_one_still_gets_some() -> None:
    pool = SharedPool(80)
    greedy, other = object(), object()
    pool.hold(greedy, 70)
    assert not pool.has_share(greedy)
    assert pool.has_share(other)
    assert (pool.taken, pool.held_most) == (70, 70)
    pool.add(greedy, -70)
    assert pool.has_share(greedy, 70)
    assert not pool.has_share(greedy, 71) or not pool.taken
    assert pool.held_most == 0


def test_what_is_larger_than_all_places_may_be_held_alone() -> None:
    pool = SharedPool(8)
    one, other = object(), object()
    assert pool.has_share(one, 100)
    pool.hold(one, 100)
    assert not pool.has_share(other)
    pool.hold(one, 0)
    assert pool.has_share(other, 100)


async def test_those_that_wait_go_on_when_places_come_back(autojump_clock: Clock) -> None:
    pool = SharedPool(8)
    greedy, done = object(), 0
    pool.hold(greedy, 8)

    async def wait() -> None:
        nonlocal done
        await pool.wait(object())
        done += 1

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert done == 0
        pool.hold(greedy, 4)
        await trio.testing.wait_all_tasks_blocked()
        assert done == 3


async def test_a_client_that_reads_no_errors_is_not_read_either(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client(magic=b"", is_lockstep=True)
        await client.stream.send_all(b"  V2")
        assert await client.ask("SUB t c") == "OK"
        sent = 0
        with trio.move_on_after(20):
            while True:
                await client.send("\n".join([f"FIN {ID}"] * 100))
                sent += 100
        assert sent < 10_000
        assert ANSWER_BYTES_MAX < world.server.values()["memory_bytes"] < 4 * ANSWER_BYTES_MAX
        for _ in range(sent):
            assert (await client.response()).startswith("E_FIN_FAILED")
        with trio.move_on_after(1):
            while await client.frame():  # of a piece that was sent when its time was over
                pass
        assert len(world.server.connections) == 1  # it goes on
        assert world.server.values()["memory_bytes"] < 100


async def test_a_consumer_that_does_not_read_holds_little(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        publisher = await world.client()
        for _ in range(30):
            assert await publisher.ask("PUB t", bytes(500_000)) == "OK"
        consumer = await world.client(magic=b"", is_lockstep=True)
        await consumer.stream.send_all(b"  V2")
        await consumer.subscribe(ready=100)
        await trio.sleep(5)
        assert world.server.values()["memory_bytes"] <= 2 * OUT_BYTES_MAX
        for _ in range(30):
            await consumer.finish(await consumer.message())


async def test_incomplete_commands_of_one_client_leave_memory_for_others(autojump_clock: Clock) -> None:
    async with nsq_world(config=NsqConfig(memory_bytes_max=800_000)) as world:
        for size in (1_000_000, 1_000_000):
            greedy = await world.client(magic=b"", is_lockstep=True)
            await greedy.stream.send_all(b"  V2MPUB t\n" + struct.pack(">i", size))
            with trio.move_on_after(5):
                while True:
                    await greedy.stream.send_all(bytes(50_000))
        assert world.server.counts["memory_waited"] == 2
        assert world.server.values()["memory_bytes"] <= 900_000
        other = await world.client()
        assert await other.ask("PUB t", bytes(10_000)) == "OK"
        await trio.sleep(100)  # the greedy ones are silent, and end
        assert world.server.values()["memory_bytes"] == 0


async def test_memory_comes_back_when_a_client_leaves(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client = await world.client()
        await client.stream.send_all(b"MPUB t\n" + struct.pack(">i", 1_000_000) + bytes(300_000))
        await trio.testing.wait_all_tasks_blocked()
        assert world.server.values()["memory_bytes_largest_connection"] == 300_000
        await client.stream.aclose()
        await trio.sleep(1)
        assert world.server.values() == {
            "memory_bytes": 0,
            "memory_bytes_largest_connection": 0,
            "publishes_pending": 0,
            "publishes_pending_largest_connection": 0,
        }


async def test_a_publish_waits_for_its_share(autojump_clock: Clock) -> None:
    async with nsq_world(config=NsqConfig(publishes_pending_max=16)) as world:
        others = object()
        world.server.quotas.publishes.hold(others, 16)
        client = await world.client()
        await client.send("MPUB t", mpub(3))
        assert await client.silent(10)
        assert world.server.counts["publishes_waited_share"] == 1
        world.server.quotas.publishes.hold(others, 0)
        assert await client.response() == "OK"
        assert await client.ask("MPUB t", mpub(200)) == "OK"  # alone it may have more than all
        assert world.server.values()["publishes_pending"] == 0


async def test_an_mpub_of_too_many_messages_is_refused_before_it_is_read_apart(autojump_clock: Clock) -> None:
    most = NsqLimits().mpub_items_max
    async with nsq_world() as world:
        client = await world.client()
        assert await client.ask("MPUB t", mpub(most)) == "OK"
        assert (await client.ask("MPUB t", mpub(most + 1))).startswith(f"E_BAD_BODY MPUB of {most + 1} messages")


async def test_one_connection_makes_topics_at_a_rate(autojump_clock: Clock) -> None:
    async with nsq_world() as world:
        client, started_s = await world.client(), trio.current_time()
        for number in range(TOPICS_BURST + 40):
            assert await client.ask(f"PUB t{number}", b"x") == "OK"
        assert 1.9 <= trio.current_time() - started_s <= 2.2
        assert world.server.counts["topics_waited"] >= 1
        started_s = trio.current_time()
        other = await world.client()
        assert await other.ask("PUB another", b"x") == "OK"
        assert trio.current_time() == started_s


async def test_there_are_so_many_topics_and_no_more(autojump_clock: Clock) -> None:
    async with nsq_world(config=NsqConfig(topics_max=2)) as world:
        client = await world.client()
        assert [await client.ask(f"PUB t{number}", b"x") for number in (1, 2, 1)] == ["OK"] * 3
        answer = await client.ask("PUB t3", b"x")
        assert answer.startswith("E_PUB_FAILED")
        assert "topics_max" in answer
        assert world.server.counts["topics_refused"] == 1


async def test_a_rate_of_messages_holds_a_connection_back(autojump_clock: Clock) -> None:
    async with nsq_world(config=NsqConfig(messages_per_s=2.0)) as world:
        client, started_s = await world.client(), trio.current_time()
        for _ in range(30):
            assert await client.ask("PUB t", b"x") == "OK"
        assert 4.5 <= trio.current_time() - started_s <= 5.5
        assert world.server.counts["messages_waited"] >= 1


@pytest.mark.real
async def test_a_connection_that_says_nothing_makes_room_for_one_that_does() -> None:
    async with nsq_world(config=NsqConfig(connections_max=3)) as world, trio.open_nursery() as nursery:
        server = world.server
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(server.serve_tcp, listener)
        port = int(server.tcp_address.rpartition(":")[2])

        opened: list[trio.SocketStream] = []

        async def connect(data: bytes) -> tuple[trio.SocketStream, bytes]:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            opened.append(stream)
            await stream.send_all(data)
            return stream, bytes(await stream.receive_some(100)) if b"PUB" in data else b""

        publish = b"  V2PUB t\n" + struct.pack(">i", 1) + b"x"
        with trio.fail_after(10):
            idle = [(await connect(b"  V2"))[0] for _ in range(2)]
            used = [await connect(publish) for _ in range(3)]
            assert [answer[8:] for _, answer in used] == [b"OK"] * 3
            for stream in idle:
                assert await stream.receive_some(1) == b""
            refused, _ = await connect(b"  V2")
            assert b"too many connections" in bytes(await refused.receive_some(100))
            assert server.counts["connections_ended_idle"] == 2
            assert server.counts["connections_refused"] == 1
        for stream in opened:
            await trio.aclose_forcefully(stream)
        nursery.cancel_scope.cancel()
