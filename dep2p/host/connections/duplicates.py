"""Several connections to one peer: the newest is used at once, the others are tested, and one of them stays.

A second connection has one of two causes. The peer has restarted, or its path has changed, and the older connection is
dead without a word: every part of the node has to leave it now, not when its liveness probe fails. Or both sides dialed
at the same time: then both connections live, and both sides choose the same one.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, Generic, Protocol, TypeVar

import trio

from dep2p.errors import Dep2pError, ProtocolNotSupportedError
from dep2p.host.connections.relay_grace import RelayGrace
from dep2p.host.interface import ConnectionPreferred, Direction, HostEvent
from dep2p.types import PeerId

PROBE_S: Final = 1.0
"""Seconds without an answer after which an older connection beside a newer one is dead, when its round trip is not
known."""
PROBE_RTTS: Final = 6
"""Round trips without an answer after which it is dead, when its round trip is known: the probe's stream takes two."""
PROBE_MIN_S: Final = 0.5
PROBE_MAX_S: Final = 3.0
DRAIN_CHECK_S: Final = 0.25
LATE_S: Final = 10.0
"""Seconds that the side which is to end the surplus connection has for it; after them the other side ends it."""
RESUMED: Final = ("pubsub", "delivery", "session", "clock")
"""Protocols of a realm whose streams move to another connection by themselves and lose nothing."""


class DuplicateConnection(Protocol):
    """A connection as this module needs it."""

    is_superseded: bool

    @property
    def id(self) -> int: ...

    @property
    def peer(self) -> PeerId: ...

    @property
    def direction(self) -> Direction: ...

    @property
    def remote_addr(self) -> str: ...

    @property
    def rtt_s(self) -> float | None: ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def carried_bytes(self) -> int:
        """Bytes that the relay of the connection has carried for it, both ways; 0 for a direct one."""
        ...

    def open_protocols(self) -> Collection[str]:
        """The protocols of the streams that are open."""
        ...

    def abort(self, reason: str) -> None: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=DuplicateConnection)


def is_relayed(connection: DuplicateConnection) -> bool:
    """Whether the connection goes through a relay."""
    return "/p2p-circuit" in connection.remote_addr


def elect(one: C, other: C, own: PeerId) -> C:
    """Choose which of two live connections both sides keep: the direct one; else the one that the smaller peer id
    dialed; else the newer."""
    if is_relayed(one) != is_relayed(other):
        return other if is_relayed(one) else one
    if one.direction != other.direction:
        wanted: Direction = "outbound" if own < one.peer else "inbound"
        return one if one.direction == wanted else other
    return max(one, other, key=lambda each: each.id)


def is_idle(connection: DuplicateConnection) -> bool:
    """Whether no work of an app is under way on the connection: the other streams move to another connection by
    themselves."""
    for protocol in connection.open_protocols():
        parts = protocol.split("/")
        if protocol.startswith("/dep2p/app/") and not (len(parts) > 4 and parts[4] in RESUMED):
            return False
    return True


class Duplicates(Generic[C]):
    """Sets `is_superseded` of connections, and ends the surplus ones."""

    def __init__(
        self,
        own: PeerId,
        probe: Callable[[C, float], Awaitable[None]],
        emit: Callable[[HostEvent], None],
        count: Callable[[str], None],
    ) -> None:
        """``probe`` (connection, seconds): returns when the peer answers; raises a Dep2pError when it does not."""
        self._own = own
        self._probe = probe
        self._emit = emit
        self._count = count

    def admitted(self, connection: C, others: Sequence[C]) -> None:
        """Use a further connection to a peer from now on."""
        connection.is_superseded = False
        for other in others:
            other.is_superseded = True

    def ended(self, others: Sequence[C]) -> None:
        """Note that a connection has ended; ``others``: those to the same peer that are left, oldest first."""
        if others and all(one.is_superseded for one in others):
            self._prefer(others[-1])

    def _prefer(self, connection: C) -> None:
        if connection.is_superseded:
            connection.is_superseded = False
            self._emit(ConnectionPreferred(connection))  # type: ignore[arg-type]

    async def settle(self, connection: C, others: Sequence[C]) -> None:
        """Test the older connections, and end surplus ones. Returns when that is done."""
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(self._settle_pair, connection, other)

    async def _settle_pair(self, new: C, old: C) -> None:
        is_alive = await self._answers(old)
        if new.is_closed or old.is_closed:
            return
        if not is_alive:
            self._count("connections_replaced_silent")
            old.abort("it is silent, and there is a newer connection to the peer")
            return
        self._count("connections_duplicate")
        kept = elect(new, old, self._own)
        surplus = old if kept is new else new
        if kept.is_superseded and not surplus.is_superseded:
            surplus.is_superseded = True
            self._prefer(kept)
        if new.direction == old.direction and is_relayed(new) == is_relayed(old):
            return  # one side has dialed twice and answers on both: it knows why
        # One side ends it, or both would end streams that the other one has just opened.
        if not self._own < new.peer:
            await trio.sleep(LATE_S)
        grace = RelayGrace(now_s=trio.current_time()) if is_relayed(surplus) and not is_relayed(kept) else None
        while not (kept.is_closed or surplus.is_closed):
            if is_idle(surplus) or (
                grace is not None and grace.is_over(surplus.carried_bytes, now_s=trio.current_time())
            ):
                self._count("connections_duplicate_closed")
                await surplus.close()
                return
            await trio.sleep(DRAIN_CHECK_S)

    async def _answers(self, connection: C) -> bool:
        rtt_s = connection.rtt_s
        within_s = PROBE_S if rtt_s is None else min(max(PROBE_MIN_S, PROBE_RTTS * rtt_s), PROBE_MAX_S)
        try:
            await self._probe(connection, within_s)
        except ProtocolNotSupportedError:
            return True
        except Dep2pError:
            return False
        return True
