"""What producers and consumers count, added up over those that are at work and those that are over."""

import pytest
import trio
import trio.lowlevel
import trio.testing

from dep2p.errors import Dep2pError, RejectMessage
from dep2p.queues.api.push_consumer import PushedMessage
from dep2p.queues.client_metrics import Durations, FlowCounts, Handovers
from dep2p.queues.distributed.consumer import PlacedConsumer
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from tests.io.queues_support import queue_sides
from tests.io.test_queue_exclusive import until
from tests.io.test_queue_placed import cluster, key_at, make


async def test_what_flows_did_is_there_when_they_are_over(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [keeper, user]:
        place = user.at(keeper)
        await keeper.queues.create("jobs", {"partitions": 2})
        flows = user.keeping.flows
        done = trio.Event()

        async def handle(message: PushedMessage) -> None:
            if message.body == b"7":
                raise RejectMessage("no")
            if message.body == b"9":
                done.set()

        for _ in range(3):
            done = trio.Event()
            async with place.producer("jobs") as producer, place.consumer("jobs", "c", handle, mode="fifo"):
                for number in range(10):
                    await producer.publish(b"%d" % number, order_key="k")
                await done.wait()
                await until(lambda: flows.counts("consumer")["confirmed"] % 10 == 0)
                assert flows.values("producer")["at_work"] == 1
                assert flows.values("consumer")["partitions"] == 2
        assert flows.values("producer") == {"at_work": 0}
        assert flows.values("consumer") == {"at_work": 0}
        counts = flows.counts("producer")
        assert (counts["submitted"], counts["taken"]) == (30, 30)
        counts = flows.counts("consumer")
        assert (counts["arrived"], counts["done"], counts["confirmed"]) == (30, 27, 30)
        assert (counts["rejected"], counts["dead_lettered"]) == (3, 3)
        assert sum(flows.handovers().taken.counts) == 6
        assert not keeper.keeping.flows.counts("producer"), "they are counted where they work"


@pytest.mark.parametrize("is_placed", [False, True])
async def test_the_time_of_a_handover_is_that_of_the_work_in_it(
    autojump_clock: trio.testing.MockClock, is_placed: bool
) -> None:
    async with queue_sides(4) as [home, one, first, second]:
        if is_placed:
            await make(home.queues, [one], 2)
        else:
            await home.queues.create("jobs", {"partitions": 2, "order": "strict", "lease_s": 6.0})
        began = [trio.Event(), trio.Event()]

        async def slow(message: PushedMessage) -> None:
            began[message.body == b"b"].set()
            await trio.sleep(4)

        async def quick(message: PushedMessage) -> None:
            await trio.lowlevel.checkpoint()

        async with first.at(home).consumer("jobs", "c", slow, mode="fifo"):
            route = await home.queues.route("jobs")
            used: dict[int, None] = {}
            for number in range(100):  # one in each partition
                await home.queues.publish("jobs", b"ab"[len(used) : len(used) + 1], order_key=f"k{number}")
                used = {
                    each["partition"]: None
                    for each in (await home.queues.route("jobs"))["partitions"]
                    if each["messages"]
                }
                if len(used) == 2:
                    break
            assert route["partitions"]
            for each in began:
                await each.wait()
            async with second.at(home).consumer("jobs", "c", quick, mode="fifo"):
                given, taken = first.keeping.flows.handovers, second.keeping.flows.handovers
                with trio.fail_after(60):
                    await until(lambda: sum(given().given.counts) >= 1 and sum(taken().taken.counts) >= 1)
                assert 1.0 < given().given.sum_s / sum(given().given.counts) < 5.0
                assert 1.0 < taken().taken.sum_s / sum(taken().taken.counts) < 6.0


async def test_a_lost_lock_is_counted(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(3) as nodes:
        home, one, user = nodes.sides
        await make(home.queues, [one], 1)
        async with user.at(home).consume("jobs", "c", exclusive=True) as messages:
            assert isinstance(messages.consumer, PlacedConsumer)
            await user.at(home).publish("jobs", b"x", order_key="k")
            await messages.consumer.receive()
            assert user.keeping.flows.values("consumer")["partitions"] == 1
            await nodes.kill(1)
            await until(lambda: user.keeping.flows.counts("consumer").get("partitions_lost", 0) == 1)
            assert user.keeping.flows.values("consumer")["partitions"] == 0


async def test_the_home_tells_what_is_under_way(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        assert home.service.placed_values()["queues"] == 0
        await make(home.queues, [one, two], 2)
        await home.queues.create_channel("jobs", "c", exclusive=True)
        for number in range(40):
            await user.at(home).publish("jobs", b"x", order_key=f"k{number}")
        await home.queues.expand("jobs", 4)
        (there,) = key_at(await home.queues.route("jobs"), two.peer)
        found = home.service.placed_values()
        assert (found["queues"], found["growing"], found["barriers"], found["nodes"]) == (1, 0, 2, 2)
        assert found["nodes_away"] == 0
        await nodes.kill(2)
        with pytest.raises(Dep2pError):  # now it is known to be away
            await user.at(home).publish("jobs", b"x", order_key=there, timeout=1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: user.at(home).publish("jobs", b"x", order_key=there, timeout=1e6))
            with trio.fail_after(60):
                await until(lambda: home.service.placed_values()["nodes_away"] == 1)
                await until(lambda: user.service.placed_values()["waiting_in_line"] == 1)
            nursery.cancel_scope.cancel()
        await home.queues.delete("jobs", force=True)
        found = home.service.placed_values()
        assert (found["queues"], found["to_remove"]) == (0, 2)


def test_many_flows_that_are_over_are_not_kept() -> None:
    class Over:
        flow_kind = "producer"
        is_over = True
        handovers: Handovers | None = None

        def flow_counts(self) -> dict[str, int]:
            return {"taken": 2}

        def flow_values(self) -> dict[str, float]:
            return {"waiting": 1}

    flows = FlowCounts()
    for _ in range(10_000):
        flows.add(Over())
    assert flows.live <= 64
    assert flows.counts("producer") == {"taken": 20_000}
    assert flows.values("producer") == {"at_work": 0}


def test_durations() -> None:
    durations = Durations()
    for seconds in (0.0, 0.01, 0.3, 61.0):
        durations.add(seconds)
    assert durations.counts == [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    twice = Durations()
    twice.update(durations)
    twice.update(durations)
    assert twice.counts == [each * 2 for each in durations.counts]
    assert twice.sum_s == pytest.approx(2 * 61.31)
    assert ExclusiveConsumer.flow_kind == "consumer"
