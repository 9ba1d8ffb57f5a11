"""Outboxes whose queues are on several nodes: each committed row is one message, in the order of its key."""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from dep2p.errors import Dep2pError, QueueIsDistributedError, StreamClosedError
from dep2p.protocols.queues.names import parse_message_id
from dep2p.protocols.queues.wire.frames import WireMessage
from dep2p.queues.api.outbox import OutboxRelay
from dep2p.queues.api.queues import Queues
from dep2p.queues.service.realm_queues import RemoteQueues
from dep2p.storage.app_outbox import create_outbox, publish_in
from tests.queues.distributed.test_distributed import cluster, key_at, make
from tests.queues.nodes import QueueSide, exported, queue_sides

KEYS = 12


class Shaky(RemoteQueues):
    """Fails as told, before a batch is sent or after it was taken, and then until it is `mended`: a crash of the
    relay, as the next one sees it."""

    def __init__(self, side: QueueSide, controller: QueueSide) -> None:
        super().__init__(side.service, controller.peer)
        self.fails: list[str] = []
        self.sent: list[tuple[int, str]] = []
        self.is_over = False

    def mended(self) -> RemoteQueues:
        self.is_over = False
        return self

    async def publish_sequenced(
        self, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int], destination: str = ""
    ) -> list[tuple[int, int]]:
        if self.is_over:
            raise StreamClosedError("it ends here, for good")
        self.sent.append((publisher[1], destination))
        fails = self.fails.pop(0) if self.fails and destination else ""
        if fails == "before":
            self.is_over = True
            raise StreamClosedError("it ends here, before")
        try:
            points = await super().publish_sequenced(name, messages, publisher, destination)
        except Dep2pError:
            self.fails[:0] = [fails] if fails else []
            raise
        if fails == "after":
            self.is_over = True
            raise StreamClosedError("it ends here, after")
        return points


class Outbox:
    """The database of an app."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = sqlite3.connect(path)
        self.db.execute("pragma journal_mode=wal")
        create_outbox(self.db)
        self.db.commit()

    def put(self, key: str, *numbers: int) -> None:
        for number in numbers:
            publish_in(self.db, "jobs", b"%d" % number, key=key)
        self.db.commit()

    def put_all(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            for key in range(KEYS):
                publish_in(self.db, "jobs", b"%d" % number, key=f"k{key}")
        self.db.commit()

    def left(self) -> list[tuple[Any, ...]]:
        return self.db.execute("select id, error from dep2p_outbox order by id").fetchall()


@pytest.fixture
def outbox(tmp_path: Path) -> Any:
    made = Outbox(tmp_path / "app.db")
    yield made
    made.db.close()


async def flush(relay: OutboxRelay) -> None:
    with trio.fail_after(60):
        await relay.flush()


async def problem(relay: OutboxRelay, text: str) -> None:
    with trio.fail_after(60):
        while text not in relay.problem:  # noqa: ASYNC110  (there is no event for it)
            await trio.sleep(0.01)


async def by_key(queues: Queues) -> dict[str, list[int]]:
    """The numbers of each key, as they are in its partitions, the older partition first."""
    found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for message in await exported(queues, "jobs"):
        found[message.key].append((*parse_message_id(message.id), int(message.body)))
    return {key: [number for _partition, _seq, number in sorted(each)] for key, each in found.items()}


async def test_each_row_goes_to_the_node_of_its_key(outbox: Outbox) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [controller, one, two], 5)
        for first, queues in ((1, user.at(controller)), (11, controller.queues)):
            outbox.put_all(first, first + 9)
            async with queues.relay(outbox.path, poll_s=0.01) as relay:
                await flush(relay)
                assert relay.counts["published"] == 10 * KEYS
                assert relay.counts["redirected"] == relay.counts["failed"] == 0
        assert await by_key(controller.queues) == {f"k{key}": list(range(1, 21)) for key in range(KEYS)}
        assert outbox.left() == []
        route = await controller.queues.route("jobs")
        assert sum(each.off_partition or 0 for each in route.partitions) == 0
        assert sum(each.messages > 0 for each in route.partitions) >= 3


async def test_rows_without_a_key_are_on_all_nodes_in_the_end(outbox: Outbox) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [controller, one], 2)
        async with user.at(controller).relay(outbox.path, poll_s=0.01) as relay:
            for number in range(6):
                outbox.put("", number)
                await flush(relay)
        route = await controller.queues.route("jobs")
        assert [each.messages for each in route.partitions] == [3, 3]


@pytest.mark.parametrize("seed", range(6))
async def test_a_relay_that_ends_anywhere_publishes_nothing_twice(outbox: Outbox, seed: int) -> None:
    """Also when the queue is expanded between the two."""
    rng = Random(seed)
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [controller, one], 2)
        partitions = 2
        for turn in range(8):
            outbox.put_all(3 * turn + 1, 3 * turn + 3)
            queues = Shaky(user, controller)
            queues.fails = [""] * rng.randrange(2) + [rng.choice(["before", "after"])]
            async with queues.relay(outbox.path, poll_s=0.01) as relay:
                await problem(relay, "it ends here")
            if turn % 3 == 1:
                partitions += rng.choice((1, 2))
                node = rng.choice((controller, one, two))
                await controller.queues.expand("jobs", partitions, nodes=[node.peer])
        async with user.at(controller).relay(outbox.path, poll_s=0.01) as relay:
            await flush(relay)
            assert relay.problem == ""
        assert await by_key(controller.queues) == {f"k{key}": list(range(1, 25)) for key in range(KEYS)}
        assert outbox.left() == []


async def test_what_was_not_taken_before_an_expansion_goes_where_its_keys_are(outbox: Outbox) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one], 1)
        outbox.put_all(1, 3)
        queues = Shaky(user, controller)
        queues.fails = ["before"]
        async with queues.relay(outbox.path, poll_s=0.01) as relay:
            await problem(relay, "it ends here")
        await controller.queues.expand("jobs", 2, nodes=[two.peer])
        async with queues.mended().relay(outbox.path, poll_s=0.01) as relay:
            await flush(relay)
            assert relay.counts["redirected"] == 3 * KEYS
        assert await by_key(controller.queues) == {f"k{key}": [1, 2, 3] for key in range(KEYS)}
        assert min(each.messages for each in (await controller.queues.route("jobs")).partitions) > 0


async def test_what_was_taken_before_an_expansion_is_known_where_it_was_taken(outbox: Outbox) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one], 1)
        outbox.put_all(1, 3)
        queues = Shaky(user, controller)
        queues.fails = ["after"]
        async with queues.relay(outbox.path, poll_s=0.01) as relay:
            await problem(relay, "it ends here")
        await controller.queues.expand("jobs", 3, nodes=[two.peer])
        outbox.put_all(4, 5)
        async with queues.mended().relay(outbox.path, poll_s=0.01) as relay:
            await flush(relay)
        assert await by_key(controller.queues) == {f"k{key}": [1, 2, 3, 4, 5] for key in range(KEYS)}
        assert queues.sent[1] == queues.sent[2]


async def test_in_strict_order_rows_wait_for_their_node(outbox: Outbox) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        await make(controller.queues, [controller, away], 2)
        route = await user.at(controller).route("jobs")
        (here,), (there,) = key_at(route, controller.peer), key_at(route, away.peer)
        await nodes.kill(1)
        outbox.put(there, 1, 2)
        outbox.put(here, 1)
        async with user.at(controller).relay(outbox.path, poll_s=0.01) as relay:
            await problem(relay, away.peer)
            assert len(outbox.left()) >= 2
            await nodes.restart(1)
            await flush(relay)
        assert await by_key(controller.queues) == {there: [1, 2], here: [1]}


async def test_in_best_effort_order_rows_go_past_a_node_that_was_never_reached(outbox: Outbox) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        await make(controller.queues, [controller, away], 2, order="best_effort")
        (there,) = key_at(await controller.queues.route("jobs"), away.peer)
        await nodes.kill(1)
        outbox.put(there, 1, 2)
        async with user.at(controller).relay(outbox.path, poll_s=0.01) as relay:
            await flush(relay)
            assert relay.counts["redirected"] == 2
            outbox.put(there, 3)
            await flush(relay)
            assert relay.counts["redirected"] == 2  # it is known to be away
        assert user.count("distributed_sent_off_partition") == 3
        await nodes.restart(1)
        assert await by_key(controller.queues) == {there: [1, 2, 3]}


async def test_what_a_node_may_have_taken_waits_for_it_in_any_order(outbox: Outbox) -> None:
    async with cluster(3) as nodes:
        controller, away, user = nodes.sides
        await make(controller.queues, [controller, away], 2, order="best_effort")
        queues = Shaky(user, controller)
        (there,) = key_at(await queues.route("jobs"), away.peer)
        outbox.put(there, 1)
        queues.fails = ["after"]
        async with queues.relay(outbox.path, poll_s=0.01) as relay:
            await problem(relay, "it ends here")
        await nodes.kill(1)
        for same in (True, False):  # the relay that sent it, and the next one
            async with queues.mended().relay(outbox.path, poll_s=0.01) as relay:
                if same:
                    queues.fails = ["after"]
                    await nodes.restart(1)
                    await problem(relay, "it ends here")
                    await nodes.kill(1)
                    queues.is_over = False
                await problem(relay, away.peer)
                assert relay.counts["redirected"] == 0
        await nodes.restart(1)
        async with queues.mended().relay(outbox.path, poll_s=0.01) as relay:
            await flush(relay)
        assert await by_key(controller.queues) == {there: [1]}


@pytest.mark.parametrize("anew", ["", "plain", "elsewhere"])
async def test_a_queue_that_was_deleted_and_perhaps_made_anew(outbox: Outbox, anew: str) -> None:
    async with queue_sides(4) as [controller, one, two, user]:
        await make(controller.queues, [one], 2)
        outbox.put_all(1, 1)
        queues = Shaky(user, controller)
        queues.fails = ["before"]
        async with queues.relay(outbox.path, poll_s=0.01) as relay:
            await problem(relay, "it ends here")
        await controller.queues.delete("jobs")
        if anew == "plain":
            await controller.queues.create("jobs")
        elif anew:
            await make(controller.queues, [two], 3)
        async with queues.mended().relay(outbox.path, poll_s=0.01) as relay:
            await flush(relay)
            outbox.put_all(2, 2)
            await flush(relay)
        if anew:
            assert await by_key(controller.queues) == {f"k{key}": [1, 2] for key in range(KEYS)}
            assert outbox.left() == []
        else:
            assert Counter("QueueNotFoundError" in error for _id, error in outbox.left()) == {True: 2 * KEYS}


async def test_a_number_needs_its_destination(outbox: Outbox) -> None:
    async with queue_sides(3) as [controller, one, user]:
        await make(controller.queues, [one], 1)
        queues = user.at(controller)
        message = WireMessage(b"", b"x")
        with pytest.raises(QueueIsDistributedError):
            await queues.publish_sequenced("jobs", [message], (b"p" * 16, 1))
        (destination,) = await queues.destinations("jobs", [message])
        first = await queues.publish_sequenced("jobs", [message], (b"p" * 16, 1), destination)
        assert await queues.publish_sequenced("jobs", [message], (b"p" * 16, 1), destination) == first
        for wrong in ("x", "1", f"a {one.peer} jobs.1.x", "1 no-peer jobs", f"{destination} more"):
            with pytest.raises(ValueError, match=r"destination|peer"):
                await queues.publish_sequenced("jobs", [message], (b"p" * 16, 2), wrong)
        await controller.queues.create("plain")
        assert await queues.destinations("plain", [message, message]) == ["", ""]
        assert await controller.queues.destinations("plain", [message]) == [""]


async def test_an_outbox_of_an_earlier_version(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "app.db")
    db.execute(
        "create table dep2p_outbox (id integer primary key autoincrement, queue text not null, "
        "attributes blob not null, body blob not null, batch integer, error text)"
    )
    db.execute("insert into dep2p_outbox (queue, attributes, body) values ('jobs', x'', x'31')")
    db.commit()
    create_outbox(db)
    create_outbox(db)
    db.commit()
    async with queue_sides(2) as [controller, one]:
        await make(controller.queues, [one], 2)
        async with controller.queues.relay(tmp_path / "app.db", poll_s=0.01) as relay:
            await flush(relay)
        assert await by_key(controller.queues) == {"": [1]}
    db.close()
