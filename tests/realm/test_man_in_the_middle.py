"""A node in the middle passes every byte of a realm's handshake on, over each transport, and the transport is fooled.

The test makes the transport's mistake itself: each side's connection to the middle says that the other side is there.
"""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest
import trio

from dep2p.errors import NotMemberError
from dep2p.host.connections.connection import PeerConnection
from dep2p.host.host import HostOptions, LibP2PHost
from dep2p.host.interface import ByteStream
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.realm.handshake import AUTH_PROTOCOL
from dep2p.protocols.realm.keys import derive_keys
from dep2p.realm.handshake_responder import RealmResponder
from dep2p.realm.handshakes import Handshakes
from tests.host.conftest import eventually

pytestmark = pytest.mark.real

KEYS = derive_keys(bytes(range(32)))
AUTH = AUTH_PROTOCOL
LISTEN = {
    "tcp": "/ip4/127.0.0.1/tcp/0",
    "websocket": "/ip4/127.0.0.1/tcp/0/ws",
    "quic": "/ip4/127.0.0.1/udp/0/quic-v1",
}


def handshakes(host: LibP2PHost) -> Handshakes:
    counts: Counter[str] = Counter()
    responder = RealmResponder(host, host.peer_id, Limits(), rng=Random(host.peer_id))
    made = Handshakes(
        KEYS,
        Limits(),
        responder=responder,
        features=[],
        rng=Random(host.peer_id),
        counts=counts,
        on_verified=lambda _connection: None,
    )
    responder.add(made)
    return made


@asynccontextmanager
async def three_hosts(transport: str) -> AsyncGenerator[tuple[LibP2PHost, LibP2PHost, LibP2PHost], None]:
    """Ann, the middle and Bob. Over ``relay`` the middle is Bob's relay, too, as the best place to stand in."""
    listen = [LISTEN.get(transport, LISTEN["tcp"])]
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(
                LibP2PHost.open(
                    Identity.generate(),
                    listen=listen,
                    options=HostOptions(relay=role if transport == "relay" else "off"),
                )
            )
            for role in ("client", "server", "client")
        ]
        yield opened[0], opened[1], opened[2]


async def relayed(middle: LibP2PHost, target: LibP2PHost) -> list[str]:
    """The addresses at which the target is reached through the middle."""
    await target.dial(middle.peer_id, middle.listen_addrs())
    await eventually(lambda: "p2p-circuit" in str(target.listen_addrs()))
    return [addr for addr in target.listen_addrs() if "p2p-circuit" in addr]


async def far_end(host: LibP2PHost, connection: PeerConnection) -> PeerConnection:
    """The other end of a connection; it may be there a moment after the dial has returned."""
    found: list[PeerConnection] = []

    def is_there() -> bool:
        both = [one for one in host.connections() if one.channel_binding == connection.channel_binding]
        found.extend(one for one in both if isinstance(one, PeerConnection))
        return bool(found)

    await eventually(is_there)
    return found[0]


async def dialled(host: LibP2PHost, target: LibP2PHost, addrs: list[str]) -> PeerConnection:
    connection = await host.dial(target.peer_id, addrs)
    assert isinstance(connection, PeerConnection)
    return connection


@pytest.mark.parametrize("transport", [*LISTEN, "relay"])
async def test_no_one_takes_the_middle_for_a_member(transport: str) -> None:
    async with three_hosts(transport) as (ann, middle, bob):
        to_bob = bob.listen_addrs() if transport != "relay" else await relayed(middle, bob)
        from_ann = await dialled(ann, middle, middle.listen_addrs())
        onwards = await dialled(middle, bob, bob.listen_addrs())
        at_bob = await far_end(bob, onwards)
        at_ann, at_bobs = handshakes(ann), handshakes(bob)
        passed = bytearray()

        async def pass_on(stream: ByteStream) -> None:
            further = await onwards.open_stream(AUTH)

            async def copy(source: ByteStream, to: ByteStream) -> None:
                while data := await source.read():
                    passed.extend(data)
                    await to.write(data)
                await to.close_write()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(copy, stream, further)
                nursery.start_soon(copy, further, stream)

        middle.set_stream_handler(AUTH, pass_on)
        # The mistake of the transport: both take the middle for the other one.
        from_ann.peer, at_bob.peer = bob.peer_id, ann.peer_id
        async with trio.open_nursery() as nursery:
            at_ann.use(nursery)
            at_bobs.use(nursery)
            with pytest.raises(NotMemberError):
                await at_ann.settle(from_ann)
            assert len(passed) > 100, "the bytes of both must have gone through"
            assert not at_ann.verified and not at_bobs.verified
            from_ann.peer = at_bob.peer = middle.peer_id

            # Without anybody in between, over the same transport, both are verified.
            straight = await dialled(ann, bob, to_bob)
            await at_ann.settle(straight)
            assert straight.id in at_ann.verified
            assert (await far_end(bob, straight)).id in at_bobs.verified
            if transport == "relay":
                assert "p2p-circuit" in straight.remote_addr
            nursery.cancel_scope.cancel()
