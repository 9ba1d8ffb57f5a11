"""Answers realm handshakes of one host for all realms that it is in: the only thing that is open to strangers.

One responder serves all realms, since no message of the blinded handshake names one (docs/spec/realm.md §3).
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from dep2p.errors import (
    ErrorCode,
    NotMemberError,
    OverloadedError,
    ProtocolError,
    StreamClosedError,
    WireError,
)
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import Limits
from dep2p.protocols.realm.handshake import (
    AUTH_PROTOCOL,
    HandshakeBytes,
    HandshakeChannel,
    HandshakeEffect,
    HandshakeFailed,
    HandshakeInitiator,
    HandshakeResponder,
    HandshakeStreamEnded,
    PeerAuthenticated,
    ResponderKeys,
    SendBytes,
    check_features,
)
from dep2p.protocols.realm.handshake_limits import FailureLimit, address_key
from dep2p.protocols.realm.keys import PSK_BYTES, RealmKeys, derive_keys
from dep2p.protocols.wire.frame import encode_error
from dep2p.protocols.wire.headers import HeaderKey, encode_headers
from dep2p.types import PeerId, RealmId, Rng

FEATURES: Final = ("zstd",)
"""Features of this implementation. The same for all realms, or they would tell them apart."""
RESPONDING_MAX: Final = 256
"""Inbound handshakes at work at a time; each has a stream and a few hundred bytes."""
RESPONDING_PER_CONNECTION_MAX: Final = 16
"""A peer proves itself in all of its realms at once."""
HANDSHAKES_PER_FAILURE: Final = 24
"""So many times as many handshakes as failures may a peer make in a minute: one for each of its realms, some again."""
LOG_INTERVAL_S: Final = 5.0
"""Between two lines of the log about failed handshakes."""

_logger = logging.getLogger("dep2p.realm")


class AnsweredRealm(Protocol):
    """A realm of this node as its responder sees it."""

    @property
    def keys(self) -> RealmKeys: ...

    def verify(self, connection: Connection, features: tuple[str, ...]) -> None:
        """The peer proved itself on the connection; called before any later byte of it is looked at."""
        ...


@dataclass(slots=True, eq=False)
class Responding:
    """An inbound handshake at work."""

    connection: int
    peer: PeerId
    address: str
    over: trio.Event = field(default_factory=trio.Event)
    """Set with a verdict, or to make room for others."""


class RealmResponder:
    """Answers handshakes for the realms that are added to it; one for each host."""

    def __init__(
        self, host: Host, own: PeerId, limits: Limits, *, rng: Rng, features: Sequence[str] = FEATURES
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._host = host
        self.own = own
        self._limits = limits
        self._rng = rng
        self._features = check_features(features)
        self._decoy = derive_keys(rng.randbytes(PSK_BYTES))
        self._realms: dict[RealmId, AnsweredRealm] = {}
        per_min = limits.handshake_failures_per_peer_per_min
        self._failures = FailureLimit(per_min)
        self._starts = FailureLimit(HANDSHAKES_PER_FAILURE * per_min)
        self._log_after = 0.0
        self._unlogged = 0
        self._responding: dict[int, Responding] = {}
        """The inbound handshakes at work, oldest first."""
        self._next_responding = 0
        self._one_over = trio.Event()

    @property
    def at_work(self) -> int:
        """Inbound handshakes in progress."""
        return len(self._responding)

    def add(self, realm: AnsweredRealm) -> None:
        """Answer handshakes of this realm from now on."""
        if not self._realms:
            self._host.set_stream_handler(AUTH_PROTOCOL, self.serve)
        self._realms[realm.keys.realm_id] = realm

    def remove(self, realm_id: RealmId) -> None:
        """Answer no further handshakes of this realm; those at work go on. Idempotent."""
        if self._realms.pop(realm_id, None) is not None and not self._realms:
            self._host.remove_stream_handler(AUTH_PROTOCOL)

    def counts_for(self, realm_id: RealmId) -> Counter[str]:
        """The counts of failures, for one realm of all: they belong to none, and a sum over realms counts them once."""
        first = next(iter(self._realms), realm_id)
        return self.counts if first == realm_id else Counter()

    async def all_over(self) -> None:
        """Wait until no inbound handshake is at work; bounded by their deadlines if none is let in."""
        while self._responding:
            await self._one_over.wait()

    async def serve(self, stream: ByteStream) -> None:
        """Respond to a handshake."""
        connection, now = stream.connection, trio.current_time()
        peer = connection.peer
        retry_s = max(self._failures.retry_after_s(peer, now), self._starts.retry_after_s(peer, now))
        if retry_s > 0.0:
            self.counts["handshake_refused_rate"] += 1
            headers = encode_headers({HeaderKey.RETRY_AFTER_MS: int(retry_s * 1000) + 1})
            await self._turn_away(stream, ErrorCode.RATE_LIMITED, "too many failed handshakes", headers)
            return
        at_work = sum(one.connection == connection.id for one in self._responding.values())
        if at_work >= RESPONDING_PER_CONNECTION_MAX:
            self.counts["handshake_refused_busy"] += 1
            await self._turn_away(stream, ErrorCode.OVERLOADED, "too many handshakes at work", b"")
            return
        if peer == self.own:
            stream.reset()
            return
        self._starts.note(peer, now)
        if len(self._responding) >= RESPONDING_MAX:
            self._make_room()
        number = self._next_responding = self._next_responding + 1
        responding = self._responding[number] = Responding(connection.id, peer, address_key(connection.remote_addr))
        realms = dict(self._realms)  # one that is left meanwhile has to hear of it on this connection, too
        dropped = False
        try:
            core = HandshakeResponder(
                ResponderKeys(tuple(realm.keys for realm in realms.values()), self._decoy),
                HandshakeChannel(self.own, peer, connection.channel_binding),
                features=self._features,
                rng=self._rng,
                now=now,
                timeout_s=self._limits.handshake_timeout_s,
            )

            def verify(verdict: PeerAuthenticated) -> None:
                realms[verdict.realm_id].verify(connection, verdict.features)

            verdict = await drive(stream, core, [], responding.over, verify)
        finally:
            dropped = self._responding.pop(number, None) is None
            self._one_over.set()
            self._one_over = trio.Event()
        if isinstance(verdict, HandshakeFailed) and not connection.is_closed and not dropped:
            if isinstance(verdict.error, NotMemberError) and not verdict.by_peer:
                self.counts["handshake_no_common_realm"] += 1  # it saw the decoy: no offence
            else:
                self._note_failure(connection, verdict.error)
        await end_stream(stream, self._limits.close_timeout_s)

    def _make_room(self) -> None:
        """End the oldest handshake of the peer with the most, at the address with the most.

        Who holds handshakes open harms the peers behind its own address (or relay) only, and those last.
        """
        per_address = Counter(one.address for one in self._responding.values())
        most = max(per_address.values())
        crowded = {n: one for n, one in self._responding.items() if per_address[one.address] == most}
        per_peer = Counter(one.peer for one in crowded.values())
        most = max(per_peer.values())
        number = next(n for n, one in crowded.items() if per_peer[one.peer] == most)
        self._responding.pop(number).over.set()
        self.counts["handshake_dropped_busy"] += 1

    def _note_failure(self, connection: Connection, error: WireError) -> None:
        now, peer = trio.current_time(), connection.peer
        self._failures.note(peer, now)
        self.counts["handshake_failed"] += 1
        if isinstance(error, ProtocolError):
            self.counts["handshake_failed_protocol"] += 1
        if now < self._log_after:  # strangers must not fill the log
            self._unlogged += 1
            return
        self._log_after = now + LOG_INTERVAL_S
        retry_s = self._failures.retry_after_s(peer, now)
        _logger.info(
            "realm handshake with %s at %s failed: %s%s%s",
            peer,
            connection.remote_addr,
            error,
            f"; this peer is refused for {retry_s:.0f} s" if retry_s else "",
            f" ({self._unlogged} more failures since the last such line)" if self._unlogged else "",
        )
        self._unlogged = 0

    async def _turn_away(self, stream: ByteStream, code: ErrorCode, text: str, headers: bytes) -> None:
        _write_if_open(stream, encode_error(code, text, headers=headers))
        await end_stream(stream, self._limits.close_timeout_s)


async def drive(
    stream: ByteStream,
    core: HandshakeInitiator | HandshakeResponder,
    effects: list[HandshakeEffect],
    over: trio.Event,
    on_authenticated: Callable[[PeerAuthenticated], None],
) -> PeerAuthenticated | HandshakeFailed:
    """Wait for the verdict; a caller that sets ``over`` ends the waiting without one."""
    verdicts: list[PeerAuthenticated | HandshakeFailed] = []

    def perform(effects: list[HandshakeEffect]) -> None:
        for effect in effects:
            match effect:
                case SendBytes():
                    _write_if_open(stream, effect.data)
                case PeerAuthenticated():
                    on_authenticated(effect)
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


async def end_stream(stream: ByteStream, timeout_s: float) -> None:
    """Close a handshake's stream, or cut it after ``timeout_s``."""
    with trio.move_on_after(timeout_s) as scope:
        await stream.close()
    if scope.cancelled_caught:
        stream.reset()


def _write_if_open(stream: ByteStream, data: bytes) -> None:
    try:
        stream.write_nowait(data, urgent=True)
    except StreamClosedError:
        # Its end callback says so, too, and that is what ends the handshake.
        return
