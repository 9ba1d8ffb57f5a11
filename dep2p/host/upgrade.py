"""From a transport connection to an authenticated, multiplexed one; every way this fails becomes one error."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from libp2p.crypto.keys import KeyPair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey

from dep2p.host.connection import Muxer
from dep2p.host.upstream_muxer import UpstreamMuxer
from dep2p.limits import Limits
from dep2p.types import PeerId

if TYPE_CHECKING:
    from libp2p.abc import IRawConnection
    from libp2p.transport.upgrader import TransportUpgrader


_PEER_IN_TEXT = re.compile(r"\b(?:12D3KooW|16Uiu2|Qm)[1-9A-HJ-NP-Za-km-z]{30,60}\b")


class UpgradeError(Exception):
    """The handshake failed; the text says at which step and why."""


@dataclass(frozen=True, slots=True)
class Upgraded:
    """An authenticated connection that is ready to run."""

    muxer: Muxer
    peer: PeerId


async def upgrade_inbound(upgrader: "TransportUpgrader", raw: Any) -> Upgraded:
    """Raises UpgradeError; the caller closes ``raw`` then."""
    return await _upgrade(upgrader, raw, None)


async def upgrade_outbound(upgrader: "TransportUpgrader", raw: Any, peer: PeerId) -> Upgraded:
    """Raises UpgradeError, for another peer than ``peer`` too; the caller closes ``raw`` then."""
    return await _upgrade(upgrader, raw, peer)


async def _upgrade(upgrader: "TransportUpgrader", raw: Any, expected: PeerId | None) -> Upgraded:
    connection = cast("IRawConnection", RawConnection(raw, expected is not None))
    step = "encryption"
    try:
        secured = await upgrader.upgrade_security(
            connection, expected is not None, None if expected is None else ID.from_string(expected)
        )
        remote = secured.get_remote_peer()
        step = "multiplexing"
        muxed: Any = await upgrader.upgrade_connection(secured, remote)
    except Exception as error:
        other = _other_peer(error)
        if other is not None:
            raise UpgradeError(f"another node answers there: {other}") from error
        raise UpgradeError(f"{step} failed: {describe(error)}") from error
    return Upgraded(muxer_of(muxed), PeerId(str(remote)))


def _other_peer(error: BaseException) -> str | None:
    """Who answered instead, when the handshake failed because it was not the expected peer."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerIDMismatchesPubkey):
            found = _PEER_IN_TEXT.findall(str(cause))
            return found[-1] if found else "its id is not known"
        cause = cause.__cause__
    return None


def muxer_of(muxed: Any) -> Muxer:
    """Our muxer over a py-libp2p muxed connection."""
    return UpstreamMuxer(muxed)


def describe(error: BaseException) -> str:
    """One line that names the innermost cause."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 4:
        text = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
        if text not in texts:
            texts.append(text)
        cause = cause.__cause__
    return ": ".join(texts)


def new_upgrader(key_pair: KeyPair, limits: Limits) -> "TransportUpgrader":
    """The security and multiplexing that this host speaks on TCP and WebSocket."""
    from libp2p.crypto.x25519 import create_new_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.security.noise.transport import Transport
    from libp2p.stream_muxer.yamux.yamux import Yamux
    from libp2p.transport.upgrader import TransportUpgrader

    noise = Transport(key_pair, create_new_key_pair().private_key)
    return TransportUpgrader({TProtocol("/noise"): noise}, {TProtocol("/yamux/1.0.0"): Yamux})
