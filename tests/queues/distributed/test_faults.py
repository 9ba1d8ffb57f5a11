"""Queues on several nodes whose controller, or whose shard's node, does what it should not; and their ends."""

from typing import Any

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from dep2p.errors import (
    ChannelNotFoundError,
    MessageTooLargeError,
    ProtocolError,
    QueueAccessError,
    QueueConsumerClosedError,
    QueueExistsError,
    QueueNotFoundError,
    QueuePartlyPublishedError,
)
from dep2p.protocols.queues.admin import QueueInfo, operation_of
from dep2p.protocols.queues.attributes import Attributes, encode_attributes
from dep2p.protocols.queues.names import parse_message_id
from dep2p.protocols.queues.ordering.placement import ShardLocation
from dep2p.protocols.queues.wire.admin import parse_request
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.api.queues import Queues
from dep2p.queues.consumer import Consumer
from tests.messaging.nodes import REALM
from tests.queues.distributed.test_distributed import cluster, key_at, make, shards
from tests.queues.nodes import queue_sides

OWNER_ONLY = {"publish": "owner", "consume": "owner", "administer": "owner"}


async def test_a_queue_that_becomes_a_plain_one_does_not_end_its_consumers_node(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 2)
        async with user.at(controller).consume("jobs", "c"):
            await controller.queues.delete("jobs")
            await controller.queues.create("jobs")
            await trio.sleep(12)
        await user.at(controller).publish("jobs", b"x")
        assert [each.name for each in await user.at(controller).listing()] == ["jobs"]


BAD: list[object] = [
    {"table": [9, [[0, 1, 5, []], [1, 2, 6, []], [2, 1024, 5, []]]]},
    {"table": [9, [[0, 1024, "1", []]]]},
    {"table": "table"},
    {"places": [[1, "no peer", "jobs.1.x"]]},
    {"places": [[1, "1" * 100_000, "jobs.1.x"]]},
    {"places": 5},
    {"order": {}},
    None,
    "nothing",
]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("is_exclusive", [False, True])
async def test_a_table_that_cannot_be_costs_its_own_queue_alone(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, bad: Any, is_exclusive: bool
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        plain = controller.service.administer
        is_bad = False

        async def answer(peer: Any, request: Any) -> Any:
            found = await plain(peer, request)
            if operation_of(request) == "route" and is_bad:
                broken: Any = found.placement | bad if isinstance(bad, dict) else bad
                return replace(found, placement=broken)
            return found

        monkeypatch.setattr(controller.service, "administer", answer)
        async with user.at(controller).consume("jobs", "c", exclusive=is_exclusive) as messages:
            is_bad = True
            await controller.queues.expand("jobs", 2)
            await trio.sleep(12)
            is_bad = False
            # What it had goes on, and the rest is there as soon as the controller is sane again.
            await user.at(controller).publish("jobs", b"x")
            with trio.fail_after(60):
                assert (await messages.consumer.receive())[0].body == b"x"
            is_bad = True
            await trio.sleep(12)
        with pytest.raises(ProtocolError):
            await one.at(controller).publish("jobs", b"x")


@pytest.mark.parametrize("owner", ["controller", "user"])
async def test_a_controller_cannot_send_others_to_a_queue_that_is_no_shard_of_its_own(
    autojump_clock: trio.testing.MockClock, owner: str
) -> None:
    async with queue_sides(2) as [controller, user]:
        where = controller if owner == "controller" else user
        await where.queues.create("private", access=OWNER_ONLY)
        await where.queues.publish("private", b"secret")
        await controller.queues.create("jobs", {"partitions": 1})
        queue = await controller.engine.loaded(REALM, "jobs")
        queue.set_locations({queue.partition_ids[0]: ShardLocation(where.peer, "private")})
        with pytest.raises(ProtocolError, match="no partition of the queue"):
            await user.at(controller).publish("jobs", b"x")
        with pytest.raises(ProtocolError, match="no partition of the queue"):
            async with user.at(controller).consume("jobs", "c"):
                pass
        assert (await where.queues.info("private")).messages == 1


async def test_a_table_that_leads_to_itself_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [controller, user]:
        await controller.queues.create("jobs", {"partitions": 1})
        queue = await controller.engine.loaded(REALM, "jobs")
        queue.set_locations({queue.partition_ids[0]: ShardLocation(controller.peer, "jobs")})
        with pytest.raises(ProtocolError, match="no partition of the queue"):
            await user.at(controller).publish("jobs", b"x", timeout_s=5.0)


async def test_a_node_has_no_more_rights_at_its_own_shard_than_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(2) as [controller, user]:
        await controller.queues.ask(
            parse_request(
                {
                    "op": "create",
                    "queue": "jobs",
                    "options": {"partitions": 1},
                    "access": {**OWNER_ONLY, "consume": "members"},
                    "nodes": [user.peer],
                }
            ),
        )
        await controller.queues.publish("jobs", b"x")
        with pytest.raises(QueueAccessError):
            await user.at(controller).publish("jobs", b"y")
        async with user.at(controller).consume("jobs", "c", from_start=True) as messages:
            assert [each.body for each in await messages.consumer.receive()] == [b"x"]


async def test_who_made_a_queue_of_a_shards_name_before_does_not_read_the_shard(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(4) as [controller, one, two, thief]:
        for side in (one, controller):
            for partition in range(40, 100):  # those of the controller begin with 61
                name = f"jobs.{partition}.{controller.peer[-8:]}"
                access = {"access": {"administer": [controller.peer]}} if partition % 2 else {}
                await thief.at(side).ask(
                    parse_request({"op": "create", "queue": name, "options": {"partitions": 1}, **access})
                )
        ask = {"queue": "jobs", "options": {"partitions": 1}, "access": OWNER_ONLY}
        await controller.queues.ask(parse_request({"op": "create", **ask, "nodes": [two.peer]}))
        for side in (one, controller):
            with pytest.raises(QueueExistsError, match="was not made by"):
                await controller.queues.expand("jobs", 2, nodes=[side.peer])
        await controller.queues.delete("jobs")
        for side in (one, controller):
            with pytest.raises(QueueExistsError, match="was not made by"):
                await controller.queues.ask(parse_request({"op": "create", **ask, "nodes": [side.peer]}))
        assert len(await one.queues.listing()) == 60


async def test_a_controller_makes_its_shard_again_after_a_crash_of_either(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster(2) as nodes:
        controller, one = nodes.sides
        name = f"jobs.7.{controller.peer[-8:]}"
        request = {"queue": name, "options": {"partitions": 1}}
        await controller.at(one).ask(parse_request({"op": "create", **request}))
        await nodes.kill(1)
        await nodes.restart(1)
        one = nodes.sides[1]
        await trio.sleep(5)  # the controller has seen that the old link is over
        again = await controller.at(one).ask(parse_request({"op": "create", **request}))
        assert isinstance(again, QueueInfo)
        assert again.name == name
        of_one = {"queue": f"jobs.7.{one.peer[-8:]}", "options": {"partitions": 1}}
        await controller.at(one).ask(parse_request({"op": "create", **of_one}))
        await nodes.kill(1)
        await nodes.restart(1)
        with pytest.raises(QueueExistsError, match="was not made by this node"):
            await nodes.sides[1].queues.ask(parse_request({"op": "create", **of_one}))


@pytest.mark.parametrize("is_exclusive", [False, True])
async def test_a_consumer_ends_when_its_queue_is_deleted(
    autojump_clock: trio.testing.MockClock, is_exclusive: bool
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 2)
        async with user.at(controller).consume("jobs", "c", exclusive=is_exclusive) as messages:
            await trio.sleep(1)
            await controller.queues.delete("jobs")
            with trio.fail_after(60), pytest.raises((QueueConsumerClosedError, QueueNotFoundError)):
                await messages.consumer.receive()
        # Also one that was cut off when it was made anew.
        await make(controller.queues, [one], 2)
        async with user.at(controller).consume("jobs", "c", exclusive=is_exclusive) as messages:
            await trio.sleep(1)
            await user.cut(controller)
            await controller.queues.delete("jobs")
            await make(controller.queues, [one], 2)
            with trio.fail_after(60), pytest.raises((QueueConsumerClosedError, ChannelNotFoundError)):
                await messages.consumer.receive()
        assert not controller.engine.registry.queues[REALM, "jobs"].channels


@pytest.mark.parametrize("is_exclusive", [False, True])
@pytest.mark.parametrize("slow_at", [0, 1, 2])
async def test_a_channel_that_is_deleted_slowly_stays_deleted_everywhere(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, is_exclusive: bool, slow_at: int
) -> None:
    async with queue_sides(5) as [controller, one, two, user, other]:
        await make(controller.queues, [one, two], 2)
        slow_side = (controller, one, two)[slow_at]
        plain = slow_side.service.administer

        async def slow(peer: Any, request: Any) -> Any:
            if operation_of(request) == "delete_channel":
                await trio.sleep(3)
            return await plain(peer, request)

        monkeypatch.setattr(slow_side.service, "administer", slow)
        async with (
            user.at(controller).consume("jobs", "c", exclusive=is_exclusive, max_in_flight=4) as first,
            other.at(controller).consume("jobs", "c", exclusive=is_exclusive, max_in_flight=4) as second,
        ):
            await trio.sleep(3)
            await one.at(controller).delete_channel("jobs", "c")
            await trio.sleep(10)
            for side in (controller, one, two):
                for name in ["jobs", *shards(side)]:
                    queue = side.engine.registry.queues.get((REALM, name))
                    assert queue is None or not queue.channels
            for messages in (first, second):
                with trio.fail_after(1), pytest.raises(QueueConsumerClosedError):
                    await messages.consumer.receive()


async def comes(queues: Queues, consumer: Consumer, body: bytes) -> None:
    await queues.publish("jobs", body)
    with trio.fail_after(60):
        while body not in [each.body for each in await consumer.receive()]:
            pass


async def test_an_ephemeral_channel_is_gone_everywhere_with_its_last_consumer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 2)
        for number in range(3):
            async with user.at(controller).consume("jobs", f"c{number}#ephemeral", max_in_flight=64) as messages:
                await trio.sleep(1)
                await comes(user.at(controller), messages.consumer, b"x%d" % number)
                await user.cut(one)  # it comes again there, though its channel ends with the link
                await trio.sleep(5)
                await comes(user.at(controller), messages.consumer, b"y%d" % number)
        await trio.sleep(30)
        for side, names in ((controller, ["jobs"]), (one, shards(one))):
            assert [dict(side.engine.registry.queues[REALM, name].channels) for name in names] == [{}] * len(names)


@pytest.mark.parametrize("order", ["strict", "best_effort"])
@pytest.mark.parametrize("key", ["", "k"])
async def test_what_is_published_together_is_in_one_partition(
    autojump_clock: trio.testing.MockClock, order: str, key: str
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4, order=order)
        used: dict[int, None] = {}
        for _ in range(8):
            ids = await user.at(controller).publish_many("jobs", [b"x"] * 20, key=key)
            (partition,) = dict.fromkeys(parse_message_id(each)[0] for each in ids)
            used[partition] = None
        assert len(used) == (1 if key else 4)
        # Refused as a whole, too.
        with pytest.raises(MessageTooLargeError):
            await user.at(controller).publish_many("jobs", [b"x", b"x" * (1 << 26)], key=key)
        assert sum(each.messages for each in (await controller.queues.route("jobs")).partitions) == 160


@pytest.mark.parametrize("how", ["away", "gone"])
async def test_messages_of_several_keys_of_which_some_are_taken_can_be_published_again(
    autojump_clock: trio.testing.MockClock, how: str
) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 2)
        route = await controller.queues.route("jobs")
        keys = key_at(route, one.peer, count=3) + key_at(route, two.peer, count=3)
        messages = [WireMessage(encode_attributes(Attributes(key)), key.encode()) for key in keys]
        await user.at(controller).publish("jobs", b"x", key=keys[0])
        if how == "away":
            await nodes.kill(2)
        else:  # as when it is being deleted
            await controller.at(two).delete(shards(two)[0])
        with pytest.raises(QueuePartlyPublishedError, match="3 of 6") as caught:
            await user.at(controller).publish_batch("jobs", messages, 5.0)
        assert list(caught.value.taken) == [0, 1, 2]
        if how == "away":
            await nodes.restart(2)
            rest = [each for index, each in enumerate(messages) if index not in caught.value.taken]
            await user.at(controller).publish_batch("jobs", rest, 30.0)
            found = (await controller.queues.route("jobs")).partitions
            assert sorted(each.messages for each in found) == [3, 4]
        else:
            with pytest.raises(QueueNotFoundError):  # nothing of it was taken
                await user.at(controller).publish_batch("jobs", messages[3:], 5.0)
            assert (await controller.at(one).info(shards(one)[0])).messages == 4
