"""The DHT of this node and go-libp2p's: provider records both ways, and peers that only the other one knows."""

import hashlib
from collections.abc import Awaitable, Callable

import pytest
import trio

from dep2p.host.discovery.dht import DhtDiscovery
from dep2p.host.host import HostOptions, LibP2PHost
from dep2p.identity import Identity
from dep2p.types import PeerId
from tests.interop.go_daemon import GoDaemon, GoError, go_daemon

pytestmark = [pytest.mark.interop, pytest.mark.real, pytest.mark.timeout(120)]

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
MULTIHASH = b"\x12\x20" + hashlib.sha256(b"dep2p-namespace:x").digest()
"""The key of the namespace "x"."""


async def until(is_found: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it is so: routing tables fill in the background."""
    with trio.fail_after(45):
        while not await is_found():  # noqa: ASYNC110 - another process does it
            await trio.sleep(0.2)


async def provided_by(go: GoDaemon) -> None:
    """Let go announce itself, as soon as its routing table has this node."""
    with trio.fail_after(20):
        while True:
            try:
                await go.provide(MULTIHASH)
                return
            except GoError:  # no peer in the table yet
                await trio.sleep(0.1)


async def test_what_go_announces_is_found_here() -> None:
    dht = DhtDiscovery("x")
    async with (
        go_daemon("-dhtServer") as go,
        LibP2PHost.open(Identity.generate(), listen=LOOPBACK, options=HostOptions(discovery=[dht])) as node,
    ):
        await node.dial(go.peer, [go.addr()])
        await provided_by(go)
        found: dict[PeerId, list[str]] = {}

        async def find() -> bool:
            found.update(await dht.find("x"))
            return go.peer in found

        await until(find)
        assert [addr for addr in found[go.peer] if addr.startswith("/ip4/127.0.0.1/tcp/")]


async def test_what_this_node_announces_is_found_by_go() -> None:
    dht = DhtDiscovery("x")
    async with (
        go_daemon("-dhtServer") as go,
        LibP2PHost.open(Identity.generate(), listen=LOOPBACK, options=HostOptions(discovery=[dht])) as node,
    ):
        await node.dial(go.peer, [go.addr()])
        found: dict[str, list[str]] = {}

        async def find() -> bool:
            found.update(await go.find_providers(MULTIHASH))
            return bool(found.get(node.peer_id))

        await until(find)
        port = node.listen_addrs()[0].split("/")[4]
        assert f"/ip4/127.0.0.1/tcp/{port}" in found[node.peer_id]


async def test_two_of_ours_find_each_other_through_go_alone() -> None:
    first_dht, second_dht = DhtDiscovery("x"), DhtDiscovery("x")
    async with (
        go_daemon("-dhtServer") as go,
        LibP2PHost.open(Identity.generate(), listen=LOOPBACK, options=HostOptions(discovery=[first_dht])) as first,
        LibP2PHost.open(Identity.generate(), listen=LOOPBACK, options=HostOptions(discovery=[second_dht])) as second,
    ):
        await first.dial(go.peer, [go.addr()])
        await second.dial(go.peer, [go.addr()])
        found: dict[PeerId, list[str]] = {}

        async def find() -> bool:
            found.update(await second_dht.find("x"))
            return bool(found.get(first.peer_id))

        await until(find)
        await second.dial(first.peer_id, found[first.peer_id])
        assert await second.ping(first.peer_id) > 0


async def test_go_finds_a_peer_that_only_this_node_knows() -> None:
    async with (
        go_daemon("-dhtServer") as go,
        LibP2PHost.open(
            Identity.generate(), listen=LOOPBACK, options=HostOptions(discovery=[DhtDiscovery("x")])
        ) as node,
        LibP2PHost.open(
            Identity.generate(), listen=LOOPBACK, options=HostOptions(discovery=[DhtDiscovery("y")])
        ) as third,
    ):
        await third.dial(node.peer_id, node.listen_addrs())
        await node.dial(go.peer, [go.addr()])
        found: list[str] = []

        async def find() -> bool:
            try:
                found[:] = await go.find_peer(third.peer_id)
            except GoError:
                return False
            return bool(found)

        await until(find)
        port = third.listen_addrs()[0].split("/")[4]
        assert f"/ip4/127.0.0.1/tcp/{port}" in found
