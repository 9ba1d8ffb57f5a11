"""The node puts its parts together: realms joined and left at run time, handlers that follow, clear refusals."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from dep2p import Limits, Node, NoHandlerError, Notification, NotInRealmError, PeerNotFoundError, Realm, Request
from dep2p.errors import Dep2pError
from dep2p.messaging.message_stream import MessageStream
from dep2p.realm.interface import MemberEvent
from dep2p.testing import MemoryNetwork
from dep2p.types import RealmId


def on(network: MemoryNetwork, realm: Realm | None = None, **options: Any) -> AbstractAsyncContextManager[Node]:
    """A node on a network in memory."""
    host = network.host()
    return Node.open(realm, host=host, identity=host.identity, **options)


@asynccontextmanager
async def nodes(count: int, realm: Realm | None, **options: Any) -> AsyncGenerator[list[Node]]:
    """Nodes on one network that know each other's addresses through the first one."""
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        made: list[Node] = []
        for _ in range(count):
            first = made[0].listen_addrs() if made else []
            made.append(await stack.enter_async_context(on(network, realm, bootstrap=first, **options)))
        yield made


async def until_up(node: Node, count: int, realm: Realm | None = None) -> None:
    """Until the node sees ``count`` members up."""
    changed = trio.Event()

    def on_event(_realm_id: RealmId, _event: MemberEvent) -> None:
        changed.set()

    unsubscribe = node.subscribe_members(on_event)
    with trio.fail_after(60):
        while sum(member.state == "up" for member in node.membership(realm).members()) < count:
            await changed.wait()
            changed = trio.Event()
    unsubscribe()


async def test_request_notify_and_stream_through_the_public_api(autojump_clock: trio.testing.MockClock) -> None:
    notifications: list[Notification] = []
    async with nodes(2, Realm.generate("team")) as (a, b):
        await until_up(b, 1)

        @a.on_request("greet")
        async def greet(request: Request) -> bytes:
            assert request.peer == b.peer_id
            return b"hello " + request.body

        @a.on_notify("seen")
        async def seen(notification: Notification) -> None:
            notifications.append(notification)

        @a.on_stream("double")
        async def double(stream: MessageStream) -> None:
            async for item in stream:
                await stream.send(item * 2)
            await stream.send_eof()

        assert await b.request(a.peer_id, "greet", b"ann", timeout_s=5) == b"hello ann"
        await b.notify(a.peer_id, "seen", b"42")
        async with b.stream(a.peer_id, "double") as stream:
            await stream.send(b"x")
            await stream.send(b"y")
            await stream.send_eof()
            assert [item async for item in stream] == [b"xx", b"yy"]
        assert await b.broadcast_request("greet", b"all") == {a.peer_id: b"hello all"}
        await trio.sleep(1)
        assert [(notification.body, notification.peer) for notification in notifications] == [(b"42", b.peer_id)]


async def test_three_nodes_find_each_other_through_one(autojump_clock: trio.testing.MockClock) -> None:
    async with nodes(3, Realm.generate("team")) as (a, b, c):
        for node in (a, b, c):
            await until_up(node, 2)

        @c.on_request("who")
        async def who(request: Request) -> bytes:
            return b"c"

        assert await b.request(c.peer_id, "who", b"") == b"c"
        results = await a.broadcast_request("who", b"")
        assert results[c.peer_id] == b"c"
        assert isinstance(results[b.peer_id], NoHandlerError)


async def test_a_node_without_a_realm_says_what_to_do(autojump_clock: trio.testing.MockClock) -> None:
    async with nodes(1, None) as (a,):
        with pytest.raises(NotInRealmError, match="join one first"):
            await a.request(a.peer_id, "x", b"")
        with pytest.raises(NotInRealmError, match="not in a realm 'nope'"):
            a.membership("nope")


async def test_with_two_realms_the_call_must_say_which(autojump_clock: trio.testing.MockClock) -> None:
    red, blue = Realm.generate("red"), Realm.generate("blue")
    async with nodes(2, red) as (a, b):
        await a.join_realm(blue)
        await b.join_realm(blue)
        await until_up(b, 1, red)
        await until_up(b, 1, blue)

        @a.on_request("where", realm=blue)
        async def where(request: Request) -> bytes:
            return b"blue"

        with pytest.raises(NotInRealmError, match="say which one"):
            await b.request(a.peer_id, "where", b"")
        assert await b.request(a.peer_id, "where", b"", realm="blue") == b"blue"
        assert await b.request(a.peer_id, "where", b"", realm=blue.realm_id[:12]) == b"blue"
        with pytest.raises(NoHandlerError):
            await b.request(a.peer_id, "where", b"", realm=red)


async def test_a_handler_registered_before_joining_serves_the_realm(autojump_clock: trio.testing.MockClock) -> None:
    realm = Realm.generate("late")
    async with nodes(2, None) as (a, b):

        @a.on_request("early")
        async def early(request: Request) -> bytes:
            return b"yes"

        await a.join_realm(realm)
        status = await b.join_realm(realm, a.listen_addrs())
        assert (status.name, status.realm_id) == ("late", realm.realm_id)
        await until_up(b, 1)
        assert await b.request(a.peer_id, "early", b"") == b"yes"


async def test_leaving_is_seen_by_the_others_and_can_be_undone(autojump_clock: trio.testing.MockClock) -> None:
    realm = Realm.generate("team")
    events: list[tuple[RealmId, MemberEvent]] = []
    async with nodes(2, realm) as (a, b):
        a.subscribe_members(lambda realm_id, event: events.append((realm_id, event)))
        await until_up(a, 1)
        await b.leave_realm(realm)
        assert b.realms() == []
        await trio.sleep(5)
        assert [event.kind for _realm_id, event in events if event.peer == b.peer_id][-1] == "left"
        with pytest.raises(Dep2pError):
            await a.request(b.peer_id, "x", b"", timeout_s=2)
        await b.join_realm(realm)
        await until_up(a, 1)
        with pytest.raises(NoHandlerError):
            await a.request(b.peer_id, "x", b"", timeout_s=2)


async def test_joining_twice_is_once_and_the_number_of_realms_is_bounded(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with nodes(1, None, limits=Limits(realms_max=2)) as (a,):
        one = Realm.generate("one")
        await a.join_realm(one)
        await a.join_realm(one)
        await a.join_realm(Realm.generate("two"))
        assert [status.name for status in a.realms()] == ["one", "two"]
        with pytest.raises(NotInRealmError, match="realms_max"):
            await a.join_realm(Realm.generate("three"))


async def test_connect_says_in_which_realms_the_peer_is_verified(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = Realm.generate("ours"), Realm.generate("theirs")
    network = MemoryNetwork()
    async with (
        on(network, realms=[ours, theirs]) as a,
        on(network, ours) as b,
        on(network) as stranger,
    ):
        assert (await a.connect(b.listen_addrs()[0])).realms == ("ours",)
        assert (await a.connect(stranger.listen_addrs()[0])).realms == ()
        with pytest.raises(ValueError, match="not a full address"):
            await a.connect("/ip4/127.0.0.1/tcp/1")
        with pytest.raises(PeerNotFoundError):
            await a.connect(network.host().peer_id)
        assert await a.disconnect(b.peer_id)


async def test_leaving_the_block_lets_a_request_in_flight_finish(autojump_clock: trio.testing.MockClock) -> None:
    answers: list[bytes] = []
    network = MemoryNetwork()
    realm = Realm.generate("team")
    async with on(network, realm) as b, trio.open_nursery() as nursery:
        async with on(network, realm, bootstrap=b.listen_addrs()) as a:
            started = trio.Event()

            @a.on_request("slow")
            async def slow(request: Request) -> bytes:
                started.set()
                await trio.sleep(3)
                return b"done"

            await until_up(b, 1)

            async def ask() -> None:
                answers.append(await b.request(a.peer_id, "slow", b""))

            nursery.start_soon(ask)
            await started.wait()
    assert answers == [b"done"]


async def test_without_a_data_directory_nothing_is_written(
    autojump_clock: trio.testing.MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with on(MemoryNetwork(), Realm.generate("team")) as node:
        node.counters()
        node.stats()
    assert os.listdir(tmp_path) == []


async def test_notifies_of_a_node_that_stopped_right_after_sending_them_are_handled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    got: list[bytes] = []
    async with on(network, realm) as a:

        @a.on_notify("n")
        async def slow(notification: Notification) -> None:
            await trio.sleep(1)
            got.append(notification.body)

        async with on(network, realm, bootstrap=a.listen_addrs()) as b:
            await until_up(b, 1)
            for number in range(3):
                await b.notify(a.peer_id, "n", b"%d" % number)
        await b.host.disconnect(a.peer_id)  # as its process's end does
        await trio.sleep(10)
    assert got == [b"0", b"1", b"2"]


async def test_two_calls_may_join_the_same_realm_at_once(autojump_clock: trio.testing.MockClock) -> None:
    realm = Realm.generate("team")
    async with on(MemoryNetwork()) as node:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.join_realm, realm)
            nursery.start_soon(node.join_realm, realm)
        assert [each.realm_id for each in node.realms()] == [realm.realm_id]


async def test_a_leave_that_is_cancelled_leaves_all_the_same(autojump_clock: trio.testing.MockClock) -> None:
    async with nodes(2, Realm.generate("team"), limits=Limits(drain_timeout_s=10.0)) as (a, b):
        await until_up(b, 1)
        started = trio.Event()

        @a.on_request("long")
        async def long(request: Request) -> bytes:
            started.set()
            await trio.sleep_forever()
            raise AssertionError

        async def ask() -> None:
            with pytest.raises(Dep2pError):
                await b.request(a.peer_id, "long", b"", timeout_s=60)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await started.wait()
            with trio.move_on_after(1):
                await a.leave_realm(None)
        await trio.sleep(30)
        assert not a.realms()


async def test_a_handler_that_one_realm_refuses_is_registered_in_none(autojump_clock: trio.testing.MockClock) -> None:
    async with on(MemoryNetwork(), None, realms=[Realm.generate("one"), Realm.generate("two")]) as node:

        async def answer(request: Request) -> bytes:
            return b""

        node.on_request("x", realm="two")(answer)
        with pytest.raises(ValueError, match="has a handler already"):
            node.on_request("x")(answer)
        node.on_request("x", realm="one")(answer)


async def test_a_node_that_was_drained_stops_without_draining_again(autojump_clock: trio.testing.MockClock) -> None:
    async with nodes(2, Realm.generate("team"), limits=Limits(drain_timeout_s=10.0)) as (a, b):
        await until_up(b, 1)
        started = trio.Event()

        @a.on_request("long")
        async def long(request: Request) -> bytes:
            started.set()
            with trio.CancelScope(shield=True):
                await trio.sleep(100)
            return b""

        async def ask() -> None:
            with suppress(Dep2pError):
                await b.request(a.peer_id, "long", b"", timeout_s=200)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await started.wait()
            await a.drain()
            assert a.counters()["messaging_drain_abandoned"] == 1
            before_s = trio.current_time()
            await a.drain()
            assert trio.current_time() - before_s < 1


async def test_a_handler_or_decorator_written_wrongly_is_reported_at_once() -> None:
    realm = Realm.generate("team")
    host = MemoryNetwork().host()
    async with Node.open(realm, host=host, identity=host.identity) as node:
        with pytest.raises(TypeError, match="needs a name"):
            node.on_request(print)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

        def plain(request: object) -> bytes:
            return b""

        with pytest.raises(TypeError, match=r"plain\(\) must be an async def"):
            node.on_request("greet")(plain)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


async def test_arguments_of_the_wrong_kind_are_reported_before_anything_is_opened() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"realm": "team"}, "must be a dep2p.Realm, not str"),
        ({"realm": [Realm.generate("a")]}, "not list; several go into realms"),
        ({"listen": "/ip4/127.0.0.1/tcp/0"}, "listen takes a list"),
    ]
    for arguments, says in wrong:
        with pytest.raises(TypeError, match=says):
            async with Node.open(**arguments):
                pass


def test_a_node_in_asyncio_says_what_to_use_there() -> None:
    async def main() -> None:
        async with Node.open():
            pass

    with pytest.raises(RuntimeError, match=r"dep2p\.client\.Client"):
        asyncio.run(main())


async def test_an_address_is_kept_only_when_its_peer_answered_there(autojump_clock: trio.testing.MockClock) -> None:
    async with nodes(2, Realm.generate("team")) as (a, b):
        await until_up(b, 1)
        wrong = f"/ip4/127.0.0.1/tcp/9/p2p/{a.peer_id}"
        await b.connect(wrong)
        assert wrong not in b.host.addrs(a.peer_id)


async def test_a_closed_node_says_that_it_is_closed(autojump_clock: trio.testing.MockClock) -> None:
    async with on(MemoryNetwork(), Realm.generate("team")) as node:
        peer = node.peer_id
    with pytest.raises(NotInRealmError, match="is closed"):
        await node.request(peer, "x", b"")


async def test_a_bootstrap_peer_that_is_down_is_said_with_the_last_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        away = network.host()
        away.kill()
        node = await stack.enter_async_context(on(network, Realm.generate("team"), bootstrap=[away.addr]))
        await trio.sleep(5)
        (said,) = node.unreached_bootstrap()
        assert away.peer_id in said and "does not answer" in said and "tried again" in said
        back = network.host(away.identity)
        node.remember(back.peer_id, [back.addr])
        await trio.sleep(5)
        assert node.unreached_bootstrap() == ()
