"""One call for many peers: a result for each, in bounded concurrency."""

import pytest
import trio

from dep2p import Node, Realm
from dep2p.errors import HandlerError, NoHandlerError, PeerNotFoundError, RequestTimeoutError
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.messaging.broadcast import to_each
from dep2p.messaging.service import Notification, Request
from dep2p.testing import MemoryNetwork
from dep2p.types import PeerId
from tests.messaging.nodes import settled, sides


async def test_each_peer_has_its_result_and_failures_stop_no_one(autojump_clock: trio.abc.Clock) -> None:
    async with sides(6) as (a, *others):

        async def ok(request: Request) -> bytes:
            return b"from " + request.body

        async def fails(request: Request) -> bytes:
            raise HandlerError("no")

        async def hangs(request: Request) -> bytes:
            await trio.sleep_forever()
            return b""

        good1, good2, bad, deaf, absent = others
        good1.messaging.on_request("q", ok)
        good2.messaging.on_request("q", ok)
        bad.messaging.on_request("q", fails)
        deaf.messaging.on_request("q", hangs)
        stranger = Identity.generate().peer_id
        peers = [good1.peer, bad.peer, stranger, deaf.peer, absent.peer, good2.peer, good1.peer]
        results = await a.messaging.broadcast_request(peers, "q", b"a", timeout_s=3)
        assert list(results) == peers[:-1]
        kinds = [type(result) for result in results.values()]
        assert kinds == [bytes, HandlerError, PeerNotFoundError, RequestTimeoutError, NoHandlerError, bytes]


async def test_notifies_to_many(autojump_clock: trio.abc.Clock) -> None:
    async with sides(4) as (a, *others):
        got: list[PeerId] = []
        for other in others:

            async def handler(notification: Notification, peer: PeerId = other.peer) -> None:
                got.append(peer)

            other.messaging.on_notify("n", handler)
        stranger = Identity.generate().peer_id
        results = await a.messaging.broadcast_notify([*[o.peer for o in others], stranger], "n", b"", headers={"k": 1})
        assert [results[other.peer] for other in others] == [None] * 3
        assert isinstance(results[stranger], PeerNotFoundError)
        await settled()
        assert sorted(got) == sorted(other.peer for other in others)


async def test_no_more_than_the_concurrency_at_a_time(autojump_clock: trio.abc.Clock) -> None:
    running = most = 0

    async def call(peer: PeerId) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(1)
        running -= 1
        return 1

    peers = [PeerId(str(index)) for index in range(20)]
    began = trio.current_time()
    results = await to_each(peers, call, 6)
    assert results == dict.fromkeys(peers, 1)
    assert most == 6
    assert trio.current_time() - began == pytest.approx(4)


async def test_no_one_and_no_concurrency(autojump_clock: trio.abc.Clock) -> None:
    async def call(peer: PeerId) -> int:
        return 1

    assert await to_each([], call, 6) == {}
    with pytest.raises(ValueError, match="concurrency"):
        await to_each([PeerId("x")], call, 0)


async def test_a_programming_error_is_not_swallowed(autojump_clock: trio.abc.Clock) -> None:
    async def call(peer: PeerId) -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await to_each([PeerId("x"), PeerId("y")], call, 2)


async def test_a_wrong_argument_of_a_broadcast_is_an_error_and_not_a_group(autojump_clock: trio.abc.Clock) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    host = network.host()
    async with Node.open(realm, host=host, identity=host.identity) as node:
        peers = [PeerId(f"peer{number}") for number in range(3)]
        for headers in ({"a": 1 << 80}, {"a": object()}):
            with pytest.raises(ValueError, match="headers"):
                await node.messaging().broadcast_request(peers, "q", b"", headers=headers)
            with pytest.raises(ValueError, match="headers"):
                await node.messaging().broadcast_notify(peers, "q", b"", headers=headers)


async def test_a_peer_that_takes_no_notifies_holds_up_no_one_forever(autojump_clock: trio.abc.Clock) -> None:
    limits = Limits(link_in_items_max=4, link_out_items_max=4, request_timeout_s=30.0, compress_bytes_min=0)
    async with sides(3, limits=limits) as (a, stuck, ok):
        got: list[bytes] = []

        async def never(notification: Notification) -> None:
            await trio.sleep_forever()

        async def takes(notification: Notification) -> None:
            got.append(notification.body)

        stuck.messaging.on_notify("n", never)
        ok.messaging.on_notify("n", takes)
        for _ in range(2):  # what the writer holds in its hands, and what waits behind it
            with trio.move_on_after(5):
                while True:
                    await a.messaging.notify(stuck.peer, "n", bytes(100_000))
        with trio.fail_after(100):
            results = await a.messaging.broadcast_notify([stuck.peer, ok.peer], "n", b"x", concurrency=1)
        await settled()
        assert isinstance(results[stuck.peer], RequestTimeoutError) and results[ok.peer] is None
        assert got == [b"x"]


async def test_a_broadcast_request_that_is_idempotent_is_tried_again(autojump_clock: trio.abc.Clock) -> None:
    async with sides(2) as (a, b):
        seen: list[bool] = []

        async def answer(request: Request) -> bytes:
            seen.append(request.idempotent)
            return b"ok"

        b.messaging.on_request("q", answer, rate_per_s=1.0)
        for _ in range(2):
            assert await a.messaging.broadcast_request([b.peer], "q", b"", idempotent=True) == {b.peer: b"ok"}
        assert seen == [True, True] and a.count("requests_retried") == 1
