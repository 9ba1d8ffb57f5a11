"""Messages that failed or expired: times to live, the log, the list, and sending them again."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from dep2p import Node, Realm
from dep2p.errors import DeliveryExpiredError, DeliveryFailedError, HandlerError
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.delivery.states import DeliveryState
from dep2p.protocols.messaging.incoming import Notification
from dep2p.testing import MemoryNetwork
from tests.pubsub.nodes import pubsub_nodes


async def test_each_message_expires_at_its_own_time(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        began = trio.current_time()
        ended: dict[float, float] = {}

        async def send(ttl_s: float | None) -> None:
            receipt = await a.send(b.peer_id, "nobody", b"", reliable=True, ttl_s=ttl_s)
            with pytest.raises(DeliveryExpiredError):
                await receipt.wait()
            ended[ttl_s or 300.0] = trio.current_time() - began

        async with trio.open_nursery() as nursery:
            for ttl_s in (600.0, None, 20.0, 900.0, 1.0):
                nursery.start_soon(send, ttl_s)
        assert list(ended) == [1.0, 20.0, 300.0, 600.0, 900.0]
        assert all(ttl_s <= took_s <= ttl_s * 1.01 + 0.1 for ttl_s, took_s in ended.items())


async def test_a_short_time_to_live_ends_behind_a_long_one_to_a_peer_that_is_away(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(1) as (a,):
        away = Identity.generate().peer_id
        await a.send(away, "news", b"1", reliable=True)
        began = trio.current_time()
        short = await a.send(away, "news", b"2", reliable=True, ttl_s=2.0)
        with pytest.raises(DeliveryExpiredError):
            await short.wait()
        assert 2.0 <= trio.current_time() - began <= 2.2


@pytest.mark.parametrize("ttl_s", [0, -1, 0.0001, 31 * 86_400, float("inf"), float("nan"), "5", True])
async def test_a_time_to_live_that_cannot_be_is_refused(autojump_clock: MockClock, ttl_s: float) -> None:
    async with pubsub_nodes(2) as (a, b):
        with pytest.raises(ValueError, match="ttl_s"):
            await a.send(b.peer_id, "news", b"", reliable=True, ttl_s=ttl_s)
        with pytest.raises(ValueError, match="ttl_s"):
            await a.send(b.peer_id, "news", b"", ttl_s=60)
        assert a.delivery().outbox() == []


async def test_a_reliable_publish_expires_at_its_own_time_for_each_critical_peer(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        topic = await a.join("prices")
        began = trio.current_time()
        by_topic = await topic.publish(b"1", reliable=True, critical_peers=[b.peer_id], ttl_s=20.0)
        by_node = await a.publish_reliably("prices", b"2", critical_peers=[b.peer_id], ttl_s=600.0)
        usual = await a.publish_reliably("prices", b"3", critical_peers=[b.peer_id])
        for published, ttl_s in ((by_topic, 20.0), (usual, 300.0), (by_node, 600.0)):
            with pytest.raises(DeliveryExpiredError):
                await published.wait()
            assert ttl_s <= trio.current_time() - began <= ttl_s * 1.01 + 0.1


@pytest.mark.parametrize("ttl_s", [0, -1, 31 * 86_400, float("nan"), True])
async def test_a_time_to_live_of_a_publish_that_cannot_be_is_refused(autojump_clock: MockClock, ttl_s: float) -> None:
    async with pubsub_nodes(2) as (a, b):
        topic = await a.join("prices")
        publish = cast(Callable[..., Awaitable[object]], topic.publish)
        with pytest.raises(ValueError, match="ttl_s"):
            await topic.publish(b"", reliable=True, critical_peers=[b.peer_id], ttl_s=ttl_s)
        with pytest.raises(ValueError, match="ttl_s"):
            await a.publish_reliably("prices", b"", critical_peers=[b.peer_id], ttl_s=ttl_s)
        with pytest.raises(ValueError, match="ttl_s"):
            await publish(b"", on_no_peers="ok", ttl_s=60.0)
        with pytest.raises(TypeError, match="until_s"):
            await publish(b"", on_no_peers="ok", until_s=60.0)
        assert a.delivery().outbox() == []


async def test_what_failed_or_expired_is_listed_with_its_reason_and_sent_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with pubsub_nodes(2) as (a, b):
        got: list[bytes] = []
        is_open = False

        @b.on_notify("orders")
        async def take(notification: Notification) -> None:
            if not is_open:
                raise HandlerError("we are closed")
            got.append(notification.body)

        rejected = await a.send(b.peer_id, "orders", b"1", reliable=True, headers={"kind": "test"})
        expired = await a.send(b.peer_id, "nobody", b"2", reliable=True, ttl_s=5)
        dropped = await a.send(b.peer_id, "nobody", b"3", reliable=True)
        with pytest.raises(DeliveryFailedError):
            await rejected.wait()
        with pytest.raises(DeliveryExpiredError):
            await expired.wait()
        assert a.delivery().drop(dropped.id) == 1
        lost = a.delivery().lost()
        assert [(each.id, each.state, each.name) for each in lost] == [
            (rejected.id, DeliveryState.FAILED, "orders"),
            (expired.id, DeliveryState.EXPIRED, "nobody"),
        ]
        assert "we are closed" in lost[0].last_error and "no program there took it" in lost[1].last_error
        warned = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
        assert len(warned) == 2 and "outbox ls --failed" in warned[0] and "we are closed" in warned[0]
        is_open = True
        assert await a.delivery().replay(rejected.id) == 1
        await a.delivery().flush()
        assert got == [b"1"]
        assert [each.id for each in a.delivery().lost()] == [expired.id]
        assert await a.delivery().replay("nobody:7") == 0
        assert a.delivery().forget_lost(peer=b.peer_id) == 1 and a.delivery().lost() == []


async def test_a_reliable_publish_that_was_lost_is_sent_again_with_its_data(autojump_clock: MockClock) -> None:
    async with pubsub_nodes(2) as (a, b):
        topic = await a.join("prices")
        published = await topic.publish(b"1", reliable=True, critical_peers=[b.peer_id])
        with pytest.raises(DeliveryExpiredError):
            await published.wait()
        async with (await b.join("prices")).subscribe() as reader:
            assert await a.delivery().replay() == 1
            message = await anext(reader)
            assert getattr(message, "body", None) == b"1"
            with trio.move_on_after(0.1):
                await anext(reader)
        await a.delivery().flush()
        assert a.delivery().lost() == []


async def test_many_lost_messages_are_a_few_lines_of_the_log_and_are_bounded(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(delivery_lost_items_max=50, delivery_age_max_s=10)
    async with pubsub_nodes(2, limits=limits) as (a, b):
        for number in range(400):
            await a.send(b.peer_id, "nobody", b"%d" % number, reliable=True)
        await a.delivery().flush()
        await a.send(b.peer_id, "nobody", b"400", reliable=True)
        await trio.sleep(30)
        lost = a.delivery().lost()
        assert [each.id.rpartition(":")[2] for each in lost] == [str(number) for number in range(352, 402)]
        assert a.counters()["delivery_messages_lost_forgotten"] == 351
        warned = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
        assert len(warned) <= 12 and "others before it" in warned[-1]


async def test_lost_messages_outlive_the_process_and_a_replayed_one_is_not_lost_any_more(tmp_path: Path) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    host = network.host()
    other = network.host()

    async def run_once(wanted: list[str]) -> None:
        async with Node.open(realm, host=host, identity=host.identity, data_dir=tmp_path, outbox="disk") as node:
            delivery = node.delivery()
            assert [each.id for each in delivery.lost()] == wanted
            if not wanted:
                receipts = [
                    await node.send(other.peer_id, "late", b"%d" % number, reliable=True, ttl_s=2.5)
                    for number in range(3)
                ]
                for receipt in receipts:
                    assert await receipt.until_ended() is DeliveryState.EXPIRED
            elif wanted[1].endswith(":2"):
                assert await delivery.replay(wanted[1]) == 1
                await delivery.flush()

    ids = [f"{other.peer_id}:{number}" for number in (1, 2, 3, 4)]
    await run_once([])
    await run_once(ids[:3])
    await run_once([ids[0], ids[2], ids[3]])
