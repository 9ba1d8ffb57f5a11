"""Messaging over real hosts: TCP, our Noise and yamux, on loopback."""

import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio

from dep2p.errors import NoHandlerError, StreamClosedError
from dep2p.host.host import HostOptions, LibP2PHost
from dep2p.host.interface import Connection
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.messaging.service import MessageStream, Messaging, Notification, Request
from dep2p.types import PeerId
from tests.messaging.nodes import REALM

pytestmark = pytest.mark.real


class OpenGate:
    """Everybody is a member."""

    realm_id = REALM

    def __init__(self, host: LibP2PHost) -> None:
        self._host = host

    def is_verified(self, connection: Connection) -> bool:
        return True

    def features(self, connection: Connection) -> frozenset[str]:
        return frozenset({"zstd"})

    def verified_connection(self, peer: PeerId) -> Connection | None:
        return next(iter(self._host.connections(peer)), None)

    async def connect(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        return await self._host.dial(peer, addrs, timeout_s=timeout_s)

    def subscribe_unverified(self, on_lost: Callable[[Connection], None]) -> Callable[[], None]:
        return lambda: None

    def subscribe_verified(self, on_verified: Callable[[Connection], None]) -> Callable[[], None]:
        return lambda: None


@asynccontextmanager
async def real_pair() -> AsyncGenerator[tuple[Messaging, Messaging, LibP2PHost, LibP2PHost], None]:
    limits = Limits()
    with trio.fail_after(60):
        async with (
            LibP2PHost.open(Identity.generate(), listen=[], options=HostOptions(limits=limits)) as a_host,
            LibP2PHost.open(
                Identity.generate(), listen=["/ip4/127.0.0.1/tcp/0"], options=HostOptions(limits=limits)
            ) as b_host,
            trio.open_nursery() as nursery,
        ):
            a = Messaging(a_host, OpenGate(a_host), REALM, limits, rng=Random(1))
            b = Messaging(b_host, OpenGate(b_host), REALM, limits, rng=Random(2))
            await nursery.start(a.run)
            await nursery.start(b.run)
            a_host.add_addrs(b_host.peer_id, b_host.listen_addrs(), ttl_s=600)
            yield a, b, a_host, b_host
            nursery.cancel_scope.cancel()


async def test_requests_notifies_and_streams() -> None:
    async with real_pair() as (a, b, _a_host, b_host):
        got: list[bytes] = []
        all_there = trio.Event()

        async def echo(request: Request) -> bytes:
            return request.body

        async def note(notification: Notification) -> None:
            got.append(notification.body)
            if len(got) == 20_000:
                all_there.set()

        async def stream_echo(stream: MessageStream) -> None:
            async for item in stream:
                await stream.send(item)

        b.on_request("echo", echo)
        b.on_notify("note", note)
        b.on_stream("echo", stream_echo)
        peer = b_host.peer_id
        for size in (0, 100, 70_000, 1_048_576):
            data = os.urandom(size)
            assert await a.request(peer, "echo", data) == data
        async with trio.open_nursery() as nursery:

            async def many() -> None:
                for index in range(100):
                    data = str(index).encode()
                    assert await a.request(peer, "echo", data) == data

            for _ in range(20):
                nursery.start_soon(many)
        for index in range(20_000):
            await a.notify(peer, "note", str(index).encode())
        await all_there.wait()
        assert got == [str(index).encode() for index in range(20_000)]
        items = [os.urandom(size) for size in (0, 1, 65_536, 5_000_000, 16_777_216)]
        async with a.stream(peer, "echo") as stream, trio.open_nursery() as nursery:

            async def send_all() -> None:
                for item in items:
                    await stream.send(item)
                await stream.send_eof()

            nursery.start_soon(send_all)
            assert [item async for item in stream] == items
        with pytest.raises(NoHandlerError):
            await a.request(peer, "nobody", b"")
        assert a.counters()["links_opened"] == 1


async def test_a_slow_notify_handler_holds_the_sender_back() -> None:
    async with real_pair() as (a, b, _a_host, b_host):
        may_handle = trio.Event()
        all_handled = trio.Event()
        handled = 0

        async def slow(notification: Notification) -> None:
            nonlocal handled
            await may_handle.wait()
            handled += 1
            if handled == 4_000:
                all_handled.set()

        b.on_notify("slow", slow)
        sent = 0

        async def flood() -> None:
            nonlocal sent
            for _ in range(4_000):
                await a.notify(b_host.peer_id, "slow", os.urandom(10_000))
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            last = -1
            while last != sent:  # until nothing moves any more
                last = sent
                await trio.sleep(0.5)
            assert 100 < sent < 3_000
            may_handle.set()
        await all_handled.wait()


async def test_a_lost_connection_fails_the_request_in_flight_and_the_next_one_dials_again() -> None:
    async with real_pair() as (a, b, a_host, b_host):
        reached = trio.Event()
        cancelled = trio.Event()

        async def hang(request: Request) -> bytes:
            reached.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()
            return b""

        async def echo(request: Request) -> bytes:
            return request.body

        b.on_request("hang", hang)
        b.on_request("echo", echo)
        peer = b_host.peer_id
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(StreamClosedError):
                    await a.request(peer, "hang", b"")

            nursery.start_soon(ask)
            await reached.wait()
            await a_host.disconnect(peer)
        await cancelled.wait()
        assert await a.request(peer, "echo", b"again") == b"again"


async def test_cancelled_calls_over_tcp_leave_the_link_usable() -> None:
    async with real_pair() as (a, b, _a_host, b_host):

        async def echo(request: Request) -> bytes:
            await trio.sleep(0.001)
            return request.body

        b.on_request("echo", echo)
        peer = b_host.peer_id
        data = os.urandom(300_000)
        for microseconds in range(0, 20_000, 500):
            with trio.move_on_after(microseconds / 1e6):
                await a.request(peer, "echo", data)
            assert await a.request(peer, "echo", b"x") == b"x"
        assert a.counters()["links_opened"] == 1
