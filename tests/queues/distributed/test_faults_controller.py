"""The controller of a distributed queue: creation, deletion and expansion with nodes away or at once, and bad
answers."""

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
from dep2p.protocols.queues.admin import operation_of
from dep2p.protocols.queues.wire.admin import parse_request
from dep2p.queues.access import Access
from tests.messaging.nodes import REALM
from tests.queues.broker.test_exclusive import put, until
from tests.queues.distributed.test_distributed import cluster, key_at, make, shards
from tests.queues.nodes import queue_sides


async def test_creating_on_nodes_never_deletes_an_existing_queue(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        await controller.queues.create("plain")
        await controller.queues.publish("plain", b"x")
        await nodes.kill(1)
        with pytest.raises(Dep2pError):
            await user.at(controller).create("plain", {}, nodes=[away.peer])
        assert (await controller.queues.info("plain")).messages == 1


async def test_who_may_not_administer_deletes_nothing_by_creating(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        controller.rights.default = Access(administer="owner")
        await controller.queues.create("plain")
        await controller.queues.publish("plain", b"x")
        with pytest.raises(QueueAccessError):
            await user.at(controller).delete("plain")
        await nodes.kill(1)
        with pytest.raises(Dep2pError):
            await user.at(controller).create("plain", {}, nodes=[away.peer])
        assert (await controller.queues.info("plain")).messages == 1


async def test_access_that_changes_later_changes_at_the_shards(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        await user.at(controller).publish("jobs", b"x")
        await controller.queues.ask(
            parse_request(
                {
                    "op": "create",
                    "queue": "jobs",
                    "options": {"partitions": 1, "order": "strict", "lease_s": 6.0},
                    "access": {"publish": "owner", "consume": "owner", "administer": "owner"},
                }
            ),
        )
        with pytest.raises(QueueAccessError):
            await user.at(controller).publish("jobs", b"y")


async def test_a_shard_that_answers_nonsense_does_not_end_the_controller(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        await controller.queues.create_channel("jobs", "c", exclusive=True)
        await put(user.at(controller), 5, 1, 1)
        plain = one.service.administer

        async def answer(peer: Any, request: Any) -> Any:
            return {} if operation_of(request) == "floors" else await plain(peer, request)

        monkeypatch.setattr(one.service, "administer", answer)
        await controller.queues.expand("jobs", 2, nodes=["self"])
        await trio.sleep(5)
        assert await user.at(controller).listing()


async def test_an_expansion_that_failed_in_the_middle_goes_on_without_a_restart(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(3) as nodes:
        controller, one, _user = nodes.sides
        await make(controller.queues, [one], 1)
        queue = await controller.engine.loaded(REALM, "jobs")
        with monkeypatch.context() as patch:

            def fail(_last_seq: object) -> list[int]:
                raise Dep2pError("the end")

            patch.setattr(queue, "complete_expansion", fail)
            with pytest.raises(Dep2pError, match="the end"):
                await controller.queues.expand("jobs", 2, nodes=[controller.peer])
        await trio.sleep(60)
        assert len(queue.locations) == 2


async def test_deletion_during_an_expansion_leaves_no_shard(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(4) as nodes:
        controller, one, two, _user = nodes.sides
        await make(controller.queues, [one], 1)
        queue = await controller.engine.loaded(REALM, "jobs")
        with monkeypatch.context() as patch:

            def fail(_last_seq: object) -> list[int]:
                raise Dep2pError("the end")

            patch.setattr(queue, "complete_expansion", fail)
            with pytest.raises(Dep2pError, match="the end"):
                await controller.queues.expand("jobs", 2, nodes=[two.peer])
        await controller.queues.delete("jobs")
        await trio.sleep(30)
        assert not shards(one)
        assert not shards(two)


async def test_a_pause_holds_in_added_partitions(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        await controller.queues.create_channel("jobs", "c")
        await controller.queues.pause_all("jobs")
        await controller.queues.expand("jobs", 2, nodes=["self"])
        async with user.at(controller).consume("jobs", "c", max_in_flight=8) as messages:
            for _ in range(4):
                await user.at(controller).publish("jobs", b"x")
            with trio.move_on_after(10):
                got = await messages.consumer.receive()
                raise AssertionError(f"delivered while paused: {got}")


async def test_create_again_with_other_nodes_is_refused_or_says_what_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [controller, one, two]:
        first = await make(controller.queues, [one], 2)
        try:
            again = await make(controller.queues, [two], 2)
        except Dep2pError:
            return
        assert again.shards == first.shards


async def test_deletion_with_a_node_away_deletes_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with cluster(3) as nodes:
        controller, one, two = nodes.sides
        await make(controller.queues, [one, two], 2)
        await put(controller.queues, 20, 1, 1)
        await nodes.kill(2)
        with pytest.raises(Dep2pError):
            await controller.queues.delete("jobs")
        assert shards(one)  # either all or nothing


async def test_a_queue_deleted_while_the_controller_looks_at_others(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        for name in ("a", "b"):
            await controller.queues.create(name, {"partitions": 1}, nodes=[one.peer if name == "a" else "self"])
            await controller.queues.create_channel(name, "c", exclusive=True)
            await controller.queues.publish(name, b"x")
        plain = one.service.administer
        asked = trio.Event()

        async def slow(peer: Any, request: Any) -> Any:
            if operation_of(request) == "floors":
                asked.set()
                await trio.sleep(1)
            return await plain(peer, request)

        monkeypatch.setattr(one.service, "administer", slow)
        for name in ("a", "b"):
            await controller.queues.expand(name, 2, nodes=["self"])
        await asked.wait()
        await controller.queues.delete("b")
        await trio.sleep(10)
        assert await user.at(controller).listing()


async def test_what_is_published_while_a_queue_is_made_is_not_lost(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are published between the creation of the plain queue and its placement."""
    async with queue_sides(3) as [controller, one, user]:
        plain = one.service.administer
        seen = trio.Event()

        async def slow(peer: Any, request: Any) -> Any:
            if operation_of(request) == "create":
                seen.set()
                await trio.sleep(1)
            return await plain(peer, request)

        monkeypatch.setattr(one.service, "administer", slow)
        async with trio.open_nursery() as nursery:
            errors: list[Exception] = []

            async def create() -> None:
                try:
                    await make(controller.queues, [one], 1)
                except (Dep2pError, ValueError) as error:
                    errors.append(error)

            nursery.start_soon(create)
            await seen.wait()
            try:
                await user.at(controller).publish("jobs", b"x", timeout_s=5.0)
            except Dep2pError:
                pass
        assert not errors
        assert shards(one)


async def test_more_than_sixteen_partitions_on_a_node(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(3) as [controller, one, _user]:
        await make(controller.queues, [one], 24)
        await controller.queues.create_channel("jobs", "c")
        made = sum("c" in one.engine.registry.queues[REALM, shard].channels for shard in shards(one))
        up = sum(bool(each.is_up) for each in (await controller.queues.route("jobs")).partitions)
        try:
            await controller.queues.delete("jobs")
        except Dep2pError as error:
            raise AssertionError(f"{made} channels, {up} up, {error}") from None
        assert (made, up, shards(one)) == (24, 24, [])


async def test_an_error_of_a_shard_comes_out_as_itself(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [controller, user]:
        await make(controller.queues, [controller], 1)
        wrong: Any = 5
        with pytest.raises(ValueError, match="channel"):
            await controller.queues.pause("jobs", wrong)
        await controller.queues.pause_all("jobs")
        with pytest.raises(Dep2pError, match="channel"):
            await user.at(controller).resume("jobs", "none")


async def test_two_creations_at_once_make_one_table(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        plain = two.service.administer
        asked = trio.Event()

        async def slow(peer: Any, request: Any) -> Any:
            if operation_of(request) == "serve":
                asked.set()
                await trio.sleep(2)
            return await plain(peer, request)

        monkeypatch.setattr(two.service, "administer", slow)
        results: list[object] = []

        async def create(side: Any) -> None:
            try:
                results.append((await make(controller.queues, [side], 1)).shards)
            except (Dep2pError, ValueError) as error:
                results.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(create, two)
            await asked.wait()
            nursery.start_soon(create, one)
            await trio.sleep(1)
            first = {
                name: location.node
                for name, location in controller.engine.registry.queues[REALM, "jobs"].locations.items()
            }
            await user.at(controller).publish("jobs", b"x", key="a")
        last = {
            name: location.node for name, location in controller.engine.registry.queues[REALM, "jobs"].locations.items()
        }
        assert first == last, results


async def test_a_node_with_many_queues_can_have_partitions(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [controller, one]:
        for number in range(6000):
            one.engine.registry.create(REALM, f"queue-with-some-name-{number:06}", one.engine.defaults)
        await one.engine.flush()
        await make(controller.queues, [one], 1)


async def test_a_channel_made_during_an_expansion_misses_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one], 1)
        await controller.queues.create_channel("jobs", "first")
        plain = two.service.administer
        asked = trio.Event()

        async def slow(peer: Any, request: Any) -> Any:
            found = await plain(peer, request)
            if operation_of(request) == "create_channel":
                asked.set()
                await trio.sleep(2)
            return found

        monkeypatch.setattr(two.service, "administer", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: controller.queues.expand("jobs", 2, nodes=[two.peer]))
            await asked.wait()
            await controller.queues.create_channel("jobs", "second")
        (key,) = key_at(await controller.queues.route("jobs"), two.peer)
        await user.at(controller).publish("jobs", b"x", key=key)
        with trio.fail_after(60):
            async with user.at(controller).consume("jobs", "second") as messages:
                assert (await messages.__anext__()).body == b"x"


async def test_deletion_goes_on_when_the_node_is_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An expansion with the keys of each publisher, controller killed in the middle of two, strict order."""
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one], 1)
        await put(user.at(controller), 10, 1, 1)
        await controller.queues.expand("jobs", 2, nodes=[two.peer])
        await nodes.kill(2)
        with pytest.raises(Dep2pError):
            await controller.queues.delete("jobs")
        await nodes.restart(2)
        await controller.queues.delete("jobs")
        assert not shards(one) and not shards(nodes.sides[2])


async def test_a_channel_begins_in_all_partitions_or_in_none(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 2)
        away = two.peer
        (key,) = key_at(await controller.queues.route("jobs"), away)
        await nodes.kill(2)
        with pytest.raises(Dep2pError, match=away):
            await controller.queues.create_channel("jobs", "c")
        assert not controller.engine.registry.queues[REALM, "jobs"].channels
        for shard in shards(one):
            assert not one.engine.registry.queues[REALM, shard].channels
        await nodes.restart(2)
        await controller.queues.create_channel("jobs", "c")
        await user.at(controller).publish("jobs", b"x", key=key)
        with trio.fail_after(60):
            async with user.at(controller).consume("jobs", "c") as messages:
                assert (await messages.__anext__()).body == b"x"


async def test_a_known_channel_opens_with_a_node_away(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 2)
        await controller.queues.create_channel("jobs", "c")
        (key,) = key_at(await controller.queues.route("jobs"), one.peer)
        await nodes.kill(2)
        await user.at(controller).publish("jobs", b"x", key=key)
        with trio.fail_after(60):
            async with user.at(controller).consume("jobs", "c") as messages:
                assert (await messages.__anext__()).body == b"x"


async def test_a_queue_whose_node_is_gone_for_good_is_deleted_by_force(autojump_clock: trio.testing.MockClock) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        await make(controller.queues, [one, two], 2)
        await nodes.kill(2)
        with pytest.raises(Dep2pError, match=two.peer):
            await controller.queues.delete("jobs")
        assert shards(one)
        assert (await controller.queues.route("jobs")).partitions
        left = await controller.queues.delete("jobs", force=True)
        assert [each.node for each in left] == [two.peer]
        assert not shards(one)
        with pytest.raises(QueueNotFoundError):
            await user.at(controller).publish("jobs", b"x")


async def test_a_creation_that_fails_in_the_middle_leaves_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [controller, one, two]:

        async def fail(peer: Any, request: Any) -> Any:
            if operation_of(request) == "serve":
                raise PeerNotFoundError("away")
            return await plain(peer, request)

        plain = two.service.administer
        with monkeypatch.context() as patch:
            patch.setattr(two.service, "administer", fail)
            with pytest.raises(Dep2pError):
                await make(controller.queues, [one, two], 2)
        assert not shards(one)
        assert not shards(two)
        with pytest.raises(QueueNotFoundError):
            await controller.queues.info("jobs")
        await make(controller.queues, [one, two], 2)


async def test_a_creation_that_a_crash_interrupted_is_ended(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(4) as nodes:
        controller, one, two, user = nodes.sides
        plain = two.service.administer
        asked = trio.Event()

        async def hang(peer: Any, request: Any) -> Any:
            if operation_of(request) == "create":
                asked.set()
                await trio.sleep_forever()
            return await plain(peer, request)

        with monkeypatch.context() as patch:
            patch.setattr(two.service, "administer", hang)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(make, controller.queues, [one, two], 2)
                await asked.wait()
                nursery.cancel_scope.cancel()
            await nodes.kill(0)
        await nodes.restart(0)
        with trio.fail_after(60):
            await until(lambda: len(shards(one)) + len(shards(two)) == 2)
            await user.at(nodes.sides[0]).publish("jobs", b"x", key="a")


async def test_an_existing_queue_of_one_node_is_refused_by_its_name(autojump_clock: trio.testing.MockClock) -> None:
    async with queue_sides(2) as [controller, one]:
        await controller.queues.create("jobs")
        with pytest.raises(QueueExistsError, match="delete it first"):
            await make(controller.queues, [one], 1)
        assert not shards(one)


@pytest.mark.parametrize("ack_floors", [5, {"c": -1}, {"c": "x"}, {"c": 2**70}, {"c": True}])
async def test_a_shard_that_answers_with_bad_ack_floors_lets_nobody_past_its_barrier(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, ack_floors: object
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        await controller.queues.create_channel("jobs", "c", exclusive=True)
        await put(user.at(controller), 5, 1, 1)
        plain = one.service.administer
        asked = 0

        async def answer(peer: Any, request: Any) -> Any:
            nonlocal asked
            asked += operation_of(request) == "floors"
            return {"floors": ack_floors} if operation_of(request) == "floors" else await plain(peer, request)

        monkeypatch.setattr(one.service, "administer", answer)
        await controller.queues.expand("jobs", 2, nodes=["self"])
        await until(lambda: asked >= 3)
        assert (await controller.engine.loaded(REALM, "jobs")).routes.has_barriers
        monkeypatch.undo()
        assert (await user.at(controller).route("jobs")).partitions


async def test_an_expansion_refuses_a_last_number_that_is_none(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        await put(user.at(controller), 5, 1, 1)
        plain = one.service.administer

        async def answer(peer: Any, request: Any) -> Any:
            return {"last_seq": 2**70} if operation_of(request) == "serve" else await plain(peer, request)

        with monkeypatch.context() as patch:
            patch.setattr(one.service, "administer", answer)
            with pytest.raises(ProtocolError, match="last_seq"):
                await controller.queues.expand("jobs", 2, nodes=["self"])
        queue = await controller.engine.loaded(REALM, "jobs")
        await until(lambda: len(queue.locations) == 2)
