"""Feeds that many readers share: the node's events, and the notifies that arrive."""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from dep2p.control_api.encoding import encode_headers, encode_line, fields_of
from dep2p.control_api.replies import EventLine, MemberEventFields, NotifyLine
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.node_interface import IncomingNotify, MessagingInterface, NodeInterface
from dep2p.daemon.problems import Problem, problem_of
from dep2p.errors import HandlerError
from dep2p.host.interface import ConnectionPreferred, HostEvent, NetworkChanged, PeerConnected, PeerDiscovered
from dep2p.messaging.handlers import HandlerAwayError
from dep2p.node.summaries import offered
from dep2p.outside_text import one_line
from dep2p.realm.interface import MemberEvent
from dep2p.types import RealmId

_logger = logging.getLogger("dep2p.daemon.events")

EVENT_KINDS = (
    "peer_connected",
    "peer_disconnected",
    "peer_discovered",
    "member_joined",
    "member_up",
    "member_down",
    "member_left",
    "member_expired",
    "member_changed",
)
_QUIET = frozenset({"peer_discovered", "member_changed"})
"""Events that may be many: in the log from the level debug on."""


class EventFeed:
    """Events of peers and members. One event drives its log line, its count and its readers."""

    def __init__(self, node: NodeInterface, subscriptions: SubscriptionRegistry, counts: Counter[str]) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._counts = counts
        self._readers: dict[LineQueue, tuple[frozenset[str], RealmId | None]] = {}
        self._last_id = 0
        self._undo = [node.subscribe_peers(self._on_host), node.subscribe_members(self._on_member)]

    def close(self) -> None:
        """Stop listening to the node."""
        for undo in self._undo:
            undo()

    def subscribe(self, kinds: frozenset[str], only: RealmId | None = None) -> tuple[LineQueue, Callable[[], None]]:
        """Return a queue of events of these kinds, and a function that ends it. ``only``: those of members of other
        realms are left out."""
        queue = self._subscriptions.open("events")
        self._readers[queue] = kinds, only

        def end() -> None:
            self._readers.pop(queue, None)
            self._subscriptions.forget(queue)

        return queue, end

    def _emit(self, kind: str, **fields: object) -> None:
        self._note(kind, fields)
        if self._readers:
            self._write_to_readers(kind, fields, None)

    def _note(self, kind: str, fields: Mapping[str, object]) -> None:
        self._last_id += 1
        self._counts[f"event_{kind}"] += 1
        _logger.log(logging.DEBUG if kind in _QUIET else logging.INFO, kind.replace("_", " "), extra=fields)

    def _write_to_readers(self, kind: str, fields: Mapping[str, object], realm_id: RealmId | None) -> None:
        head = EventLine(id=self._last_id, kind=kind, time_s=round(time.time(), 3))
        line = encode_line({**fields_of(head), **fields})
        for queue, (kinds, only) in self._readers.items():
            if kind in kinds and (only is None or realm_id in (None, only)):
                queue.put(line)

    def _on_host(self, event: HostEvent) -> None:
        if isinstance(event, PeerDiscovered):
            self._emit("peer_discovered", peer=event.peer, addrs=list(event.addrs), source=event.source)
            return
        if isinstance(event, ConnectionPreferred | NetworkChanged):
            return  # of interest inside of the node only
        connection = event.connection
        fields = {
            "peer": connection.peer,
            "connection": connection.id,
            "direction": connection.direction,
            "addr": connection.remote_addr,
        }
        if isinstance(event, PeerConnected):
            self._emit("peer_connected", **fields)
        else:
            self._emit("peer_disconnected", **fields, last=event.last, reason=event.reason)

    def _on_member(self, realm_id: RealmId, event: MemberEvent) -> None:
        name = next((realm.name for realm in self._node.realms() if realm.realm_id == realm_id), "")
        kind = f"member_{event.kind}"
        fields: dict[str, object] = {"peer": event.peer, "realm": name, "realm_id": realm_id}
        self._note(kind, fields)
        if self._readers:
            member = self._node.membership(realm_id).member(event.peer) if name else None
            said = MemberEventFields()
            if member is not None:
                said = MemberEventFields(member.state, dict(member.fields), offered(member.services))
            self._write_to_readers(kind, fields | fields_of(said), realm_id)


@dataclass(slots=True, eq=False)
class _Unconfirmed:
    """A reliable message that a program has in hand."""

    ended: trio.Event = field(default_factory=trio.Event)
    error: str | None = None
    is_gone: bool = False
    """Whether the program went away without a word."""


@dataclass(slots=True, eq=False)
class _Reader:
    """A program that reads the notifies of a name."""

    only: RealmId | None
    """The one realm that it asked for; None: all."""
    confirms: bool
    in_hand: dict[str, _Unconfirmed] = field(default_factory=dict[str, _Unconfirmed])

    def reads(self, realm_id: RealmId) -> bool:
        """Return whether it gets notifies of this realm."""
        return self.only is None or self.only == realm_id


class NotifyFeed:
    """One handler for each name in use, and its readers. Each notify is encoded once, however many read it."""

    def __init__(self, node: NodeInterface, subscriptions: SubscriptionRegistry, bounds: ControlBounds) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._bounds = bounds
        self._names: dict[str, dict[LineQueue, _Reader]] = {}
        self._unregister: dict[str, Callable[[], None]] = {}
        self._in_hand: dict[str, _Unconfirmed] = {}

    @property
    def unconfirmed_count(self) -> int:
        """The number of reliable messages that programs have in hand."""
        return len(self._in_hand)

    def subscribe(
        self, name: str, realm: str | None, rate_per_s: float = 0.0, *, confirms: bool = False
    ) -> tuple[LineQueue, Callable[[], None]]:
        """Return a queue of the notifies ``name`` of every realm, or of one, and a function that ends it.

        ``confirms``: the program says by `confirm` when it has handled a reliable message. Raises NotInRealmError.
        """
        only = None if realm is None else self._node.messaging(realm).realm_id
        queue = self._subscriptions.open("notifies")
        if name not in self._names:
            self._names[name] = {}
            try:
                self._unregister[name] = self._node.handle(
                    None, lambda messaging: self._register(messaging, name, rate_per_s)
                )
            except BaseException:
                del self._names[name]
                self._subscriptions.forget(queue)
                raise
        reader = self._names[name][queue] = _Reader(only, confirms)

        def end() -> None:
            self._subscriptions.forget(queue)
            for message in reader.in_hand.values():
                message.is_gone = True
                message.ended.set()
            readers = self._names[name]
            readers.pop(queue, None)
            if not readers and name in self._unregister:
                del self._names[name]
                self._unregister.pop(name)()

        return queue, end

    def confirm(self, message_id: str, error: str | None) -> None:
        """Note that a program has handled a reliable message, or rejects it. Raises :class:`Problem` D5011."""
        message = self._in_hand.pop(message_id, None)
        if message is None or message.ended.is_set():
            raise Problem("D5011", f"no reliable message {message_id[:40]!r} waits to be confirmed")
        message.error = error
        message.ended.set()

    async def _deliver(self, notify: NotifyLine) -> None:
        """Return when a reader that confirms has handled the message, or another reader's program has it in its
        socket, where it outlives this process.

        Raises HandlerAwayError when no reader is left, HandlerError when the reader rejects it. Readers that are not
        the first one get it as other lines.
        """
        line = encode_line(notify)
        copied_to = set[LineQueue]()
        while True:
            readers = [
                (queue, reader)
                for queue, reader in self._names.get(notify.name, {}).items()
                if reader.reads(notify.realm_id) and not queue.is_closed
            ]
            if not readers:
                raise HandlerAwayError
            for other, _ in readers[1:]:
                if other not in copied_to:
                    other.put(line)
                    copied_to.add(other)
            queue, reader = readers[0]
            if await (self._handled(queue, reader, notify) if reader.confirms else queue.deliver(line)):
                return

    async def _handled(self, queue: LineQueue, reader: _Reader, notify: NotifyLine) -> bool:
        """Return true when the program has handled the message, false when it is gone. Raises HandlerError."""
        message_id = secrets.token_hex(8)
        message = self._in_hand[message_id] = reader.in_hand[message_id] = _Unconfirmed()
        try:
            if not await queue.deliver(encode_line(replace(notify, id=message_id))):
                return False
            await self._until_ended(message, queue, notify)
        finally:
            self._in_hand.pop(message_id, None)
            reader.in_hand.pop(message_id, None)
        if message.error is not None:
            raise HandlerError(message.error)
        return message.ended.is_set() and not message.is_gone

    async def _until_ended(self, message: _Unconfirmed, queue: LineQueue, notify: NotifyLine) -> None:
        """Wait for the program's word; end the subscription of one that gives none."""
        bounds = self._bounds
        with trio.move_on_after(bounds.confirm_warn_s):
            await message.ended.wait()
            return
        fields = {"peer": notify.peer}
        _logger.warning(
            "a program has had a reliable message %r in hand for %g s: the further messages of its sender wait",
            one_line(notify.name),
            bounds.confirm_warn_s,
            extra=fields,
        )
        with trio.move_on_after(bounds.confirm_timeout_s - bounds.confirm_warn_s):
            await message.ended.wait()
            return
        _logger.warning(
            "a reliable message %r was not confirmed for %g s: its program's subscription ends; the message goes on",
            one_line(notify.name),
            bounds.confirm_timeout_s,
            extra=fields,
        )
        text = f"a reliable message was not confirmed within {bounds.confirm_timeout_s:g} s"
        queue.close(encode_line({"error": problem_of(Problem("D5001", text))}))

    def _register(self, messaging: MessagingInterface, name: str, rate_per_s: float) -> Callable[[], None]:
        realm_id = messaging.realm_id

        async def take(notification: IncomingNotify) -> None:
            readers = self._names.get(name)
            if readers:
                notify = NotifyLine(
                    peer=notification.peer,
                    name=notification.name,
                    realm_id=realm_id,
                    data=bytes(notification.body),
                    headers=encode_headers(dict(notification.headers)),
                    received_at_s=round(time.time(), 6),
                )
                if notification.is_reliable:
                    await self._deliver(notify)
                    return
                line = encode_line(notify)
                for queue, reader in readers.items():
                    if reader.reads(realm_id):
                        queue.put(line)

        return messaging.on_notify(name, take, concurrency=64, rate_per_s=rate_per_s)
