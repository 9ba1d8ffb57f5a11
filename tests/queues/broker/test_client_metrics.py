"""Counters of producers and consumers: the sums over those at work and those that have ended."""

import pytest
import trio
import trio.lowlevel
import trio.testing

from dep2p.errors import Dep2pError, RejectMessage
from dep2p.queues.api.push_consumer import PushedMessage
from dep2p.queues.client_metrics import Durations, FlowCounts, Handovers
from dep2p.queues.distributed.consumer import DistributedConsumer
from dep2p.queues.ordered_consumer import ExclusiveConsumer
from tests.queues.broker.test_exclusive import until
from tests.queues.distributed.test_distributed import cluster, key_at, make
from tests.queues.nodes import queue_sides


async def test_what_flows_did_is_there_when_they_are_over(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides() as [broker, user]:
        queues = user.at(broker)
        await broker.queues.create("jobs", {"partitions": 2})
        flows = user.ownership.flows
        done = trio.Event()

        async def handle(message: PushedMessage) -> None:
            if message.body == b"7":
                raise RejectMessage("no")
            if message.body == b"9":
                done.set()

        for _ in range(3):
            done = trio.Event()
            async with queues.producer("jobs") as producer, queues.consumer("jobs", "c", handle, mode="fifo"):
                for number in range(10):
                    await producer.publish(b"%d" % number, key="k")
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
        assert not broker.ownership.flows.counts("producer"), "they are counted where they work"


@pytest.mark.parametrize("is_distributed", [False, True])
async def test_the_time_of_a_handover_is_that_of_the_work_in_it(
    autojump_clock: trio.testing.MockClock, is_distributed: bool
) -> None:
    async with queue_sides(4) as [controller, one, first, second]:
        if is_distributed:
            await make(controller.queues, [one], 2)
        else:
            await controller.queues.create("jobs", {"partitions": 2, "order": "strict", "lease_s": 6.0})
        began = [trio.Event(), trio.Event()]

        async def slow(message: PushedMessage) -> None:
            began[message.body == b"b"].set()
            await trio.sleep(4)

        async def quick(message: PushedMessage) -> None:
            await trio.lowlevel.checkpoint()

        async with first.at(controller).consumer("jobs", "c", slow, mode="fifo"):
            route = await controller.queues.route("jobs")
            used: dict[int, None] = {}
            for number in range(100):  # one in each partition
                await controller.queues.publish("jobs", b"ab"[len(used) : len(used) + 1], key=f"k{number}")
                used = {
                    each.partition: None for each in (await controller.queues.route("jobs")).partitions if each.messages
                }
                if len(used) == 2:
                    break
            assert route.partitions
            for each in began:
                await each.wait()
            async with second.at(controller).consumer("jobs", "c", quick, mode="fifo"):
                given, taken = first.ownership.flows.handovers, second.ownership.flows.handovers
                with trio.fail_after(60):
                    await until(lambda: sum(given().given.counts) >= 1 and sum(taken().taken.counts) >= 1)
                assert 1.0 < given().given.sum_s / sum(given().given.counts) < 5.0
                assert 1.0 < taken().taken.sum_s / sum(taken().taken.counts) < 6.0


async def test_a_lost_lock_is_counted(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(3) as nodes:
        controller, one, user = nodes.sides
        await make(controller.queues, [one], 1)
        async with user.at(controller).consume("jobs", "c", exclusive=True) as messages:
            assert isinstance(messages.consumer, DistributedConsumer)
            await user.at(controller).publish("jobs", b"x", key="k")
            await messages.consumer.receive()
            assert user.ownership.flows.values("consumer")["partitions"] == 1
            await nodes.kill(1)
            await until(lambda: user.ownership.flows.counts("consumer").get("partitions_lost", 0) == 1)
            assert user.ownership.flows.values("consumer")["partitions"] == 0


async def test_the_controller_tells_what_is_under_way(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        assert controller.service.distributed_values()["queues"] == 0
        await make(controller.queues, [one, two], 2)
        await controller.queues.create_channel("jobs", "c", exclusive=True)
        for number in range(40):
            await user.at(controller).publish("jobs", b"x", key=f"k{number}")
        await controller.queues.expand("jobs", 4)
        (there,) = key_at(await controller.queues.route("jobs"), two.peer)
        found = controller.service.distributed_values()
        assert (found["queues"], found["expanding"], found["barriers"], found["nodes"]) == (1, 0, 2, 2)
        assert found["nodes_away"] == 0
        await nodes.kill(2)
        with pytest.raises(Dep2pError):  # now it is known to be away
            await user.at(controller).publish("jobs", b"x", key=there, timeout_s=1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: user.at(controller).publish("jobs", b"x", key=there, timeout_s=1e6))
            with trio.fail_after(60):
                await until(lambda: controller.service.distributed_values()["nodes_away"] == 1)
                await until(lambda: user.service.distributed_values()["waiting_in_key_queue"] == 1)
            nursery.cancel_scope.cancel()
        await controller.queues.delete("jobs", force=True)
        found = controller.service.distributed_values()
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
