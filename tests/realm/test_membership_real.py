"""Memberships over real hosts: what only a real transport can show."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from dep2p.errors import NotMemberError
from dep2p.host.connections.connection import PeerConnection
from dep2p.host.host import LibP2PHost
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.realm.membership import Membership
from tests.realm.realm_nodes import OTHER, TEAM

pytestmark = pytest.mark.real
LISTEN = ["/ip4/127.0.0.1/tcp/0"]


@asynccontextmanager
async def memberships(count: int) -> AsyncGenerator[tuple[list[Membership], list[LibP2PHost]], None]:
    async with AsyncExitStack() as stack:
        identities = [Identity.generate() for _ in range(count)]
        hosts = [await stack.enter_async_context(LibP2PHost.open(one, listen=LISTEN)) for one in identities]
        nursery = await stack.enter_async_context(trio.open_nursery())
        made = [Membership(TEAM, host, one, Limits()) for host, one in zip(hosts, identities, strict=True)]
        for membership in made:
            await nursery.start(membership.run)
        yield made, hosts
        nursery.cancel_scope.cancel()


async def until_all_up(made: list[Membership], expected: int) -> None:
    """By events, not by looking again and again."""
    changed = trio.Event()
    ends = [membership.subscribe(lambda _event: changed.set()) for membership in made]
    with trio.fail_after(20):
        while any([one.state for one in m.members()].count("up") < expected for m in made):
            await changed.wait()
            changed = trio.Event()
    for end in ends:
        end()


async def test_members_on_real_hosts_verify_and_learn_of_each_other() -> None:
    async with memberships(3) as (made, hosts):
        for membership in made[1:]:
            connection = await membership.connect(hosts[0].peer_id, hosts[0].listen_addrs())
            assert membership.is_verified(connection) and membership.features(connection) == {"zstd"}
        await until_all_up(made, 2)


async def test_leaving_over_real_hosts_is_seen_by_all() -> None:
    async with memberships(3) as (made, hosts):
        for membership in made[1:]:
            await membership.connect(hosts[0].peer_id, hosts[0].listen_addrs())
        await until_all_up(made, 2)
        with trio.fail_after(5):
            await made[0].leave()
        for membership in made[1:]:
            member = membership.member(hosts[0].peer_id)
            assert member is not None and member.state == "left"
            assert membership.verified_connection(hosts[0].peer_id) is None


async def test_an_unknown_peer_on_real_hosts_is_not_admitted() -> None:
    async with memberships(1) as (made, hosts):
        identity = Identity.generate()
        async with LibP2PHost.open(identity, listen=LISTEN) as host, trio.open_nursery() as nursery:
            stranger = Membership(OTHER, host, identity, Limits())
            await nursery.start(stranger.run)
            with pytest.raises(NotMemberError):
                await stranger.connect(hosts[0].peer_id, hosts[0].listen_addrs())
            assert made[0].members() == stranger.members() == []
            nursery.cancel_scope.cancel()


async def test_verified_connections_are_protected_until_they_are_so_no_more() -> None:
    """Protection means that the host must not end them to make room for strangers."""
    async with memberships(2) as (made, hosts):
        connection = await made[0].connect(hosts[1].peer_id, hosts[1].listen_addrs())
        await until_all_up(made, 1)
        (inbound,) = hosts[1].connections(hosts[0].peer_id)
        assert isinstance(connection, PeerConnection) and isinstance(inbound, PeerConnection)
        assert list(connection.protected_by) == list(inbound.protected_by) == [TEAM.realm_id]
        with trio.fail_after(5):
            await made[0].leave()
        assert connection.protected_by == inbound.protected_by == {}
