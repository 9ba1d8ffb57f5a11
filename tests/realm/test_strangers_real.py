"""What a stranger learns of a node's realms, over real hosts: nothing."""

import pytest
import trio

from dep2p.errors import ProtocolNotSupportedError
from dep2p.host.connections.identify import IDENTIFY
from dep2p.host.host import LibP2PHost
from dep2p.host.interface import ByteStream, Connection
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.realm.handshake import AUTH_PROTOCOL
from dep2p.protocols.realm.messages import members_protocol
from dep2p.realm.membership import Membership
from dep2p.types import RealmId
from tests.host.conftest import eventually
from tests.realm.realm_nodes import OTHER, TEAM
from tests.realm.test_membership_real import LISTEN, memberships, until_all_up

pytestmark = pytest.mark.real
MEMBERS = members_protocol(TEAM.realm_id)


async def identify_bytes(connection: Connection) -> bytes:
    stream = await connection.open_stream(IDENTIFY)
    data = b""
    while part := await stream.read():
        data += part
    return data


async def test_realm_protocols_show_to_members_only() -> None:
    async with memberships(2) as (made, hosts), LibP2PHost.open(Identity.generate(), listen=LISTEN) as stranger:
        connection = await stranger.dial(hosts[0].peer_id, hosts[0].listen_addrs())
        said = await identify_bytes(connection)
        assert AUTH_PROTOCOL.encode() in said and TEAM.realm_id.encode() not in said
        for protocol in (MEMBERS, members_protocol(OTHER.realm_id), f"/dep2p/app/{TEAM.realm_id}/msg/1.0.0"):
            with pytest.raises(ProtocolNotSupportedError):
                await connection.open_stream(protocol)
        # A member sees them, also while the same host hides them from the stranger.
        verified = await made[1].connect(hosts[0].peer_id, hosts[0].listen_addrs())
        await until_all_up(made, 1)
        assert MEMBERS.encode() in await identify_bytes(verified)
        assert TEAM.realm_id.encode() not in await identify_bytes(connection)
        await eventually(lambda: bool(stranger.peer_protocols(hosts[0].peer_id)))
        assert not any(TEAM.realm_id in name for name in stranger.peer_protocols(hosts[0].peer_id))


async def test_a_realm_that_is_joined_or_left_is_not_announced_to_strangers() -> None:
    identity = Identity.generate()
    async with (
        LibP2PHost.open(identity, listen=LISTEN) as host,
        LibP2PHost.open(Identity.generate(), listen=LISTEN) as stranger,
    ):
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        async with trio.open_nursery() as nursery:
            first = Membership(OTHER, host, identity, Limits())
            await nursery.start(first.run)
            before = await identify_bytes(connection)
            nursery.cancel_scope.cancel()
        assert OTHER.realm_id.encode() not in before
        after = await identify_bytes(connection)
        assert OTHER.realm_id.encode() not in after
        with pytest.raises(ProtocolNotSupportedError):
            await connection.open_stream(members_protocol(RealmId(OTHER.realm_id)))


async def test_the_other_end_of_a_dial_cannot_tell_the_realm() -> None:
    """The dialer reveals itself as little as the node that is dialed: the stranger speaks the handshake's protocol."""
    seen = bytearray()
    async with memberships(1) as (made, _hosts), LibP2PHost.open(Identity.generate(), listen=LISTEN) as stranger:

        async def record(stream: ByteStream) -> None:
            while data := await stream.read():
                seen.extend(data)
                if len(seen) >= 64:
                    break

        stranger.set_stream_handler(AUTH_PROTOCOL, record)
        with trio.move_on_after(3):
            await made[0].connect(stranger.peer_id, stranger.listen_addrs())
        assert len(seen) >= 64 and TEAM.realm_id.encode() not in seen
        assert bytes.fromhex(TEAM.realm_id) not in seen
        (connection,) = stranger.connections()
        assert TEAM.realm_id.encode() not in await identify_bytes(connection)
