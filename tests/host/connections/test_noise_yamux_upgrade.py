"""From a raw connection to a multiplexed one: what is agreed, and how it fails."""

from typing import Any

import pytest
import trio
from libp2p.abc import IRawConnection
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.peer.id import ID
from libp2p.transport.exceptions import MuxerUpgradeFailure, SecurityUpgradeFailure

from dep2p.host.connections.noise_yamux_upgrade import HardenedUpgrader
from dep2p.host.noise.session import NoiseSession
from dep2p.host.yamux.connection import YamuxConnection
from dep2p.limits import Limits

RawPair = tuple[IRawConnection, IRawConnection]
KEYS, OTHER_KEYS = create_new_key_pair(), create_new_key_pair()
OTHER_PEER = ID.from_pubkey(OTHER_KEYS.public_key)
HEADER = b"\x13/multistream/1.0.0\n"


def upgrader(events: list[str], keys: KeyPair = KEYS) -> HardenedUpgrader:
    return HardenedUpgrader(keys, limits=Limits(handshake_timeout_s=5), on_event=events.append)


async def secure_both(pair: RawPair, events: list[str]) -> tuple[Any, Any]:
    sessions: list[Any] = []

    async def answer() -> None:
        sessions.append(await upgrader(events, OTHER_KEYS).upgrade_security(pair[1], False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        first = await upgrader(events).upgrade_security(pair[0], True, OTHER_PEER)
    return first, sessions[0]


async def is_at_end(connection: IRawConnection) -> bool:
    """True when the peer has closed: reading gives what was sent, then the end or an error."""
    with trio.move_on_after(2):
        try:
            while await connection.read(65_536):
                pass
        except Exception:
            return True
        return True
    return False


async def test_two_upgraders_agree_on_noise_and_yamux(raw_pair: RawPair) -> None:
    events: list[str] = []
    with trio.fail_after(10):
        one, other = await secure_both(raw_pair, events)
        assert isinstance(one, NoiseSession)
        assert one.get_remote_peer() == OTHER_PEER
        muxed: list[Any] = []

        async def answer() -> None:
            muxed.append(await upgrader(events).upgrade_connection(other, other.get_remote_peer()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            mine: Any = await upgrader(events).upgrade_connection(one, OTHER_PEER)
        assert isinstance(mine, YamuxConnection)
        assert (mine.is_initiator, muxed[0].is_initiator, mine.peer_id) == (True, False, OTHER_PEER)
        assert (mine.negotiated_muxer_protocol, mine.negotiated_security_protocol) == ("/yamux/1.0.0", "/noise")
        assert events == []


@pytest.mark.parametrize(
    "hostile",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER + b"\xff\xff\xff\xff\x0f" + bytes(100),
        HEADER + b"\x05\xff\xfe\xfd\xfc\n",
        HEADER + b"\x07/noise\n" + b"\xff\xff" + bytes(10_000),
        HEADER + b"\x07/noise\n" + b"\x00\x20" + bytes(32),
        HEADER + 20 * b"\x0c/tls/1.0.00\n",
    ],
)
async def test_a_hostile_dialer_is_cut_off(raw_pair: RawPair, hostile: bytes) -> None:
    events: list[str] = []
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw_pair[0].write, hostile)
            with pytest.raises(SecurityUpgradeFailure):
                await upgrader(events, OTHER_KEYS).upgrade_security(raw_pair[1], False)
            nursery.cancel_scope.cancel()
        assert await is_at_end(raw_pair[0])
    assert events == ["security_failed"]


async def test_a_silent_dialer_is_cut_off_in_time(raw_pair: RawPair, autojump_clock: trio.testing.MockClock) -> None:
    events: list[str] = []
    with pytest.raises(SecurityUpgradeFailure, match="within 5 s"):
        await upgrader(events, OTHER_KEYS).upgrade_security(raw_pair[1], False)
    assert trio.current_time() <= 5
    assert events == ["security_timeout"]


async def test_a_silent_multiplexer_negotiation_is_cut_off_in_time(
    raw_pair: RawPair, autojump_clock: trio.testing.MockClock
) -> None:
    events: list[str] = []
    one, other = await secure_both(raw_pair, events)
    with pytest.raises(MuxerUpgradeFailure, match="within 5 s"):
        await upgrader(events).upgrade_connection(other, other.get_remote_peer())
    assert events == ["muxer_timeout"]
    assert other.is_closed
    assert not one.is_closed


async def test_a_hostile_multiplexer_negotiation_is_cut_off(raw_pair: RawPair) -> None:
    events: list[str] = []
    with trio.fail_after(5):
        one, other = await secure_both(raw_pair, events)
        await one.write(HEADER + b"\xff\xff\xff\xff\x0f")
        with pytest.raises(MuxerUpgradeFailure):
            await upgrader(events).upgrade_connection(other, other.get_remote_peer())
    assert events == ["muxer_failed"]
    assert other.is_closed


async def test_a_peer_without_noise_is_refused(raw_pair: RawPair) -> None:
    events: list[str] = []
    with trio.fail_after(5):
        await raw_pair[1].write(HEADER + b"\x03na\n")
        with pytest.raises(SecurityUpgradeFailure, match="does not speak"):
            await upgrader(events).upgrade_security(raw_pair[0], True, OTHER_PEER)
    assert events == ["security_failed"]


async def test_a_cancelled_upgrade_closes_the_connection(raw_pair: RawPair) -> None:
    with trio.fail_after(5):
        with trio.move_on_after(0.02) as scope:
            await upgrader([]).upgrade_security(raw_pair[0], True, OTHER_PEER)
        assert scope.cancelled_caught
        assert await is_at_end(raw_pair[1])


async def test_an_outbound_upgrade_without_a_peer_is_our_own_error(raw_pair: RawPair) -> None:
    with pytest.raises(ValueError, match="peer"):
        await upgrader([]).upgrade_security(raw_pair[0], True)
