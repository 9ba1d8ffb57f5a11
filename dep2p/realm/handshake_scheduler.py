"""When to try a handshake: on new connections, on discovered peers, and again when something may have changed.

A refusal holds for as long as it says and no longer. While the connection lives the handshake is tried again: when the
peer said, or after a back-off. Only a verdict ends that, which the peer itself can undo by a handshake of its own.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from dep2p.errors import (
    Dep2pError,
    NotInRealmError,
    NotMemberError,
    OverloadedError,
    ProtocolNotSupportedError,
    RateLimitedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import Connection, PeerDiscovered
from dep2p.protocols.timing.backoff import Backoff
from dep2p.realm.handshakes import Handshakes
from dep2p.types import PeerId, Rng

ABSENT_DELAYS_S: Final = (2.0, 8.0)
"""Before a peer that is not in the realm is asked again. It may join a moment later; later on it asks by itself."""
REPEAT: Final = Backoff(first_s=2.0, max_s=60.0)
"""Waits after refusals, time-outs and ended streams, unless the peer says a longer one."""
PROTOCOL_REPEAT: Final = Backoff(first_s=30.0, max_s=600.0)
"""Waits after a peer broke the protocol: an older or newer node, which a restart may mend."""
RETRY_AFTER_MAX_S: Final = 600.0
"""The longest wait that a peer can ask for: the realm needs its members, whatever one of them says."""
AGAIN_DELAY_S: Final = 0.1
AGAIN_FAILURES_MAX: Final = 3
"""So many tries to prove anew may fail, then the connection counts as verified no more; the tries go on."""
AGAIN_PER_CONNECTION_MAX: Final = 20
"""In an hour; the next one waits until the hour is over."""
AGAIN_WINDOW_S: Final = 3_600.0
DIALING_MAX: Final = 4
DISCOVERED_MAX: Final = 64
"""Discovered peers that wait for a dial. The rest is looked at again: see LOOK_AGAIN_S."""
PAUSED_PEERS_MAX: Final = 4_096
"""Peers whose failures are remembered, and more while discovery names more: what is forgotten is dialed as if new."""
NON_MEMBER_PAUSE_S: Final = 600.0
UNREACHABLE: Final = Backoff(first_s=30.0, max_s=3_600.0)
"""Waits before a discovered peer that could not be reached is dialed again."""
LOOK_AGAIN_S: Final = 15.0
"""Seconds between two looks at the peers that discovery has named. So a peer is dialed that was named before the realm
was joined, or while too many were waiting, or that could not be reached at that moment."""

_logger = logging.getLogger("dep2p.realm")


@dataclass(frozen=True, slots=True)
class HandshakeRefusal:
    """A handshake that does not succeed for now: with whom, why, and when it is tried again (by the clock of trio)."""

    peer: PeerId
    reason: str
    retry_at: float


class Connector(Protocol):
    """The membership, as the scheduler uses it."""

    def verified_connection(self, peer: PeerId) -> Connection | None: ...

    async def connect(
        self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> Connection: ...

    def is_up(self, peer: PeerId) -> bool: ...

    def discovered(self) -> list[PeerDiscovered]: ...

    def link_refused(self, connection: Connection, *, is_gone: bool) -> None: ...


class HandshakeScheduler:
    """Decides when to try a handshake; `Handshakes` does it."""

    def __init__(
        self, connector: Connector, handshakes: Handshakes, own: PeerId, counts: Counter[str], *, rng: Rng
    ) -> None:
        self._connector = connector
        self._handshakes = handshakes
        self._own = own
        self._counts = counts
        self._rng = rng
        self._pauses: dict[PeerId, tuple[float, int]] = {}
        """The end of each pause, and the failures that led to it."""
        self._waiting: dict[PeerId, PeerDiscovered] = {}
        """Discovered peers that wait for a dial, the latest last."""
        self._dialing: dict[PeerId, None] = {}
        self._idle_dialers = trio.lowlevel.ParkingLot()
        self._in_handshake: dict[int, trio.Event] = {}
        """Set when the connection ends, by connection."""
        self._refusals: dict[int, HandshakeRefusal] = {}
        """Those on live connections, by connection."""
        self._again: dict[int, tuple[float, int]] = {}
        """Start of the current hour, and tries in it, by connection."""
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Begin to dial what discovery finds."""
        self._nursery = nursery
        for _ in range(DIALING_MAX):
            nursery.start_soon(self._dial_discovered)
        nursery.start_soon(self._look_again)

    def refusals(self) -> list[HandshakeRefusal]:
        """The handshakes on live connections that do not succeed for now, oldest first."""
        return list(self._refusals.values())

    async def try_handshake(self, connection: Connection) -> None:
        """Try the handshake on a connection until there is a verdict or the connection ends."""
        if connection.id not in self._in_handshake:
            await self._run(connection, 0.0, again=False, on_lasting=lambda: None)

    def reauthenticate(self, connection: Connection) -> None:
        """The peer does not count us, or we doubt it: do the handshake anew, soon."""
        if self._nursery is None or connection.is_closed or connection.id in self._in_handshake:
            return
        now = trio.current_time()
        since, tries = self._again.get(connection.id, (now, 0))
        if now - since > AGAIN_WINDOW_S:
            since, tries = now, 0
        delay_s = AGAIN_DELAY_S if tries < AGAIN_PER_CONNECTION_MAX else since + AGAIN_WINDOW_S - now
        self._again[connection.id] = (since, tries + 1)
        self._nursery.start_soon(self._reauthenticate, connection, delay_s)

    def disconnected(self, connection: Connection) -> None:
        """Forget a connection."""
        self._again.pop(connection.id, None)
        self._refusals.pop(connection.id, None)
        ended = self._in_handshake.get(connection.id)
        if ended is not None:
            ended.set()

    async def _reauthenticate(self, connection: Connection, delay_s: float) -> None:
        def unverify() -> None:
            self._connector.link_refused(connection, is_gone=True)

        if connection.id not in self._in_handshake and not await self._run(
            connection, delay_s, again=True, on_lasting=unverify
        ):
            unverify()

    async def _run(
        self, connection: Connection, delay_s: float, *, again: bool, on_lasting: Callable[[], None]
    ) -> bool:
        self._in_handshake[connection.id] = ended = trio.Event()
        try:
            return await self._try(connection, delay_s, ended, again=again, on_lasting=on_lasting)
        finally:
            del self._in_handshake[connection.id]
            self._refusals.pop(connection.id, None)

    async def _try(
        self,
        connection: Connection,
        delay_s: float,
        ended: trio.Event,
        *,
        again: bool,
        on_lasting: Callable[[], None],
    ) -> bool:
        """Try until there is a verdict. ``on_lasting`` is called when the failures do not look like passing ones."""
        failures = absences = 0
        while True:
            if delay_s:
                with trio.move_on_after(delay_s):
                    await ended.wait()
            if connection.is_closed:
                return False
            try:
                await self._handshakes.settle(connection, again=again)
                return True
            except (ProtocolNotSupportedError, NotMemberError):
                self._counts["not_in_realm"] += 1
                if absences == len(ABSENT_DELAYS_S):
                    return False
                delay_s = ABSENT_DELAYS_S[absences]
                absences += 1
                continue
            except NotInRealmError:
                return False
            except Dep2pError as error:
                failures += 1
                delay_s = self._retry_delay_s(error, failures)
                self._note_refusal(connection, error, failures, delay_s)
            if failures == AGAIN_FAILURES_MAX:
                on_lasting()

    def _retry_delay_s(self, error: Dep2pError, failures: int) -> float:
        if isinstance(error, RateLimitedError):
            asked_s = min(error.retry_after_ms / 1000, RETRY_AFTER_MAX_S)
            return max(asked_s, REPEAT.after(failures)) * (1.0 + 0.1 * self._rng.random())
        if isinstance(error, OverloadedError | RequestTimeoutError | StreamClosedError):
            return REPEAT.jittered(failures, self._rng)
        return PROTOCOL_REPEAT.jittered(failures, self._rng)

    def _note_refusal(self, connection: Connection, error: Dep2pError, failures: int, delay_s: float) -> None:
        if connection.is_closed:
            return
        self._counts["handshake_retries"] += 1
        # The first one is common while nodes start and stop: the second is worth a line, and then each tenth.
        level = logging.WARNING if failures == 2 or failures % 10 == 0 else logging.DEBUG
        _logger.log(level, "no realm handshake with %s: %s; trying again in %.0f s", connection.peer, error, delay_s)
        self._refusals[connection.id] = HandshakeRefusal(connection.peer, str(error), trio.current_time() + delay_s)

    def discovered(self, event: PeerDiscovered) -> None:
        """A discovery source named a peer: dial it, unless it is known, was tried lately, or too many are waiting.

        What is passed over now is looked at again: see LOOK_AGAIN_S.
        """
        if self._is_paused(event.peer):
            self._counts["discovered_paused"] += 1
        elif self._is_wanted(event.peer) and event.peer not in self._waiting:
            self._waiting[event.peer] = event
            if len(self._waiting) > DISCOVERED_MAX:
                # Of those that failed most, the one that waits longest.
                del self._waiting[max(self._waiting, key=self._failures)]
                self._counts["discovered_dropped"] += 1
            self._idle_dialers.unpark()

    def _is_paused(self, peer: PeerId) -> bool:
        return self._pauses.get(peer, (0.0, 0))[0] > trio.current_time()

    def _failures(self, peer: PeerId) -> int:
        return self._pauses.get(peer, (0.0, 0))[1]

    def _is_wanted(self, peer: PeerId) -> bool:
        """Whether a dial is of use, now or later."""
        if self._nursery is None or peer == self._own or peer in self._dialing:
            return False
        return self._connector.verified_connection(peer) is None

    async def _look_again(self) -> None:
        while True:
            # A member that is up needs no connection of its own: the realm chooses which it keeps.
            wanted = [
                event
                for event in reversed(self._connector.discovered())
                if not self._is_paused(event.peer)
                and not self._connector.is_up(event.peer)
                and self._is_wanted(event.peer)
            ]
            # A peer that failed less comes first; at equal failures, the one that a source named last. So unreachable
            # peers hold up no member, however many they are.
            wanted.sort(key=lambda event: self._failures(event.peer))
            self._waiting = {event.peer: event for event in reversed(wanted[:DISCOVERED_MAX])}
            self._idle_dialers.unpark(count=len(self._waiting))
            await trio.sleep(LOOK_AGAIN_S)

    async def _dial_discovered(self) -> None:
        while True:
            while not self._waiting:
                await self._idle_dialers.park()
            event = self._waiting.pop(min(reversed(self._waiting), key=self._failures))
            self._dialing[event.peer] = None
            try:
                await self._connector.connect(event.peer, event.addrs)
                self._pauses.pop(event.peer, None)
            except NotInRealmError:
                return
            except NotMemberError:
                self._pause(event.peer, NON_MEMBER_PAUSE_S)
            except Dep2pError as error:
                _logger.debug("discovered %s, but: %s", event.peer, error)
                self._pause(event.peer, 0.0)
            finally:
                del self._dialing[event.peer]

    def _pause(self, peer: PeerId, least_s: float) -> None:
        """Note one more failure: the peer is dialed later, and after those that failed less."""
        failures = self._failures(peer) + 1
        self._pauses.pop(peer, None)
        kept = max(PAUSED_PEERS_MAX, len(self._connector.discovered()))
        while len(self._pauses) >= kept:
            del self._pauses[next(iter(self._pauses))]
        self._pauses[peer] = (trio.current_time() + max(least_s, UNREACHABLE.after(failures)), failures)
