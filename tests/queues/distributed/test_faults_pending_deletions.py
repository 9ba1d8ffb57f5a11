"""Queues on several nodes: what is left behind on nodes that were away, what one node's trouble costs the others, and
what a member may not do through a controller."""

from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import Dep2pError, PeerNotFoundError, QueueAccessError
from dep2p.protocols.queues.admin import QueueAccess, operation_of
from dep2p.queues.access import Access
from tests.messaging.nodes import REALM
from tests.queues.broker.test_exclusive import put, until
from tests.queues.distributed.test_distributed import Cluster, cluster, make, shards
from tests.queues.nodes import queue_sides


async def gone(nodes: Cluster, index: int) -> None:
    with trio.fail_after(120):
        await until(lambda: not shards(nodes.sides[index]))
        await until(lambda: not nodes.sides[0].engine.registry.pending_deletions)


@pytest.mark.parametrize("is_controller_restarted", [False, True])
async def test_what_force_left_is_removed_when_its_node_is_back(
    autojump_clock: trio.testing.MockClock, is_controller_restarted: bool
) -> None:
    async with cluster(3) as nodes:
        controller, one, two = nodes.sides
        await make(controller.queues, [one, two], 4)
        await nodes.kill(2)
        assert len(await controller.queues.delete("jobs", force=True)) == 2
        await make(controller.queues, [one], 1)  # of the same name, with which nothing happens
        if is_controller_restarted:
            await nodes.kill(0)
            await nodes.restart(0)
        await trio.sleep(60)
        await nodes.restart(2)
        assert len(shards(nodes.sides[2])) == 2
        await gone(nodes, 2)
        assert len(shards(one)) == 1
        await nodes.kill(0)
        await nodes.restart(0)
        assert not nodes.sides[0].engine.registry.pending_deletions, "it is still remembered on disk"


async def test_what_an_undone_creation_left_is_removed_when_its_node_is_back(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(3) as nodes:
        controller, one, two = nodes.sides
        plain = two.service.administer

        async def fail(peer: Any, request: Any) -> Any:
            if operation_of(request) in ("serve", "delete"):
                raise PeerNotFoundError("away")
            return await plain(peer, request)

        monkeypatch.setattr(two.service, "administer", fail)
        with pytest.raises(Dep2pError):
            await make(controller.queues, [one, two], 2)
        assert not shards(one)
        assert shards(two)
        monkeypatch.undo()
        await gone(nodes, 2)


@pytest.mark.parametrize("is_made_later", [False, True])
async def test_a_channel_that_was_not_made_everywhere_is_removed_unless_it_is_wanted_again(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, is_made_later: bool
) -> None:
    async with cluster(3) as nodes:
        controller, one, two = nodes.sides
        await make(controller.queues, [one, two], 2)
        is_bad = True
        for side in (one, two):
            plain = side.service.administer

            async def fail(peer: Any, request: Any, side: Any = side, plain: Any = plain) -> Any:
                if is_bad and (
                    (operation_of(request) == "create_channel" and side is two)
                    or (operation_of(request) == "delete_channel" and side is one)
                ):
                    raise PeerNotFoundError("away")
                return await plain(peer, request)

            monkeypatch.setattr(side.service, "administer", fail)
        with pytest.raises(Dep2pError):
            await controller.queues.create_channel("jobs", "c")
        (shard,) = shards(one)
        assert list(one.engine.registry.queues[REALM, shard].channels) == ["c"]
        is_bad = False
        if is_made_later:
            await controller.queues.create_channel("jobs", "c")
        with trio.fail_after(120):
            await until(lambda: not controller.engine.registry.pending_deletions)
        await trio.sleep(60)
        wanted = ["c"] if is_made_later else []
        for side in (one, two):
            assert list(side.engine.registry.queues[REALM, shards(side)[0]].channels) == wanted


@pytest.mark.parametrize("hangs_at", ["floors", "serve", "create"])
async def test_a_node_that_hangs_holds_up_no_queue_without_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, hangs_at: str
) -> None:
    async with queue_sides(4) as [controller, slow, quick, user]:
        for name, side in (("a", slow), ("b", quick)):
            await controller.queues.create(name, {"partitions": 1}, nodes=[side.peer])
            await controller.queues.create_channel(name, "c", exclusive=True)
            await controller.queues.publish(name, b"x", key="k")
        plain = slow.service.administer
        asked = trio.Event()

        async def hang(peer: Any, request: Any) -> Any:
            if operation_of(request) == hangs_at:
                asked.set()
                await trio.sleep_forever()
            return await plain(peer, request)

        monkeypatch.setattr(slow.service, "administer", hang)

        async def expand(name: str) -> None:
            try:
                await controller.queues.expand(name, 2)
            except Dep2pError:
                assert name == "a"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expand, "a")
            await asked.wait()
            await expand("b")
            queue = await controller.engine.loaded(REALM, "b")
            assert queue.routes.has_barriers
            async with user.at(controller).consume("b", "c", exclusive=True) as messages:
                message = await messages.__anext__()
                await message.finish()
                began_s = trio.current_time()
                await until(lambda: not queue.routes.has_barriers)
                assert trio.current_time() - began_s < 1.0
            nursery.cancel_scope.cancel()


async def test_nodes_that_hang_hold_up_no_other_node_of_the_same_queue(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barriers of eight partitions are looked at together, not one after another."""
    async with queue_sides(3) as [controller, slow, user]:
        await make(controller.queues, [slow], 8)
        await controller.queues.create_channel("jobs", "c", exclusive=True)
        await put(user.at(controller), 100, 1, 1)
        await controller.queues.expand("jobs", 16, nodes=["self"])
        plain = slow.service.administer
        times: list[float] = []

        async def hang(peer: Any, request: Any) -> Any:
            if operation_of(request) == "floors":
                times.append(trio.current_time())
                await trio.sleep_forever()
            return await plain(peer, request)

        monkeypatch.setattr(slow.service, "administer", hang)
        await until(lambda: len(times) >= 16)
        assert times[-1] - times[0] < 5.0


async def test_what_a_member_may_not_do_at_a_node_it_does_not_through_a_controller_either(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        one.rights.create = (controller.peer,)
        with pytest.raises(QueueAccessError):
            await user.at(one).create("q")
        with pytest.raises(QueueAccessError, match=f"let {user.peer} make"):
            await make(user.at(controller), [one], 1)
        assert not controller.engine.queue_names(REALM)
        await make(controller.queues, [one], 1)
        with pytest.raises(QueueAccessError, match=f"let {user.peer} make"):
            await user.at(controller).expand("jobs", 2)
        assert len((await controller.queues.expand("jobs", 2)).added) == 1
        # At the controller itself, and the controller at a node that does not let it.
        controller.rights.create = (one.peer,)
        with pytest.raises(QueueAccessError):
            await user.at(controller).expand("jobs", 3, nodes=["self"])
        one.rights.create = "owner"
        with pytest.raises(QueueAccessError, match=f"let {controller.peer} make"):
            await controller.queues.expand("jobs", 3)
        assert len(shards(one)) == 2
        assert not (await controller.engine.loaded(REALM, "jobs")).pending_expansion


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("is_default", [False, True])
async def test_to_make_a_queue_again_changes_nothing_that_its_owner_alone_may_change(
    autojump_clock: trio.testing.MockClock, is_distributed: bool, is_default: bool
) -> None:
    async with queue_sides(3) as [controller, one, user]:
        owner_only: Any = {"publish": "members", "consume": "members", "administer": "owner"}
        if is_default:
            controller.rights.default = Access(administer="owner")
        await controller.queues.create(
            "jobs",
            {"partitions": 1},
            access=None if is_default else owner_only,
            nodes=[one.peer] if is_distributed else (),
        )
        for access in ({"administer": "members"}, {"publish": "owner"}, {"consume": [user.peer]}):
            with pytest.raises(QueueAccessError):
                await user.at(controller).create("jobs", {"partitions": 1}, access=access)
        await user.at(controller).create("jobs", {"partitions": 1})
        assert (await controller.queues.info("jobs")).access == QueueAccess(**owner_only)
        with pytest.raises(QueueAccessError):
            await user.at(controller).delete("jobs")
