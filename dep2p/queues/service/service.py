"""The queues of one joined realm: those that this node keeps for its members, and those of other members."""

import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import trio

from dep2p.errors import (
    Dep2pError,
    ProtocolError,
    QueueExistsError,
    QueueNotFoundError,
    RequestTimeoutError,
    StreamClosedError,
)
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import Limits
from dep2p.links.link import LinkPool
from dep2p.protocols.queues import wire
from dep2p.protocols.queues.ordering.placement import is_share_of
from dep2p.protocols.queues.wire import WireMessage, queue_protocol
from dep2p.protocols.queues.wire_exclusive import MEMBER_BYTES
from dep2p.protocols.wire.frame import encode_frame
from dep2p.queues.access import Right, Rights
from dep2p.queues.api.queues import Queues
from dep2p.queues.broker.admin import RIGHTS, perform
from dep2p.queues.broker.connection import ServedQueueLink
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.local_consumer import LocalConsumer
from dep2p.queues.broker.ownership import Keeping
from dep2p.queues.client_metrics import FlowCounts
from dep2p.queues.consumer import Consumer
from dep2p.queues.distributed.controller import QueueHome
from dep2p.queues.distributed.queue import PlacedQueue
from dep2p.queues.remote.abandoned_receives import Receivings
from dep2p.queues.remote.broker_directory import Ways, answer_of
from dep2p.queues.remote.consumer import RemoteConsumer
from dep2p.queues.remote.exclusive_port import RemotePort
from dep2p.queues.remote.link import QueueLink
from dep2p.queues.remote.publisher import PeerPublisher
from dep2p.queues.service.realm_queues import LocalQueues, RealmQueues, RemoteQueues
from dep2p.queues.types import new_messages
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId, RealmId, Rng, parse_peer_id

logger = logging.getLogger("dep2p.io")

_LINKS_PER_PEER: Final = 4
"""Streams of one peer: more than one only for a moment when it reconnects."""
_IDLE_CHECK_S: Final = 30.0
_BYTES_MAX_DEFAULT: Final = 8_388_608
_DRAIN_STEP_S: Final = 0.02
_PLACED_MAX: Final = 1_000
"""Tables of queues on several nodes; the one that came first is forgotten, and asked for again."""


class QueueService:
    """The queues of one realm. Everything but `run` may be called while `run` runs in another task."""

    def __init__(
        self,
        host: Host,
        gate: RealmGate,
        realm_id: RealmId,
        limits: Limits,
        keeping: Keeping,
        rights: Rights,
        *,
        rng: Rng,
    ) -> None:
        self.protocol = queue_protocol(realm_id)
        self._host = host
        self._gate = gate
        self._realm_id = realm_id
        self._limits = limits
        self._keeping = keeping
        self._rights = rights
        self._rng = rng
        self._counters: Counter[str] = Counter()
        self._served: dict[ServedQueueLink, None] = {}
        self._publishers: dict[PeerId, PeerPublisher] = {}
        self._publisher_scopes: dict[PeerId, trio.CancelScope] = {}
        self._consumers: dict[RemoteConsumer, None] = {}
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self.home = QueueHome(keeping, rights, realm_id, host.peer_id, self._place)
        """Of queues whose partitions are on several nodes."""
        self._placed: dict[tuple[PeerId, str], PlacedQueue] = {}
        self.receivings = Receivings(self._counters, self._start_soon, rng)
        self._pool: LinkPool[QueueLink] = LinkPool(gate, self.protocol, limits, self._counters, self._make_link)
        self._ways = Ways(self._pool, host.peer_id, self._counters, lambda: keeping.is_shared and keeping.is_here)

    # Life

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        unsubscribe = self._gate.subscribe_unverified(self._on_unverified)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._pool.serve_in(nursery)
                self._host.set_stream_handler(self.protocol, self._accept)
                nursery.start_soon(self.home.run)
                nursery.start_soon(self._ways.run)
                task_status.started()
                while True:
                    await trio.sleep(_IDLE_CHECK_S)
                    self._pool.close_idle()
                    self._end_idle_publishers()
        finally:
            self._nursery = None
            self._pool.serve_in(None)
            unsubscribe()
            self._host.remove_stream_handler(self.protocol)

    async def drain(self) -> None:
        """Take no new streams and hand out nothing more. Wait until what was published to others is answered, and what
        others hold is settled, at most ``drain_timeout_s``."""
        self._is_draining = True
        for served in self._served:
            served.drain()
        with trio.move_on_after(self._limits.drain_timeout_s):
            while self._is_busy:  # noqa: ASYNC110  (once in a life)
                await trio.sleep(_DRAIN_STEP_S)
            for link in self._pool.links.copy().values():
                await link.flush()  # results of consumers that were closed a moment ago

    @property
    def _is_busy(self) -> bool:
        return any(not publisher.is_idle for publisher in self._publishers.values()) or any(
            link.is_holding for link in self._served
        )

    def _on_unverified(self, connection: Connection) -> None:
        for link in [*self._served, *self._pool.links.values()]:
            if link.connection.id == connection.id:
                link.lose_membership()

    def _make_link(self, stream: ByteStream) -> QueueLink:
        self._ways.linked()
        return QueueLink(stream, self._gate, self._limits, self._counters, self._pool.forget)

    def _end_idle_publishers(self) -> None:
        links = self._pool.links
        for peer in [peer for peer, each in self._publishers.items() if each.is_idle and each.way.at not in links]:
            self._publisher_scopes.pop(peer).cancel()
            del self._publishers[peer]

    # Serving

    async def _accept(self, stream: ByteStream) -> None:
        nursery = self._nursery
        peer = stream.connection.peer
        if nursery is None or self._is_draining:
            stream.reset()
        elif sum(link.peer == peer for link in self._served) >= _LINKS_PER_PEER:
            self._counters["links_refused_per_peer_max"] += 1
            stream.reset()
        else:
            nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: ByteStream) -> None:
        link = ServedQueueLink(stream, self._gate, self._limits, self._counters, self)
        self._served[link] = None
        self._counters["links_served"] += 1
        try:
            if not self._gate.is_verified(stream.connection):
                link.lose_membership()
            await link.serve()
        finally:
            del self._served[link]

    @property
    def _engine(self) -> QueueEngine:
        """Raises NotOwnerError while another node keeps the queues."""
        return self._keeping.engine

    def publish_soon(
        self,
        peer: PeerId,
        name: str,
        messages: Sequence[WireMessage],
        publisher: tuple[bytes, int] | None,
        on_done: Callable[[Sequence[tuple[int, int]], Dep2pError | None], None],
    ) -> None:
        """See `QueueHost`."""
        engine = self._engine
        self._require(name, peer, Right.PUBLISH)
        engine.publish_soon(self._realm_id, name, new_messages(messages), publisher, on_done)

    async def subscribe(
        self,
        peer: PeerId,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        bytes_max: int,
        from_start: bool,
        filter_text: str = "",
        member: bytes = b"",
        of_placed: bool = False,
    ) -> LocalConsumer:
        """See `QueueHost`."""
        engine = self._engine
        self._require(name, peer, Right.CONSUME)
        return await engine.subscribe(
            self._realm_id,
            name,
            channel,
            max_in_flight=max_in_flight,
            bytes_max=bytes_max,
            from_start=from_start,
            filter_text=filter_text,
            owner=f"peer {peer}",
            member=member,
            of_placed=of_placed,
        )

    async def administer(self, peer: PeerId, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """See `QueueHost`."""
        if op == "keepers":
            return self._keeping.keepers()
        with self._keeping.term():
            return await self._administer(peer, op, fields)

    async def _administer(self, peer: PeerId, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        right = RIGHTS.get(op)
        if right is None:
            raise ProtocolError(f"no operation {op[:40]!r} on queues")
        name = fields.get("queue")
        if right is Right.CREATE:
            self._require_create(fields, peer)
        elif isinstance(name, str) and right is not Right.LOOK:
            self._require(name, peer, right)
            if op == "delete":
                try:
                    self._require_own_share(fields, peer)
                except QueueExistsError as error:  # the home has no share there, and could not make it
                    raise QueueNotFoundError(str(error)) from None
        return await self._perform(op, fields, f"peer {peer}", peer)

    def _require(self, name: str, peer: PeerId, right: Right) -> None:
        """The nodes that share the store are its owners alike."""
        if peer not in self._keeping.nodes:
            self._rights.require(self._realm_id, name, peer, right)

    def _require_create(self, fields: Mapping[str, object], peer: PeerId | None) -> None:
        """Also the one for whom the home of a placed queue asks may make queues here. None: this node asks."""
        asker = fields.get("for")
        for each in (peer, None if asker is None else parse_peer_id(str(asker))):
            if each is not None and not self._is_own(each):
                self._rights.require_create(self._realm_id, each, fields, is_there=self._is_there(fields))
        self._require_own_share(fields, peer)

    def _is_there(self, fields: Mapping[str, object]) -> bool:
        return (self._realm_id, str(fields.get("queue"))) in self._engine.book.queues

    def _require_own_share(self, fields: Mapping[str, object], home: PeerId | None) -> None:
        """Whoever made a queue of the name of a home's share before may read it, whatever access the home sets then.

        Raises QueueExistsError. None: this node is the home.
        """
        name = fields.get("queue")
        if not isinstance(name, str) or not is_share_of(name, home or self._host.peer_id):
            return
        found = self._engine.book.queues.get((self._realm_id, name))
        if found is not None and found.made_by != (home or ""):
            raise QueueExistsError(
                f"the queue {name!r} is there, and was not made by {home or 'this node'}, whose partition would have "
                "that name: export what is in it, then delete it (`dep2p queue rm`)"
            )

    async def _perform(
        self, op: str, fields: Mapping[str, object], owner: str, asker: PeerId | None = None
    ) -> dict[str, Any]:
        async def plain(op: str, fields: Mapping[str, object]) -> dict[str, Any]:
            fields = {name: value for name, value in fields.items() if name != "nodes"}
            return await perform(self._engine, self._rights, self._realm_id, op, fields, owner)

        if self.home.handles(op, fields):
            return await self.home.perform(op, fields, plain, asker)
        return await perform(self._engine, self._rights, self._realm_id, op, fields, owner)

    # Asking others

    def elsewhere(self) -> "RemoteQueues | None":
        """While another node that shares the store keeps the queues: those are its."""
        if self._keeping.is_here:
            return None
        others = [each for each in (self._keeping.owner, *self._keeping.nodes) if each not in ("", self._host.peer_id)]
        if not others:
            return None
        self._ways.to(PeerId(others[0])).keepers.add([*others, self._host.peer_id])
        return self.at(PeerId(others[0]))

    def own(self) -> LocalQueues:
        """The queues that this node keeps for the realm."""
        return LocalQueues(self._keeping, self._rights, self._realm_id, self)

    async def perform_own(self, op: str, fields: Mapping[str, object]) -> dict[str, Any]:
        """An administrative request of a program of this node."""
        with self._keeping.term():
            if RIGHTS[op] is Right.CREATE:
                self._require_create(fields, None)
            return await self._perform(op, fields, "local")

    def _place(self, node: str) -> Queues:
        peer = parse_peer_id(node)
        return self.own() if self._is_own(peer) else self.at(peer)

    def _is_own(self, peer: PeerId) -> bool:
        """Also one that shares the store: what it kept, this node keeps in its place."""
        return peer == self._host.peer_id or peer in self._keeping.nodes

    def _share_at(self, node: str) -> RealmQueues:
        """Of a placed queue, of any home: here, too, this node is a member like others."""
        peer = parse_peer_id(node)
        if not self._is_own(peer):
            return self.at(peer)
        return LocalQueues(self._keeping, self._rights, self._realm_id, self, as_member=self._host.peer_id)

    def _is_up(self, node: str) -> bool:
        peer = parse_peer_id(node)
        if self._is_own(peer):
            return self._keeping.is_here or self._is_up_at(self._keeping.owner)
        return self._is_up_at(self._ways.to(peer).at)

    def _is_up_at(self, peer: str) -> bool:
        return bool(peer) and self._gate.verified_connection(PeerId(peer)) is not None

    def placed(self, peer: PeerId | None, name: str) -> PlacedQueue:
        """A queue whose partitions are on several nodes, by its home; None: this node."""
        peer = peer or self._host.peer_id
        found = self._placed.get((peer, name))
        if found is None:
            home = self.own() if self._is_own(peer) else self.at(peer)
            found = PlacedQueue(
                name,
                lambda: self._homes(peer),
                home,
                self._share_at,
                self._is_up,
                self._counters,
                self.receivings,
                self._start_soon,
            )
            while len(self._placed) >= _PLACED_MAX:
                del self._placed[next(iter(self._placed))]
            self._placed[peer, name] = found
        return found

    def _homes(self, peer: PeerId) -> Sequence[str]:
        if self._is_own(peer):
            return [*dict.fromkeys([peer, *self._keeping.nodes])]
        return self._ways.to(peer).keepers.nodes

    def known_placed(self, peer: PeerId | None, name: str) -> PlacedQueue | None:
        """One that was used here before."""
        return self._placed.get((peer or self._host.peer_id, name))

    def forget_placed(self, peer: PeerId | None, name: str) -> None:
        """It is no such queue any more."""
        self._placed.pop((peer or self._host.peer_id, name), None)

    def _start_soon(self, run: Callable[[], Awaitable[None]]) -> None:
        if self._nursery is None:
            raise StreamClosedError("queues are not running")
        self._nursery.start_soon(run)

    def at(self, peer: PeerId, *others: PeerId) -> RemoteQueues:
        """The queues that another member keeps, or one of ``others``, which share its store."""
        if others:
            self._ways.to(peer).keepers.add(others)
        return RemoteQueues(self, peer)

    async def publish(
        self, peer: PeerId, name: str, messages: Sequence[WireMessage], timeout_s: float | None
    ) -> list[tuple[int, int]]:
        """To a member's queue."""
        publisher = self._publishers.get(peer)
        if publisher is None:
            if self._nursery is None:
                raise StreamClosedError("queues are not running")
            publisher = PeerPublisher(self._ways.to(peer), self._limits, self._counters, self._rng)
            self._publishers[peer] = publisher
            self._nursery.start_soon(self._run_publisher, peer, publisher)
        timeout_s = self._limits.request_timeout_s if timeout_s is None else timeout_s
        return [*await publisher.publish(name, messages, timeout_s)]

    async def _run_publisher(self, peer: PeerId, publisher: PeerPublisher) -> None:
        with trio.CancelScope() as scope:
            self._publisher_scopes[peer] = scope
            await publisher.run()

    async def consume(
        self,
        peer: PeerId,
        name: str,
        channel: str,
        *,
        max_in_flight: int,
        from_start: bool,
        bytes_max: int | None,
        filter_text: str = "",
        exclusive: bool = False,
        of_placed: bool = False,
    ) -> Consumer:
        """From a member's queue."""
        nursery = self._nursery
        if nursery is None:
            raise StreamClosedError("queues are not running")
        options: dict[str, object] = {"q": name, "c": channel, "n": max_in_flight, "b": bytes_max or _BYTES_MAX_DEFAULT}
        if from_start:
            options["s"] = True
        if filter_text:
            options["f"] = filter_text
        if of_placed:
            options["p"] = True
        consumer: RemoteConsumer
        if exclusive:
            member = self._rng.randbytes(MEMBER_BYTES)
            consumer = RemotePort(self._ways.to(peer), name, channel, options, self._limits, self._counters, member)
        else:
            consumer = RemoteConsumer(self._ways.to(peer), name, channel, options, self._limits, self._counters)
        self._consumers[consumer] = None
        nursery.start_soon(self._run_consumer, consumer)
        try:
            with trio.fail_after(self._limits.request_timeout_s):
                await consumer.subscribed.wait()
        except BaseException as error:
            await _close(consumer)
            if isinstance(error, trio.TooSlowError):
                raise RequestTimeoutError(
                    f"{peer} cannot be reached within {self._limits.request_timeout_s:g} s to consume {name!r}"
                ) from None
            raise
        if consumer.error is not None:
            raise consumer.error
        return consumer.consumer if isinstance(consumer, RemotePort) else consumer

    async def _run_consumer(self, consumer: RemoteConsumer) -> None:
        try:
            await (consumer.run_all() if isinstance(consumer, RemotePort) else consumer.run())
        finally:
            del self._consumers[consumer]

    async def ask(
        self, peer: PeerId, op: str, fields: Mapping[str, object], *, on_sent: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """An administrative request to a member. ``on_sent`` is called when there is a link, and it goes."""
        payload = json.dumps({"op": op, **fields}, separators=(",", ":")).encode()
        if len(payload) > wire.ADMIN_BYTES_MAX:
            raise ValueError(f"the request has {len(payload)} bytes: at most {wire.ADMIN_BYTES_MAX}")
        wait_s = fields.get("wait_s")  # the other side answers after that
        timeout_s = self._limits.request_timeout_s + (float(wait_s) if isinstance(wait_s, int | float) else 0.0)

        def frame(req_id: int) -> bytes:
            if on_sent is not None:
                on_sent()
            return encode_frame(wire.ADMIN, payload, req_id=req_id)

        return answer_of(await self._ways.to(peer).request(frame, timeout_s))

    async def publish_numbered(
        self, peer: PeerId, name: str, messages: Sequence[WireMessage], publisher: tuple[bytes, int]
    ) -> list[tuple[int, int]]:
        """To a member's queue, as a publisher of its own numbers; once, without another try."""
        answer = await self._ways.to(peer).request(
            lambda req_id: wire.encode_publish(req_id, name, *publisher, messages), self._limits.request_timeout_s
        )
        if answer.error is not None:
            raise answer.error
        points = wire.decode_published(answer.payload) if answer.type == wire.PUBLISHED else []
        if len(points) != len(messages):
            raise ProtocolError(f"{len(points)} ids for {len(messages)} messages")
        return [*points]

    # Telling

    @property
    def flows(self) -> FlowCounts:
        """Those of the node."""
        return self._keeping.flows

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return dict(self._counters)

    def placed_values(self) -> dict[str, int]:
        """Of queues on several nodes: `QueueHome.values`, and ``waiting_in_line`` for nodes that are away."""
        waiting = sum(each.waiting for each in self._placed.values())
        return {**self.home.values(), "waiting_in_line": waiting}

    def stats(self) -> object:
        """What is going on now."""
        return {
            "links_served": len(self._served),
            "consumers_served": sum(link.subscriptions for link in self._served),
            "consumers": len(self._consumers),
            "placed": self.placed_values(),
        }


async def _close(consumer: Consumer) -> None:
    with trio.CancelScope(shield=True):
        await consumer.aclose()
