"""The client's producer, on both event loops: to queues of a real engine behind the control API, and over a scripted
daemon that goes away."""

from collections.abc import Callable
from typing import cast

import anyio
import pytest

from dep2p.client import (
    Backoff,
    Client,
    ControlError,
    DaemonUnreachableError,
    MessageTooLargeError,
    QueueNotFoundError,
    RequestTimeoutError,
    StoreError,
    StreamClosedError,
)
from tests.client.queues.running import Run, ScriptedRun
from tests.client.queues.test_push_consumer import INFO
from tests.client.scripted_daemon import Answer, Call, ScriptedDaemon, refused

Fields = dict[str, object]
FAST = Backoff(0.01, 0.05)


async def _bodies(client: Client) -> list[bytes]:
    async with client.queues.export("jobs") as messages:
        return [message.body async for message in messages]


def test_a_publish_is_durable_when_it_returns(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await client.queues.create("jobs")
        async with queue.producer() as producer:
            assert not producer.is_over
            assert len(await producer.publish(b"a", headers={"h": 1}, tags=["t"], priority=2)) == 16
            (info,) = await client.queues.peek("jobs")
            assert (info.body, dict(info.headers), info.tags, info.priority) == (b"a", {"h": 1}, ("t",), 2)
        assert producer.is_over
        with pytest.raises(StreamClosedError):
            await producer.publish(b"b")

    run(body)


@pytest.mark.parametrize("order", ["strict", "best_effort"])
def test_the_messages_of_a_key_are_in_the_order_of_the_calls(run: Run, order: str) -> None:
    async def body(client: Client) -> None:
        await client.queues.create("jobs", {"partitions": 4})
        async with client.queues.producer("jobs", order="strict" if order == "strict" else "best_effort") as producer:
            sendings = [await producer.send(b"%d" % n, key=f"k{n % 5}", headers={"n": n}) for n in range(100)]
            for sending in sendings:
                await sending.wait()
            assert (producer.statistics()["taken"], producer.statistics()["waiting"]) == (100, 0)
        numbers = [int(each) for each in await _bodies(client)]
        assert sorted(numbers) == list(range(100))
        for key in range(5):
            of_key = [number for number in numbers if number % 5 == key]
            assert of_key == sorted(of_key)

    run(body)


def test_a_refused_message_fails_alone(run: Run) -> None:
    async def body(client: Client) -> None:
        await client.queues.create("jobs", {"message_bytes_max": 10})
        async with client.queues.producer("jobs", order="strict") as producer:
            bodies = [b"a", b"too large for it", b"c"]
            sendings = [await producer.send(each, key="k") for each in bodies]
            await sendings[0].wait()
            with pytest.raises(MessageTooLargeError):
                await sendings[1].wait()
            await sendings[2].wait()
            with pytest.raises(ValueError, match="delay"):
                await producer.send(b"a", key="k", delay_s=1.0)
            with pytest.raises(ValueError, match="priority"):
                await producer.send(b"a", priority=256)
        assert await _bodies(client) == [b"a", b"c"]

    run(body)


def test_without_a_queue_a_send_fails_with_the_reason(run: Run) -> None:
    async def body(client: Client) -> None:
        async with client.queues.producer("nothing") as producer:
            with pytest.raises(QueueNotFoundError):
                await producer.publish(b"a")
        with pytest.raises(ValueError, match="max_attempts"):
            client.queues.producer("nothing", max_attempts=0)

    run(body)


def test_a_full_queue_holds_strict_messages_and_a_timeout_withdraws_one(run: Run) -> None:
    async def body(client: Client) -> None:
        queue = await client.queues.create("jobs", {"items_max": 2})
        await client.queues.create_channel("jobs", "w")
        async with queue.producer(order="strict", close_timeout_s=0.0) as producer:
            for number in range(2):
                await producer.publish(b"%d" % number, key="k")
            with pytest.raises(RequestTimeoutError, match="full"):
                await producer.publish(b"2", key="k", timeout_s=0.5)
            sending = await producer.send(b"3", key="k")
            await client.queues.empty_all("jobs")
            await sending.wait()
            assert sending.tries <= 20
        assert await _bodies(client) == [b"3"]

    run(body)


# A daemon that goes away


class Broker:
    """The queue ``jobs`` behind a scripted daemon: it notes publishes, and knows numbers that come again."""

    def __init__(self, daemon: ScriptedDaemon) -> None:
        self.daemon = daemon
        self.batches: list[Fields] = []
        self.taken: list[str] = []
        self.known: dict[tuple[str, int], list[str]] = {}
        self.faults: list[Callable[[Call], Answer]] = []
        """For the next publishes: what comes in place of the answer."""
        daemon.answer = self.answer

    def answer(self, call: Call) -> Answer:
        if call.method == "GET":
            return Answer(fields=INFO)
        if call.path.endswith("/destinations"):
            return Answer(fields={"destinations": ["1 node shard"]})
        self.batches.append(call.json)
        return self.faults.pop(0)(call) if self.faults else self.take(call)

    def take(self, call: Call) -> Answer:
        given = call.json
        bodies = [each["body"] for each in cast(list[dict[str, str]], given["messages"])]
        number = (cast(str, given.get("publisher", "")), cast(int, given.get("number", 0)))
        ids = self.known.get(number)
        if ids is None:
            ids = [f"{len(self.taken) + n:016x}" for n in range(len(bodies))]
            self.taken += bodies
            if number[1]:
                self.known[number] = ids
        return Answer(201, fields={"ids": ids})

    def lose_answer(self, call: Call) -> Answer:
        """Take the batch; its answer is lost."""
        self.take(call)
        return Answer(cut=True)


def test_a_strict_message_whose_answer_was_lost_is_taken_once(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        async with client.queues.producer("jobs", order="strict", retry=FAST) as producer:
            await producer.publish(b"0", key="k")
            broker.faults = [broker.lose_answer, lambda call: refused("D5301"), broker.lose_answer]
            await producer.publish(b"1", key="k")
            await producer.publish(b"2", key="k")
        assert len(broker.taken) == 3
        numbers = [(each["publisher"], each["number"]) for each in broker.batches]
        assert len(set(numbers)) == 3, "a try again has the number of the first one"
        assert numbers == sorted(numbers, key=lambda each: cast(int, each[1]))

    scripted(body)


@pytest.mark.parametrize("ids", [None, "all", [], [7]])
def test_an_answer_of_another_version_is_no_refusal_and_ends_nothing(scripted: ScriptedRun, ids: object) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        fetches = 0

        def answer(call: Call) -> Answer:
            nonlocal fetches
            fetches += call.method == "GET"
            return Answer(fields={"name": 7}) if call.method == "GET" and fetches == 1 else broker.answer(call)

        def unreadable(call: Call) -> Answer:
            broker.take(call)
            return Answer(201, fields={"ids": ids})

        daemon.answer = answer
        async with client.queues.producer("jobs", order="strict", retry=FAST) as producer:
            broker.faults = [unreadable]
            sendings = [await producer.send(b"%d" % number, key="k") for number in range(2)]
            for sending in sendings:
                await sending.wait()
        assert fetches == 2
        assert len(broker.batches) == 3 and len(broker.taken) == 2
        fetches = 0
        async with client.queues.producer("jobs", retry=FAST) as producer:
            with pytest.raises(ControlError, match="not the answer that was expected"):
                await producer.publish(b"no route")
        daemon.answer = lambda call: Answer(fields={"messages": "many", "queues": 7})
        for call in (client.queues.empty_all("jobs"), client.queues.empty("jobs", "w"), client.queues.listing()):
            with pytest.raises(ControlError, match="not the answer that was expected"):
                await call

    scripted(body)


def _refusing(code: str) -> Callable[[Call], Answer]:
    return lambda call: refused(code)


def test_a_strict_message_that_was_not_sent_keeps_no_number(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        async with client.queues.producer("jobs", order="strict", retry=FAST) as producer:
            broker.faults = [_refusing("D4001")] * 3 + [_refusing("D5001")]
            sending = await producer.send(b"0", key="k")
            await sending.wait()
            assert producer.statistics()["unsettled"] == 0
        assert len(broker.taken) == 1
        assert {each["publisher"] for each in broker.batches} == {broker.batches[0]["publisher"]}
        # A number is new until a try may have been taken, and then it stays.
        assert [each["number"] for each in broker.batches] == [1, 2, 3, 4, 4]

    scripted(body)


def test_messages_wait_while_the_daemon_is_away_and_keep_their_order(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        for order, first in (("strict", 0), ("best_effort", 100)):
            async with client.queues.producer(
                "jobs", order="strict" if order == "strict" else "best_effort", retry=FAST, max_attempts=1
            ) as producer:
                await producer.publish(b"%d" % first, key="k")
                await daemon.go_away()
                sendings = [await producer.send(b"%d" % (first + n), key="k") for n in range(1, 20)]
                await anyio.wait_all_tasks_blocked()
                await daemon.start()
                for sending in sendings:
                    await sending.wait()
        assert len(broker.taken) == 40 == len(set(broker.taken))

    scripted(body)


def test_a_best_effort_message_fails_after_its_attempts_and_the_key_goes_on(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        async with client.queues.producer("jobs", max_attempts=3, retry=FAST) as producer:
            await producer.publish(b"0")
            broker.faults = [lambda call: refused("D5301")] * 3
            first = await producer.send(b"a", key="k")
            second = await producer.send(b"b", key="k")
            with pytest.raises(StoreError):
                await first.wait()
            await second.wait()
            assert producer.statistics()["left_key_queue"] == 1

    scripted(body)


def test_a_transactional_message_has_one_try(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        async with client.queues.producer("jobs") as producer:
            broker.faults = [lambda call: Answer(cut=True)]
            with pytest.raises(DaemonUnreachableError):
                await producer.publish(b"a", transactional=True)
        assert len(broker.batches) == 1

    scripted(body)


def test_what_was_not_taken_at_the_end_fails_and_room_is_waited_for(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        async with client.queues.producer("jobs", items_max=4) as producer:
            for number in range(30):
                await producer.send(b"%d" % number)
                assert producer.statistics()["waiting"] <= 4
        assert len(broker.taken) == 30
        broker.faults = [lambda call: refused("D5301")] * 1_000
        async with client.queues.producer("jobs", order="strict", retry=FAST, close_timeout_s=0.1) as producer:
            sending = await producer.send(b"a", key="k")
        with pytest.raises(StreamClosedError):
            await sending.wait()
        assert producer.statistics()["failed_at_the_end"] == 1
        with pytest.raises(ZeroDivisionError):
            async with client.queues.producer("jobs"):
                raise ZeroDivisionError

    scripted(body)


def test_a_strict_message_for_a_queue_on_several_nodes_has_a_destination(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        async with client.queues.producer("jobs", order="strict", retry=FAST) as producer:
            broker.faults = [lambda call: refused("D5210")]
            await producer.publish(b"a", key="k")
            broker.faults = [lambda call: refused("D5211")]
            await producer.publish(b"b", key="k")
        assert [each.get("destination", "") for each in broker.batches] == ["", *["1 node shard"] * 3]
        assert len({(each["publisher"], each["number"]) for each in broker.batches}) == 4
        stale = [call.json.get("is_stale", False) for call in daemon.calls if call.path.endswith("/destinations")]
        assert stale == [False, False, True]

    scripted(body)


def test_messages_without_a_key_go_to_all_brokers_in_turn(scripted: ScriptedRun) -> None:
    async def body(daemon: ScriptedDaemon, client: Client) -> None:
        broker = Broker(daemon)
        others = [client.queues.of("team"), client.queues.of("other")]
        async with client.queues.producer("jobs", other_brokers=others) as producer:
            for number in range(9):
                await producer.publish(b"%d" % number)
        publishes = [call.params.get("realm") for call in daemon.calls if call.path.endswith("/publishes")]
        assert len(broker.taken) == 9
        assert {realm: publishes.count(realm) for realm in set(publishes)} == {None: 3, "team": 3, "other": 3}

    scripted(body)
