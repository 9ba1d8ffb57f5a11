"""Members hear what others say about themselves, and watchers hear of every change or how many they missed."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from dep2p.errors import NotInRealmError
from dep2p.gossipsub.topic_types import Lagged
from dep2p.node.member_watch import WATCH_ITEMS_MAX, MemberWatch
from dep2p.node.node import Node
from dep2p.protocols.realm.member_update import MemberUpdate
from dep2p.realm.interface import MemberEvent
from dep2p.testing import MemoryNetwork
from tests.realm.realm_nodes import OTHER, TEAM, realm_nodes, until

Clock = trio.testing.MockClock


async def until_update(
    updates: AsyncIterator[MemberUpdate | Lagged], is_last: Callable[[MemberUpdate], bool]
) -> list[MemberUpdate]:
    """Take updates up to one of this kind."""
    seen: list[MemberUpdate] = []
    with trio.fail_after(10):
        while not seen or not is_last(seen[-1]):
            update = await anext(updates)
            assert isinstance(update, MemberUpdate)
            seen.append(update)
    return seen


async def test_members_hear_of_fields_and_of_their_end(autojump_clock: Clock, tmp_path: Path) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(records_path=tmp_path / "a"), await nodes.add()
        await a.connect(b)
        assert b.membership.set_fields({"app": "mailer", "load": "0.5"}) == {"app": "mailer", "load": "0.5"}
        started = trio.current_time()
        await until(lambda: a.membership.members()[0].fields == {"app": "mailer", "load": "0.5"})
        assert trio.current_time() - started < 1
        assert b.membership.set_fields({"load": None, "status": "at lunch"}) == {"app": "mailer", "status": "at lunch"}
        await until(lambda: a.membership.members()[0].fields == {"app": "mailer", "status": "at lunch"})
        assert a.kinds(b)[-2:] == ["changed", "changed"]
        c = await nodes.add()  # a newcomer learns it from any member
        await c.connect(a)
        await until(lambda: len(c.membership.members()) == 2)
        assert {tuple(member.fields) for member in c.membership.members()} == {(), ("app", "status")}


async def test_fields_that_break_a_bound_change_nothing(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a = await nodes.add()
        with pytest.raises(ValueError, match="control characters"):
            a.membership.set_fields({"status": "\x1b"})
        assert a.membership.fields == {}


async def test_a_node_says_things_in_one_realm_and_watches_all(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    a_host, b_host = network.host(), network.host()
    async with (
        Node.open(TEAM, host=a_host, identity=a_host.identity) as a,
        Node.open(TEAM, host=b_host, identity=b_host.identity, bootstrap=a.listen_addrs()) as b,
    ):
        await a.join_realm(OTHER)
        async with a.watch_members() as everywhere, a.watch_members(realm="other") as other:
            with pytest.raises(NotInRealmError, match="say which one"):
                a.fields()
            b.set_fields({"load": "1"})
            seen = await until_update(everywhere, lambda update: update.kind == "changed" and bool(update.fields))
            assert {update.peer for update in seen} == {b.peer_id} and seen[-1].state == "up"
            await b.leave_realm(None)
            (*_, last) = await until_update(everywhere, lambda update: update.kind == "left")
            assert (last.state, last.fields) == ("left", {})
            with trio.move_on_after(1):
                pytest.fail(f"nothing happened in the other realm: {await anext(other)}")


async def test_a_watcher_that_does_not_read_costs_a_bounded_buffer_and_hears_how_much_it_missed(
    autojump_clock: Clock,
) -> None:
    watch = MemberWatch(lambda _realm, _peer: None, None)
    peer = MemoryNetwork().host().peer_id
    for _ in range(WATCH_ITEMS_MAX + 5):
        watch.put(TEAM.realm_id, MemberEvent("expired", peer))
    assert await anext(watch) == Lagged(5)
    for _ in range(WATCH_ITEMS_MAX):
        assert await anext(watch) == MemberUpdate(kind="expired", peer=peer, realm=TEAM.realm_id)
    with trio.move_on_after(1) as waited:
        await anext(watch)
    assert waited.cancelled_caught
