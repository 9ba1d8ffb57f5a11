"""Membership of one realm: the trio shell around handshakes, member records and the member table."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import trio

from dep2p.errors import (
    Dep2pError,
    NotInRealmError,
    NotMemberError,
    PeerNotFoundError,
    ProtocolNotSupportedError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import (
    Connection,
    ConnectionPreferred,
    Host,
    HostEvent,
    NetworkChanged,
    PeerConnected,
    PeerDisconnected,
    PeerDiscovered,
)
from dep2p.identity import Identity
from dep2p.limits import Limits
from dep2p.outside_text import one_line
from dep2p.protocols.addresses.dialable import addrs_for_others, link_scope
from dep2p.protocols.realm.anti_entropy import SendFrames
from dep2p.protocols.realm.member_table import (
    AddrsChanged,
    ClockObserved,
    CloseLink,
    LeaveRequested,
    LinkClosed,
    LinkOpened,
    MemberChanged,
    MembershipEnded,
    MemberTable,
    MessageReceived,
    PeerUnverified,
    PeerVerified,
    ProbePeer,
    RealmMember,
    RecordsLoaded,
    ReleasePeer,
    RetainPeer,
    StatementChanged,
    TableEffect,
    TableEvent,
)
from dep2p.protocols.realm.messages import MembersMessage, encode_records, members_protocol
from dep2p.protocols.realm.offer_index import OfferIndex
from dep2p.protocols.realm.own_record import OwnRecord
from dep2p.protocols.realm.record_store import UNPROVED_PER_INTRODUCER_MAX, RecordStore, StoredRecord
from dep2p.protocols.realm.statement import MemberStatement, ServiceOffer, TopicGroup
from dep2p.realm.credentials import Realm
from dep2p.realm.handshake_responder import FEATURES, RealmResponder
from dep2p.realm.handshake_scheduler import HandshakeScheduler
from dep2p.realm.handshakes import Handshakes
from dep2p.realm.interface import MemberEvent
from dep2p.realm.member_links import MemberLinks
from dep2p.realm.records_file import load_records, save_records
from dep2p.types import PeerId, RealmId, Rng, parse_peer_id

TICK_S: Final = 15.0
"""How often the wall clock and the listen addresses are looked at."""
UNLINKED_S: Final = 30.0
"""After this long without a members stream from the peer that dialed, it has to prove itself again."""
SAVE_INTERVAL_S: Final = 5.0
LEAVE_TIMEOUT_S: Final = 2.0
PROBLEMS_MAX: Final = 8
INTRODUCERS_MAX: Final = 128
"""Peers that `problems` names one by one."""
_BOOTSTRAP_TTL_S: Final = 365 * 86_400.0
_LOAD_BATCH: Final = 32

_logger = logging.getLogger("dep2p.realm")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipOptions:
    """Options of a membership.

    ``records_path``: where the member table is kept between runs; None for nowhere. ``rng`` makes the nonces: give one
    only to tests, None is the system's. ``features``: what this node offers in handshakes. ``responder``: answers the
    handshakes of all realms of the host, so its memberships share one; None makes one for this membership alone.
    """

    records_path: Path | None = None
    rng: Rng | None = None
    wall_clock_s: Callable[[], float] = time.time
    features: Sequence[str] = FEATURES
    responder: RealmResponder | None = None


class Membership:
    """This node's membership of one realm; implements ``RealmGate``. One use: run it once."""

    def __init__(
        self, realm: Realm, host: Host, identity: Identity, limits: Limits, options: MembershipOptions | None = None
    ) -> None:
        options = options or MembershipOptions()
        features = options.features
        self.realm = realm
        self._host = host
        self._limits = limits
        self._records_path = options.records_path
        self._wall_clock_s = options.wall_clock_s
        rng = random.SystemRandom() if options.rng is None else options.rng
        self._counts: Counter[str] = Counter()
        self._table = MemberTable(
            OwnRecord(identity.peer_id, realm.keys, identity.sign, features=features),
            RecordStore(identity.peer_id, realm.keys, records_max=limits.members_per_realm_max),
            members_max=limits.members_per_realm_max,
            rng=rng,
        )
        self._responder = options.responder or RealmResponder(
            host, identity.peer_id, limits, rng=rng, features=features
        )
        self._handshakes = Handshakes(
            realm.keys,
            limits,
            responder=self._responder,
            features=features,
            rng=rng,
            counts=self._counts,
            on_verified=self._on_verified,
        )
        self._links = MemberLinks(realm.realm_id, limits, self._counts, self)
        self._handshake_scheduler = HandshakeScheduler(self, self._handshakes, identity.peer_id, self._counts, rng=rng)
        self._verified = self._handshakes.verified
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._is_leaving = False
        self._has_left = False
        self._wake = trio.Event()
        self._armed_at = 0.0
        self._addrs: tuple[str, ...] = ()
        self._retained: dict[PeerId, None] = {}
        self._introducers: dict[PeerId, None] = {}
        """Peers whose addresses came with the realm or an invite to it."""
        self._has_logged_alone = False
        self._saved_version = 0
        self._subscribers: dict[int, Callable[[MemberEvent], None]] = {}
        self._loss_subscribers: dict[int, Callable[[Connection], None]] = {}
        self._verified_subscribers: dict[int, Callable[[Connection], None]] = {}
        self._subscriptions = 0
        self._introduced: dict[int, None] = {}
        """Live connections whose peer has proved itself once: the realm is no secret to it."""
        host.restrict(self._protocols_part, self)

    # RealmGate

    @property
    def _is_running(self) -> bool:
        return self._nursery is not None and not self._is_leaving

    @property
    def realm_id(self) -> RealmId:
        """The realm's public id."""
        return self.realm.realm_id

    @property
    def _protocols_part(self) -> str:
        """The part of a protocol's id that is in those of this realm and in no other."""
        return f"/{self.realm_id}/"

    def is_open(self, connection: Connection) -> bool:
        """For the host: whether this realm's protocols show on the connection."""
        return connection.id in self._introduced

    def is_verified(self, connection: Connection) -> bool:
        """Whether the peer has proved itself on this connection and is still a member. One dict lookup.

        This node needs no proof from itself.
        """
        return connection.id in self._verified or (connection is self._host.loopback and self._is_running)

    def features(self, connection: Connection) -> frozenset[str]:
        """Return the features that the peer offered in its handshake; empty when not verified."""
        entry = self._verified.get(connection.id)
        return frozenset() if entry is None else entry.features

    def verified_connection(self, peer: PeerId) -> Connection | None:
        """The live verified connection to the peer that is to be used: the newest, unless an older one is preferred.

        For this node's own id: its connection to itself.
        """
        if peer == self._host.peer_id:
            return self._host.loopback if self._is_running else None
        return self._handshakes.connection(peer)

    async def connect(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        """A verified connection: an existing one, or by dialing and the handshake.

        ``timeout_s`` bounds both; by default the limits for dialing and for handshakes together. Raises
        PeerNotFoundError, NotMemberError (also for a peer that is not in the realm at all), RequestTimeoutError, or
        NotInRealmError when this membership does not run.
        """
        if not self._is_running:
            raise NotInRealmError(f"this node is not in the realm {self.realm.name!r}")
        limit_s = self._limits.dial_timeout_s + self._limits.handshake_timeout_s if timeout_s is None else timeout_s
        with trio.move_on_after(limit_s):
            return await self._connect(peer, addrs)
        raise RequestTimeoutError(f"no verified connection to {peer} within {limit_s:g} s")

    def subscribe_unverified(self, on_lost: Callable[[Connection], None]) -> Callable[[], None]:
        """Call ``on_lost`` when a live connection stops being verified; returns a function that ends it."""
        return self._subscribe(self._loss_subscribers, on_lost)

    def subscribe_verified(self, on_verified: Callable[[Connection], None]) -> Callable[[], None]:
        """Call ``on_verified`` for each connection on which the peer proves itself, at once and undamped; and again
        when a verified one is preferred to others of the peer.

        Returns a function that ends it.
        """
        return self._subscribe(self._verified_subscribers, on_verified)

    # For apps

    def members(self) -> list[RealmMember]:
        """All other members, also those that left lately."""
        return self._table.members()

    def member(self, peer: PeerId) -> RealmMember | None:
        """One other member."""
        return self._table.member(peer)

    @property
    def fields(self) -> Mapping[str, str]:
        """The fields of this node, by key."""
        return dict(self._table.own_statement.fields)

    def set_fields(self, fields: Mapping[str, str | None]) -> Mapping[str, str]:
        """See `Node.set_fields`."""
        before = self._table.own_statement
        merged = {key: value for key, value in {**before.fields, **fields}.items() if value is not None}
        self._state(replace(before, fields=merged))
        return merged

    def set_services(self, services: Sequence[ServiceOffer]) -> None:
        """Offer these services, in rising order. Raises ``ValueError`` when a bound is broken."""
        self._state(replace(self._table.own_statement, services=tuple(services)))

    def set_groups(self, groups: Sequence[TopicGroup]) -> None:
        """Read in these groups of topics, in rising order. Raises ``ValueError`` when a bound is broken."""
        self._state(replace(self._table.own_statement, groups=tuple(groups)))

    def _state(self, statement: MemberStatement) -> None:
        self._feed(StatementChanged(statement))

    @property
    def offers(self) -> OfferIndex:
        """Which members offer which services, and read in which groups."""
        return self._table.index

    def subscribe(self, on_event: Callable[[MemberEvent], None]) -> Callable[[], None]:
        """Call ``on_event`` for each member event; it must not block. Returns a function that ends it."""
        return self._subscribe(self._subscribers, on_event)

    def problems(self) -> tuple[str, ...]:
        """Why connected peers are not verified although this node tries, a sentence for each; at most eight."""
        now = trio.current_time()
        refusals = self._handshake_scheduler.refusals()
        texts = [
            f"no realm handshake with {refusal.peer}: {refusal.reason}; "
            f"it is tried again in {max(0.0, refusal.retry_at - now):.0f} s"
            for refusal in refusals[:PROBLEMS_MAX]
        ]
        more = len(refusals) - len(texts)
        texts += [f"the same with {more} more peers"] if more else []
        texts += [
            f"{peer} brought records of {UNPROVED_PER_INTRODUCER_MAX} members that this node never met; no more are "
            "taken from it until some of them prove themselves"
            for peer in self._table.full_introducers()[:PROBLEMS_MAX]
        ]
        return (*texts, *self._unreached())

    def introduce(self, peers: Iterable[PeerId]) -> None:
        """Name peers that an invite says are members: `problems` says so when none of them is reached."""
        for peer in peers:
            if peer != self._host.peer_id and len(self._introducers) < INTRODUCERS_MAX:
                self._introducers[peer] = None

    def _unreached(self) -> list[str]:
        """While no member is connected: which peers this node has tried, and why each was not reached."""
        if self._verified:
            return []
        failures = [(peer, self._host.dial_failure(peer)) for peer in self._introducers]
        failed = [(peer, why) for peer, why in failures if why is not None]
        texts = [
            f"no member of the realm is connected: dialing {peer} failed: {why}; it is tried again"
            for peer, why in failed[:PROBLEMS_MAX]
        ]
        return [*texts, f"the same with {len(failed) - len(texts)} more peers"] if len(failed) > len(texts) else texts

    def _log_when_alone(self) -> None:
        """Log once that no member is connected, when each peer of the invite was tried."""
        if self._verified:
            self._has_logged_alone = False
        elif not self._has_logged_alone and self._introducers:
            failures = [self._host.dial_failure(peer) for peer in self._introducers]
            if None not in failures:
                self._has_logged_alone = True
                for text in self._unreached():
                    _logger.warning("realm %r: %s", self.realm.name, one_line(text))

    def counters(self) -> dict[str, int]:
        """Monotonic counts, by name."""
        return dict(self._counts + self._table.counts + self._responder.counts_for(self.realm_id))

    async def leave(self) -> None:
        """Notify every verified member that this node leaves, wait until they know (at most some seconds), then end
        everything of this realm; `run` returns. The kept member table is deleted. Cancelling it ends the realm at once.
        """
        if self._nursery is None or self._is_leaving:
            await self._ended.wait()
            return
        self._is_leaving = True
        self._has_left = True
        try:
            self._responder.remove(self.realm_id)
            self._handshakes.use(None)
            # A peer whose handshake is in progress must hear it too.
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
                    self._responder.add(self._handshakes)
                    host.set_stream_handler(members_protocol(self.realm_id), self._links.serve)
                    unsubscribe = host.subscribe(self._on_host_event)
                    nursery.start_soon(self._tick)
                    nursery.start_soon(self._save_now_and_then)
                    self._handshake_scheduler.start(nursery)
                    for connection in host.connections():
                        nursery.start_soon(self._handshake_scheduler.try_handshake, connection)
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
            records = await trio.to_thread.run_sync(self._load, self._records_path)
            for at in range(0, len(records), _LOAD_BATCH):
                self._feed(RecordsLoaded(tuple(records[at : at + _LOAD_BATCH])))
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
                self._retain(peer)
                self.introduce([peer])

    def _end(self) -> None:
        host = self._host
        self._nursery = None
        self._handshakes.use(None)
        self._responder.remove(self.realm_id)
        self._introduced.clear()
        host.restrict(self._protocols_part, None)
        host.remove_stream_handler(members_protocol(self.realm_id))
        for entry in list(self._verified.values()):
            self._unverify(entry.connection)
        self._notify(self._loss_subscribers, host.loopback)
        for peer in list(self._retained):
            self._release(peer)
        path = self._records_path
        if path is None:
            return
        try:
            if self._has_left:
                path.unlink(missing_ok=True)
            elif self._table.version != self._saved_version:
                save_records(path, self._table.stored())
        except OSError as error:
            self._note_save_failure(path, error)

    async def _connect(self, peer: PeerId, addrs: Sequence[str]) -> Connection:
        for _ in range(2):
            verified = self.verified_connection(peer)
            if verified is not None:
                await trio.lowlevel.checkpoint()
                return verified
            known = [*addrs, *self._table.dialable_addrs(peer)]
            connection = await self._host.dial(peer, list(dict.fromkeys(known)))
            try:
                await self._handshakes.settle(connection)
            except StreamClosedError:
                continue  # the connection ended meanwhile: once more with a new one
            except (ProtocolNotSupportedError, NotMemberError):
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
            self._reauthenticate_unlinked(now)
            self._log_when_alone()

    def _look_at_addrs(self) -> None:
        addrs = addrs_for_others(self._host.listen_addrs())
        if addrs != self._addrs or self._table.own_record is None:
            self._addrs = addrs
            self._feed(AddrsChanged(addrs))

    def _reauthenticate_unlinked(self, now: float) -> None:
        """A peer that dialed opens the members stream; one that does not may be in the realm no more."""
        for entry in list(self._verified.values()):
            connection = entry.connection
            if connection.direction == "outbound" or self._links.of(connection):
                entry.unlinked_since = now
            elif now - entry.unlinked_since > UNLINKED_S:
                entry.unlinked_since = now
                self._handshake_scheduler.reauthenticate(connection)

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
                    await trio.to_thread.run_sync(save_records, path, self._table.stored())
                    self._saved_version = version
                except OSError as error:
                    self._note_save_failure(path, error)

    def _note_save_failure(self, path: Path, error: OSError) -> None:
        if self._counts["save_failures"] == 0:
            _logger.warning("cannot write the member records %s (%s): trying on, in silence", path, error.strerror)
        self._counts["save_failures"] += 1

    def _load(self, path: Path) -> list[StoredRecord]:
        return load_records(path, records_max=self._limits.members_per_realm_max)

    # Calls of the host, the handshakes and the links

    def _on_host_event(self, event: HostEvent) -> None:
        match event:
            case PeerConnected():
                # The side that dialed begins; the other one would only double the work.
                if event.connection.direction == "outbound" and self._nursery is not None:
                    self._nursery.start_soon(self._handshake_scheduler.try_handshake, event.connection)
            case PeerDisconnected():
                self._handshake_scheduler.disconnected(event.connection)
                self._unverify(event.connection)
                self._introduced.pop(event.connection.id, None)
            case ConnectionPreferred():
                if event.connection.id in self._verified:
                    self._notify(self._verified_subscribers, event.connection)
            case PeerDiscovered():
                self._handshake_scheduler.discovered(event)
            case NetworkChanged():
                self._look_at_addrs()

    def _on_verified(self, connection: Connection) -> None:
        self._introduced[connection.id] = None
        self._host.protect(connection, self.realm_id)
        self._feed(PeerVerified(connection.id, connection.peer))
        if connection.direction == "outbound" and self._nursery is not None:
            self._nursery.start_soon(self._links.keep, connection)
        self._notify(self._verified_subscribers, connection)

    def is_up(self, peer: PeerId) -> bool:
        """For `HandshakeScheduler`: whether the peer is a member that is up, as far as this node knows."""
        member = self._table.member(peer)
        return member is not None and member.state == "up"

    def discovered(self) -> list[PeerDiscovered]:
        """For `HandshakeScheduler`: the peers that discovery has named."""
        return self._host.discovered()

    async def wait_for_attempt(self, connection: Connection) -> None:
        """For `MemberLinks`, and for the host before it says that it does not speak a protocol."""
        await self._handshakes.wait_for_attempt(connection)

    def link_opened(self, link: int, connection: Connection) -> None:
        """For `MemberLinks`."""
        self._feed(LinkOpened(link, connection.peer, link_scope(connection.remote_addr)))

    def link_closed(self, link: int, connection: Connection) -> None:
        """For `MemberLinks`."""
        entry = self._verified.get(connection.id)
        if entry is not None:
            entry.unlinked_since = trio.current_time()
        self._feed(LinkClosed(link))

    def link_message(self, link: int, message: MembersMessage, *, has_more: bool) -> list[SendFrames]:
        """For `MemberLinks`."""
        self._feed(ClockObserved(self._wall_clock_s()))
        effects = self._table.handle(MessageReceived(link, message, has_more), trio.current_time())
        replies = [effect for effect in effects if isinstance(effect, SendFrames) and effect.is_reply]
        self._perform([effect for effect in effects if not (isinstance(effect, SendFrames) and effect.is_reply)])
        self._rearm()
        return replies

    def link_refused(self, connection: Connection, *, is_gone: bool) -> None:
        """For `MemberLinks`."""
        self._unverify(connection)
        if not is_gone and not self._is_leaving:
            self._handshake_scheduler.reauthenticate(connection)

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
                    self._notify(self._subscribers, MemberEvent(effect.kind, effect.peer))
                case MembershipEnded():
                    for entry in list(self._verified.values()):
                        if entry.connection.peer == effect.peer:
                            self._unverify(entry.connection)
                case CloseLink():
                    self._links.end(effect.link, effect.error)
                case RetainPeer():
                    self._host.add_addrs(effect.peer, effect.addrs, ttl_s=effect.ttl_s)
                    self._retain(effect.peer)
                case ReleasePeer():
                    self._release(effect.peer)
                case ProbePeer():
                    if self._nursery is not None:
                        self._nursery.start_soon(self._probe, effect)

    async def _probe(self, probe: ProbePeer) -> None:
        """One dial of a member that never proved itself here; success shows as a verified connection."""
        self._counts["probes"] += 1
        try:
            with trio.move_on_after(self._limits.dial_timeout_s + self._limits.handshake_timeout_s):
                connection = await self._host.dial(probe.peer, probe.addrs)
                await self._handshakes.settle(connection)
        except Dep2pError as error:
            self._counts["probes_failed"] += 1
            _logger.debug("%s is not met: %s", probe.peer, error)

    def _retain(self, peer: PeerId) -> None:
        """The realm needs a connection to the peer."""
        self._retained[peer] = None
        self._host.keep_connected(peer, self.realm_id)

    def _release(self, peer: PeerId) -> None:
        if self._retained.pop(peer, peer) is None:
            self._host.forget(peer, self.realm_id)

    def _unverify(self, connection: Connection) -> None:
        if self._verified.pop(connection.id, None) is None:
            return
        self._host.unprotect(connection, self.realm_id)
        self._feed(PeerUnverified(connection.id, connection.peer))
        for link in self._links.of(connection):
            self._links.end(link, NotMemberError("not a member any more"))
        if not connection.is_closed:
            self._counts["unverified_live"] += 1
            self._notify(self._loss_subscribers, connection)

    def _notify(self, subscribers: dict[int, Callable[[_T], None]], what: _T) -> None:
        for on_event in list(subscribers.values()):
            try:
                on_event(what)
            except Exception:
                # An app's mistake must not end the realm for other subscribers.
                self._counts["subscriber_failures"] += 1
                _logger.exception("a subscriber to member events failed")

    def _subscribe(self, subscribers: dict[int, _T], subscriber: _T) -> Callable[[], None]:
        self._subscriptions += 1
        key = self._subscriptions
        subscribers[key] = subscriber

        def end() -> None:
            subscribers.pop(key, None)

        return end
