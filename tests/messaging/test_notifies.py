"""Notifies over links in memory: order, back-pressure, independence, refusals."""

import logging
import tracemalloc

import pytest
import trio

from dep2p.errors import MessageTooLargeError, PeerNotFoundError
from dep2p.limits import Limits
from dep2p.messaging.service import Notification, Request
from dep2p.testing.memory import MemoryNetwork
from tests.messaging.nodes import Side, settled, sides


async def collect(side: Side, name: str = "n") -> list[Notification]:
    got: list[Notification] = []

    async def handler(notification: Notification) -> None:
        got.append(notification)

    side.messaging.on_notify(name, handler)
    return got


async def test_notifies_arrive_in_order_with_all_that_was_sent(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got = await collect(b)
        for index in range(2_000):
            await a.messaging.notify(b.peer, "n", str(index).encode(), headers={"i": index} if index % 2 else None)
        await settled()
        assert [notification.body for notification in got] == [str(index).encode() for index in range(2_000)]
        assert got[1].headers == {"i": 1} and got[2].headers == {}
        assert {notification.peer for notification in got} == {a.peer}
        assert a.count("notifies_sent") == b.count("notifies_received") == 2_000


async def test_headers_of_one_notification_are_its_own(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got = await collect(b)
        for _ in range(2):
            await a.messaging.notify(b.peer, "n", b"", headers={"k": "v"})
        await settled()
        assert got[0].headers == got[1].headers == {"k": "v"}
        assert got[0].headers is not got[1].headers


async def test_names_are_kept_apart_and_in_one_order(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        order: list[str] = []

        async def slow(notification: Notification) -> None:
            await trio.sleep(1)
            order.append(notification.name)

        async def quick(notification: Notification) -> None:
            order.append(notification.name)

        b.messaging.on_notify("slow", slow)
        b.messaging.on_notify("quick", quick)
        for name in ("slow", "quick", "slow", "quick"):
            await a.messaging.notify(b.peer, name, b"")
        await trio.sleep(5)
        assert order == ["slow", "quick", "slow", "quick"]


async def test_a_name_without_a_handler_is_dropped_and_counted(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got = await collect(b)
        await a.messaging.notify(b.peer, "nobody", b"")
        await a.messaging.notify(b.peer, "n", b"")
        await settled()
        assert len(got) == 1
        assert b.count("notifies_dropped_no_handler") == 1


async def test_a_handler_s_exception_is_logged_and_the_next_notify_is_handled(
    autojump_clock: trio.abc.Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with sides() as (a, b):
        got: list[bytes] = []

        async def fussy(notification: Notification) -> None:
            if notification.body == b"bad":
                raise ValueError("I do not like it")
            got.append(notification.body)

        b.messaging.on_notify("n", fussy)
        with caplog.at_level(logging.ERROR, "dep2p.io"):
            for data in (b"1", b"bad", b"2"):
                await a.messaging.notify(b.peer, "n", data)
            await settled()
        assert got == [b"1", b"2"]
        assert "I do not like it" in caplog.text
        assert b.count("handlers_failed") == 1


async def test_a_paused_handler_makes_the_sender_wait_and_nothing_is_lost(autojump_clock: trio.abc.Clock) -> None:
    limits = Limits(link_in_bytes_max=100_000, link_out_bytes_max=100_000, compress_bytes_min=0)
    async with sides(limits=limits) as (a, b):
        gate = trio.Event()
        got = 0

        async def handler(notification: Notification) -> None:
            nonlocal got
            await gate.wait()
            got += 1

        b.messaging.on_notify("n", handler)
        sent = 0

        async def send_all() -> None:
            nonlocal sent
            for _ in range(5_000):
                await a.messaging.notify(b.peer, "n", bytes(1_000))
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            await trio.sleep(20)
            # In: 100 kB and one window's arrival; out: 100 kB, what the stream may hold unsent; the window between.
            assert 100 < sent < 2_000
            stuck = sent
            for side in (a, b):
                for stats in side.messaging.stats():
                    assert stats.queued_out_bytes <= 110_000
                    assert stats.queued_in_bytes <= 100_000 + 300_000
            await trio.sleep(20)
            assert sent == stuck
            gate.set()
        await trio.sleep(1)
        assert got == 5_000
        assert b.count("links_paused") >= 1


async def test_a_few_compressed_bytes_do_not_fill_the_memory(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        may_handle = trio.Event()
        got: list[int] = []

        async def handler(notification: Notification) -> None:
            await may_handle.wait()
            got.append(len(notification.body))

        b.messaging.on_notify("n", handler)
        tracemalloc.start()
        try:
            for _ in range(200):
                await a.messaging.notify(b.peer, "n", bytes(1_000_000))
            await settled()
            assert b.count("notifies_received") == 200
            assert tracemalloc.get_traced_memory()[0] < 10_000_000
        finally:
            tracemalloc.stop()
        may_handle.set()
        await settled()
        assert got == [1_000_000] * 200


async def test_a_link_that_is_full_does_not_hold_up_requests_the_other_way(autojump_clock: trio.abc.Clock) -> None:
    limits = Limits(link_in_items_max=10)
    async with sides(limits=limits) as (a, b):

        async def asks_back(notification: Notification) -> None:
            assert await b.messaging.request(notification.peer, "echo", notification.body) == notification.body

        async def echo(request: Request) -> bytes:
            return request.body

        a.messaging.on_request("echo", echo)
        b.messaging.on_notify("n", asks_back)
        for index in range(200):
            await a.messaging.notify(b.peer, "n", str(index).encode())
        await trio.sleep(5)
        assert a.count("requests_received") == 200
        assert b.count("handlers_failed") == 0


async def test_a_slow_peer_beside_a_fast_one(autojump_clock: trio.abc.Clock) -> None:
    async with sides(3, limits=Limits(link_in_items_max=10, link_out_items_max=10)) as (a, slow, fast):

        async def hang(notification: Notification) -> None:
            await trio.sleep_forever()

        slow.messaging.on_notify("n", hang)
        got = await collect(fast)

        async def flood(peer: Side) -> None:
            while True:
                await a.messaging.notify(peer.peer, "n", bytes(10_000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, slow)
            await trio.sleep(5)
            began = trio.current_time()
            for _ in range(500):
                await a.messaging.notify(fast.peer, "n", b"x")
            await settled()
            assert len(got) == 500
            assert trio.current_time() - began < 1
            nursery.cancel_scope.cancel()


async def test_concurrency_counts_across_peers_and_every_peer_gets_its_turn(autojump_clock: trio.abc.Clock) -> None:
    async with sides(4) as (b, *senders):
        running = most = 0
        by_peer: dict[str, int] = {}

        async def handler(notification: Notification) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await trio.sleep(0.1)
            running -= 1
            by_peer[notification.peer] = by_peer.get(notification.peer, 0) + 1

        b.messaging.on_notify("n", handler, concurrency=2)
        for sender in senders:
            for _ in range(20):
                await sender.messaging.notify(b.peer, "n", b"")
        await trio.sleep(1.55)
        assert most == 2
        assert len(by_peer) == 3 and max(by_peer.values()) - min(by_peer.values()) <= 1
        await trio.sleep(5)
        assert set(by_peer.values()) == {20}


@pytest.mark.parametrize("by_limits", [True, False])
async def test_a_sender_over_its_rate_is_slowed_down_and_loses_nothing(
    by_limits: bool, autojump_clock: trio.abc.Clock
) -> None:
    async with sides(limits=Limits(notifies_per_peer_per_s=10.0 if by_limits else 0.0)) as (a, b):
        times: list[float] = []

        async def handler(notification: Notification) -> None:
            times.append(trio.current_time())

        b.messaging.on_notify("n", handler, rate_per_s=0.0 if by_limits else 10.0)
        for _ in range(30):
            await a.messaging.notify(b.peer, "n", b"")
        await trio.sleep(10)
        assert len(times) == 30
        assert 1.9 <= times[-1] - times[0] <= 2.2


async def test_too_large_a_notify_is_refused_before_anything_is_sent(autojump_clock: trio.abc.Clock) -> None:
    async with sides(limits=Limits(message_bytes_max=100)) as (a, b):
        got = await collect(b)
        with pytest.raises(MessageTooLargeError):
            await a.messaging.notify(b.peer, "n", bytes(101))
        await a.messaging.notify(b.peer, "n", bytes(100))
        await settled()
        assert len(got) == 1


async def test_what_was_received_is_handled_although_the_sender_is_gone(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got: list[bytes] = []

        async def handler(notification: Notification) -> None:
            await trio.sleep(0.1)
            got.append(notification.body)

        b.messaging.on_notify("n", handler)
        for index in range(20):
            await a.messaging.notify(b.peer, "n", str(index).encode())
        await settled()
        a.host.kill()
        await trio.sleep(5)
        assert got == [str(index).encode() for index in range(20)]
        assert b.messaging.stats() == []


@pytest.mark.parametrize("tell", [True, False])
async def test_queued_notifies_of_a_member_that_is_expelled_reach_no_handler(
    tell: bool, autojump_clock: trio.abc.Clock
) -> None:
    async with sides() as (a, b):
        got: list[bytes] = []

        async def handler(notification: Notification) -> None:
            got.append(notification.body)
            await trio.sleep(1)

        b.messaging.on_notify("n", handler)
        for index in range(20):
            await a.messaging.notify(b.peer, "n", str(index).encode())
        await trio.sleep(2.5)
        handled = len(got)
        b.gate.expel(a.peer, tell=tell)
        await trio.sleep(30)
        assert 2 <= handled == len(got) < 20
        assert b.count("notifies_dropped_not_member") == 20 - handled


async def test_the_link_is_opened_again_for_the_next_notify(autojump_clock: trio.abc.Clock) -> None:
    network = MemoryNetwork()
    async with sides(network=network) as (a, b):
        got = await collect(b)
        await a.messaging.notify(b.peer, "n", b"1")
        await settled()
        await b.host.disconnect(a.peer)
        await settled()
        await a.messaging.notify(b.peer, "n", b"2")
        await settled()
        assert [notification.body for notification in got] == [b"1", b"2"]
        assert a.count("links_opened") == 2
        b.host.kill()
        await settled()
        with pytest.raises(PeerNotFoundError):
            await a.messaging.notify(b.peer, "n", b"3")


async def test_draining_finishes_what_is_queued_and_counts_what_comes_later(autojump_clock: trio.abc.Clock) -> None:
    async with sides() as (a, b):
        got: list[bytes] = []

        async def handler(notification: Notification) -> None:
            await trio.sleep(0.1)
            got.append(notification.body)

        b.messaging.on_notify("n", handler)
        for _ in range(10):
            await a.messaging.notify(b.peer, "n", b"early")
        await settled()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.messaging.drain)
            await trio.sleep(0.05)
            await a.messaging.notify(b.peer, "n", b"late")
        assert got == [b"early"] * 10
        assert b.count("notifies_dropped_draining") == 1


async def test_many_senders_to_one_full_link_each_keep_their_order(autojump_clock: trio.abc.Clock) -> None:
    limits = Limits(link_out_items_max=5, link_in_items_max=5)
    async with sides(limits=limits) as (a, b):
        got: list[str] = []

        async def handler(notification: Notification) -> None:
            await trio.sleep(0.001)
            got.append(notification.body.decode())

        b.messaging.on_notify("n", handler)

        async def send(sender: int) -> None:
            for index in range(50):
                await a.messaging.notify(b.peer, "n", f"{sender} {index}".encode() + bytes(5_000))

        async with trio.open_nursery() as nursery:
            for sender in range(10):
                nursery.start_soon(send, sender)
        await trio.sleep(5)
        for sender in range(10):
            mine = [int(text.split("\0")[0].split()[1]) for text in got if text.startswith(f"{sender} ")]
            assert mine == list(range(50))


async def test_a_few_compressed_bytes_do_not_hold_up_the_others(autojump_clock: trio.abc.Clock) -> None:
    async with sides(network=MemoryNetwork(latency_s=0.0)) as (a, b):
        got = 0
        held_up: list[int] = []

        async def handler(notification: Notification) -> None:
            nonlocal got
            got += 1

        async def other_task() -> None:
            while got < 200:
                before = got
                await trio.lowlevel.checkpoint()
                held_up.append(got - before)

        b.messaging.on_notify("n", handler)
        for _ in range(200):
            await a.messaging.notify(b.peer, "n", bytes(1_000_000))
        with trio.fail_after(60):
            await other_task()
        assert max(held_up) <= 8
