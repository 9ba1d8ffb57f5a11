"""The client's push consumer, on both event loops: against queues of a real engine behind the control API, and against
a scripted daemon that goes away."""

import asyncio
import contextlib
import logging
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable
from typing import cast, get_args

import anyio
import anyio.lowlevel
import pytest

from dep2p.client import (
    Backoff,
    Client,
    ClientPushConsumer,
    ClientPushedMessage,
    ClientQueueHandle,
    ClientQueueMessage,
    DaemonUnreachableError,
    FeedEndedError,
    QueueExistsError,
    QueueNotFoundError,
    RejectMessage,
    RetryMessage,
)
from dep2p.protocols.queues.admin import ChannelInfo, OptionValue
from dep2p.protocols.queues.clients.push_consumer import Mode
from tests.client.queues.running import Run, ScriptedRun
from tests.client.scripted_daemon import Answer, Call, ScriptedDaemon, refused
from tests.daemon.api.harness import Served

Fields = dict[str, object]

FAST = Backoff(0.01, 0.05)
MODES: tuple[Mode, ...] = get_args(Mode)


class Log:
    """The messages that handlers saw, and a way to wait for them."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.by_key: dict[str, list[int]] = defaultdict(list)
        self._changed = anyio.Event()

    def add(self, message: ClientPushedMessage) -> None:
        self.bodies.append(message.body)
        self.by_key[message.key].append(int(message.body))
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, count: int) -> None:
        while len(self.bodies) < count:
            await self._changed.wait()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that has no event."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.005)


async def _queue(client: Client, **options: OptionValue) -> ClientQueueHandle:
    return await client.queues.create("jobs", options)


async def _publish(queue: ClientQueueHandle, count: int, keys: int) -> None:
    for number in range(count):
        await queue.publish(b"%d" % number, key=f"k{number % keys}" if keys else "")


async def _channel(queue: ClientQueueHandle) -> ChannelInfo:
    """The channel, when its last consumer has left."""
    while True:
        (channel,) = (await queue.info()).channels
        if not channel.consumers:
            return channel
        await anyio.sleep(0.01)


def test_a_handler_gets_every_message_and_finishes_it(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        log = Log()

        async def handle(message: ClientPushedMessage) -> None:
            assert (message.attempts, message.is_redelivered, message.expired) == (1, False, False)
            await anyio.lowlevel.checkpoint()
            log.add(message)

        async with queue.consumer("work", handle, concurrency=4) as consumer:
            await _publish(queue, 50, 0)
            await log.until(50)
            assert not consumer.is_over
        assert consumer.is_over
        assert sorted(log.bodies, key=int) == [b"%d" % n for n in range(50)]
        assert consumer.statistics()["done"] == 50
        channel = await _channel(queue)
        assert (channel.ready, channel.in_flight, channel.finished) == (0, 0, 50)

    run(body)


@pytest.mark.parametrize("mode", MODES)
def test_never_more_handlers_than_asked_for(run: Run, mode: Mode) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        running = most = 0
        log = Log()
        all_busy = anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == 3:
                all_busy.set()
            await all_busy.wait()
            await anyio.sleep(0.005)
            running -= 1
            log.add(message)

        await _publish(queue, 12, 12)
        async with client.queues.consumer("jobs", "work", handle, concurrency=3, mode=mode) as consumer:
            await all_busy.wait()
            assert consumer.running == 3
            await log.until(12)
        assert most == 3

    run(body)


def test_a_failing_handler_is_its_own_message_s_error_and_ends_as_a_dead_letter(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client, max_attempts=3)
        tries: list[int] = []
        log = Log()

        async def handle(message: ClientPushedMessage) -> None:
            if message.body == b"0":
                tries.append(message.attempts)
                raise ValueError("a poison message")
            log.add(message)

        async with queue.consumer("work", handle, retry=FAST):
            await _publish(queue, 5, 0)
            await log.until(4)
            while not (dead := await client.queues.dead_letters("jobs", "work")):  # noqa: ASYNC110 - no event
                await anyio.sleep(0.01)
        assert tries == [1, 2, 3]
        assert "ValueError: a poison message" in str(dead[0].reasons)

    run(body)
    said = [each for each in caplog.records if "of 'jobs', channel 'work', failed at try" in each.getMessage()]
    assert len(said) == 3 and all(each.levelno == logging.WARNING and each.exc_info for each in said)


def test_in_fifo_mode_the_messages_of_a_key_are_handled_in_order_and_failed_ones_wait(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client, partitions=3)
        log = Log()
        busy: set[str] = set()
        failed: set[bytes] = set()

        async def handle(message: ClientPushedMessage) -> None:
            assert message.key not in busy
            busy.add(message.key)
            await anyio.sleep(0.001)
            busy.remove(message.key)
            if int(message.body) % 5 == 0 and message.body not in failed:
                failed.add(message.body)
                raise OSError("try again")
            log.add(message)

        async with queue.consumer("work", handle, mode="fifo", retry=FAST, max_attempts=0, concurrency=8) as consumer:
            await _publish(queue, 60, 7)
            await log.until(60)
            assert consumer.statistics()["tried_again"] == 12
        for key, numbers in log.by_key.items():
            assert numbers == sorted(numbers), key
        assert (await _channel(queue)).finished == 60

    run(body)


def test_in_fifo_mode_a_key_goes_on_behind_its_dead_letter(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client, max_attempts=2)
        log = Log()

        async def handle(message: ClientPushedMessage) -> None:
            if message.body == b"1":
                raise RejectMessage("no such customer")
            if message.body == b"2":
                raise ValueError("poison")
            log.add(message)

        async with queue.consumer("work", handle, mode="fifo", retry=FAST):
            await _publish(queue, 4, 1)
            await log.until(2)
        assert log.bodies == [b"0", b"3"]
        letters = await client.queues.dead_letters("jobs", "work")
        assert [each.reasons[-1] for each in letters] == ["no such customer", "ValueError: poison"]

    run(body)


@pytest.mark.parametrize("delay_s", [float("nan"), float("inf"), -1.0, "soon", True, 10**400])
def test_a_handler_that_asks_for_a_senseless_delay_is_tried_again_by_the_back_off(run: Run, delay_s: object) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        log = Log()

        async def handle(message: ClientPushedMessage) -> None:
            if message.attempts == 1:
                raise RetryMessage("closed", delay_s=cast(float, delay_s))
            log.add(message)

        for mode in MODES:
            async with client.queues.consumer("jobs", mode, handle, mode=mode, retry=FAST):
                await _publish(queue, 1, 1)
                await log.until(1)
            log.bodies.clear()

    run(body)


def test_the_handler_cannot_settle_what_the_consumer_settles(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        settled: list[str] = []
        done = anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            for verb in (message.finish, message.requeue, message.release, message.reject):
                with contextlib.suppress(RuntimeError):
                    await verb()
                    settled.append(str(verb))
            assert await message.touch() == message.deadline_s
            done.set()

        async with queue.consumer("work", handle):
            await _publish(queue, 1, 0)
            await done.wait()
        assert not settled
        assert (await _channel(queue)).finished == 1

    run(body)


def test_a_handler_may_run_for_longer_than_the_message_s_time(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client, msg_timeout_s=0.4)
        deadlines: list[float] = []
        renewed = anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            first = message.deadline_s
            await until(lambda: message.deadline_s > first + 0.5)  # after two renewals at least
            deadlines.append(message.deadline_s)
            renewed.set()

        async with queue.consumer("work", handle) as consumer:
            await _publish(queue, 1, 0)
            await renewed.wait()
        assert (len(deadlines), consumer.statistics()["done"]) == (1, 1)
        assert (await _channel(queue)).timed_out == 0

    run(body)


def test_the_end_of_the_block_lets_handlers_finish_and_gives_the_rest_back_without_an_attempt(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        began, may_end = anyio.Event(), anyio.Event()
        done: list[bytes] = []

        async def handle(message: ClientPushedMessage) -> None:
            began.set()
            await may_end.wait()
            done.append(message.body)

        await _publish(queue, 10, 0)
        async with anyio.create_task_group() as tasks:
            async with queue.consumer("work", handle, concurrency=1) as consumer:
                await began.wait()
                await until(lambda: consumer.cached == 10)

                async def end_when_it_drains() -> None:
                    await until(lambda: consumer.cached == 1)
                    may_end.set()

                tasks.start_soon(end_when_it_drains)
        assert done == [b"0"]
        channel = await _channel(queue)
        assert (channel.finished, channel.ready) == (1, 9)
        async with queue.consume("work") as messages:
            assert (await anext(messages)).attempts == 1

    run(body)


def test_handlers_that_take_too_long_at_the_end_are_cancelled_and_counted(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        began, ended = anyio.Event(), anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            began.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        async with queue.consumer("work", handle, drain_timeout_s=0.0) as consumer:
            await _publish(queue, 1, 0)
            await began.wait()
        assert ended.is_set()
        assert consumer.statistics()["cancelled_at_the_end"] == 1
        assert (await _channel(queue)).ready == 1

    run(body)
    assert any("1 handlers that did not finish within 0 s" in each.getMessage() for each in caplog.records)


def test_an_error_of_the_block_comes_out_as_it_is_and_a_cancelled_block_cancels_its_handlers(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        began, ended = anyio.Event(), anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            began.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        with pytest.raises(KeyError, match="mine"):
            async with queue.consumer("work", handle, drain_timeout_s=0.0):
                raise KeyError("mine")
        await _publish(queue, 1, 0)
        with anyio.CancelScope() as scope:
            async with queue.consumer("work", handle, drain_timeout_s=1e6):
                await began.wait()
                scope.cancel()
                await anyio.sleep_forever()
        assert ended.is_set()

    run(body)


def test_a_deleted_queue_ends_the_block_and_wrong_settings_begin_none(run: Run) -> None:
    async def body(client: Client) -> None:
        async def handle(message: ClientPushedMessage) -> None:
            raise AssertionError

        with pytest.raises(QueueNotFoundError):
            async with client.queues.consumer("jobs", "work", handle):
                raise AssertionError
        queue = await _queue(client)
        with pytest.raises(FeedEndedError, match="deleted"):
            async with queue.consumer("work", handle):
                while not (await queue.info()).consumers:  # noqa: ASYNC110 - the daemon has no event for it
                    await anyio.sleep(0.005)
                await queue.delete()
                await anyio.sleep_forever()
        queue = await _queue(client)
        await client.queues.create_channel("jobs", "work")
        with pytest.raises(QueueExistsError):
            async with queue.consumer("work", handle, mode="fifo"):
                raise AssertionError
        with pytest.raises(ValueError, match="concurrency"):
            queue.consumer("work", handle, concurrency=0)
        with pytest.raises(TypeError, match="async def"):
            queue.consumer("work", lambda message: None)  # type: ignore[arg-type, return-value]

    run(body)


def test_two_fifo_consumers_share_the_partitions_and_keep_the_order_when_one_leaves(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client, partitions=4)
        log = Log()
        busy: set[str] = set()

        async def handle(message: ClientPushedMessage) -> None:
            assert message.key not in busy
            busy.add(message.key)
            await anyio.sleep(0.002)
            busy.remove(message.key)
            log.add(message)

        async with queue.consumer("work", handle, mode="fifo"), anyio.create_task_group() as tasks:
            async with queue.consumer("work", handle, mode="fifo") as second:
                tasks.start_soon(_publish, queue, 150, 11)
                await until(lambda: bool(second.statistics().get("done")))
            await log.until(150)
        for key, numbers in log.by_key.items():
            assert numbers == sorted(numbers), key
        assert len(log.bodies) == 150

    run(body)


def test_a_task_that_was_cancelled_below_a_handler_is_that_message_s_error(served: Served) -> None:
    async def main() -> None:
        async with Client.open(served.socket) as client:
            queue = await _queue(client)
            log = Log()

            async def handle(message: ClientPushedMessage) -> None:
                if message.body == b"0" and message.attempts == 1:
                    task = asyncio.ensure_future(asyncio.sleep(1e6))
                    task.cancel()
                    await task
                log.add(message)

            async with queue.consumer("work", handle, retry=FAST) as consumer:
                await _publish(queue, 3, 0)
                await log.until(3)
                assert consumer.statistics()["failed"] == 1

    asyncio.run(asyncio.wait_for(main(), 30))


# A daemon that goes away


def _delivery(number: int, attempts: int = 1, *, key: str = "", timeout_s: float = 60.0) -> Fields:
    body = b64encode(b"%d" % number).decode()
    head: Fields = {"id": f"{number:016x}", "attempts": attempts, "published_s": 1.0, "timeout_s": timeout_s}
    return head | {"body": body, "encoding": "base64", "key": key}


class QueueScript:
    """The queue ``jobs``: each consumer gets the lines of its turn; its results are noted."""

    def __init__(self, daemon: ScriptedDaemon, *turns: list[Fields]) -> None:
        self.daemon = daemon
        self.turns = list(turns)
        self.opened = 0
        self.results: list[tuple[str, str, int]] = []
        """Consumer, result, message."""
        self.ready: list[tuple[str, int]] = []
        self.refuse: Callable[[Call], Answer | None] = lambda call: None
        self.changed = anyio.Event()
        daemon.answer = self.answer

    def answer(self, call: Call) -> Answer:
        if call.method == "GET":
            return Answer(fields=INFO)
        if call.path.endswith("/consume"):
            self.opened += 1
            lines = self.turns.pop(0) if self.turns else []
            head: Fields = {"consumer": f"c{self.opened}", "queue": "jobs", "channel": "w"}
            return Answer(lines=[head, *lines])
        answer = self.refuse(call)
        if answer is not None:
            return answer
        given = call.json
        consumer = call.path.split("/")[3]
        results = cast(list[dict[str, str]], given.get("results", []))
        self.results += [(consumer, each["do"], int(each["id"], 16)) for each in results]
        if "max_in_flight" in given:
            self.ready.append((consumer, cast(int, given["max_in_flight"])))
        self.changed.set()
        self.changed = anyio.Event()
        touched = {each["id"]: 60.0 for each in results if each["do"] == "touch"}
        return Answer(fields={"refused": {}, "timeouts_s": touched})

    async def until(self, *results: tuple[str, str, int]) -> None:
        while not set(results) <= set(self.results):
            await self.changed.wait()


NUMBERS = ("messages", "bytes", "in_flight", "deferred", "dead", "channel_count", "consumers")
INFO: Fields = {
    **dict.fromkeys(NUMBERS, 0),
    "name": "jobs",
    "is_paused": False,
    "counts": {},
    "options": {},
    "access": {"publish": "members", "consume": "members", "administer": "members"},
    "channels": [],
}


def test_it_goes_on_over_a_restart_and_cancels_handlers_of_messages_that_were_lost(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        script = QueueScript(daemon, [_delivery(1), _delivery(2)], [_delivery(1, 2), _delivery(2, 2)])
        seen: list[tuple[int, int]] = []
        cancelled: list[int] = []
        both = anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            number = int(message.body)
            seen.append((number, message.attempts))
            if len(seen) == 2:
                both.set()
            if message.attempts == 1:
                try:
                    await anyio.sleep_forever()
                finally:
                    assert message.expired
                    cancelled.append(number)

        async with client.queues.consumer("jobs", "w", handle) as consumer:
            await both.wait()
            await daemon.restart()
            await script.until(("c2", "finish", 1), ("c2", "finish", 2))
            assert consumer.statistics()["lost"] == 2
        assert sorted(cancelled) == [1, 2]
        assert sorted(seen) == [(1, 1), (1, 2), (2, 1), (2, 2)]

    scripted(body)


def test_in_fifo_mode_what_was_done_before_the_restart_is_settled_and_not_handled_again(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        script = QueueScript(daemon, [_delivery(1, key="a")], [_delivery(1, 2, key="a"), _delivery(2, key="a")])
        refusals = anyio.Event()

        def refuse(call: Call) -> Answer | None:
            if script.opened == 1:
                refusals.set()
                return Answer(cut=True)
            return None

        script.refuse = refuse
        seen: list[int] = []

        async def handle(message: ClientPushedMessage) -> None:
            seen.append(int(message.body))

        async with client.queues.consumer("jobs", "w", handle, mode="fifo") as consumer:
            await refusals.wait()  # the result of 1 is owed
            await daemon.restart()
            await script.until(("c2", "finish", 1), ("c2", "finish", 2))
            assert consumer.statistics()["settled_unhandled"] == 1
        assert seen == [1, 2]

    scripted(body)


@pytest.mark.parametrize("lost", [Answer(cut=True), refused("D3008")])
def test_a_result_that_is_not_taken_is_sent_again_while_the_connection_lasts(
    scripted: ScriptedRun, lost: Answer
) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        script = QueueScript(daemon, [_delivery(1)])
        refusals = [lost]
        script.refuse = lambda call: refusals.pop() if refusals else None

        async def handle(message: ClientPushedMessage) -> None:
            await anyio.lowlevel.checkpoint()

        async with client.queues.consumer("jobs", "w", handle):
            await script.until(("c1", "finish", 1))
        assert script.opened == 1

    scripted(body)


def test_in_fifo_mode_a_lost_message_that_comes_behind_the_next_one_of_its_key_is_handled_first(
    scripted: ScriptedRun,
) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        # As a best-effort queue delivers them when the time of 1 is over.
        script = QueueScript(daemon, [_delivery(2, key="k"), _delivery(3, key="k"), _delivery(1, 2, key="k")])
        seen: list[int] = []

        async def handle(message: ClientPushedMessage) -> None:
            await anyio.lowlevel.checkpoint()
            seen.append(int(message.body))

        async with client.queues.consumer("jobs", "w", handle, mode="fifo"):
            await script.until(*(("c1", "finish", number) for number in (1, 2, 3)))
        assert seen == [1, 2, 3]

    scripted(body)


@pytest.mark.parametrize("code", ["D1005", "D1006", "D1007"])
@pytest.mark.parametrize("mode", MODES)
def test_a_result_that_the_daemon_refuses_each_time_is_dropped_alone(
    scripted: ScriptedRun, caplog: pytest.LogCaptureFixture, mode: Mode, code: str
) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        count = 40
        script = QueueScript(daemon, [_delivery(number, key=f"k{number}") for number in range(count)])
        script.refuse = lambda call: refused(code) if b'"%016x"' % 7 in call.body else None
        began = 0
        all_began = anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            nonlocal began
            began += 1
            if began == count:
                all_began.set()
            await all_began.wait()  # so that their results go together

        async with client.queues.consumer("jobs", "w", handle, mode=mode, concurrency=count) as consumer:
            await script.until(*(("c1", "finish", number) for number in range(count) if number != 7))
            assert consumer.statistics()["results_malformed"] == 1
            assert consumer.statistics().get("results_lost", 0) == 0
        assert len(script.results) == count - 1
        assert script.opened == 1

    scripted(body)
    (said,) = [each.getMessage() for each in caplog.records if "is dropped" in each.getMessage()]
    assert f"message {7:016x} of 'jobs'" in said


def test_a_malformed_result_of_a_message_is_its_caller_s_error_alone(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await _queue(client)
        await _publish(queue, 3, 0)
        errors: list[ValueError] = []
        async with queue.consume("work", max_in_flight=3) as messages:

            async def requeue(message: ClientQueueMessage) -> None:
                try:
                    await message.requeue(1e12)
                except ValueError as error:
                    errors.append(error)
                    await message.finish()

            async with anyio.create_task_group() as group:  # in one round
                group.start_soon((await anext(messages)).finish)
                group.start_soon(requeue, await anext(messages))
                group.start_soon((await anext(messages)).finish)
        assert len(errors) == 1
        assert (await _channel(queue)).finished == 3

    run(body)


def test_a_daemon_that_stays_away_ends_the_block(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        QueueScript(daemon, [_delivery(1)])
        began = anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            began.set()
            await anyio.sleep_forever()

        consumers: list[ClientPushConsumer] = []
        with pytest.raises(DaemonUnreachableError):
            async with client.queues.consumer("jobs", "w", handle) as consumer:
                consumers.append(consumer)
                await began.wait()
                await daemon.go_away()
                await anyio.sleep_forever()
        assert isinstance(consumers[0].error, DaemonUnreachableError)

    scripted(body, reconnect_s=0.3)


def test_the_block_ends_while_the_daemon_is_away(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        QueueScript(daemon, [_delivery(1)])
        began, ended = anyio.Event(), anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            began.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        async with client.queues.consumer("jobs", "w", handle, drain_timeout_s=1e6):
            await began.wait()
            await daemon.go_away()
            await ended.wait()
        assert ended.is_set()

    scripted(body)


def test_a_line_about_a_revoked_partition_releases_what_was_not_begun_and_asks_for_the_rest(
    scripted: ScriptedRun,
) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        other = 1 << 40
        lines = [_delivery(1, key="a"), _delivery(2, key="b"), _delivery(other, key="c")]
        script = QueueScript(daemon, [*lines, {"loss": "revoked", "partition": 0}])
        may_end = anyio.Event()

        async def handle(message: ClientPushedMessage) -> None:
            await may_end.wait()

        async with client.queues.consumer("jobs", "w", handle, mode="fifo", concurrency=1):
            await script.until(("c1", "release", 2), ("c1", "touch", 1))
            assert ("c1", "release", other) not in script.results
            may_end.set()
            await script.until(("c1", "finish", 1), ("c1", "finish", other))

    scripted(body)


def test_a_line_about_a_lost_connection_to_the_queue_cancels_handlers(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        script = QueueScript(daemon, [_delivery(1), {"loss": "connection"}, _delivery(1, 2)])

        async def handle(message: ClientPushedMessage) -> None:
            if message.attempts == 1:
                await anyio.sleep_forever()

        async with client.queues.consumer("jobs", "w", handle) as consumer:
            await script.until(("c1", "finish", 1))
            assert consumer.statistics()["lost"] == 1
        assert script.results == [("c1", "finish", 1)]

    scripted(body)
