"""Messages and dead letters of a queue on several nodes, looked at by its own name."""

from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import Dep2pError, ProtocolError, QueueAccessError, QueueMessageNotFoundError
from dep2p.queues.api.queues import Queues
from dep2p.queues.types import parse_message_id
from tests.io.queues_support import QueueSide, queue_sides
from tests.io.test_queue_placed import cluster, key_at, make, shares


async def fill(place: Queues, count: int, size: int = 1) -> list[str]:
    return [
        await place.publish("jobs", b"%05d" % number + b"x" * size, order_key=f"k{number}") for number in range(count)
    ]


async def bury(place: Queues, count: int) -> None:
    async with place.consume("jobs", "c", max_in_flight=16, from_start=True) as messages:
        for _ in range(count):
            await (await messages.__anext__()).reject("bad")


def nodes_of(rows: list[dict[str, Any]]) -> set[str]:
    return {row["node"] for row in rows}


@pytest.mark.parametrize("asker", ["home", "user"])
async def test_messages_of_all_partitions_are_told_with_their_node(
    autojump_clock: trio.testing.MockClock, asker: str
) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [home, one, two], 5)
        place = home.queues if asker == "home" else user.at(home)
        ids = await fill(place, 40)
        rows = await place.peek("jobs", count=1_000)
        assert {row["id"] for row in rows} == set(ids)
        assert [row["published_s"] for row in rows] == sorted(row["published_s"] for row in rows)
        assert nodes_of(rows) == {home.peer, one.peer, two.peer}
        assert all(parse_message_id(row["id"])[0] == row["partition"] for row in rows)
        # Three of some of the oldest: each partition has told its own.
        assert [row["id"] for row in await place.peek("jobs", count=3)] == [row["id"] for row in rows[:3]]
        exported = [row async for row in place.export("jobs")]
        assert [row["id"] for row in exported] == sorted(ids)
        assert nodes_of(exported) == {home.peer, one.peer, two.peer}


async def test_an_export_of_many_pages_has_each_message_once(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dep2p.queues.api.queues.EXPORT_ITEMS", 3)
    async with queue_sides(3) as [home, one, user]:
        await make(home.queues, [home, one], 3)
        ids = await fill(user.at(home), 31)
        assert [row["id"] async for row in user.at(home).export("jobs")] == sorted(ids)
        for wrong in (f"{(99 << 40) + 1:016x}", "x"):
            with pytest.raises((ProtocolError, ValueError)):
                await user.at(home).ask("export", {"queue": "jobs", "after": wrong})


async def test_what_is_large_is_told_in_parts(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one, two], 4)
        ids = await fill(user.at(home), 24, 200_000)
        rows = await user.at(home).peek("jobs", count=1_000)
        assert 1 <= len(rows) <= 4
        assert [row["id"] async for row in user.at(home).export("jobs")] == sorted(ids)
        await home.queues.create_channel("jobs", "c", from_start=True)
        await bury(user.at(home), 24)
        found: list[dict[str, Any]] = []
        while page := await user.at(home).dead("jobs", "c", after=found[-1]["id"] if found else 0):
            assert len(page) <= 4
            found += page
        assert len({row["id"] for row in found}) == 24
        assert {row["message_id"] for row in found} == set(ids)


async def dead_ids(place: Queues, page: int) -> list[int]:
    found: list[int] = []
    while rows := await place.dead("jobs", "c", after=found[-1] if found else 0, count=page):
        found += [row["id"] for row in rows]
    return found


@pytest.mark.parametrize("page", [1, 4, 100])
async def test_dead_letters_of_all_partitions_have_ids_of_their_own(
    autojump_clock: trio.testing.MockClock, page: int
) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        place = user.at(home)
        await make(home.queues, [one, two], 3)
        await home.queues.create_channel("jobs", "c", from_start=True)
        await fill(place, 20)
        await bury(place, 20)
        before = await dead_ids(place, page)
        assert before == sorted(set(before))
        assert len(before) == 20
        rows = {row["id"]: row for row in await place.dead("jobs", "c")}
        assert nodes_of(list(rows.values())) == {one.peer, two.peer}
        assert {row["reasons"][0] for row in rows.values()} == {"bad"}
        await home.queues.expand("jobs", 5, nodes=["home"])
        assert await dead_ids(place, page) == before, "ids outlive an expansion"
        (shown,) = await place.dead("jobs", "c", after=before[7] - 1, count=1)
        assert shown == rows[before[7]]
        # Some of them, over partitions; ids that are none do no harm.
        assert await place.forget_dead("jobs", "c", [before[0], before[7], before[9], 1 << 40, 5]) == 3
        with pytest.raises(QueueMessageNotFoundError):
            await place.forget_dead("jobs", "c", [before[0]])
        async with place.consume("jobs", "c", max_in_flight=16) as messages:
            assert await place.replay("jobs", "c", before[1:3]) == 2
            bodies = {(await messages.__anext__()).body for _ in range(2)}
        assert len(bodies) == 2
        assert await place.replay("jobs", "c") == 15
        assert await dead_ids(place, page) == []


@pytest.mark.parametrize("op", ["peek", "export", "dead", "replay", "forget_dead"])
async def test_a_node_that_is_away_is_named(autojump_clock: trio.testing.MockClock, op: str) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one, two], 2)
        await home.queues.create_channel("jobs", "c", from_start=True)
        for side in (one, two):
            (key,) = key_at(await home.queues.route("jobs"), side.peer)
            await user.at(home).publish("jobs", b"x", order_key=key)
        await nodes.kill(2)

        async def all_of_it() -> None:
            after = ""
            while True:
                answer = await user.at(home).ask(
                    op, {"queue": "jobs", "channel": "c", **({"after": after} if op == "export" else {})}
                )
                after = answer.get("after", "")
                if not after:
                    return

        with pytest.raises(Dep2pError, match=f"not the whole queue.*{two.peer}"):
            await all_of_it()
        assert len(await home.at(one).peek(shares(one)[0])) == 1
        await nodes.restart(2)
        await all_of_it()


async def test_who_may_not_consume_sees_no_messages(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [home, one, user]:
        ask: dict[str, Any] = {"queue": "jobs", "options": {"partitions": 1}, "nodes": [one.peer]}
        await home.queues.ask("create", {**ask, "access": {"consume": "owner", "administer": "owner"}})
        await home.queues.create_channel("jobs", "c")
        await home.queues.publish("jobs", b"x")
        for op in ("peek", "export", "dead", "replay", "forget_dead"):
            with pytest.raises(QueueAccessError):
                await user.at(home).ask(
                    op, {"queue": "jobs", "channel": "c", **({"after": ""} if op == "export" else {})}
                )
        assert len(await home.queues.peek("jobs")) == 1


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
    async with queue_sides(3) as [home, one, user]:
        await make(home.queues, [one], 1)

        async def answer(side: QueueSide, op: str, fields: Any) -> dict[str, Any]:
            return {"messages": bad, "dead": bad, "after": ""}

        monkeypatch.setattr(one.service, "administer", answer)
        for op in ("peek", "export", "dead"):
            with pytest.raises(ProtocolError, match=one.peer):
                await user.at(home).ask(op, {"queue": "jobs", "channel": "c", "after": "" if op == "export" else 0})
