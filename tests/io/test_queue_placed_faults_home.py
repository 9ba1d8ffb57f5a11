"""The home of a placed queue: creation, deletion and expansion with nodes away or at once, and bad answers."""

from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import (
    Dep2pError,
    PeerNotFoundError,
    ProtocolError,
    QueueAccessError,
    QueueExistsError,
    QueueNotFoundError,
)
from dep2p.queues.access import Access
from tests.io.queues_support import queue_sides
from tests.io.support import REALM
from tests.io.test_queue_exclusive import put, until
from tests.io.test_queue_placed import cluster, key_at, make, shares


async def test_creating_on_nodes_never_deletes_an_existing_queue(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(3) as nodes:
        home, away, user = nodes.sides
        await home.queues.create("plain")
        await home.queues.publish("plain", b"x")
        await nodes.kill(1)
        with pytest.raises(Dep2pError):
            await user.at(home).ask("create", {"queue": "plain", "options": {}, "nodes": [away.peer]})
        assert (await home.queues.info("plain"))["messages"] == 1


async def test_who_may_not_administer_deletes_nothing_by_creating(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(3) as nodes:
        home, away, user = nodes.sides
        home.rights.default = Access(administer="owner")
        await home.queues.create("plain")
        await home.queues.publish("plain", b"x")
        with pytest.raises(QueueAccessError):
            await user.at(home).delete("plain")
        await nodes.kill(1)
        with pytest.raises(Dep2pError):
            await user.at(home).ask("create", {"queue": "plain", "options": {}, "nodes": [away.peer]})
        assert (await home.queues.info("plain"))["messages"] == 1


async def test_access_that_changes_later_changes_at_the_shares(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [home, one, user]:
        await make(home.queues, [one], 1)
        await user.at(home).publish("jobs", b"x")
        await home.queues.ask(
            "create",
            {
                "queue": "jobs",
                "options": {"partitions": 1, "order": "strict", "lease_s": 6.0},
                "access": {"publish": "owner", "consume": "owner", "administer": "owner"},
            },
        )
        with pytest.raises(QueueAccessError):
            await user.at(home).publish("jobs", b"y")


async def test_a_share_that_answers_nonsense_does_not_end_the_home(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [home, one, user]:
        await make(home.queues, [one], 1)
        await home.queues.create_channel("jobs", "c", exclusive=True)
        await put(user.at(home), 5, 1, 1)
        plain = one.service.administer

        async def answer(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            return {} if op == "floors" else await plain(peer, op, fields)

        monkeypatch.setattr(one.service, "administer", answer)
        await home.queues.expand("jobs", 2, nodes=["home"])
        await trio.sleep(5)
        assert await user.at(home).listing()


async def test_an_expansion_that_failed_in_the_middle_goes_on_without_a_restart(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(3) as nodes:
        home, one, _user = nodes.sides
        await make(home.queues, [one], 1)
        queue = await home.engine.loaded(REALM, "jobs")
        with monkeypatch.context() as patch:

            def fail(_last_seq: object) -> list[int]:
                raise Dep2pError("the end")

            patch.setattr(queue, "grow", fail)
            with pytest.raises(Dep2pError, match="the end"):
                await home.queues.ask("expand", {"queue": "jobs", "partitions": 2, "nodes": [home.peer]})
        await trio.sleep(60)
        assert len(queue.places) == 2


async def test_deletion_during_an_expansion_leaves_no_share(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(4) as nodes:
        home, one, two, _user = nodes.sides
        await make(home.queues, [one], 1)
        queue = await home.engine.loaded(REALM, "jobs")
        with monkeypatch.context() as patch:

            def fail(_last_seq: object) -> list[int]:
                raise Dep2pError("the end")

            patch.setattr(queue, "grow", fail)
            with pytest.raises(Dep2pError, match="the end"):
                await home.queues.ask("expand", {"queue": "jobs", "partitions": 2, "nodes": [two.peer]})
        await home.queues.delete("jobs")
        await trio.sleep(30)
        assert not shares(one)
        assert not shares(two)


async def test_a_pause_holds_in_added_partitions(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [home, one, user]:
        await make(home.queues, [one], 1)
        await home.queues.create_channel("jobs", "c")
        await home.queues.pause("jobs")
        await home.queues.expand("jobs", 2, nodes=["home"])
        async with user.at(home).consume("jobs", "c", max_in_flight=8) as messages:
            for _ in range(4):
                await user.at(home).publish("jobs", b"x")
            with trio.move_on_after(10):
                got = await messages.consumer.receive()
                raise AssertionError(f"delivered while paused: {got}")


async def test_create_again_with_other_nodes_is_refused_or_says_what_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [home, one, two]:
        first = await make(home.queues, [one], 2)
        try:
            again = await make(home.queues, [two], 2)
        except Dep2pError:
            return
        assert again["placed"] == first["placed"]


async def test_deletion_with_a_node_away_deletes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster(3) as nodes:
        home, one, two = nodes.sides
        await make(home.queues, [one, two], 2)
        await put(home.queues, 20, 1, 1)
        await nodes.kill(2)
        with pytest.raises(Dep2pError):
            await home.queues.delete("jobs")
        assert shares(one)  # either all or nothing


async def test_a_queue_deleted_while_the_home_looks_at_others(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [home, one, user]:
        for name in ("a", "b"):
            await home.queues.create(name, {"partitions": 1}, nodes=[one.peer if name == "a" else "home"])
            await home.queues.create_channel(name, "c", exclusive=True)
            await home.queues.publish(name, b"x")
        plain = one.service.administer
        asked = trio.Event()

        async def slow(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == "floors":
                asked.set()
                await trio.sleep(1)
            return await plain(peer, op, fields)

        monkeypatch.setattr(one.service, "administer", slow)
        for name in ("a", "b"):
            await home.queues.expand(name, 2, nodes=["home"])
        await asked.wait()
        await home.queues.delete("b")
        await trio.sleep(10)
        assert await user.at(home).listing()


async def test_what_is_published_while_a_queue_is_made_is_not_lost(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published between the plain queue and its placement."""
    async with queue_sides(3) as [home, one, user]:
        plain = one.service.administer
        seen = trio.Event()

        async def slow(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == "create":
                seen.set()
                await trio.sleep(1)
            return await plain(peer, op, fields)

        monkeypatch.setattr(one.service, "administer", slow)
        async with trio.open_nursery() as nursery:
            errors: list[Exception] = []

            async def create() -> None:
                try:
                    await make(home.queues, [one], 1)
                except (Dep2pError, ValueError) as error:
                    errors.append(error)

            nursery.start_soon(create)
            await seen.wait()
            try:
                await user.at(home).publish("jobs", b"x", timeout=5.0)
            except Dep2pError:
                pass
        assert not errors
        assert shares(one)


async def test_more_than_sixteen_partitions_on_a_node(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [home, one, _user]:
        await make(home.queues, [one], 24)
        await home.queues.create_channel("jobs", "c")
        made = sum("c" in one.engine.book.queues[REALM, share].channels for share in shares(one))
        up = sum(each["is_up"] for each in (await home.queues.route("jobs"))["partitions"])
        try:
            await home.queues.delete("jobs")
        except Dep2pError as error:
            raise AssertionError(f"{made} channels, {up} up, {error}") from None
        assert (made, up, shares(one)) == (24, 24, [])


async def test_an_error_of_a_share_comes_out_as_itself(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [home, user]:
        await make(home.queues, [home], 1)
        with pytest.raises(ValueError, match="channel"):
            await home.queues.ask("pause", {"queue": "jobs", "channel": 5})
        await home.queues.ask("pause", {"queue": "jobs", "channel": None})
        with pytest.raises(Dep2pError, match="channel"):
            await user.at(home).ask("resume", {"queue": "jobs", "channel": 5})


async def test_two_creations_at_once_make_one_table(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        plain = two.service.administer
        asked = trio.Event()

        async def slow(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == "serve":
                asked.set()
                await trio.sleep(2)
            return await plain(peer, op, fields)

        monkeypatch.setattr(two.service, "administer", slow)
        results: list[object] = []

        async def create(side: Any) -> None:
            try:
                results.append((await make(home.queues, [side], 1))["placed"])
            except (Dep2pError, ValueError) as error:
                results.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create, two)
            await asked.wait()
            nursery.start_soon(create, one)
            await trio.sleep(1)
            first = {name: place.node for name, place in home.engine.book.queues[REALM, "jobs"].places.items()}
            await user.at(home).publish("jobs", b"x", order_key="a")
        last = {name: place.node for name, place in home.engine.book.queues[REALM, "jobs"].places.items()}
        assert first == last, results


async def test_a_node_with_many_queues_can_have_partitions(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [home, one]:
        for number in range(6000):
            one.engine.book.create(REALM, f"queue-with-some-name-{number:06}", one.engine.defaults)
        await one.engine.flush()
        await make(home.queues, [one], 1)


async def test_a_channel_made_during_an_expansion_misses_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [home, one, two, user]:
        await make(home.queues, [one], 1)
        await home.queues.create_channel("jobs", "first")
        plain = two.service.administer
        asked = trio.Event()

        async def slow(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            found = await plain(peer, op, fields)
            if op == "create_channel":
                asked.set()
                await trio.sleep(2)
            return found

        monkeypatch.setattr(two.service, "administer", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: home.queues.expand("jobs", 2, nodes=[two.peer]))
            await asked.wait()
            await home.queues.create_channel("jobs", "second")
        (key,) = key_at(await home.queues.route("jobs"), two.peer)
        await user.at(home).publish("jobs", b"x", order_key=key)
        with trio.fail_after(60):
            async with user.at(home).consume("jobs", "second") as messages:
                assert (await messages.__anext__()).body == b"x"


async def test_deletion_goes_on_when_the_node_is_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An expansion with the keys of each publisher, home killed in the middle of two, strict order."""
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one], 1)
        await put(user.at(home), 10, 1, 1)
        await home.queues.expand("jobs", 2, nodes=[two.peer])
        await nodes.kill(2)
        with pytest.raises(Dep2pError):
            await home.queues.delete("jobs")
        await nodes.restart(2)
        await home.queues.delete("jobs")
        assert not shares(one) and not shares(nodes.sides[2])


async def test_a_channel_begins_in_all_partitions_or_in_none(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one, two], 2)
        away = two.peer
        (key,) = key_at(await home.queues.route("jobs"), away)
        await nodes.kill(2)
        with pytest.raises(Dep2pError, match=away):
            await home.queues.create_channel("jobs", "c")
        assert not home.engine.book.queues[REALM, "jobs"].channels
        for share in shares(one):
            assert not one.engine.book.queues[REALM, share].channels
        await nodes.restart(2)
        await home.queues.create_channel("jobs", "c")
        await user.at(home).publish("jobs", b"x", order_key=key)
        with trio.fail_after(60):
            async with user.at(home).consume("jobs", "c") as messages:
                assert (await messages.__anext__()).body == b"x"


async def test_a_known_channel_opens_with_a_node_away(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one, two], 2)
        await home.queues.create_channel("jobs", "c")
        (key,) = key_at(await home.queues.route("jobs"), one.peer)
        await nodes.kill(2)
        await user.at(home).publish("jobs", b"x", order_key=key)
        with trio.fail_after(60):
            async with user.at(home).consume("jobs", "c") as messages:
                assert (await messages.__anext__()).body == b"x"


async def test_a_queue_whose_node_is_gone_for_good_is_deleted_by_force(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        await make(home.queues, [one, two], 2)
        await nodes.kill(2)
        with pytest.raises(Dep2pError, match=two.peer):
            await home.queues.delete("jobs")
        assert shares(one)
        assert (await home.queues.route("jobs"))["partitions"]
        left = await home.queues.delete("jobs", force=True)
        assert [each["node"] for each in left] == [two.peer]
        assert not shares(one)
        with pytest.raises(QueueNotFoundError):
            await user.at(home).publish("jobs", b"x")


async def test_a_creation_that_fails_in_the_middle_leaves_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [home, one, two]:

        async def fail(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == "serve":
                raise PeerNotFoundError("away")
            return await plain(peer, op, fields)

        plain = two.service.administer
        with monkeypatch.context() as patch:
            patch.setattr(two.service, "administer", fail)
            with pytest.raises(Dep2pError):
                await make(home.queues, [one, two], 2)
        assert not shares(one)
        assert not shares(two)
        with pytest.raises(QueueNotFoundError):
            await home.queues.info("jobs")
        await make(home.queues, [one, two], 2)


async def test_a_creation_that_a_crash_interrupted_is_ended(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(4) as nodes:
        home, one, two, user = nodes.sides
        plain = two.service.administer
        asked = trio.Event()

        async def hang(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == "create":
                asked.set()
                await trio.sleep_forever()
            return await plain(peer, op, fields)

        with monkeypatch.context() as patch:
            patch.setattr(two.service, "administer", hang)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(make, home.queues, [one, two], 2)
                await asked.wait()
                nursery.cancel_scope.cancel()
            await nodes.kill(0)
        await nodes.restart(0)
        with trio.fail_after(60):
            await until(lambda: len(shares(one)) + len(shares(two)) == 2)
            await user.at(nodes.sides[0]).publish("jobs", b"x", order_key="a")


async def test_an_existing_queue_of_one_node_is_refused_by_its_name(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [home, one]:
        await home.queues.create("jobs")
        with pytest.raises(QueueExistsError, match="delete it first"):
            await make(home.queues, [one], 1)
        assert not shares(one)


@pytest.mark.parametrize("floors", [5, {"c": -1}, {"c": "x"}, {"c": 2**70}, {"c": True}])
async def test_a_share_that_answers_with_bad_floors_lets_nobody_past_its_barrier(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, floors: object
) -> None:
    async with queue_sides(3) as [home, one, user]:
        await make(home.queues, [one], 1)
        await home.queues.create_channel("jobs", "c", exclusive=True)
        await put(user.at(home), 5, 1, 1)
        plain = one.service.administer
        asked = 0

        async def answer(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            nonlocal asked
            asked += op == "floors"
            return {"floors": floors} if op == "floors" else await plain(peer, op, fields)

        monkeypatch.setattr(one.service, "administer", answer)
        await home.queues.expand("jobs", 2, nodes=["home"])
        await until(lambda: asked >= 3)
        assert (await home.engine.loaded(REALM, "jobs")).routes.has_barriers
        monkeypatch.undo()
        assert (await user.at(home).route("jobs"))["partitions"]


async def test_an_expansion_refuses_a_last_number_that_is_none(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [home, one, user]:
        await make(home.queues, [one], 1)
        await put(user.at(home), 5, 1, 1)
        plain = one.service.administer

        async def answer(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            return {"last_seq": 2**70} if op == "serve" else await plain(peer, op, fields)

        with monkeypatch.context() as patch:
            patch.setattr(one.service, "administer", answer)
            with pytest.raises(ProtocolError, match="last_seq"):
                await home.queues.expand("jobs", 2, nodes=["home"])
        queue = await home.engine.loaded(REALM, "jobs")
        await until(lambda: len(queue.places) == 2)
