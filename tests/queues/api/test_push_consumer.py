"""Push consumers: handlers in both modes, over the queues of this node and of another one."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import QueueConsumerClosedError, QueueNotFoundError, RejectMessage, RetryMessage
from dep2p.protocols.queues.admin import OptionValue
from dep2p.protocols.queues.clients.settings import ConsumerSettings
from dep2p.protocols.timing.backoff import Backoff
from dep2p.queues.api.push_consumer import PushedMessage
from dep2p.queues.api.queues import QueueHandle, Queues
from tests.queues.nodes import QueueSide, queue_sides

Clock = trio.testing.MockClock

FAST = Backoff(0.5, 2.0)


class QueueSetup:
    """A queue, as its node or another member sees it."""

    def __init__(self, queues: Queues, broker: QueueSide, asker: QueueSide | None) -> None:
        self.queues = queues
        self.broker = broker
        self.asker = asker

    async def queue(self, **options: OptionValue) -> QueueHandle:
        return await self.queues.create("jobs", options)

    async def cut(self) -> None:
        """The connection is lost; nothing for a queue of this node."""
        if self.asker is not None:
            await self.asker.cut(self.broker)


@pytest.fixture(params=["local", "remote"])
async def setup(request: pytest.FixtureRequest) -> AsyncGenerator[QueueSetup, None]:
    async with queue_sides() as (broker, asker):
        if request.param == "local":
            yield QueueSetup(broker.queues, broker, None)
        else:
            yield QueueSetup(asker.at(broker), broker, asker)


class Log:
    """The messages that handlers saw, and a way to wait for them."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.by_key: dict[str, list[int]] = defaultdict(list)
        self._changed = trio.Event()

    def add(self, message: PushedMessage) -> None:
        self.bodies.append(message.body)
        self.by_key[message.key].append(int(message.body))
        self._changed.set()

    async def until(self, count: int) -> None:
        with trio.fail_after(3_600):
            while len(self.bodies) < count:
                self._changed = trio.Event()
                await self._changed.wait()


async def _publish(queue: QueueHandle, count: int, keys: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await queue.publish(b"%d" % number, key=f"k{number % keys}" if keys else "")


async def test_a_handler_gets_every_message_and_finishes_it(setup: QueueSetup, autojump_clock: Clock) -> None:
    queue = await setup.queue()
    log = Log()

    async def handle(message: PushedMessage) -> None:
        await trio.sleep(0.01)
        log.add(message)

    async with queue.consumer("work", handle, concurrency=4):
        await _publish(queue, 50, 0)
        await log.until(50)
    assert sorted(log.bodies, key=int) == [b"%d" % n for n in range(50)]
    (channel,) = (await queue.info()).channels
    assert (channel.ready, channel.in_flight) == (0, 0)


async def test_never_more_handlers_than_asked_for(setup: QueueSetup, autojump_clock: Clock) -> None:
    queue = await setup.queue()
    running = most = 0
    log = Log()

    async def handle(message: PushedMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1
        log.add(message)

    async with queue.consumer("work", handle, concurrency=3) as consumer:
        await _publish(queue, 12, 0)
        await log.until(12)
        assert consumer.statistics()["done"] >= 11
    assert most == 3


async def test_in_normal_mode_a_failed_message_comes_later_and_ends_as_a_dead_letter(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    queue = await setup.queue(max_attempts=3)
    tries: list[int] = []
    log = Log()

    async def handle(message: PushedMessage) -> None:
        if message.body == b"0":
            tries.append(message.attempts)
            raise ValueError("a poison message")
        log.add(message)

    async with queue.consumer("work", handle, retry=FAST):
        await _publish(queue, 5, 0)
        await log.until(4)
        with trio.fail_after(60):
            while not (dead := await setup.queues.dead_letters("jobs", "work")):  # noqa: ASYNC110  (there is no event for it)
                await trio.sleep(1)
    assert tries == [1, 2, 3]
    assert "ValueError: a poison message" in str(dead[0].reasons)


async def test_in_fifo_mode_the_messages_of_a_key_are_handled_in_order(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    queue = await setup.queue()
    log = Log()
    rng = Random(3)
    busy: dict[str, None] = {}

    async def handle(message: PushedMessage) -> None:
        assert message.key not in busy
        busy[message.key] = None
        await trio.sleep(rng.random())
        del busy[message.key]
        if rng.random() < 0.2:
            raise OSError("try again")
        log.add(message)

    async with queue.consumer("work", handle, mode="fifo", retry=FAST, max_attempts=0, concurrency=8) as consumer:
        await _publish(queue, 100, 7)
        await log.until(100)
        assert consumer.statistics()["tried_again"] > 5
    for key, numbers in log.by_key.items():
        assert numbers == sorted(numbers), key


async def test_in_fifo_mode_a_lost_connection_keeps_the_order_and_repeats_nothing_that_was_done(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    queue = await setup.queue(max_attempts=50)  # what is held when a connection is lost has had an attempt
    log = Log()
    rng = Random(5)

    async def handle(message: PushedMessage) -> None:
        await trio.sleep(rng.random())
        log.add(message)

    async with trio.open_nursery() as nursery, queue.consumer("work", handle, mode="fifo", concurrency=8):
        nursery.start_soon(_publish, queue, 120, 6)
        for done in (10, 30, 50, 70, 90):
            await log.until(done)
            await setup.cut()
        await log.until(120)
    for numbers in log.by_key.values():
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers))
    assert len(log.bodies) == 120, "what was handled well came to a handler again"


async def test_25_one_failing_key_blocks_only_itself(setup: QueueSetup, autojump_clock: Clock) -> None:
    """(25: alibaba/rocketmq#23) One failing key blocked the other keys of its queue."""
    queue = await setup.queue()
    log = Log()
    healed = trio.Event()

    async def handle(message: PushedMessage) -> None:
        if message.key == "k0" and not healed.is_set():
            raise OSError("not yet")
        log.add(message)

    async with queue.consumer("work", handle, mode="fifo", retry=FAST, max_attempts=0):
        await _publish(queue, 40, 4)
        await log.until(30)
        assert not log.by_key["k0"]
        healed.set()
        await log.until(40)
    assert log.by_key["k0"] == list(range(0, 40, 4))


async def test_in_fifo_mode_the_key_goes_on_behind_its_dead_letter(setup: QueueSetup, autojump_clock: Clock) -> None:
    queue = await setup.queue(max_attempts=3)
    log = Log()
    tries: list[int] = []

    async def handle(message: PushedMessage) -> None:
        if message.body == b"1":
            tries.append(message.attempts)
            raise ValueError("poison")
        log.add(message)

    async with queue.consumer("work", handle, mode="fifo", retry=FAST):
        await _publish(queue, 4, 1)
        await log.until(3)
    assert log.bodies == [b"0", b"2", b"3"]
    assert tries == [1, 2, 3]
    (letter,) = await setup.queues.dead_letters("jobs", "work")
    assert "ValueError: poison" in letter.reasons[-1]


async def test_20_a_handler_may_run_for_longer_than_the_message_s_time(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    """(20: apache/rocketmq-clients#1198) The handle expired in the middle of the handler."""
    queue = await setup.queue(msg_timeout_s=10.0)
    log = Log()

    async def handle(message: PushedMessage) -> None:
        await trio.sleep(100)
        log.add(message)

    async with queue.consumer("work", handle, mode="fifo") as consumer:
        await _publish(queue, 3, 1)
        await log.until(3)
        assert not consumer.statistics().get("lost"), consumer.statistics()
    assert log.bodies == [b"0", b"1", b"2"]


async def test_a_handler_ends_when_its_message_cannot_be_held_any_longer(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    queue = await setup.queue(msg_timeout_s=10.0, msg_timeout_max_s=30.0)
    ended = trio.Event()
    began = 0.0

    async def handle(message: PushedMessage) -> None:
        nonlocal began
        began = began or trio.current_time()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with queue.consumer("work", handle, drain_timeout_s=0):
        await _publish(queue, 1, 0)
        await ended.wait()
        assert trio.current_time() - began == pytest.approx(30, abs=1)


async def test_a_handler_can_reject_a_message_or_say_when_to_try_again(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    queue = await setup.queue()
    times: list[float] = []
    log = Log()

    async def handle(message: PushedMessage) -> None:
        if message.body == b"0":
            raise RejectMessage("no such customer")
        if message.body == b"1":
            times.append(trio.current_time())
            if len(times) < 2:
                raise RetryMessage("the shop is closed", delay_s=77.0)
        log.add(message)

    async with queue.consumer("work", handle, mode="fifo"):
        await _publish(queue, 3, 1)
        await log.until(2)
    assert times[1] - times[0] == pytest.approx(77, abs=1)
    (letter,) = await setup.queues.dead_letters("jobs", "work")
    assert letter.reasons[-1].endswith("no such customer")


async def test_the_handler_cannot_settle_what_the_consumer_settles(setup: QueueSetup, autojump_clock: Clock) -> None:
    queue = await setup.queue()
    errors: list[str] = []
    done = trio.Event()

    async def handle(message: PushedMessage) -> None:
        for verb in (message.finish, message.requeue, message.release, message.reject):
            with contextlib.suppress(RuntimeError):
                await verb()
                errors.append("it could")
        assert await message.touch() == message.deadline_s
        done.set()

    async with queue.consumer("work", handle):
        await _publish(queue, 1, 0)
        await done.wait()
    assert not errors


async def test_22_a_consumer_that_is_left_lets_handlers_finish_and_gives_back_the_rest(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    """(22: apache/rocketmq#2085, rocketmq-clients#1353, #1308) A shutdown dropped what was in flight, or never came."""
    queue = await setup.queue()
    finished: list[bytes] = []
    begun = trio.Event()

    async def handle(message: PushedMessage) -> None:
        begun.set()
        await trio.sleep(5)
        finished.append(message.body)

    async with queue.consumer("work", handle, concurrency=2):
        await _publish(queue, 10, 0)
        await begun.wait()
        await trio.sleep(1)
    assert sorted(finished) == [b"0", b"1"]
    async with setup.queues.consume("jobs", "work", max_in_flight=10) as messages:
        attempts = [(await anext(messages)).attempts for _ in range(8)]
    assert attempts == [1] * 8, "what was never begun counted as an attempt"


async def test_22_a_handler_that_never_ends_holds_the_end_up_no_longer_than_said(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    queue = await setup.queue()
    begun = trio.Event()

    async def handle(_message: PushedMessage) -> None:
        begun.set()
        await trio.sleep_forever()

    async with queue.consumer("work", handle, mode="fifo", drain_timeout_s=3):
        await _publish(queue, 2, 1)
        await begun.wait()
        left_s = trio.current_time()
    assert trio.current_time() - left_s == pytest.approx(3, abs=0.5)
    async with setup.queues.consume("jobs", "work", exclusive=True) as messages:
        message = await anext(messages)
        assert (message.body, message.attempts) == (b"0", 2)


async def test_18_nothing_is_delivered_before_the_settings_are_known(setup: QueueSetup, autojump_clock: Clock) -> None:
    """(18: apache/rocketmq-clients#754, #1092, #599) Messages were handled concurrently until the settings came."""
    queue = await setup.queue(max_attempts=2)
    await setup.queues.create_channel("jobs", "work", exclusive=True)
    await _publish(queue, 20, 1)
    running = most = 0
    log = Log()

    async def handle(message: PushedMessage) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.1)
        running -= 1
        log.add(message)

    async with queue.consumer("work", handle, mode="fifo"):
        await log.until(20)
    assert most == 1
    assert log.by_key["k0"] == list(range(20))


async def test_a_deleted_queue_ends_its_consumer_with_the_reason(setup: QueueSetup, autojump_clock: Clock) -> None:
    queue = await setup.queue()

    async def handle(_message: PushedMessage) -> None:
        pass

    with pytest.raises(QueueConsumerClosedError), trio.fail_after(60):
        async with queue.consumer("work", handle):
            await queue.delete()
            await trio.sleep_forever()


async def test_without_its_queue_no_consumer_begins(setup: QueueSetup, autojump_clock: Clock) -> None:
    async def handle(_message: PushedMessage) -> None:
        pass

    with pytest.raises(QueueNotFoundError):
        async with setup.queues.consumer("nothing", "work", handle):
            pass


async def test_what_the_block_raises_comes_out_as_it_is(setup: QueueSetup, autojump_clock: Clock) -> None:
    queue = await setup.queue()

    async def handle(_message: PushedMessage) -> None:
        pass

    with pytest.raises(ZeroDivisionError):
        async with queue.consumer("work", handle):
            raise ZeroDivisionError


async def test_a_cancelled_consumer_gives_its_messages_to_others_at_once(
    setup: QueueSetup, autojump_clock: Clock
) -> None:
    queue = await setup.queue()
    begun = trio.Event()

    async def handle(_message: PushedMessage) -> None:
        begun.set()
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with queue.consumer("work", handle):
            await _publish(queue, 3, 0)
            await begun.wait()
            scope.cancel()
            await trio.sleep_forever()
    async with setup.queues.consume("jobs", "work", max_in_flight=3) as messages:
        with trio.fail_after(5):
            assert [(await anext(messages)).body for _ in range(3)] == [b"0", b"1", b"2"]


async def test_what_is_held_is_bounded(setup: QueueSetup, autojump_clock: Clock) -> None:
    queue = await setup.queue()
    begun = trio.Event()

    async def handle(_message: PushedMessage) -> None:
        begun.set()
        await trio.sleep_forever()

    await setup.queues.create_channel("jobs", "work")
    await queue.publish_many([b"%d" % n for n in range(200)])
    async with queue.consumer("work", handle, cache_items=20, concurrency=2, drain_timeout_s=0) as consumer:
        await begun.wait()
        await trio.sleep(1)
        assert consumer.cached == 20
        assert consumer.running == 2


def _wrong() -> Iterator[tuple[str, object]]:
    yield from [("mode", "lifo"), ("concurrency", 0), ("cache_items", -1), ("cache_items", 100_000), ("cache_bytes", 0)]
    yield from [("max_attempts", -1), ("max_attempts", 3), ("drain_timeout_s", -1.0)]


@pytest.mark.parametrize(("name", "value"), list(_wrong()))
def test_settings_that_make_no_sense_are_refused(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        ConsumerSettings(**given)
