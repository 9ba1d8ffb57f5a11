"""Handshakes of one realm that this node initiates, and the connections that are verified in it."""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from dep2p.errors import (
    Dep2pError,
    NotInRealmError,
    NotMemberError,
    ProtocolNotSupportedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import Connection
from dep2p.limits import Limits
from dep2p.protocols.realm.handshake import (
    AUTH_PROTOCOL,
    HandshakeChannel,
    HandshakeFailed,
    HandshakeInitiator,
    check_features,
)
from dep2p.protocols.realm.keys import RealmKeys
from dep2p.realm.handshake_responder import RealmResponder, drive, end_stream
from dep2p.types import PeerId, Rng


@dataclass(slots=True)
class Verified:
    """A connection whose peer proved itself."""

    connection: Connection
    features: frozenset[str]
    unlinked_since: float
    """When it was last seen without a members stream, by the clock of trio."""


@dataclass(slots=True)
class Attempt:
    """A handshake that this side initiates; any number of tasks may wait for it."""

    connection: Connection
    over: trio.Event = field(default_factory=trio.Event)
    error: Dep2pError | None = None


class Handshakes:
    """Initiates handshakes, and remembers which connections are verified; `RealmResponder` answers those of others."""

    def __init__(
        self,
        keys: RealmKeys,
        limits: Limits,
        *,
        responder: RealmResponder,
        features: Sequence[str],
        rng: Rng,
        counts: Counter[str],
        on_verified: Callable[[Connection], None],
    ) -> None:
        """``on_verified`` is called in the step in which a connection becomes verified, before any later byte."""
        self.verified: dict[int, Verified] = {}
        self.keys = keys
        self._own = responder.own
        self._limits = limits
        self._features = check_features(features)
        self._rng = rng
        self._counts = counts
        self._on_verified = on_verified
        self._responder = responder
        self._attempts: dict[int, Attempt] = {}
        self._nursery: trio.Nursery | None = None
        self._one_over = trio.Event()

    def use(self, nursery: trio.Nursery | None) -> None:
        """Run attempts in this nursery from now on; None: no more attempts."""
        self._nursery = nursery

    @property
    def at_work(self) -> int:
        """Handshakes in progress, inbound ones of all realms included."""
        return self._responder.at_work + len(self._attempts)

    def connection(self, peer: PeerId) -> Connection | None:
        """The live verified connection to the peer that is not superseded; else the one that was verified last."""
        found: Connection | None = None
        for entry in self.verified.values():
            connection = entry.connection
            if connection.peer == peer and not connection.is_closed:
                found = connection
                if not connection.is_superseded:
                    break
        return found

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
        while self._attempts:
            await self._one_over.wait()
        await self._responder.all_over()

    def _note_over(self) -> None:
        self._one_over.set()
        self._one_over = trio.Event()

    async def wait_for_attempt(self, connection: Connection) -> None:
        """Wait until no handshake that this side initiated is under way on the connection; bounded by its deadline."""
        attempt = self._attempts.get(connection.id)
        if attempt is not None:
            await attempt.over.wait()

    async def _initiate(self, attempt: Attempt) -> None:
        connection = attempt.connection
        try:
            stream = await connection.open_stream(AUTH_PROTOCOL, timeout_s=self._limits.stream_open_timeout_s)
            core = HandshakeInitiator(
                self.keys,
                HandshakeChannel(self._own, connection.peer, connection.channel_binding),
                features=self._features,
                rng=self._rng,
                now=trio.current_time(),
                timeout_s=self._limits.handshake_timeout_s,
            )
            verdict = await drive(
                stream, core, core.start(), trio.Event(), lambda proved: self.verify(connection, proved.features)
            )
            if isinstance(verdict, HandshakeFailed):
                attempt.error = verdict.error
                if connection.is_closed:
                    attempt.error = StreamClosedError(f"the connection to {connection.peer} ended in the handshake")
                elif verdict.by_peer and not isinstance(verdict.error, NotMemberError):
                    self._counts["handshake_failed"] += 1
                    self._counts["handshake_failed_protocol"] += 1
        except (ProtocolNotSupportedError, StreamClosedError, RequestTimeoutError) as error:
            attempt.error = error
            return
        except trio.Cancelled:
            attempt.error = NotInRealmError("this node left the realm")
            raise
        finally:
            # The verdict is final here; no waiting caller depends on the stream's close.
            del self._attempts[connection.id]
            attempt.over.set()
            self._note_over()
        await end_stream(stream, self._limits.close_timeout_s)

    def verify(self, connection: Connection, features: tuple[str, ...]) -> None:
        """The peer proved itself on the connection."""
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
