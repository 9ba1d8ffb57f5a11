"""The upgrade of a transport connection to an authenticated, multiplexed one; every failure becomes one error."""

import re
from typing import TYPE_CHECKING

from libp2p.abc import IMuxedConn
from libp2p.crypto.keys import KeyPair
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.transport.upgrader import TransportUpgrader

from dep2p.host.connections.connection import Upgraded
from dep2p.host.connections.noise_yamux_upgrade import HardenedUpgrader
from dep2p.host.counters import Counters
from dep2p.host.interface import Muxer
from dep2p.host.noise.handshake import BothDialedError
from dep2p.host.noise.session import NoiseSession
from dep2p.host.upstream.muxer import UpstreamMuxer
from dep2p.host.yamux.connection import YamuxConnection
from dep2p.host.yamux.muxer import YamuxMuxer
from dep2p.limits import Limits
from dep2p.types import PeerId

if TYPE_CHECKING:
    pass


_OTHER_PEER = re.compile(r"the peer is (\w+), not \w+ as expected")  # NoiseHandshake says so


class UpgradeError(Exception):
    """The handshake failed; the text says at which step and why."""


class SimultaneousOpenError(UpgradeError):
    """Both sides have dialed from and to the same ports, and one TCP connection without a responder came of it."""


async def upgrade_inbound(upgrader: TransportUpgrader, raw: ReadWriteCloser) -> Upgraded:
    """Upgrade an accepted connection. Raises UpgradeError; the caller closes ``raw`` then."""
    return await _upgrade(upgrader, raw, None)


async def upgrade_outbound(upgrader: TransportUpgrader, raw: ReadWriteCloser, peer: PeerId) -> Upgraded:
    """Upgrade a dialled connection. Raises UpgradeError, for another peer than ``peer`` too, and SimultaneousOpenError;
    the caller closes ``raw`` then."""
    return await _upgrade(upgrader, raw, peer)


async def _upgrade(upgrader: TransportUpgrader, raw: ReadWriteCloser, expected: PeerId | None) -> Upgraded:
    connection = RawConnection(raw, expected is not None)
    step = "encryption"
    try:
        secured = await upgrader.upgrade_security(
            connection, expected is not None, None if expected is None else ID.from_string(expected)
        )
        if not isinstance(secured, NoiseSession):
            raise UpgradeError(f"{type(secured).__name__} has no channel binding")
        remote = secured.get_remote_peer()
        step = "multiplexing"
        muxed = await upgrader.upgrade_connection(secured, remote)
    except Exception as error:
        if _is_caused_by(error, BothDialedError):
            raise SimultaneousOpenError(describe(error)) from error
        other = _other_peer(error)
        if other is not None:
            raise UpgradeError(f"another node answers there: {other}") from error
        raise UpgradeError(f"{step} failed: {describe(error)}") from error
    return Upgraded(muxer_of(muxed), PeerId(str(remote)), secured.channel_binding)


def _is_caused_by(error: BaseException, kind: type[BaseException]) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kind):
            return True
        cause = cause.__cause__
    return False


def _other_peer(error: BaseException) -> str | None:
    """Return the peer that answered in place of the expected one; None when the handshake failed for another reason."""
    found = _OTHER_PEER.search(describe(error))
    return None if found is None else found[1]


def muxer_of(muxed: IMuxedConn) -> Muxer:
    """Return our muxer over a py-libp2p muxed connection."""
    return YamuxMuxer(muxed) if isinstance(muxed, YamuxConnection) else UpstreamMuxer(muxed)


def describe(error: BaseException) -> str:
    """Return one line that names the innermost cause."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 4:
        text = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
        if not any(text in earlier for earlier in texts):
            texts.append(text)
        cause = cause.__cause__
    return ": ".join(texts)


def new_upgrader(key_pair: KeyPair, limits: Limits, counters: Counters) -> TransportUpgrader:
    """Make the upgrader with the security and multiplexing that this host speaks on TCP and WebSocket."""
    return HardenedUpgrader(key_pair, limits=limits, on_event=lambda event: counters.add(f"upgrade_{event}"))
