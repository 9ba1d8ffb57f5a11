"""Feeds that many readers share: the node's events, and the notifies that arrive."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from dep2p.control_api.encoding import encode_headers, encode_line, fields_of
from dep2p.control_api.replies import EventLine, MessageLine
from dep2p.daemon.api.resources.subscriptions import LineQueue, SubscriptionRegistry
from dep2p.daemon.node_interface import IncomingMessage, MessagingInterface, NodeInterface
from dep2p.host.interface import ConnectionPreferred, HostEvent, PeerConnected, PeerDiscovered
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
)
_QUIET = frozenset({"peer_discovered"})


class EventFeed:
    """Events of peers and members. One event drives its log line, its count and its readers."""

    def __init__(self, node: NodeInterface, subscriptions: SubscriptionRegistry, counts: Counter[str]) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._counts = counts
        self._readers: dict[LineQueue, frozenset[str]] = {}
        self._last_id = 0
        self._undo = [node.subscribe_peers(self._on_host), node.subscribe_members(self._on_member)]

    def close(self) -> None:
        """Stop listening to the node."""
        for undo in self._undo:
            undo()

    def subscribe(self, kinds: frozenset[str]) -> tuple[LineQueue, Callable[[], None]]:
        """Return a queue of events of these kinds, and a function that ends it."""
        queue = self._subscriptions.open("events")
        self._readers[queue] = kinds

        def end() -> None:
            self._readers.pop(queue, None)
            self._subscriptions.forget(queue)

        return queue, end

    def _emit(self, kind: str, **fields: object) -> None:
        self._last_id += 1
        self._counts[f"event_{kind}"] += 1
        _logger.log(logging.DEBUG if kind in _QUIET else logging.INFO, kind.replace("_", " "), extra=fields)
        if self._readers:
            head = EventLine(id=self._last_id, kind=kind, time_s=round(time.time(), 3))
            line = encode_line(fields_of(head) | fields)
            for queue, kinds in self._readers.items():
                if kind in kinds:
                    queue.put(line)

    def _on_host(self, event: HostEvent) -> None:
        if isinstance(event, PeerDiscovered):
            self._emit("peer_discovered", peer=event.peer, addrs=list(event.addrs), source=event.source)
            return
        if isinstance(event, ConnectionPreferred):
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
        names = [realm.name for realm in self._node.realms() if realm.realm_id == realm_id]
        self._emit(f"member_{event.kind}", peer=event.peer, realm=names[0] if names else "", realm_id=realm_id)


class NotifyFeed:
    """One handler for each name in use, and its readers. Each notify is encoded once, however many read it."""

    def __init__(self, node: NodeInterface, subscriptions: SubscriptionRegistry) -> None:
        self._node = node
        self._subscriptions = subscriptions
        self._names: dict[str, dict[LineQueue, RealmId | None]] = {}
        self._unregister: dict[str, Callable[[], None]] = {}

    def subscribe(self, name: str, realm: str | None) -> tuple[LineQueue, Callable[[], None]]:
        """Return a queue of the notifies ``name`` of every realm, or of one, and a function that ends it. Raises
        NotInRealmError."""
        only = None if realm is None else self._node.messaging(realm).realm_id
        queue = self._subscriptions.open("notifies")
        if name not in self._names:
            self._names[name] = {}
            try:
                self._unregister[name] = self._node.handle(None, lambda messaging: self._register(messaging, name))
            except BaseException:
                del self._names[name]
                self._subscriptions.forget(queue)
                raise
        self._names[name][queue] = only

        def end() -> None:
            self._subscriptions.forget(queue)
            readers = self._names[name]
            readers.pop(queue, None)
            if not readers and name in self._unregister:
                del self._names[name]
                self._unregister.pop(name)()

        return queue, end

    def _register(self, messaging: MessagingInterface, name: str) -> Callable[[], None]:
        realm_id = messaging.realm_id

        async def take(notification: IncomingMessage) -> None:
            readers = self._names.get(name)
            if readers:
                line = encode_line(
                    MessageLine(
                        peer=notification.peer,
                        name=notification.name,
                        realm_id=realm_id,
                        data=bytes(notification.body),
                        headers=encode_headers(dict(notification.headers)),
                    )
                )
                for queue, only in readers.items():
                    if only is None or only == realm_id:
                        queue.put(line)

        return messaging.on_notify(name, take, concurrency=64)
