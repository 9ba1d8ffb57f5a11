"""One member's queues, messages, consumers, receives and changes are bounded; another member has its own bounds."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from dep2p.errors import OverloadedError, QueueFullError
from dep2p.limits import Limits
from dep2p.protocols.queues.admin import ReceiveMessages
from dep2p.queues.service.member_quotas import CHANGES_BURST
from dep2p.queues.types import SubscribeOptions
from tests.queues.nodes import QueueSide, queue_sides


async def refused(ask: Callable[[], Awaitable[object]]) -> str:
    """The text of the refusal."""
    with pytest.raises((QueueFullError, OverloadedError)) as raised:
        await ask()
    return str(raised.value)


async def test_a_member_makes_so_many_queues_and_another_one_makes_its_own(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3, limits=Limits(queues_per_peer_max=5)) as [broker, greedy, other]:
        for number in range(5):
            await greedy.at(broker).create(f"q{number}")
        text = await refused(lambda: greedy.at(broker).create("one-more"))
        assert "5 queues" in text and "queues_per_peer_max" in text and "delete some" in text
        assert broker.ownership.fairness.ledger.refused == {"queues": 1}
        await greedy.at(broker).create("q0")  # to make it once more changes nothing
        await other.at(broker).create("another")
        await broker.queues.create("own")
        await greedy.at(broker).delete("q0")
        await greedy.at(broker).create("one-more")


async def test_queues_that_were_made_before_a_restart_count(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2, limits=Limits(queues_per_peer_max=2)) as [broker, greedy]:
        await greedy.at(broker).create("a")
        await greedy.at(broker).create("b")
        makers = broker.engine.registry.makers
        definitions = {
            f"queue/{queue.namespace}/{queue.name}": queue for queue in broker.engine.registry.queues.values()
        }
        assert len(definitions) == 2
        assert makers.count(greedy.peer) == 2
        await broker.ownership.aclose()
        again = broker.make_ownership()
        await again.open()
        assert again.engine.registry.makers.count(greedy.peer) == 2


async def test_a_member_changes_queues_at_its_rate(autojump_clock: trio.testing.MockClock) -> None:
    limits = Limits(queues_per_peer_max=10_000, queue_changes_per_peer_per_s=10.0)
    async with queue_sides(3, limits=limits) as [broker, greedy, other]:
        began = trio.current_time()
        made = 0
        text = ""
        for number in range(CHANGES_BURST + 100):
            try:
                await greedy.at(broker).create(f"q{number}")
                made += 1
            except OverloadedError as error:
                text = str(error)
                break
        most = CHANGES_BURST + 10 * (trio.current_time() - began) + 1
        assert CHANGES_BURST <= made <= most
        assert "queue_changes_per_peer_per_s" in text and "try again after" in text
        await other.at(broker).create("another")
        await trio.sleep(1)
        await greedy.at(broker).create("later")


async def test_what_a_member_s_queues_hold_is_bounded_whoever_publishes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3, limits=Limits(queue_bytes_per_peer_max=10_000)) as [broker, greedy, other]:
        for name in ("a", "b"):
            await greedy.at(broker).create(name)
        await other.at(broker).create("another")
        for _ in range(5):
            await greedy.at(broker).publish("a", bytes(1_000))
            await other.at(broker).publish("b", bytes(1_000))
        text = await refused(lambda: greedy.at(broker).publish("a", bytes(1_000), timeout_s=1))
        assert "queue_bytes_per_peer_max" in text and "10000 bytes" in text
        await refused(lambda: other.at(broker).publish("b", bytes(1_000), timeout_s=1))
        await other.at(broker).publish("another", bytes(1_000))
        assert broker.ownership.fairness.ledger.refused["queue_bytes"] >= 2
        await greedy.at(broker).empty_all("a")
        await greedy.at(broker).publish("a", bytes(1_000), timeout_s=1)


async def test_a_member_publishes_at_its_rate(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3, limits=Limits(queue_messages_per_peer_per_s=2.0)) as [broker, greedy, other]:
        await broker.queues.create("q")
        for _ in range(20):
            await greedy.at(broker).publish("q", b"x")
        assert "queue_messages_per_peer_per_s" in await refused(
            lambda: greedy.at(broker).publish("q", b"x", timeout_s=0.1)
        )
        await other.at(broker).publish("q", b"x", timeout_s=0.1)
        await greedy.at(broker).publish("q", b"x", timeout_s=5)


async def test_a_member_has_so_many_consumers_over_all_its_links(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3, limits=Limits(queue_consumers_per_peer_max=3)) as [broker, greedy, other]:
        await broker.queues.create("q")
        consumers = [await greedy.at(broker).open_consumer("q", "c", SubscribeOptions()) for _ in range(3)]
        with pytest.raises(OverloadedError, match="queue_consumers_per_peer_max"):
            await greedy.at(broker).open_consumer("q", "c", SubscribeOptions())
        await (await other.at(broker).open_consumer("q", "c", SubscribeOptions())).aclose()
        await consumers.pop().aclose()
        await trio.sleep(1)
        consumers.append(await greedy.at(broker).open_consumer("q", "c", SubscribeOptions()))
        for consumer in consumers:
            await consumer.aclose()
        await trio.sleep(1)
        assert broker.ownership.fairness.ledger.held(greedy.peer, "queue_consumers") == 0


async def test_receives_that_wait_are_bounded_for_each_member(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3, limits=Limits(queue_receives_per_peer_max=4)) as [broker, greedy, other]:
        await broker.queues.create("q")
        refusals = 0

        async def wait_for_one(side: QueueSide) -> None:
            nonlocal refusals
            try:
                await side.at(broker).ask(ReceiveMessages(queue="q", channel="c", wait_s=5))
            except OverloadedError:
                refusals += 1

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(wait_for_one, greedy)
            await trio.sleep(1)
            nursery.start_soon(wait_for_one, other)
        assert refusals >= 1
        ledger = broker.ownership.fairness.ledger
        assert ledger.refused["queue_receives"] >= 6
        assert {each.peer for each in ledger.usage() if each.refused} == {greedy.peer}
        assert ledger.held(greedy.peer, "queue_receives") == 0
