"""Handshakes of one realm over real streams, and which connections they verified."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from dep2p.errors import (
    Dep2pError,
    ErrorCode,
    NotInRealmError,
    OverloadedError,
    ProtocolError,
    ProtocolNotSupportedError,
    RequestTimeoutError,
    StreamClosedError,
    WireError,
)
from dep2p.host.interface import ByteStream, Connection
from dep2p.limits import Limits
from dep2p.protocols.realm.handshake import (
    HandshakeBytes,
    HandshakeEffect,
    HandshakeFailed,
    HandshakeInitiator,
    HandshakeResponder,
    HandshakeStreamEnded,
    PeerProved,
    SendBytes,
    auth_protocol,
    check_features,
)
from dep2p.protocols.realm.handshake_limits import FailureLimit, address_key
from dep2p.protocols.realm.keys import RealmKeys
from dep2p.protocols.wire.frame import encode_error
from dep2p.protocols.wire.headers import Key, encode_headers
from dep2p.types import PeerId, Rng

RESPONDING_MAX: Final = 64
"""Inbound handshakes at work at a time."""
RESPONDING_PER_CONNECTION_MAX: Final = 2

_logger = logging.getLogger("dep2p.realm")


@dataclass(slots=True)
class Verified:
    """A connection whose peer proved itself."""

    connection: Connection
    features: frozenset[str]
    unlinked_since: float
    """When it was last seen without a members stream, by the clock of trio."""


@dataclass(slots=True, eq=False)
class Responding:
    """An inbound handshake at work."""

    connection: int
    address: str
    over: trio.Event = field(default_factory=trio.Event)
    """Set with a verdict, or to make room for others."""


@dataclass(slots=True)
class Attempt:
    """A handshake that this side initiates; any number of tasks may wait for it."""

    connection: Connection
    over: trio.Event = field(default_factory=trio.Event)
    error: Dep2pError | None = None


class Handshakes:
    """Runs handshakes in both roles and remembers who is verified, per connection."""

    def __init__(
        self,
        keys: RealmKeys,
        own: PeerId,
        limits: Limits,
        *,
        features: Sequence[str],
        rng: Rng,
        counts: Counter[str],
        on_verified: Callable[[Connection], None],
    ) -> None:
        """``on_verified`` is called in the step in which a connection becomes verified, before any later byte."""
        self.verified: dict[int, Verified] = {}
        self._keys = keys
        self._own = own
        self._limits = limits
        self._features = check_features(features)
        self._rng = rng
        self._counts = counts
        self._on_verified = on_verified
        self._failures = FailureLimit(limits.handshake_failures_per_address_per_min)
        self._protocol = auth_protocol(keys.realm_id)
        self._responding: dict[int, Responding] = {}
        """The inbound handshakes at work, oldest first."""
        self._next_responding = 0
        self._attempts: dict[int, Attempt] = {}
        self._nursery: trio.Nursery | None = None
        self._one_over = trio.Event()

    def use(self, nursery: trio.Nursery | None) -> None:
        """Run attempts in this nursery from now on; None: no more attempts."""
        self._nursery = nursery

    @property
    def addresses_remembered(self) -> int:
        """Addresses with failures in memory."""
        return len(self._failures)

    @property
    def at_work(self) -> int:
        """Handshakes in progress."""
        return len(self._responding) + len(self._attempts)

    def connection(self, peer: PeerId) -> Connection | None:
        """The oldest live verified connection to the peer."""
        for entry in self.verified.values():
            if entry.connection.peer == peer and not entry.connection.is_closed:
                return entry.connection
        return None

    async def settle(self, connection: Connection, *, again: bool = False) -> None:
        """Return when the connection is verified; initiates a handshake unless one is under way.

        ``again``: prove anew even if it is verified. Raises ProtocolNotSupportedError, NotMemberError,
        StreamClosedError, RequestTimeoutError, or another WireError that the peer answered with. Cancelling the caller
        does not end the handshake, which others may wait for.
        """
        if connection.id in self.verified and not again:
            await trio.lowlevel.checkpoint()
            return
        attempt = self._attempts.get(connection.id)
        if attempt is None:
            if self._nursery is None:
                raise NotInRealmError("this node is not in the realm any more")
            attempt = self._attempts[connection.id] = Attempt(connection)
            self._nursery.start_soon(self._initiate, attempt)
        await attempt.over.wait()
        if attempt.error is not None:
            raise copy.copy(attempt.error)

    async def all_over(self) -> None:
        """Wait until no handshake is at work in either role; bounded by their deadlines if none is let in."""
        while self.at_work:
            await self._one_over.wait()

    def _note_over(self) -> None:
        self._one_over.set()
        self._one_over = trio.Event()

    async def wait_for_attempt(self, connection: Connection) -> None:
        """Wait until no handshake that this side initiated is under way on the connection; bounded by its deadline."""
        attempt = self._attempts.get(connection.id)
        if attempt is not None:
            await attempt.over.wait()

    async def serve(self, stream: ByteStream) -> None:
        """Respond to a handshake: the only thing that is open to strangers."""
        connection = stream.connection
        key = address_key(connection.remote_addr)
        retry_s = self._failures.retry_after_s(key, trio.current_time())
        if retry_s > 0.0:
            self._counts["handshake_refused_rate"] += 1
            headers = encode_headers({Key.RETRY_AFTER_MS: int(retry_s * 1000) + 1})
            await self._turn_away(stream, ErrorCode.RATE_LIMITED, "too many failed handshakes", headers)
            return
        at_work = sum(one.connection == connection.id for one in self._responding.values())
        if at_work >= RESPONDING_PER_CONNECTION_MAX:
            self._counts["handshake_refused_busy"] += 1
            await self._turn_away(stream, ErrorCode.OVERLOADED, "too many handshakes at work", b"")
            return
        if connection.peer == self._own:
            stream.reset()
            return
        if len(self._responding) >= RESPONDING_MAX:
            self._make_room()
        number = self._next_responding = self._next_responding + 1
        responding = self._responding[number] = Responding(connection.id, key)
        dropped = False
        try:
            core = HandshakeResponder(
                self._keys,
                self._own,
                connection.peer,
                features=self._features,
                rng=self._rng,
                now=trio.current_time(),
                timeout_s=self._limits.handshake_timeout_s,
            )
            verdict = await self._drive(stream, core, [], responding.over)
        finally:
            dropped = self._responding.pop(number, None) is None
            self._note_over()
        if isinstance(verdict, HandshakeFailed) and not connection.is_closed and not dropped:
            self._note_failure(connection, verdict.error)
        await self._end(stream)

    def _make_room(self) -> None:
        """End the oldest handshake of the address with the most: whoever holds them open harms only its own."""
        per_address = Counter(one.address for one in self._responding.values())
        most = max(per_address.values())
        number = next(n for n, one in self._responding.items() if per_address[one.address] == most)
        self._responding.pop(number).over.set()
        self._counts["handshake_dropped_busy"] += 1

    async def _initiate(self, attempt: Attempt) -> None:
        connection = attempt.connection
        try:
            stream = await connection.open_stream(self._protocol, timeout_s=self._limits.stream_open_timeout_s)
            core = HandshakeInitiator(
                self._keys,
                self._own,
                connection.peer,
                features=self._features,
                rng=self._rng,
                now=trio.current_time(),
                timeout_s=self._limits.handshake_timeout_s,
            )
            verdict = await self._drive(stream, core, core.start(), trio.Event())
            if isinstance(verdict, HandshakeFailed):
                attempt.error = verdict.error
                if connection.is_closed:
                    attempt.error = StreamClosedError(f"the connection to {connection.peer} ended in the handshake")
                elif verdict.by_peer:
                    self._note_failure(connection, verdict.error)
        except (ProtocolNotSupportedError, StreamClosedError, RequestTimeoutError) as error:
            attempt.error = error
            return
        except trio.Cancelled:
            attempt.error = NotInRealmError("this node left the realm")
            raise
        finally:
            # The verdict is final here; closing the stream concerns nobody who waits.
            del self._attempts[connection.id]
            attempt.over.set()
            self._note_over()
        await self._end(stream)

    async def _drive(
        self,
        stream: ByteStream,
        core: HandshakeInitiator | HandshakeResponder,
        effects: list[HandshakeEffect],
        over: trio.Event,
    ) -> PeerProved | HandshakeFailed:
        """Until the verdict; somebody else may set ``over`` to have none waited for any longer."""
        verdicts: list[PeerProved | HandshakeFailed] = []

        def perform(effects: list[HandshakeEffect]) -> None:
            for effect in effects:
                match effect:
                    case SendBytes():
                        _write_if_open(stream, effect.data)
                    case PeerProved():
                        self._verify(stream.connection, effect.features)
                        verdicts.append(effect)
                    case HandshakeFailed():
                        verdicts.append(effect)
            if verdicts:
                over.set()

        # Pushed, not pulled: the connection counts as verified before the next byte of any of its streams is looked at.
        def on_data(data: bytes | memoryview) -> None:
            perform(core.handle(HandshakeBytes(data), trio.current_time()))

        def on_end(_error: BaseException | None) -> None:
            perform(core.handle(HandshakeStreamEnded(), trio.current_time()))

        try:
            perform(effects)
            stream.set_receiver(on_data, on_end)
            deadline = core.next_deadline()
            if deadline is not None:
                with trio.move_on_at(deadline):
                    await over.wait()
                if over.is_set():
                    perform(core.abandon(OverloadedError("too many handshakes at work")))
                perform(core.on_deadline(max(deadline, trio.current_time())))
        except BaseException:
            stream.reset()
            raise
        return verdicts[0]

    def _verify(self, connection: Connection, features: tuple[str, ...]) -> None:
        if connection.is_closed:
            return
        self._counts["handshake_ok"] += 1
        known = self.verified.get(connection.id)
        if known is not None:
            known.features = frozenset(features)
            return
        self.verified[connection.id] = Verified(connection, frozenset(features), trio.current_time())
        self._on_verified(connection)
        attempt = self._attempts.get(connection.id)
        if attempt is not None:
            attempt.over.set()

    def _note_failure(self, connection: Connection, error: WireError) -> None:
        self._failures.note(address_key(connection.remote_addr), trio.current_time())
        self._counts["handshake_failed"] += 1
        if isinstance(error, ProtocolError):
            self._counts["handshake_failed_protocol"] += 1
        _logger.info("realm handshake with %s at %s failed: %s", connection.peer, connection.remote_addr, error)

    async def _turn_away(self, stream: ByteStream, code: ErrorCode, text: str, headers: bytes) -> None:
        _write_if_open(stream, encode_error(code, text, headers=headers))
        await self._end(stream)

    async def _end(self, stream: ByteStream) -> None:
        with trio.move_on_after(self._limits.close_timeout_s) as scope:
            await stream.close()
        if scope.cancelled_caught:
            stream.reset()


def _write_if_open(stream: ByteStream, data: bytes) -> None:
    try:
        stream.write_nowait(data, urgent=True)
    except StreamClosedError:
        # Its end callback says so, too, and that is what ends the handshake.
        return
