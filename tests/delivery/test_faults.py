"""Reliable delivery where two things meet at the wrong moment: each test was a fault once."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node, Realm
from dep2p.delivery.receipts import Receipt
from dep2p.errors import DeliveryFailedError, HandlerError, StoreError, StreamClosedError
from dep2p.limits import Limits
from dep2p.protocols.delivery.sender import SendWindow
from dep2p.protocols.delivery.states import DeliveryState
from dep2p.protocols.delivery.wire import WINDOW_MAX
from dep2p.protocols.messaging.incoming import Notification
from dep2p.storage.delivery_store import DeliveryBatch, OutboxRow, SendWindowRow, SqliteDeliveryStore
from dep2p.testing import MemoryNetwork
from dep2p.types import PeerId
from tests.pubsub.nodes import pubsub_nodes, take, until


class SlowStore:
    """Commits of a node's outbox wait for leave, or fail."""

    def __init__(self, node: Node) -> None:
        self.store = node.delivery().context.journal.store
        self._commit: Callable[[DeliveryBatch], None] = self.store.commit
        self.leave = threading.Event()
        self.began = threading.Event()
        self.error: StoreError | None = None
        self.fails_once = False
        self.store.commit = self.commit  # type: ignore[method-assign]

    def commit(self, batch: DeliveryBatch) -> None:
        self.began.set()
        assert self.leave.wait(60)
        if self.error is not None:
            error = self.error
            if self.fails_once:
                self.error = None
            raise error
        self._commit(batch)


async def _began(slow: SlowStore) -> None:
    with trio.fail_after(60):
        assert await trio.to_thread.run_sync(slow.began.wait, 50)


async def _send(a: Node, peer: PeerId, data: bytes, **options: Any) -> Receipt:
    return await a.send(peer, "news", data, reliable=True, **options)


def _core(node: Node, peer: PeerId) -> SendWindow[Receipt]:
    return node.delivery()._sending[peer].core  # pyright: ignore[reportPrivateUsage]


async def test_who_waits_for_space_is_admitted_when_the_disk_refuses_the_one_in_front(tmp_path: Path) -> None:
    away = MemoryNetwork().host().peer_id
    async with pubsub_nodes(1, data_dir=tmp_path, limits=Limits(delivery_queue_items_max=1)) as (a,):
        slow = SlowStore(a)
        slow.error, slow.fails_once = StoreError("no luck"), True
        ends: list[str] = []

        async def refused() -> None:
            with pytest.raises(StoreError, match="no luck"):
                await _send(a, away, b"1")
            ends.append("refused")

        async def admit() -> None:
            await _send(a, away, b"2")
            ends.append("accepted")

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused)
                await _began(slow)
                nursery.start_soon(admit)
                while not a.delivery().context.quota.waiting:
                    await trio.lowlevel.checkpoint()
                slow.leave.set()
        assert sorted(ends) == ["accepted", "refused"]


async def test_a_peer_whose_window_is_used_up_holds_up_no_one_else(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    away = network.host().peer_id
    async with pubsub_nodes(2, network=network) as (a, b):
        got: list[bytes] = []

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(notification.body)

        first = await _send(a, away, b"never taken")
        _core(a, away).next_number = WINDOW_MAX + 2  # the others were taken meanwhile
        async with trio.open_nursery() as nursery:
            held: list[Receipt] = []

            async def send_held() -> None:
                held.append(await _send(a, away, b"held"))

            nursery.start_soon(send_held)
            await trio.sleep(1)
            assert not held
            with trio.fail_after(1):
                await (await _send(a, b.peer_id, b"to another")).wait()
            a.delivery().drop(first.id)  # the window moves
            with trio.fail_after(1):
                await until(lambda: bool(held))
        assert got == [b"to another"]
        assert held[0].number == WINDOW_MAX + 2


async def test_a_late_handler_of_an_earlier_numbering_does_not_overwrite_the_record_of_the_present_one(
    tmp_path: Path,
) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    sender, receiver = network.host(), network.host()
    may_return = trio.Event()
    got: list[bytes] = []
    async with Node.open(realm, host=receiver, identity=receiver.identity, data_dir=tmp_path) as b:

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(notification.body)
            if notification.body == b"slow":
                await may_return.wait()

        with trio.fail_after(60):
            hasty = Limits(drain_timeout_s=0.05)
            async with Node.open(realm, host=sender, identity=sender.identity, limits=hasty) as a:
                await a.connect(b.listen_addrs()[0])
                await _send(a, b.peer_id, b"slow")
                while not got:  # noqa: ASYNC110  (the other side, not a time)
                    await trio.sleep(0.001)
                sender.kill()
            again = network.host(sender.identity)
            async with Node.open(realm, host=again, identity=again.identity) as a:  # in memory: it counts anew
                await a.connect(b.listen_addrs()[0])
                await (await _send(a, b.peer_id, b"new")).wait()
                may_return.set()
                while b.counters()["delivery_messages_handled"] < 1 or b.delivery().stats().links_in > 1:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                await b.delivery().context.journal.flush()
                stored = await b.delivery().context.journal.load(realm.realm_id)
                assert stored.inboxes[a.peer_id].epoch == _core(a, b.peer_id).epoch
                again.kill()
    assert got == [b"slow", b"new"]


async def test_a_topic_message_of_an_earlier_numbering_does_not_settle_a_number_of_the_present_one(
    autojump_clock: MockClock,
) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    sender = network.host()
    got: list[bytes] = []
    async with pubsub_nodes(1, network=network, realm=realm) as (b,):
        topic = await b.join("chat")
        async with topic.subscribe() as messages:
            async with Node.open(realm, host=sender, identity=sender.identity) as a:
                await a.connect(b.listen_addrs()[0])
                mine = await a.join("chat")
                await until(lambda: bool(mine.peers()))
                await mine.publish(b"read slowly", reliable=True, critical_peers=[b.peer_id])
                assert await take(messages, 1) == [b"read slowly"]
                await trio.sleep(1)
                sender.kill()
            again = network.host(sender.identity)
            async with Node.open(realm, host=again, identity=again.identity) as a:
                await a.connect(b.listen_addrs()[0])
                receipt = await _send(a, b.peer_id, b"early")  # also number 1; its handler comes later
                await trio.sleep(1)
                with trio.move_on_after(1):
                    await anext(messages)  # the app has handled the old one now
                await trio.sleep(3)
                assert not receipt.has_ended

                @b.on_notify("news")
                async def take_it(notification: Notification) -> None:
                    got.append(notification.body)

                await receipt.wait()
                assert got == [b"early"]


async def test_a_message_that_its_receiver_cannot_take_fails_and_those_behind_it_arrive(
    autojump_clock: MockClock,
) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    small = network.host()
    limits = Limits(message_bytes_max=10_000)
    async with (
        pubsub_nodes(1, network=network, realm=realm) as (a,),
        Node.open(realm, host=small, identity=small.identity, limits=limits) as b,
    ):
        got: list[int] = []

        @b.on_notify("news")
        async def take_it(notification: Notification) -> None:
            got.append(len(notification.body))

        await b.connect(a.listen_addrs()[0])
        receipts = [await _send(a, b.peer_id, bytes(size)) for size in (5, 500_000, 6, 50_000, 7)]
        for index in (0, 2, 4):
            with trio.fail_after(30):
                await receipts[index].wait()
        for index in (1, 3):
            with trio.fail_after(30), pytest.raises(DeliveryFailedError, match="rejected"):
                await receipts[index].wait()
        assert got == [5, 6, 7]


def test_a_message_that_ended_before_its_number_began_anew_does_not_take_the_new_one_along(tmp_path: Path) -> None:
    store = SqliteDeliveryStore(tmp_path / "delivery.sqlite")
    row = OutboxRow("r", "p", 1, 0, "news", "", b"", 0, b"old")
    window = SendWindowRow(b"12345678", 2)
    store.commit(DeliveryBatch(added=[row], windows={("r", "p"): window}))
    new = row._replace(body=b"new")
    store.commit(
        DeliveryBatch(added=[new], removed=[("r", "p", 1)], windows={("r", "p"): window._replace(epoch=b"x" * 8)})
    )
    assert store.load("r").rows == [new]
    store.close()


async def test_a_peer_is_not_forgotten_while_a_message_for_it_is_on_its_way_to_the_disk(tmp_path: Path) -> None:
    network = MemoryNetwork()
    peers = [network.host().peer_id for _ in range(3)]
    for peer in peers:
        network.remove(peer)
    async with pubsub_nodes(1, network=network, data_dir=tmp_path, limits=Limits(peers_known_max=1)) as (a,):
        slow = SlowStore(a)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(_send, a, peer, b"")
                await _began(slow)
                for _ in range(10):
                    await trio.lowlevel.checkpoint()
                slow.leave.set()
        assert sorted(item.peer for item in a.delivery().outbox()) == sorted(peers)


async def test_who_waits_for_a_receipt_is_reported_when_the_node_stops(
    autojump_clock: MockClock, tmp_path_factory: pytest.TempPathFactory
) -> None:
    network = MemoryNetwork()
    away = network.host().peer_id
    network.remove(away)
    async with trio.open_nursery() as nursery:
        ends: list[str] = []

        async def wait(receipt: Receipt) -> None:
            with pytest.raises((DeliveryFailedError, StreamClosedError)) as caught:
                await receipt.wait()
            ends.append(f"{receipt.state} {caught.value}")

        async def watch(node: Node) -> None:
            async with node.delivery().statuses() as statuses:
                async for _ in statuses:
                    pass
            ends.append("statuses")

        async with pubsub_nodes(1, network=network, limits=Limits(drain_timeout_s=1.0)) as (a,):
            in_memory = await _send(a, away, b"")
            nursery.start_soon(wait, in_memory)
            nursery.start_soon(watch, a)
            await trio.sleep(1)
        await until(lambda: len(ends) == 2)
        await wait(in_memory)  # also who comes later
        assert sorted(set(ends))[0].startswith("failed") and "stopped" in min(ends)


async def test_a_message_on_disk_is_kept_and_who_waits_for_it_is_reported_so_when_the_node_stops(
    tmp_path: Path,
) -> None:
    network = MemoryNetwork()
    away = network.host().peer_id
    network.remove(away)
    with trio.fail_after(60):
        async with pubsub_nodes(1, network=network, data_dir=tmp_path) as (a,):
            receipt = await _send(a, away, b"")
        with pytest.raises(StreamClosedError, match="kept"):
            await receipt.wait()
        assert receipt.state is DeliveryState.CREATED


@pytest.mark.parametrize("fails_once", [False, True])
async def test_a_rejected_message_is_not_reported_as_settled_before_its_removal_is_on_disk(
    tmp_path: Path, fails_once: bool
) -> None:
    """Killed in between, the sender has it again: a receiver that took it for settled would say that it was handled."""
    network, realm = MemoryNetwork(), Realm.generate("team")
    with trio.fail_after(60):
        async with (
            pubsub_nodes(1, network=network, realm=realm, data_dir=tmp_path) as (a,),
            pubsub_nodes(1, network=network, realm=realm) as (b,),
        ):
            await a.membership().connect(b.peer_id, b.listen_addrs())

            @b.on_notify("news")
            async def refuse(notification: Notification) -> None:
                raise HandlerError("no")

            receipt = await _send(a, b.peer_id, b"1")
            slow = SlowStore(a)
            slow.error = StoreError("no luck") if fails_once else None
            with pytest.raises(DeliveryFailedError):
                await receipt.wait()
            await _began(slow)
            assert _core(a, b.peer_id).settled == 0
            slow.leave.set()
            if fails_once:
                while not a.delivery().context.journal.counters["commits_failed"]:  # noqa: ASYNC110  (a thread, not a time)
                    await trio.sleep(0.001)
                assert _core(a, b.peer_id).settled == 0
                slow.error = None
            while _core(a, b.peer_id).settled == 0:  # noqa: ASYNC110
                await trio.sleep(0.001)


async def test_what_a_failed_commit_has_left_is_written_when_the_node_stops(tmp_path: Path) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    away = network.host().peer_id
    network.remove(away)
    with trio.fail_after(60):
        async with pubsub_nodes(1, network=network, realm=realm, data_dir=tmp_path) as (a,):
            journal = a.delivery().context.journal
            receipt = await _send(a, away, b"")
            slow = SlowStore(a)
            slow.leave.set()
            slow.error = StoreError("no luck")
            assert a.delivery().drop(receipt.id) == 1
            while not journal.counters["commits_failed"]:  # noqa: ASYNC110  (a thread, not a time)
                await trio.sleep(0.001)
            slow.error = None
            a._nursery.cancel_scope.cancel()  # pyright: ignore[reportPrivateUsage]
    store = SqliteDeliveryStore(tmp_path / "delivery.sqlite")
    assert store.load(realm.realm_id).rows == []
    store.close()
