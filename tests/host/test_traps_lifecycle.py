"""Listening and life-cycle traps of py-libp2p, against real hosts."""

import socket
from pathlib import Path
from typing import Any

import pytest
import trio

from dep2p.errors import HostFailedError, ListenError, PeerNotFoundError
from dep2p.host.host import LibP2PHost
from dep2p.identity import Identity

pytestmark = pytest.mark.real


def port_of(host: Any) -> int:
    return int(host.listen_addrs()[0].split("/")[4])


async def test_taken_port_is_an_error_that_names_it(open_host: Any) -> None:
    async with open_host() as host:
        taken = f"/ip4/127.0.0.1/tcp/{port_of(host)}"
        with pytest.raises(ListenError, match="taken by another process") as caught:  # upstream: silently shared
            async with open_host(listen=["/ip4/127.0.0.1/tcp/0", taken]):
                pass
        assert taken in str(caught.value)


async def test_port_that_another_process_would_share_is_an_error(open_host: Any) -> None:
    with socket.socket() as sharing:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind(("127.0.0.1", 0))
        sharing.listen()
        with pytest.raises(ListenError):
            async with open_host(listen=[f"/ip4/127.0.0.1/tcp/{sharing.getsockname()[1]}"]):
                pass


@pytest.mark.parametrize(
    ("addr", "why"),
    [
        ("/ip4/192.0.2.1/tcp/0", "no address of this machine"),
        ("/unix/tmp/socket", "must start with"),
        ("/ip4/127.0.0.1/sctp/4001", "not spoken here"),
        ("not an address", "not a multiaddr"),
        ("/dns4/localhost/tcp/0", "IP address"),
    ],
)
async def test_address_that_cannot_be_listened_on_is_an_error(open_host: Any, addr: str, why: str) -> None:
    with pytest.raises(ListenError, match=why) as caught:  # upstream: nothing is raised, nothing listens
        async with open_host(listen=[addr]):
            pass
    assert addr in str(caught.value)


async def test_nothing_listens_after_the_end(open_host: Any) -> None:
    async with open_host() as host:
        port = port_of(host)
    with pytest.raises(ConnectionRefusedError):  # upstream: the zombie goes on accepting
        socket.create_connection(("127.0.0.1", port), timeout=2)
    async with open_host(listen=[f"/ip4/127.0.0.1/tcp/{port}"]) as again:
        assert port_of(again) == port


async def test_nothing_listens_after_a_cancelled_host(open_host: Any) -> None:
    port = 0
    with trio.move_on_after(5) as scope:
        async with open_host() as host:
            port = port_of(host)
            scope.cancel()
            await trio.sleep_forever()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


async def test_error_of_the_body_comes_out_as_it_is(open_host: Any) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_host():
            raise KeyError("mine")


async def test_wildcard_is_expanded_and_port_zero_resolved(open_host: Any) -> None:
    async with open_host(listen=["/ip4/0.0.0.0/tcp/0"]) as host, open_host() as other:
        addrs = host.listen_addrs()
        assert any(addr.startswith("/ip4/127.0.0.1/tcp/") for addr in addrs)
        assert not any("/0.0.0.0/" in addr or "/tcp/0/" in addr for addr in addrs)
        assert all(addr.endswith(f"/p2p/{host.peer_id}") for addr in addrs)
        await other.dial(host.peer_id, addrs)


async def test_ipv6_listens_and_dials(open_host: Any) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    async with open_host(listen=["/ip6/::1/tcp/0"]) as host, open_host() as other:
        connection = await other.dial(host.peer_id, host.listen_addrs())
        assert connection.remote_addr.startswith("/ip6/::1/tcp/")
        await other.ping(host.peer_id)


async def test_advertised_address_is_reported(open_host: Any, eventually: Any) -> None:
    async with open_host(advertise=["/dns4/node.example/tcp/4001"]) as host, open_host() as other:
        assert f"/dns4/node.example/tcp/4001/p2p/{host.peer_id}" in host.listen_addrs()
        await other.dial(host.peer_id, host.listen_addrs()[:1])
        await eventually(lambda: "/dns4/node.example/tcp/4001" in other.addrs(host.peer_id))


async def test_part_that_fails_ends_the_host_with_a_clear_error(open_host: Any) -> None:
    with pytest.raises(HostFailedError, match="peer store failed"):
        async with open_host() as host:

            async def broken() -> None:
                raise RuntimeError("unexpected")

            await host._supervisor.run("peer store", broken)
            with trio.fail_after(5):
                await trio.sleep_forever()  # upstream: the body goes on beside a dead swarm


async def test_one_host_after_another_with_one_identity(open_host: Any) -> None:
    identity = Identity.generate()
    for _ in range(2):
        async with open_host(identity) as host, open_host() as other:
            await other.dial(identity.peer_id, host.listen_addrs())


async def test_peer_store_survives_a_restart(open_host: Any, tmp_path: Path, eventually: Any) -> None:
    identity, path = Identity.generate(), tmp_path / "peers.sqlite"
    async with open_host() as other:
        async with open_host(identity, peerstore_path=path) as host:
            await host.dial(other.peer_id, other.listen_addrs())
            await eventually(lambda: host.addrs(other.peer_id) != [])
        assert path.stat().st_mode & 0o777 == 0o600
        async with open_host(identity, peerstore_path=path) as host:
            await host.dial(other.peer_id)


async def test_damaged_peer_store_is_put_aside(
    open_host: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peers.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"rubbish" * 500)
    async with open_host(peerstore_path=path) as host:
        host.add_addrs(Identity.generate().peer_id, ["/ip4/127.0.0.1/tcp/1"], ttl_s=60)
        assert host.counters()["peerstore_file_damaged"] == 1
    assert len(list(tmp_path.glob("peers.sqlite.damaged-*"))) == 1  # noqa: ASYNC240
    assert "damaged" in caplog.text
    async with open_host(peerstore_path=path) as host:
        assert host.counters()["peers_known"] == 1


async def test_host_without_listen_addresses_dials(open_host: Any) -> None:
    async with open_host() as host, open_host(listen=[]) as dialler:
        assert dialler.listen_addrs() == []
        await dialler.dial(host.peer_id, host.listen_addrs())
        with pytest.raises(PeerNotFoundError):
            async with LibP2PHost.open(Identity.generate(), listen=[]) as lonely:
                await lonely.dial(dialler.peer_id)
