"""Messages and dead letters of a queue on several nodes, looked at by its own name."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import Dep2pError, ProtocolError, QueueAccessError, QueueMessageNotFoundError
from dep2p.protocols.queues.admin import BrowsedMessage, DeadLetterInfo, ExportPage
from dep2p.protocols.queues.names import parse_message_id
from dep2p.protocols.queues.wire.admin import parse_request
from dep2p.queues.api.queues import Queues
from tests.queues.distributed.test_distributed import cluster, key_at, make, shards
from tests.queues.nodes import exported, queue_sides


async def fill(queues: Queues, count: int, size: int = 1) -> list[str]:
    return [await queues.publish("jobs", b"%05d" % number + b"x" * size, key=f"k{number}") for number in range(count)]


async def make_dead_letters(queues: Queues, count: int) -> None:
    async with queues.consume("jobs", "c", max_in_flight=16, from_start=True) as messages:
        for _ in range(count):
            await (await messages.__anext__()).reject("bad")


def nodes_of(rows: Iterable[BrowsedMessage]) -> set[str]:
    return {row.node for row in rows}


@pytest.mark.parametrize("asker", ["controller", "user"])
async def test_messages_of_all_partitions_are_told_with_their_node(
    autojump_clock: trio.testing.MockClock, asker: str
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [controller, one, two], 5)
        queues = controller.queues if asker == "controller" else user.at(controller)
        ids = await fill(queues, 40)
        rows = await queues.peek("jobs", count=1_000)
        assert {row.id for row in rows} == set(ids)
        assert [row.published_s for row in rows] == sorted(row.published_s for row in rows)
        assert nodes_of(rows) == {controller.peer, one.peer, two.peer}
        assert all(parse_message_id(row.id)[0] == row.partition for row in rows)
        # Three of some of the oldest: each partition has told its own.
        assert [row.id for row in await queues.peek("jobs", count=3)] == [row.id for row in rows[:3]]
        whole = await exported(queues, "jobs")
        assert [row.id for row in whole] == sorted(ids)
        assert nodes_of(whole) == {controller.peer, one.peer, two.peer}


async def test_an_export_of_many_pages_has_each_message_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dep2p.queues.api.queues.EXPORT_ITEMS", 3)
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [controller, one], 3)
        ids = await fill(user.at(controller), 31)
        assert [row.id for row in await exported(user.at(controller), "jobs")] == sorted(ids)
        for wrong in (f"{(99 << 40) + 1:016x}", "x"):
            with pytest.raises((ProtocolError, ValueError)):
                await user.at(controller).ask(parse_request({"op": "export", "queue": "jobs", "after": wrong}))


async def test_what_is_large_is_told_in_parts(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one, two], 4)
        ids = await fill(user.at(controller), 24, 200_000)
        rows = await user.at(controller).peek("jobs", count=1_000)
        assert 1 <= len(rows) <= 4
        assert [row.id for row in await exported(user.at(controller), "jobs")] == sorted(ids)
        await controller.queues.create_channel("jobs", "c", from_start=True)
        await make_dead_letters(user.at(controller), 24)
        found: list[DeadLetterInfo] = []
        while page := await user.at(controller).dead_letters("jobs", "c", after=found[-1].id if found else 0):
            assert len(page) <= 4
            found += page
        assert len({row.id for row in found}) == 24
        assert {row.message_id for row in found} == set(ids)


async def dead_ids(queues: Queues, page: int) -> list[int]:
    found: list[int] = []
    while rows := await queues.dead_letters("jobs", "c", after=found[-1] if found else 0, count=page):
        found += [row.id for row in rows]
    return found


@pytest.mark.parametrize("page", [1, 4, 100])
async def test_dead_letters_of_all_partitions_have_ids_of_their_own(
    autojump_clock: trio.testing.MockClock, page: int
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        queues = user.at(controller)
        await make(controller.queues, [one, two], 3)
        await controller.queues.create_channel("jobs", "c", from_start=True)
        await fill(queues, 20)
        await make_dead_letters(queues, 20)
        before = await dead_ids(queues, page)
        assert before == sorted(set(before))
        assert len(before) == 20
        rows = {row.id: row for row in await queues.dead_letters("jobs", "c")}
        assert nodes_of(rows.values()) == {one.peer, two.peer}
        assert {row.reasons[0] for row in rows.values()} == {"bad"}
        await controller.queues.expand("jobs", 5, nodes=["self"])
        assert await dead_ids(queues, page) == before, "ids outlive an expansion"
        (shown,) = await queues.dead_letters("jobs", "c", after=before[7] - 1, count=1)
        assert shown == rows[before[7]]
        # Some of them, over partitions; ids that are none do no harm.
        assert await queues.delete_dead_letters("jobs", "c", [before[0], before[7], before[9], 1 << 40, 5]) == 3
        with pytest.raises(QueueMessageNotFoundError):
            await queues.delete_dead_letters("jobs", "c", [before[0]])
        async with queues.consume("jobs", "c", max_in_flight=16) as messages:
            assert await queues.replay("jobs", "c", before[1:3]) == 2
            bodies = {(await messages.__anext__()).body for _ in range(2)}
        assert len(bodies) == 2
        assert await queues.replay_all("jobs", "c") == 15
        assert await dead_ids(queues, page) == []


FIELDS: dict[str, Callable[[str], dict[str, object]]] = {
    "peek": lambda _after: {"channel": "c"},
    "export": lambda after: {"after": after},
    "dead": lambda _after: {"channel": "c"},
    "replay": lambda _after: {"channel": "c", "all": True},
    "forget_dead": lambda _after: {"channel": "c", "all": True},
}


@pytest.mark.parametrize("op", list(FIELDS))
async def test_a_node_that_is_away_is_named(autojump_clock: trio.testing.MockClock, op: str) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 2)
        await controller.queues.create_channel("jobs", "c", from_start=True)
        for side in (one, two):
            (key,) = key_at(await controller.queues.route("jobs"), side.peer)
            await user.at(controller).publish("jobs", b"x", key=key)
        await nodes.kill(2)

        async def all_of_it() -> None:
            after = ""
            while True:
                reply = await user.at(controller).ask(parse_request({"op": op, "queue": "jobs", **FIELDS[op](after)}))
                after = reply.after if isinstance(reply, ExportPage) else ""
                if not after:
                    return

        with pytest.raises(Dep2pError, match=f"not the whole queue.*{two.peer}"):
            await all_of_it()
        assert len(await controller.at(one).peek(shards(one)[0])) == 1
        await nodes.restart(2)
        await all_of_it()


async def test_who_may_not_consume_sees_no_messages(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [controller, one, user]:
        ask: dict[str, Any] = {"queue": "jobs", "options": {"partitions": 1}, "nodes": [one.peer]}
        await controller.queues.ask(
            parse_request({"op": "create", **ask, "access": {"consume": "owner", "administer": "owner"}})
        )
        await controller.queues.create_channel("jobs", "c")
        await controller.queues.publish("jobs", b"x")
        for op in FIELDS:
            with pytest.raises(QueueAccessError):
                await user.at(controller).ask(parse_request({"op": op, "queue": "jobs", **FIELDS[op]("")}))
        assert len(await controller.queues.peek("jobs")) == 1


ROW: dict[str, object] = {"id": f"{(1 << 40) + 1:016x}", "published_s": 1.0, "data": "", "encoding": "base64"}
BAD: list[object] = [
    None,
    5,
    [5],
    [{**ROW, "id": "x"}],
    [{**ROW, "id": 7}],
    [{**ROW, "published_s": "now"}],
    [{**ROW, "data": None}],
    [ROW] * 1_001,
]


@pytest.mark.parametrize("bad", BAD, ids=lambda each: str(each)[:40])
async def test_a_node_that_tells_nonsense_is_named(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, bad: object
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)

        async def answer(peer: Any, request: Any) -> Any:
            return {"messages": bad, "dead": bad, "after": ""}

        monkeypatch.setattr(one.service, "administer", answer)
        for op in ("peek", "export", "dead"):
            with pytest.raises(ProtocolError, match=one.peer):
                await user.at(controller).ask(parse_request({"op": op, "queue": "jobs", **FIELDS[op]("")}))
