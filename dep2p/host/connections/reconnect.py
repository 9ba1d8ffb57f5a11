"""Keeps peers connected: runs `ReconnectPolicy` on the clock and the dialler."""

import logging
from collections.abc import Awaitable, Callable

import trio

from dep2p.errors import Dep2pError
from dep2p.host.counters import Counters
from dep2p.host.interface import HostEvent, PeerConnected, PeerDisconnected, PeerDiscovered
from dep2p.host.scopes import new_scope
from dep2p.protocols.timing.reconnect import ReconnectPolicy
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")


class Reconnector:
    """Dials the peers to keep again whenever their last connection is gone."""

    def __init__(
        self,
        policy: ReconnectPolicy,
        dial: Callable[[PeerId], Awaitable[object]],
        is_connected: Callable[[PeerId], bool],
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._dial = dial
        self._is_connected = is_connected
        self._counters = counters
        self._changed = trio.Event()
        self._trying: dict[PeerId, trio.CancelScope] = {}

    def keep_connected(self, peer: PeerId) -> None:
        """Dial the peer now if need be, and again with back-off whenever it is lost."""
        if self._policy.add(peer, trio.current_time(), connected=self._is_connected(peer)):
            self._changed.set()
        else:
            self._counters.add("keep_connected_refused_peers_known_max")

    def forget(self, peer: PeerId) -> None:
        """Stop keeping the peer connected, and end an attempt in progress."""
        self._policy.forget(peer)
        scope = self._trying.pop(peer, None)
        if scope is not None:
            scope.cancel()

    def on_event(self, event: HostEvent) -> None:
        """Follow connections as they come and go."""
        if isinstance(event, PeerConnected):
            self._policy.connected(event.connection.peer, trio.current_time())
        elif isinstance(event, PeerDisconnected):
            if event.last:
                self._policy.disconnected(event.connection.peer, trio.current_time())
                self._changed.set()
        elif isinstance(event, PeerDiscovered):
            self.hint(event.peer)

    def hint(self, peer: PeerId) -> None:
        """Use new addresses of the peer."""
        self._policy.hint(peer, trio.current_time())
        self._changed.set()

    async def run(self) -> None:
        """Dial the peers that are due, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for peer in self._policy.due(trio.current_time()):
                    nursery.start_soon(self._try, peer)
                deadline_s = self._policy.next_deadline()
                with new_scope(float("inf") if deadline_s is None else deadline_s):
                    await self._changed.wait()
                self._changed = trio.Event()

    async def _try(self, peer: PeerId) -> None:
        self._counters.add("reconnect_attempts")
        with new_scope() as scope:
            self._trying[peer] = scope
            try:
                await self._dial(peer)
            except Dep2pError as error:
                self._counters.add("reconnect_failed")
                logger.debug("reconnecting: %s", error)
                self._policy.failed(peer, trio.current_time())
            else:
                if self._is_connected(peer):
                    self._policy.connected(peer, trio.current_time())
                else:
                    self._policy.failed(peer, trio.current_time())
            finally:
                self._changed.set()
                if self._trying.get(peer) is scope:
                    del self._trying[peer]
