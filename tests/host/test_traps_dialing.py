"""Dialling traps of py-libp2p, against real hosts: what our dialler does instead."""

import socket
from typing import Any

import pytest
import trio

from dep2p.errors import PeerNotFoundError
from dep2p.host.interface import PeerConnected, PeerDisconnected
from dep2p.identity import Identity
from dep2p.limits import Limits

pytestmark = pytest.mark.real


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_connect_takes_no_fixed_delay(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        times_s: list[float] = []
        for _ in range(5):
            started_s = trio.current_time()
            await one.dial(other.peer_id, other.listen_addrs())
            times_s.append(trio.current_time() - started_s)
            await one.disconnect(other.peer_id)
        assert min(times_s) < 0.1  # upstream: always over 0.25 s


async def test_live_address_is_found_beside_dead_ones_of_the_same_kind(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        dead = [f"/ip4/127.0.0.1/tcp/{closed_port()}" for _ in range(4)]
        connection = await one.dial(other.peer_id, [*dead, *other.listen_addrs()])
        assert connection.peer == other.peer_id


async def test_loopback_is_kept_beside_a_public_address(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        # 192.0.2.0/24 is reserved for documentation: nothing answers there.
        connection = await one.dial(other.peer_id, ["/ip4/192.0.2.1/tcp/4001", *other.listen_addrs()], timeout_s=5)
        assert connection.remote_addr.startswith("/ip4/127.0.0.1/")


async def test_reconnect_works_right_after_a_failure(open_host: Any) -> None:
    identity = Identity.generate()
    port = closed_port()
    async with open_host() as one:
        with pytest.raises(PeerNotFoundError):
            await one.dial(identity.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])
        async with open_host(identity, listen=[f"/ip4/127.0.0.1/tcp/{port}"]):
            await one.dial(identity.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"])


async def test_failure_names_each_address_and_its_reason(open_host: Any) -> None:
    peer = Identity.generate().peer_id
    ports = closed_port(), closed_port()
    async with open_host() as one:
        with pytest.raises(PeerNotFoundError) as caught:
            await one.dial(peer, [*(f"/ip4/127.0.0.1/tcp/{port}" for port in ports), "/ip4/1/tcp/1"])
        text = str(caught.value)
        assert text.count("connection refused") == 2
        assert all(f"/tcp/{port}" in text for port in ports)
        assert "/ip4/1/tcp/1" in text
        with pytest.raises(PeerNotFoundError, match="no address"):
            await one.dial(peer)


async def test_silent_address_times_out_by_name(open_host: Any) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addr = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
        async with open_host() as one:
            with pytest.raises(PeerNotFoundError, match=r"no answer within 0\.2 s"):
                await one.dial(Identity.generate().peer_id, [addr], timeout_s=0.2)


async def test_self_dial_is_a_clear_error(open_host: Any) -> None:
    async with open_host() as one:
        with pytest.raises(PeerNotFoundError, match="itself"):
            await one.dial(one.peer_id, one.listen_addrs())


async def test_other_peer_at_the_address_is_named(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        addr = other.listen_addrs()[0].rsplit("/p2p/", 1)[0]
        with pytest.raises(PeerNotFoundError, match=f"another node answers there: {other.peer_id}"):
            await one.dial(Identity.generate().peer_id, [addr])
        assert one.connections() == []


async def test_address_of_someone_else_is_not_dialled(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        with pytest.raises(PeerNotFoundError, match="not of"):
            await one.dial(Identity.generate().peer_id, other.listen_addrs())


async def test_concurrent_dials_of_one_peer_make_one_connection(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        found: list[int] = []

        async def dial() -> None:
            found.append((await one.dial(other.peer_id, other.listen_addrs())).id)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(dial)
        assert len(found) == 20 and len(set(found)) == 1
        assert len(one.connections()) == 1


async def test_one_cancelled_caller_does_not_end_the_dial_of_another(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(0):
                await one.dial(other.peer_id, other.listen_addrs())
            nursery.start_soon(one.dial, other.peer_id, other.listen_addrs())
        assert len(one.connections()) == 1


async def test_cancelling_a_dial_at_any_step_leaves_nothing(two_hosts: Any, event_log: Any, eventually: Any) -> None:
    async with two_hosts(Limits(connections_per_peer_max=2)) as (one, other):
        for steps in range(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.dial, other.peer_id, other.listen_addrs())
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await one.disconnect(other.peer_id)
        await eventually(lambda: not other.connections() and not other.counters()["inbound_pending"])
        assert one.connections() == []
        log = event_log(other)
        await one.dial(other.peer_id, other.listen_addrs())
        await log.wait(PeerConnected)
        assert "inbound_refused_connections_per_peer_max" not in other.counters()


async def test_reconnects_to_a_wanted_peer_that_was_away(open_host: Any, event_log: Any) -> None:
    identity = Identity.generate()
    port = closed_port()
    async with open_host() as one:
        log = event_log(one)
        one.add_addrs(identity.peer_id, [f"/ip4/127.0.0.1/tcp/{port}"], ttl_s=3600)
        one.keep_connected(identity.peer_id, "test")
        for count in (1, 2):
            async with open_host(identity, listen=[f"/ip4/127.0.0.1/tcp/{port}"]):
                await log.wait(PeerConnected, count)
            await log.wait(PeerDisconnected, count)
        one.forget(identity.peer_id)
        async with open_host(identity, listen=[f"/ip4/127.0.0.1/tcp/{port}"]):
            with trio.move_on_after(1.5):
                await log.wait(PeerConnected, 3)
            assert len(log.of(PeerConnected)) == 2
