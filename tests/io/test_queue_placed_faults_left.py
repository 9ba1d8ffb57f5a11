"""Queues on several nodes: what is left behind on nodes that were away, what one node's trouble costs the others, and
what a member may not do through a home."""

from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import Dep2pError, PeerNotFoundError, QueueAccessError
from dep2p.queues.access import Access
from tests.io.queues_support import queue_sides
from tests.io.support import REALM
from tests.io.test_queue_exclusive import put, until
from tests.io.test_queue_placed import Cluster, cluster, make, shares


async def gone(nodes: Cluster, index: int) -> None:
    with trio.fail_after(120):
        await until(lambda: not shares(nodes.sides[index]))
        await until(lambda: not nodes.sides[0].engine.book.left)


@pytest.mark.parametrize("is_home_restarted", [False, True])
async def test_what_force_left_is_removed_when_its_node_is_back(
    autojump_clock: trio.testing.MockClock, is_home_restarted: bool
) -> None:
    async with cluster(3) as nodes:
        home, one, two = nodes.sides
        await make(home.queues, [one, two], 4)
        await nodes.kill(2)
        assert len(await home.queues.delete("jobs", force=True)) == 2
        await make(home.queues, [one], 1)  # of the same name, with which nothing happens
        if is_home_restarted:
            await nodes.kill(0)
            await nodes.restart(0)
        await trio.sleep(60)
        await nodes.restart(2)
        assert len(shares(nodes.sides[2])) == 2
        await gone(nodes, 2)
        assert len(shares(one)) == 1
        await nodes.kill(0)
        await nodes.restart(0)
        assert not nodes.sides[0].engine.book.left, "it is still remembered on disk"


async def test_what_an_undone_creation_left_is_removed_when_its_node_is_back(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(3) as nodes:
        home, one, two = nodes.sides
        plain = two.service.administer

        async def fail(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op in ("serve", "delete"):
                raise PeerNotFoundError("away")
            return await plain(peer, op, fields)

        monkeypatch.setattr(two.service, "administer", fail)
        with pytest.raises(Dep2pError):
            await make(home.queues, [one, two], 2)
        assert not shares(one)
        assert shares(two)
        monkeypatch.undo()
        await gone(nodes, 2)


@pytest.mark.parametrize("is_made_later", [False, True])
async def test_a_channel_that_was_not_made_everywhere_is_removed_unless_it_is_wanted_again(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, is_made_later: bool
) -> None:
    async with cluster(3) as nodes:
        home, one, two = nodes.sides
        await make(home.queues, [one, two], 2)
        is_bad = True
        for side in (one, two):
            plain = side.service.administer

            async def fail(peer: Any, op: str, fields: Any, side: Any = side, plain: Any = plain) -> dict[str, Any]:
                if is_bad and ((op == "create_channel" and side is two) or (op == "delete_channel" and side is one)):
                    raise PeerNotFoundError("away")
                return dict(await plain(peer, op, fields))

            monkeypatch.setattr(side.service, "administer", fail)
        with pytest.raises(Dep2pError):
            await home.queues.create_channel("jobs", "c")
        (share,) = shares(one)
        assert list(one.engine.book.queues[REALM, share].channels) == ["c"]
        is_bad = False
        if is_made_later:
            await home.queues.create_channel("jobs", "c")
        with trio.fail_after(120):
            await until(lambda: not home.engine.book.left)
        await trio.sleep(60)
        wanted = ["c"] if is_made_later else []
        for side in (one, two):
            assert list(side.engine.book.queues[REALM, shares(side)[0]].channels) == wanted


@pytest.mark.parametrize("hangs_at", ["floors", "serve", "create"])
async def test_a_node_that_hangs_holds_up_no_queue_without_it(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, hangs_at: str
) -> None:
    async with queue_sides(4) as [home, slow, quick, user]:
        for name, side in (("a", slow), ("b", quick)):
            await home.queues.create(name, {"partitions": 1}, nodes=[side.peer])
            await home.queues.create_channel(name, "c", exclusive=True)
            await home.queues.publish(name, b"x", order_key="k")
        plain = slow.service.administer
        asked = trio.Event()

        async def hang(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == hangs_at:
                asked.set()
                await trio.sleep_forever()
            return await plain(peer, op, fields)

        monkeypatch.setattr(slow.service, "administer", hang)

        async def expand(name: str) -> None:
            try:
                await home.queues.expand(name, 2)
            except Dep2pError:
                assert name == "a"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expand, "a")
            await asked.wait()
            await expand("b")
            queue = await home.engine.loaded(REALM, "b")
            assert queue.routes.has_barriers
            async with user.at(home).consume("b", "c", exclusive=True) as messages:
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
    async with queue_sides(3) as [home, slow, user]:
        await make(home.queues, [slow], 8)
        await home.queues.create_channel("jobs", "c", exclusive=True)
        await put(user.at(home), 100, 1, 1)
        await home.queues.expand("jobs", 16, nodes=["home"])
        plain = slow.service.administer
        times: list[float] = []

        async def hang(peer: Any, op: str, fields: Any) -> dict[str, Any]:
            if op == "floors":
                times.append(trio.current_time())
                await trio.sleep_forever()
            return await plain(peer, op, fields)

        monkeypatch.setattr(slow.service, "administer", hang)
        await until(lambda: len(times) >= 16)
        assert times[-1] - times[0] < 5.0


async def test_what_a_member_may_not_do_at_a_node_it_does_not_through_a_home_either(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with queue_sides(3) as [home, one, user]:
        one.rights.create = (home.peer,)
        with pytest.raises(QueueAccessError):
            await user.at(one).create("q")
        with pytest.raises(QueueAccessError, match=f"let {user.peer} make"):
            await make(user.at(home), [one], 1)
        assert not home.engine.queue_names(REALM)
        await make(home.queues, [one], 1)
        with pytest.raises(QueueAccessError, match=f"let {user.peer} make"):
            await user.at(home).expand("jobs", 2)
        assert len(await home.queues.expand("jobs", 2)) == 1
        # At the home itself, and the home at a node that does not let it.
        home.rights.create = (one.peer,)
        with pytest.raises(QueueAccessError):
            await user.at(home).expand("jobs", 3, nodes=["home"])
        one.rights.create = "owner"
        with pytest.raises(QueueAccessError, match=f"let {home.peer} make"):
            await home.queues.expand("jobs", 3)
        assert len(shares(one)) == 2
        assert not (await home.engine.loaded(REALM, "jobs")).growing


@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("is_default", [False, True])
async def test_to_make_a_queue_again_changes_nothing_that_its_owner_alone_may_change(
    autojump_clock: trio.testing.MockClock, is_placed: bool, is_default: bool
) -> None:
    async with queue_sides(3) as [home, one, user]:
        owner_only: Any = {"publish": "members", "consume": "members", "administer": "owner"}
        if is_default:
            home.rights.default = Access(administer="owner")
        await home.queues.create(
            "jobs",
            {"partitions": 1},
            access=None if is_default else owner_only,
            nodes=[one.peer] if is_placed else (),
        )
        for access in ({"administer": "members"}, {"publish": "owner"}, {"consume": [user.peer]}):
            with pytest.raises(QueueAccessError):
                await user.at(home).create("jobs", {"partitions": 1}, access=access)
        await user.at(home).create("jobs", {"partitions": 1})
        assert (await home.queues.info("jobs"))["access"] == owner_only
        with pytest.raises(QueueAccessError):
            await user.at(home).delete("jobs")
