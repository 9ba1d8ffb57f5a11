"""Verdicts on the addresses of a node, and on the node, by tests of others. Pure.

A server that refuses, is busy or says nothing is no evidence, and leaves all as it was.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dep2p.protocols.reachability.model import Reachability
from dep2p.protocols.reachability.observed import ObservedTransport, transport_of
from dep2p.types import PeerId

SERVERS_MAX: Final = 5
"""Servers whose latest tests of an address count."""
SURE_NET: Final = 3
"""So many more successes than failures, or the other way round, make a verdict; all servers where there are fewer."""
RETEST_S: Final = 1_800.0
"""Seconds after which a server is asked again about an address; what it has said counts for twice as long."""
SILENT_RETEST_S: Final = 120.0
"""The same of a server that gave no answer which says something."""


@dataclass(frozen=True, slots=True)
class _Test:
    server: PeerId
    is_reached: bool | None
    """None: the server gave no answer that says anything."""
    at_s: float

    def is_recent(self, now_s: float) -> bool:
        return now_s - self.at_s < (SILENT_RETEST_S if self.is_reached is None else RETEST_S)


@dataclass(slots=True)
class AddressVerdicts:
    """Tests of the candidate addresses of one node.

    Example::

        verdicts = AddressVerdicts()
        verdicts.set_candidates(["/ip4/192.0.2.1/tcp/4001"])
        for addr, server in verdicts.due([server], now_s=0.0):
            verdicts.note(addr, server, True, now_s=1.0)
        verdicts.verdict("/ip4/192.0.2.1/tcp/4001")  # True
    """

    _tests: dict[str, list[_Test]] = field(default_factory=dict[str, list[_Test]])
    """The latest tests of each candidate, one of each server, the oldest first."""
    _sure: dict[str, bool] = field(default_factory=dict[str, bool])
    """The last sure verdict of each candidate: it stands until tests are sure of the contrary."""
    tested_at_s: float | None = None
    """The time of the last test that said something."""

    @property
    def candidates(self) -> list[str]:
        """The addresses that are tested."""
        return list(self._tests)

    def set_candidates(self, addrs: Iterable[str]) -> None:
        """Test these addresses from now on; what is known of those that stay remains."""
        self._tests = {addr: self._tests.get(addr, []) for addr in addrs}
        self._sure = {addr: is_reached for addr, is_reached in self._sure.items() if addr in self._tests}

    def clear(self) -> None:
        """Drop all tests: the network of this node has changed."""
        self._tests.clear()
        self._sure.clear()

    def due(self, servers: Sequence[PeerId], now_s: float) -> list[tuple[str, PeerId]]:
        """Return the tests to make now. ``servers``: all that can be asked, the most useful first.

        As many servers are asked as a verdict needs; further ones only while those disagree.
        """
        wanted: list[tuple[str, PeerId]] = []
        for addr, tests in self._tests.items():
            recent = {test.server: test for test in tests if test.is_recent(now_s)}
            said = [test for test in recent.values() if test.is_reached is not None]
            missing = SURE_NET - abs(sum(1 if test.is_reached else -1 for test in said))
            missing = min(missing, SERVERS_MAX - len(said))
            fresh = [server for server in servers if server not in recent]
            wanted.extend((addr, server) for server in fresh[: max(0, missing)])
        return wanted

    def note(self, addr: str, server: PeerId, is_reached: bool | None, now_s: float, *, servers: int) -> None:
        """Note the outcome of a test; None: it says nothing. ``servers``: how many servers can be asked."""
        tests = self._tests.get(addr)
        if tests is None:
            return  # no candidate any more
        earlier = next((test for test in tests if test.server == server), None)
        if is_reached is None and earlier is not None:
            is_reached = earlier.is_reached  # silence is no evidence
        elif is_reached is not None:
            self.tested_at_s = now_s
        tests[:] = [test for test in tests if test.server != server]
        tests.append(_Test(server, is_reached, now_s))
        del tests[: -4 * SERVERS_MAX]
        self._decide(addr, servers, now_s)

    def _decide(self, addr: str, servers: int, now_s: float) -> None:
        tests = [test for test in self._tests[addr] if now_s - test.at_s < 2 * RETEST_S]
        said = [test for test in tests if test.is_reached is not None][-SERVERS_MAX:]
        net = sum(1 if test.is_reached else -1 for test in said)
        if said and abs(net) >= min(SURE_NET, max(1, servers)):
            self._sure[addr] = net > 0

    def verdict(self, addr: str) -> bool | None:
        """Return whether others reach the address; None while that is not sure."""
        return self._sure.get(addr)

    def verified(self) -> tuple[str, ...]:
        """Return the addresses that others reach."""
        return tuple(addr for addr in self._tests if self._sure.get(addr))

    def reachability(self, transport: ObservedTransport, *, has_untested: bool) -> Reachability:
        """Return how the node is reached over a transport, when at least one member is connected over the internet.

        Without a candidate it is private: members outside see no address of it. ``has_untested``: it announces an
        address that no server can test, such as a DNS name.
        """
        verdicts = [self._sure.get(addr) for addr in self._tests if transport_of(addr) == transport]
        if True in verdicts:
            return Reachability.PUBLIC
        if has_untested or None in verdicts:
            return Reachability.UNKNOWN
        return Reachability.PRIVATE


def overall_reachability(transports: Collection[Reachability]) -> Reachability:
    """Return how a node is reached, by its transports: public by one is enough; private by all. Without one that
    listens it is private."""
    if Reachability.PUBLIC in transports:
        return Reachability.PUBLIC
    return Reachability.UNKNOWN if Reachability.UNKNOWN in transports else Reachability.PRIVATE
