"""Keeps peers connected: runs `ReconnectPolicy` on the clock and the dialler."""

import logging
from collections.abc import Awaitable, Callable

import trio

from dep2p.errors import Dep2pError, PeerNotFoundError
from dep2p.host.counters import Counters
from dep2p.host.interface import HostEvent, PeerConnected, PeerDisconnected, PeerDiscovered
from dep2p.host.scopes import new_scope
from dep2p.outside_text import one_line
from dep2p.protocols.timing.reconnect import ReconnectPolicy
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")


QUICK_DIAL_S = 3.0
"""Time of an attempt at a peer that was lost not long ago; see `ReconnectPolicy.is_quick`."""


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
        self._failures: dict[PeerId, str] = {}
        """Why the last dial failed, of peers that are kept and have not been connected since."""
        self._bootstrap: dict[PeerId, None] = {}
        self._logged: dict[PeerId, None] = {}
        """Those of `_bootstrap` whose failure was logged."""

    def keep_connected(self, peer: PeerId, *, is_bootstrap: bool = False) -> None:
        """Dial the peer now if need be, and again with back-off whenever it is lost.

        Of a bootstrap peer, which the user has named, the log says once that it cannot be reached, and why.
        """
        if is_bootstrap:
            self._bootstrap[peer] = None
        if self._policy.add(peer, trio.current_time(), connected=self._is_connected(peer)):
            self._changed.set()
        else:
            self._counters.add("keep_connected_refused_peers_known_max")

    def forget(self, peer: PeerId) -> None:
        """Stop keeping the peer connected, and end an attempt in progress."""
        self._policy.forget(peer)
        self._failures.pop(peer, None)
        self._bootstrap.pop(peer, None)
        self._logged.pop(peer, None)
        scope = self._trying.pop(peer, None)
        if scope is not None:
            scope.cancel()

    def failure(self, peer: PeerId) -> str | None:
        """Return why the last dial of a kept peer failed; None once it is connected, or before a dial has ended."""
        return self._failures.get(peer)

    def on_event(self, event: HostEvent) -> None:
        """Follow connections as they come and go."""
        if isinstance(event, PeerConnected):
            self._failures.pop(event.connection.peer, None)
            if event.connection.peer in self._logged:
                del self._logged[event.connection.peer]
                logger.info("the bootstrap peer %s is connected", event.connection.peer)
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

    def network_changed(self) -> None:
        """Try all that wait: this node's own network has changed."""
        self._policy.wake_all(trio.current_time())
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

    def _log_once(self, peer: PeerId) -> None:
        if peer in self._bootstrap and peer not in self._logged:
            self._logged[peer] = None
            logger.warning(
                "the bootstrap peer %s cannot be reached: %s; it is tried again, in the end once a minute",
                peer,
                self._failures[peer],
            )

    async def _dial_until(self, peer: PeerId, end_s: float) -> None:
        try:
            with trio.fail_at(end_s):
                await self._dial(peer)
        except trio.TooSlowError:
            raise PeerNotFoundError(f"{peer} does not answer within {QUICK_DIAL_S:g} s") from None

    async def _try(self, peer: PeerId) -> None:
        self._counters.add("reconnect_attempts")
        end_s = trio.current_time() + QUICK_DIAL_S if self._policy.is_quick(peer) else float("inf")
        with new_scope() as scope:
            self._trying[peer] = scope
            try:
                await self._dial_until(peer, end_s)
            except Dep2pError as error:
                self._counters.add("reconnect_failed")
                logger.debug("reconnecting: %s", error)
                self._policy.failed(peer, trio.current_time())
                if self._trying.get(peer) is scope:  # it is kept still
                    self._failures[peer] = one_line(str(error))
                    self._log_once(peer)
            else:
                if self._is_connected(peer):
                    self._policy.connected(peer, trio.current_time())
                else:
                    self._policy.failed(peer, trio.current_time())
            finally:
                self._changed.set()
                if self._trying.get(peer) is scope:
                    del self._trying[peer]
