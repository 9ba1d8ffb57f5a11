"""Finds a direct path to each peer whose connection goes through a relay: the protocol /libp2p/dcutr, both sides of it.

The side that the relayed connection came in at begins (B), as the specification says. It dials the public addresses of
the peer, then exchanges addresses and dials together with it, and tries again while the relayed connection lasts.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import Dep2pError, ProtocolError, ProtocolNotSupportedError, RequestTimeoutError
from dep2p.host.addresses import Address, parse_address
from dep2p.host.counters import Counters
from dep2p.host.hole_punching.dials import DirectDials
from dep2p.host.interface import (
    ByteStream,
    Connection,
    HostEvent,
    PeerConnected,
    PeerDisconnected,
    ProtocolGate,
    StreamHandler,
)
from dep2p.outside_text import one_line
from dep2p.protocols.hole_punching.bounds import PunchBounds
from dep2p.protocols.hole_punching.exchange import Answering, Asking, DialTogether
from dep2p.protocols.hole_punching.messages import (
    ADDRS_MAX,
    DCUTR,
    MESSAGE_BYTES_MAX,
    HolePunch,
    decode,
    encode,
)
from dep2p.protocols.hole_punching.schedule import Schedule, TryKind
from dep2p.protocols.hole_punching.targets import is_punchable, punch_targets
from dep2p.types import PeerId, Rng

logger: logging.Logger = logging.getLogger("dep2p.host")

UPGRADES_MAX: Final = 256
"""Peers to which direct paths are looked for at a time."""


class PunchHost(Protocol):
    """The host, as hole punching uses it."""

    @property
    def peer_id(self) -> PeerId: ...

    def listen_addrs(self) -> list[str]: ...

    def observed_addrs(self) -> list[str]: ...

    def addrs(self, peer: PeerId) -> list[str]: ...

    def connections(self, peer: PeerId | None = None) -> Sequence[Connection]: ...

    def is_protected(self, connection: Connection) -> bool: ...

    def subscribe(self, on_event: Callable[[HostEvent], None]) -> Callable[[], None]: ...

    def set_stream_handler(self, protocol: str, handler: StreamHandler) -> None: ...

    def restrict(self, part: str, gate: ProtocolGate | None) -> None: ...


def is_relayed(connection: Connection) -> bool:
    """Whether a connection goes through a relay."""
    return "/p2p-circuit" in connection.remote_addr


class _RelayedOnly:
    """Shows the protocol over relayed connections: over another one there is nothing to find."""

    def is_open(self, connection: Connection) -> bool:
        return is_relayed(connection)

    async def wait_for_attempt(self, connection: Connection) -> None:
        """Nothing opens it."""


@dataclass(slots=True)
class _Upgrade:
    """The search for a direct path beside one relayed connection."""

    connection: Connection
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    connected: trio.Event = field(default_factory=trio.Event)
    """Set when there is a direct connection."""
    ended: trio.Event = field(default_factory=trio.Event)


class HolePunching:
    """Looks for direct paths, and answers peers that look for one to this host. `run` carries the searches."""

    def __init__(self, host: PunchHost, dials: DirectDials, counters: Counters, rng: Rng, *, timeout_s: float) -> None:
        """``timeout_s``: the time for each message of the peer."""
        self._host = host
        self._dials = dials
        self._counters = counters
        self._rng = rng
        self._timeout_s = timeout_s
        self._bounds = PunchBounds()
        self._upgrades: dict[PeerId, _Upgrade] = {}
        self._nursery: trio.Nursery | None = None
        host.restrict(DCUTR, _RelayedOnly())
        host.set_stream_handler(DCUTR, self._serve)
        host.subscribe(self._on_event)

    async def run(self) -> None:
        """Run until cancelled."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    def consider(self, peer: PeerId) -> None:
        """Look for a direct path to a peer that identify has answered for, if it is reached through a relay only."""
        if self._nursery is None or peer in self._upgrades or self._is_direct(peer):
            return
        for connection in self._host.connections(peer):
            if connection.direction == "inbound" and not connection.is_closed:
                if len(self._upgrades) >= UPGRADES_MAX:
                    self._counters.add("hole_punch_dropped_upgrades_max")
                    return
                upgrade = self._upgrades[peer] = _Upgrade(connection)
                self._nursery.start_soon(self._run_upgrade, upgrade)
                return

    def _is_direct(self, peer: PeerId) -> bool:
        return any(not is_relayed(one) for one in self._host.connections(peer))

    def _on_event(self, event: HostEvent) -> None:
        if isinstance(event, PeerConnected):
            upgrade = self._upgrades.get(event.connection.peer)
            if upgrade is not None and not is_relayed(event.connection):
                upgrade.connected.set()
        elif isinstance(event, PeerDisconnected):
            upgrade = self._upgrades.get(event.connection.peer)
            if upgrade is not None and upgrade.connection is event.connection:
                upgrade.scope.cancel()
            if not event.last:
                self.consider(event.connection.peer)  # the direct one may have ended, and the relayed one go on

    # The side that begins

    async def _run_upgrade(self, upgrade: _Upgrade) -> None:
        peer = upgrade.connection.peer
        try:
            with upgrade.scope:
                await self._upgrade(upgrade)
        except Exception:  # one peer must not end the host
            self._counters.add("hole_punch_crashed")
            logger.exception("the search for a direct path to %s failed in an unexpected way", peer)
        finally:
            del self._upgrades[peer]
            upgrade.ended.set()

    async def _upgrade(self, upgrade: _Upgrade) -> None:
        connection = upgrade.connection
        peer = connection.peer
        schedule = Schedule(self._rng)
        step = schedule.next()
        is_said = False
        while True:
            with trio.move_on_after(step.wait_s):
                await upgrade.connected.wait()
            if self._is_direct(peer):
                logger.info("%s is reached directly now: the relay carries nothing new", peer)
                return
            is_ready = self._may_try(peer, step.kind)
            if is_ready:
                try:
                    await self._try(upgrade, step.kind)
                except ProtocolNotSupportedError:
                    logger.debug("%s does not look for direct paths: it stays on the relay", peer)
                    return
                except (Dep2pError, trio.TooSlowError) as error:
                    logger.debug("no direct path to %s: %s", peer, one_line(str(error) or "no answer in time"))
                finally:
                    self._bounds.end(peer)
            if self._is_direct(peer):
                self._counters.add("hole_punch_succeeded")
                continue
            self._counters.add("hole_punch_failed" if is_ready else "hole_punch_not_ready")
            step = schedule.next() if is_ready else schedule.unready()
            if step.kind is TryKind.REVERSE and not is_said:
                is_said = True
                logger.info(
                    "no direct path to %s is found: it stays on the relay; the next try is in %.0f s", peer, step.wait_s
                )

    def _may_try(self, peer: PeerId, kind: TryKind) -> bool:
        """Whether this host has addresses to punch with by now, and a place for the try, which it takes."""
        if kind is TryKind.PUNCH and not self._own_addrs():
            return False
        return self._bounds.begin(peer, is_member=self._is_member(peer), now_s=trio.current_time()) is None

    async def _try(self, upgrade: _Upgrade, kind: TryKind) -> None:
        if kind is TryKind.REVERSE:
            peer = upgrade.connection.peer
            await self._dials.dial(peer, self._targets(self._host.addrs(peer)))
        else:
            await self._punch(upgrade, self._own_addrs())

    async def _punch(self, upgrade: _Upgrade, own: Sequence[bytes]) -> None:
        stream = await upgrade.connection.open_stream(DCUTR, timeout_s=self._timeout_s)
        try:
            with trio.fail_after(self._timeout_s):
                asking = Asking(own, now_s=trio.current_time())
                await _send(stream, asking.connect)
                dial = asking.answered(await _receive(stream), now_s=trio.current_time())
                await _send(stream, asking.sync)
                await stream.drain()
        finally:
            if not stream.is_write_closed:
                await stream.close()
        targets = self._targets(map(_text_of, dial.addrs))
        if not targets:
            raise ProtocolError("the peer names no address that the internet reaches")
        await trio.sleep(dial.wait_s)
        await self._dials.answer(upgrade.connection.peer, targets, upgrade.connected)

    # The side that answers

    async def _serve(self, stream: ByteStream) -> None:
        peer = stream.connection.peer
        if not is_relayed(stream.connection) or self._is_direct(peer):
            self._refuse(stream, "direct")
            return
        upgrade = self._upgrades.get(peer)
        if upgrade is not None:
            # Each has dialed the other through a relay. Both keep the connection that the smaller id has dialed.
            if self._host.peer_id > peer:
                self._refuse(stream, "both_begin")
                return
            upgrade.scope.cancel()
            await upgrade.ended.wait()
        refusal = self._bounds.begin(peer, is_member=self._is_member(peer), now_s=trio.current_time())
        if refusal is not None:
            self._refuse(stream, refusal)
            return
        try:
            dial = await self._answer(stream)
            targets = self._targets(map(_text_of, dial.addrs))
            found = await self._dials.dial(peer, targets)
        finally:
            self._bounds.end(peer)
        self._counters.add("hole_punch_answered_failed" if found is None else "hole_punch_answered_succeeded")

    async def _answer(self, stream: ByteStream) -> DialTogether:
        """Exchange addresses; return at the time of the dial."""
        answering = Answering(self._own_addrs())
        try:
            while True:
                with trio.fail_after(self._timeout_s):
                    step = answering.receive(await _receive(stream))
                    if isinstance(step, DialTogether):
                        return step
                    await _send(stream, step)
        except trio.TooSlowError:
            raise RequestTimeoutError("no message of hole punching in time") from None
        finally:
            await stream.close()

    def _refuse(self, stream: ByteStream, why: str) -> None:
        self._counters.add(f"hole_punch_refused_{why}")
        stream.reset()

    # Addresses

    def _is_member(self, peer: PeerId) -> bool:
        return any(map(self._host.is_protected, self._host.connections(peer)))

    def _own_addrs(self) -> list[bytes]:
        """The multiaddrs at which others see this host's listeners."""
        own = dict.fromkeys(
            addr
            for text in [*self._host.observed_addrs(), *self._host.listen_addrs()]
            if is_punchable(addr := text.partition("/p2p/")[0])
        )
        return [Multiaddr(text).to_bytes() for text in list(own)[:ADDRS_MAX]]

    def _targets(self, addrs: Iterable[str]) -> list[Address]:
        own = [*self._host.observed_addrs(), *self._host.listen_addrs()]
        return [parse_address(text) for text in punch_targets(addrs, own)]


def _text_of(addr: bytes) -> str:
    """The multiaddr as text; "" for one that cannot be read or is of a transport that is not spoken here."""
    try:
        return parse_address(str(Multiaddr(addr))).text
    except (ValueError, TypeError, KeyError, MultiaddrError):
        return ""


async def _send(stream: ByteStream, message: HolePunch) -> None:
    stream.write_nowait(encode_length_prefixed(encode(message)), urgent=True)
    await stream.drain(MESSAGE_BYTES_MAX)


async def _receive(stream: ByteStream) -> HolePunch:
    return decode(await read_length_prefixed(stream, MESSAGE_BYTES_MAX))
