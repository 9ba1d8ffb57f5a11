"""Membership of one realm: the trio shell around handshakes, member records and the member table."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import trio

from dep2p.errors import (
    NotInRealmError,
    NotMemberError,
    PeerNotFoundError,
    ProtocolNotSupportedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import Connection, Host, HostEvent, PeerConnected, PeerDisconnected
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.protocols.realm.anti_entropy import SendFrames
from dep2p.protocols.realm.handshake import auth_protocol
from dep2p.protocols.realm.member_table import (
    AddrsChanged,
    ClockObserved,
    CloseLink,
    KeepConnected,
    LeaveRequested,
    LetGo,
    LinkClosed,
    LinkOpened,
    Member,
    MemberChanged,
    MembershipEnded,
    MemberTable,
    MessageReceived,
    PeerUnverified,
    PeerVerified,
    RecordsLoaded,
    TableEffect,
    TableEvent,
)
from dep2p.protocols.realm.messages import MembersMessage, encode_records, members_protocol
from dep2p.realm.connection_interest import unwant, unwant_all, want
from dep2p.realm.credentials import Realm
from dep2p.realm.handshake_scheduler import Seeking
from dep2p.realm.handshakes import Handshakes
from dep2p.realm.interface import MemberEvent
from dep2p.realm.member_links import MemberLinks
from dep2p.realm.records_file import load_records, save_records
from dep2p.types import PeerId, RealmId, Rng, parse_peer_id

FEATURES: Final = ("zstd",)
TICK_S: Final = 15.0
"""How often the wall clock and the listen addresses are looked at."""
UNLINKED_S: Final = 30.0
"""After this long without a members stream from the peer that dialed, it has to prove itself again."""
SAVE_INTERVAL_S: Final = 5.0
LEAVE_TIMEOUT_S: Final = 2.0
_BOOTSTRAP_TTL_S: Final = 365 * 86_400.0
_LOAD_BATCH: Final = 32

_logger = logging.getLogger("dep2p.realm")
_T = TypeVar("_T")


class Membership:
    """This node's membership of one realm; implements ``RealmGate``. One use: run it once."""

    def __init__(
        self,
        realm: Realm,
        host: Host,
        identity: Identity,
        limits: Limits,
        *,
        records_path: Path | None = None,
        rng: Rng | None = None,
        wall_clock_s: Callable[[], float] = time.time,
        features: Sequence[str] = FEATURES,
    ) -> None:
        """``records_path``: where the member table is kept between runs, None for nowhere. ``rng`` makes the nonces:
        give one only to tests, the default is the system's. ``features``: what this node offers in handshakes."""
        self.realm = realm
        self._host = host
        self._limits = limits
        self._records_path = records_path
        self._wall_clock_s = wall_clock_s
        rng = random.SystemRandom() if rng is None else rng
        self._counts: Counter[str] = Counter()
        self._table = MemberTable(
            identity.peer_id,
            realm.keys,
            identity.sign,
            members_max=limits.members_per_realm_max,
            rng=rng,
            features=features,
        )
        self._handshakes = Handshakes(
            realm.keys,
            identity.peer_id,
            limits,
            features=features,
            rng=rng,
            counts=self._counts,
            on_verified=self._on_verified,
        )
        self._links = MemberLinks(realm.realm_id, limits, self._counts, self)
        self._seeking = Seeking(self, self._handshakes, identity.peer_id, self._counts)
        self._verified = self._handshakes.verified
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._is_leaving = False
        self._has_left = False
        self._wake = trio.Event()
        self._armed_at = 0.0
        self._addrs: tuple[str, ...] = ()
        self._saved_version = 0
        self._subscribers: dict[int, Callable[[MemberEvent], None]] = {}
        self._loss_subscribers: dict[int, Callable[[Connection], None]] = {}
        self._verified_subscribers: dict[int, Callable[[Connection], None]] = {}
        self._subscriptions = 0

    # RealmGate

    @property
    def realm_id(self) -> RealmId:
        """The realm's public id."""
        return self.realm.realm_id

    def is_verified(self, connection: Connection) -> bool:
        """Whether the peer has proved itself on this connection and is still a member. One dict lookup."""
        return connection.id in self._verified

    def features(self, connection: Connection) -> frozenset[str]:
        """What the peer offered in its handshake; empty when not verified."""
        entry = self._verified.get(connection.id)
        return frozenset() if entry is None else entry.features

    def verified_connection(self, peer: PeerId) -> Connection | None:
        """The oldest live verified connection to the peer."""
        return self._handshakes.connection(peer)

    async def connect(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        """A verified connection: an existing one, or by dialing and the handshake.

        ``timeout_s`` bounds both; by default the limits for dialing and for handshakes together. Raises
        PeerNotFoundError, NotMemberError (also for a peer that is not in the realm at all), RequestTimeoutError, or
        NotInRealmError when this membership does not run.
        """
        if self._nursery is None or self._is_leaving:
            raise NotInRealmError(f"this node is not in the realm {self.realm.name!r}")
        limit_s = self._limits.dial_timeout_s + self._limits.handshake_timeout_s if timeout_s is None else timeout_s
        with trio.move_on_after(limit_s):
            return await self._connect(peer, addrs)
        raise RequestTimeoutError(f"no verified connection to {peer} within {limit_s:g} s")

    def subscribe_unverified(self, on_lost: Callable[[Connection], None]) -> Callable[[], None]:
        """Call ``on_lost`` when a live connection stops being verified; returns a function that ends it."""
        return self._subscribe(self._loss_subscribers, on_lost)

    def subscribe_verified(self, on_verified: Callable[[Connection], None]) -> Callable[[], None]:
        """Call ``on_verified`` for each connection on which the peer proves itself, at once and undamped.

        Returns a function that ends it.
        """
        return self._subscribe(self._verified_subscribers, on_verified)

    # What apps ask

    def members(self) -> list[Member]:
        """All other members, also those that left lately."""
        return self._table.members()

    def member(self, peer: PeerId) -> Member | None:
        """One other member."""
        return self._table.member(peer)

    def subscribe(self, on_event: Callable[[MemberEvent], None]) -> Callable[[], None]:
        """Call ``on_event`` for each member event; it must not block. Returns a function that ends it."""
        return self._subscribe(self._subscribers, on_event)

    def counters(self) -> dict[str, int]:
        """Monotonic counts, by name."""
        return dict(self._counts + self._table.counts)

    async def leave(self) -> None:
        """Tell every verified member that this node leaves, wait until they know (at most some seconds), then end
        everything of this realm; `run` returns. The kept member table is deleted. Cancelling it ends the realm at once.
        """
        if self._nursery is None or self._is_leaving:
            await self._ended.wait()
            return
        self._is_leaving = True
        self._has_left = True
        try:
            self._host.remove_stream_handler(auth_protocol(self.realm_id))
            self._handshakes.use(None)
            # Who proves us a member this very moment must hear it too.
            with trio.move_on_after(LEAVE_TIMEOUT_S):
                await self._handshakes.all_over()
            self._feed(ClockObserved(self._wall_clock_s()))
            self._feed(LeaveRequested())
            (farewell,) = encode_records([self._table.own_envelope])
            connections = [entry.connection for entry in self._verified.values()]
            await self._links.say_and_end(farewell, connections, timeout_s=LEAVE_TIMEOUT_S)
        finally:
            self._scope.cancel()
        await self._ended.wait()

    # Running

    async def run(
        self,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Be in the realm until cancelled or `leave`."""
        if self._ended.is_set() or self._nursery is not None:
            raise NotInRealmError("a membership runs once: make a new one to join again")
        host = self._host
        unsubscribe: Callable[[], None] | None = None
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    self._handshakes.use(nursery)
                    await self._begin()
                    host.set_stream_handler(auth_protocol(self.realm_id), self._handshakes.serve)
                    host.set_stream_handler(members_protocol(self.realm_id), self._links.serve)
                    unsubscribe = host.subscribe(self._on_host_event)
                    nursery.start_soon(self._tick)
                    nursery.start_soon(self._save_now_and_then)
                    self._seeking.start(nursery)
                    for connection in host.connections():
                        nursery.start_soon(self._seeking.seek, connection)
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            if unsubscribe is not None:
                unsubscribe()
            self._end()
            self._ended.set()

    async def _begin(self) -> None:
        self._feed(ClockObserved(self._wall_clock_s()))
        if self._records_path is not None:
            envelopes = await trio.to_thread.run_sync(self._load, self._records_path)
            for at in range(0, len(envelopes), _LOAD_BATCH):
                self._feed(RecordsLoaded(tuple(envelopes[at : at + _LOAD_BATCH])))
                await trio.lowlevel.checkpoint()
        self._saved_version = self._table.version
        self._look_at_addrs()
        for addr in self.realm.bootstrap:
            try:
                peer = parse_peer_id(addr.rpartition("/p2p/")[2])
            except ValueError:
                _logger.warning("bootstrap address %r names no peer (/p2p/…): not used", addr)
                continue
            if peer != self._host.peer_id:
                self._host.add_addrs(peer, [addr], ttl_s=_BOOTSTRAP_TTL_S)
                want(self._host, self.realm_id, peer)

    def _end(self) -> None:
        host = self._host
        self._nursery = None
        self._handshakes.use(None)
        host.remove_stream_handler(auth_protocol(self.realm_id))
        host.remove_stream_handler(members_protocol(self.realm_id))
        for entry in list(self._verified.values()):
            self._unverify(entry.connection)
        unwant_all(host, self.realm_id)
        path = self._records_path
        if path is None:
            return
        try:
            if self._has_left:
                path.unlink(missing_ok=True)
            elif self._table.version != self._saved_version:
                save_records(path, self._table.envelopes())
        except OSError as error:
            self._note_save_failure(path, error)

    async def _connect(self, peer: PeerId, addrs: Sequence[str]) -> Connection:
        for _ in range(2):
            verified = self.verified_connection(peer)
            if verified is not None:
                await trio.lowlevel.checkpoint()
                return verified
            member = self._table.member(peer)
            known = [*addrs, *(() if member is None else member.addrs)]
            connection = await self._host.dial(peer, list(dict.fromkeys(known)))
            try:
                await self._handshakes.settle(connection)
            except StreamClosedError:
                continue  # the connection ended meanwhile: once more with a new one
            except ProtocolNotSupportedError:
                raise NotMemberError(f"{peer} is not in the realm {self.realm.name!r}") from None
            if connection.id in self._verified:
                return connection
        raise PeerNotFoundError(f"connections to {peer} end before the realm handshake does")

    async def _tick(self) -> None:
        while True:
            now = trio.current_time()
            due = self._table.next_deadline()
            self._armed_at = min(now + TICK_S, now + TICK_S if due is None else max(due, now))
            self._wake = trio.Event()
            with trio.move_on_at(self._armed_at):
                await self._wake.wait()
            now = trio.current_time()
            self._feed(ClockObserved(self._wall_clock_s()))
            self._perform(self._table.on_deadline(now))
            self._look_at_addrs()
            self._prove_unlinked_again(now)

    def _look_at_addrs(self) -> None:
        addrs = tuple(self._host.listen_addrs())
        if addrs != self._addrs or self._table.own_record is None:
            self._addrs = addrs
            self._feed(AddrsChanged(addrs))

    def _prove_unlinked_again(self, now: float) -> None:
        """A peer that dialed opens the members stream; one that does not may be in the realm no more."""
        for entry in list(self._verified.values()):
            connection = entry.connection
            if connection.direction == "outbound" or self._links.of(connection):
                entry.unlinked_since = now
            elif now - entry.unlinked_since > UNLINKED_S:
                entry.unlinked_since = now
                self._seeking.prove_again(connection)

    async def _save_now_and_then(self) -> None:
        path = self._records_path
        if path is None:
            return
        while True:
            await trio.sleep(SAVE_INTERVAL_S)
            version = self._table.version
            if version != self._saved_version:
                try:
                    # Not abandoned when cancelled: two writers of one file would be worse than a short wait.
                    await trio.to_thread.run_sync(save_records, path, self._table.envelopes())
                    self._saved_version = version
                except OSError as error:
                    self._note_save_failure(path, error)

    def _note_save_failure(self, path: Path, error: OSError) -> None:
        if self._counts["save_failures"] == 0:
            _logger.warning("cannot write the member records %s (%s): trying on, in silence", path, error.strerror)
        self._counts["save_failures"] += 1

    def _load(self, path: Path) -> list[bytes]:
        return load_records(path, records_max=self._limits.members_per_realm_max)

    # What the host, the handshakes and the links tell

    def _on_host_event(self, event: HostEvent) -> None:
        match event:
            case PeerConnected():
                # The side that dialed begins; the other one would only double the work.
                if event.connection.direction == "outbound" and self._nursery is not None:
                    self._nursery.start_soon(self._seeking.seek, event.connection)
            case PeerDisconnected():
                self._seeking.disconnected(event.connection)
                self._unverify(event.connection)
            case _:
                self._seeking.discovered(event)

    def _on_verified(self, connection: Connection) -> None:
        self._host.protect(connection, self.realm_id)
        self._feed(PeerVerified(connection.id, connection.peer))
        if connection.direction == "outbound" and self._nursery is not None:
            self._nursery.start_soon(self._links.keep, connection)
        self._tell(self._verified_subscribers, connection)

    async def wait_for_attempt(self, connection: Connection) -> None:
        """For `MemberLinks`."""
        await self._handshakes.wait_for_attempt(connection)

    def link_opened(self, link: int, peer: PeerId) -> None:
        """For `MemberLinks`."""
        self._feed(LinkOpened(link, peer))

    def link_closed(self, link: int, connection: Connection) -> None:
        """For `MemberLinks`."""
        entry = self._verified.get(connection.id)
        if entry is not None:
            entry.unlinked_since = trio.current_time()
        self._feed(LinkClosed(link))

    def link_message(self, link: int, message: MembersMessage) -> list[SendFrames]:
        """For `MemberLinks`."""
        self._feed(ClockObserved(self._wall_clock_s()))
        effects = self._table.handle(MessageReceived(link, message), trio.current_time())
        replies = [effect for effect in effects if isinstance(effect, SendFrames) and effect.is_reply]
        self._perform([effect for effect in effects if not (isinstance(effect, SendFrames) and effect.is_reply)])
        self._rearm()
        return replies

    def link_refused(self, connection: Connection, *, is_gone: bool) -> None:
        """For `MemberLinks`."""
        self._unverify(connection)
        if not is_gone and not self._is_leaving:
            self._seeking.prove_again(connection)

    # Effects

    def _feed(self, event: TableEvent) -> None:
        self._perform(self._table.handle(event, trio.current_time()))
        self._rearm()

    def _rearm(self) -> None:
        due = self._table.next_deadline()
        if due is not None and due < self._armed_at:
            self._wake.set()

    def _perform(self, effects: Sequence[TableEffect]) -> None:
        for effect in effects:
            match effect:
                case SendFrames():
                    self._links.send(effect)
                case MemberChanged():
                    self._tell(self._subscribers, MemberEvent(effect.kind, effect.peer))
                case MembershipEnded():
                    for entry in list(self._verified.values()):
                        if entry.connection.peer == effect.peer:
                            self._unverify(entry.connection)
                case CloseLink():
                    self._links.end(effect.link, effect.error)
                case KeepConnected():
                    self._host.add_addrs(effect.peer, effect.addrs, ttl_s=effect.ttl_s)
                    want(self._host, self.realm_id, effect.peer)
                case LetGo():
                    unwant(self._host, self.realm_id, effect.peer)

    def _unverify(self, connection: Connection) -> None:
        if self._verified.pop(connection.id, None) is None:
            return
        self._host.unprotect(connection, self.realm_id)
        self._feed(PeerUnverified(connection.id, connection.peer))
        for link in self._links.of(connection):
            self._links.end(link, NotMemberError("not a member any more"))
        if not connection.is_closed:
            self._counts["unverified_live"] += 1
            self._tell(self._loss_subscribers, connection)

    def _tell(self, subscribers: dict[int, Callable[[_T], None]], what: _T) -> None:
        for on_event in list(subscribers.values()):
            try:
                on_event(what)
            except Exception:
                # An app's mistake must not end the realm for everybody.
                self._counts["subscriber_failures"] += 1
                _logger.exception("a subscriber to member events failed")

    def _subscribe(self, subscribers: dict[int, _T], subscriber: _T) -> Callable[[], None]:
        self._subscriptions += 1
        key = self._subscriptions
        subscribers[key] = subscriber

        def end() -> None:
            subscribers.pop(key, None)

        return end
