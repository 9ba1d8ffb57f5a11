"""NSQ's TCP protocol and nsqd's HTTP API on the node's queues, on loopback. [nsq] switches them on."""

import dataclasses
import logging
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import trio

from dep2p.config.nsq import NsqConfig
from dep2p.config.validation import split_loopback
from dep2p.control_api.replies import NsqSummary
from dep2p.daemon.bounds import ControlBounds
from dep2p.daemon.http.server import HttpServer
from dep2p.daemon.node_interface import NodeInterface
from dep2p.daemon.nsq.connection import NsqConnection
from dep2p.daemon.nsq.http import NsqHttp
from dep2p.daemon.nsq.quotas import NsqQuotas
from dep2p.daemon.problems import Problem
from dep2p.errors import NotInRealmError, QueueFullError, QueueNotFoundError
from dep2p.protocols.nsq.frames import FRAME_ERROR, encode_frame
from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.token_bucket import TokenBucket

_logger = logging.getLogger("dep2p.nsq")
_BACKLOG: Final = 128
_BUSY: Final = encode_frame(FRAME_ERROR, b"E_INVALID too many connections")
_NOT_THE_BROKER: Final = encode_frame(FRAME_ERROR, b"E_INVALID another node keeps these queues now")


class NsqServer:
    """Both listeners of one daemon, and the parts that their connections share."""

    def __init__(
        self,
        ownership: StoreOwnership,
        namespace: Callable[[], str],
        *,
        limits: NsqLimits | None = None,
        rng: random.Random | None = None,
        config: NsqConfig | None = None,
    ) -> None:
        """``namespace``: returns the topics' namespace; may raise NotInRealmError, which clients get as an error."""
        self._ownership = ownership
        self.namespace = namespace
        self.limits: NsqLimits = limits or dataclasses.replace(
            NsqLimits(),
            message_bytes_max=ownership.defaults.message_bytes_max,
            body_bytes_max=max(NsqLimits().body_bytes_max, ownership.defaults.message_bytes_max + 8),
            msg_timeout_ms=round(ownership.defaults.msg_timeout_s * 1000),
            msg_timeout_max_ms=round(ownership.defaults.msg_timeout_max_s * 1000),
            defer_max_ms=round(ownership.defaults.defer_max_s * 1000),
        )
        self.quotas: NsqQuotas = NsqQuotas(config or NsqConfig())
        self.rng: random.Random = rng or random.Random()
        self.counts: Counter[str] = Counter()
        """Counts of commands done, messages dropped and commands refused, by reason."""
        self.connections: dict[NsqConnection, None] = {}
        self.started_unix_s: float = time.time()
        self.tcp_address: str = ""
        self.http_address: str = ""
        """``HOST:PORT`` in use; empty when it does not listen."""
        self.listeners: tuple[trio.SocketListener | None, trio.SocketListener | None] = (None, None)
        """The listeners of the TCP protocol and of HTTP, which `run` serves."""
        self._scope = trio.CancelScope()

    @property
    def engine(self) -> QueueEngine:
        """The engine. Raises NotOwnerError while another node is the broker of the queues."""
        return self._ownership.engine

    async def topic(self, namespace: str, name: str, rate: TokenBucket | None) -> None:
        """Make a topic when it is new, as soon as ``rate`` allows it, and load it.

        Raises StoreError, QueueFullError and ``ValueError``.
        """
        try:
            queue = self.engine.registry.find(namespace, name)
        except QueueNotFoundError:
            await self._may_make_topic(namespace, rate)
            await self.engine.create_queue(namespace, name)
            self.counts["topics_made"] += 1
            queue = self.engine.registry.find(namespace, name)
        if not queue.is_loaded:
            await self.engine.loaded(namespace, name)

    async def _may_make_topic(self, namespace: str, rate: TokenBucket | None) -> None:
        most = self.quotas.topics_max
        if sum(1 for of, _ in self.engine.registry.queues if of == namespace) >= most:
            self.counts["topics_refused"] += 1
            raise QueueFullError(
                f"there are {most} topics, the most that NSQ clients may make: delete some, or raise topics_max in "
                "[nsq]"
            )
        if rate is None:
            return
        if rate.wait_s(trio.current_time()):
            self.counts["topics_waited"] += 1
        while wait_s := rate.take(trio.current_time()):  # noqa: ASYNC110 - a rate announces nothing
            await trio.sleep(wait_s)

    async def serve_tcp(
        self, listener: trio.SocketListener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve clients until cancelled. Then cut them; their messages go to others."""
        self.tcp_address = _address(listener)
        task_status.started()
        await trio.serve_listeners(self._handle, [listener])

    async def _handle(self, stream: trio.SocketStream) -> None:
        refusal = b"" if self._make_room() else _BUSY
        if self._ownership.engine_if_here is None:
            refusal = _NOT_THE_BROKER
        if refusal:
            self.counts["connections_refused"] += 1
            with trio.move_on_after(1.0):
                try:
                    await stream.send_all(refusal)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    _logger.debug("a refused client hung up")
            await trio.aclose_forcefully(stream)
            return
        try:
            peer: Sequence[object] = stream.socket.getpeername()
        except OSError:
            await trio.aclose_forcefully(stream)
            return
        connection = NsqConnection(self, stream, f"{peer[0]}:{peer[1]}")
        connection.connected_s = int(time.time())
        self.connections[connection] = None
        self.counts["connections_opened"] += 1
        try:
            await connection.run()
        finally:
            self.connections.pop(connection, None)

    def _make_room(self) -> bool:
        """Whether another connection may come; cuts the oldest one that has sent no command when there are too many."""
        if len(self.connections) < self.quotas.connections_max:
            return True
        idle = next((each for each in self.connections if not each.has_begun), None)
        if idle is None:
            return False
        self.counts["connections_ended_idle"] += 1
        del self.connections[idle]
        idle.cut()
        return True

    async def serve_http(
        self, listener: trio.SocketListener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Answer HTTP requests until cancelled."""
        self.http_address = _address(listener)
        task_status.started()
        server = HttpServer(ControlBounds(connections_max=self.quotas.connections_max))
        await server.serve(NsqHttp(self), [listener])

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve at `listeners` until stopped or cancelled."""
        try:
            self.namespace()
        except NotInRealmError as error:
            _logger.warning("NSQ clients are refused until the realm of [nsq] is joined", extra={"reason": str(error)})
        with self._scope:
            async with trio.open_nursery() as nursery:
                for listener, serve, what in zip(
                    self.listeners,
                    (self.serve_tcp, self.serve_http),
                    ("NSQ clients are served", "nsqd's HTTP API is served"),
                    strict=True,
                ):
                    if listener is not None:
                        await nursery.start(serve, listener)
                        _logger.info(what, extra={"listen": _address(listener)})
                task_status.started()

    def stop(self) -> None:
        """Cut all clients; their messages go to others."""
        self._scope.cancel()

    @property
    def consumer_count(self) -> int:
        """The number of connections that have subscribed."""
        return sum(1 for connection in self.connections if connection.consumer is not None)

    def values(self) -> dict[str, int]:
        """Return what the clients hold, by name."""
        memory, publishes = self.quotas.memory, self.quotas.publishes
        return {
            "memory_bytes": memory.taken,
            "memory_bytes_largest_connection": memory.held_most,
            "publishes_pending": publishes.taken,
            "publishes_pending_largest_connection": publishes.held_most,
        }

    def status(self) -> NsqSummary:
        """Return its addresses, and the number of its clients."""
        return NsqSummary(
            listen=self.tcp_address,
            http=self.http_address,
            connections=len(self.connections),
            consumers=self.consumer_count,
        )


def nsq_server(config: NsqConfig, node: NodeInterface) -> NsqServer | None:
    """Make the server of [nsq], which listens; None when it is off. Raises ConfigError, :class:`Problem` D3005."""

    def namespace() -> str:
        return str(node.realm(config.realm).realm_id) if config.realm else ""

    tcp = _open(config.listen, "listen")
    try:
        http = _open(config.http, "http")
    except BaseException:
        if tcp is not None:
            tcp.socket.close()
        raise
    if tcp is None and http is None:
        return None
    server = NsqServer(node.queues.ownership, namespace, config=config)
    server.listeners = tcp, http
    return server


def _open(text: str, name: str) -> trio.SocketListener | None:
    if not text:
        return None
    host, port = split_loopback(text, f"[nsq] {name}", what="NSQ's protocol")
    opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.bind((host, port))
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        raise Problem("D3005", f"[nsq] {name}: cannot listen on {text}: {error.strerror or error}") from None
    return trio.SocketListener(trio.socket.from_stdlib_socket(opened))


def _address(listener: trio.SocketListener) -> str:
    host, port = listener.socket.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
