"""The client of AutoNAT version 2: lets members dial this node's addresses, and concludes how the node is reached."""

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio
from multiaddr import Multiaddr

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import Dep2pError, ProtocolError
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, Connection
from dep2p.host.reachability.interface import (
    TESTED_TRANSPORTS,
    ReachabilityHost,
    is_relayed,
    read_dial_message,
    send_dial_message,
)
from dep2p.host.reachability.observations import Observations
from dep2p.host.resources.ledger import address_block
from dep2p.protocols.addresses.dialable import AddressScope, address_scope
from dep2p.protocols.reachability.candidates import AddressSources, candidate_addrs
from dep2p.protocols.reachability.messages import (
    DATA_BYTES_MAX,
    DIAL_BACK,
    DIAL_BACK_BYTES_MAX,
    DIAL_REQUEST,
    DialData,
    DialDataRequest,
    DialRequest,
    DialResponse,
    DialStatus,
    ResponseStatus,
    decode_dial_back,
    encode_dial_back_response,
)
from dep2p.protocols.reachability.model import Reachability, ReachabilityReport, TransportReachability
from dep2p.protocols.reachability.observed import ObservedTransport, transport_of
from dep2p.protocols.reachability.serving import DIAL_DATA_MAX_BYTES, is_testable
from dep2p.protocols.reachability.verdicts import AddressVerdicts, overall_reachability
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

_LOOK_S = 15.0
"""Seconds after which the client looks at its addresses and members without a cause."""
_SETTLE_S = 0.3
"""Seconds that it waits after a cause: identify and the realm's handshake end soon after each other."""
_ASK_S = 35.0
"""Seconds for a test in all: dial data over a slow link, and a dial."""
_DIAL_BACK_S = 5.0
_AT_ONCE = 4
"""Tests under way."""

_SENTENCES = {
    Reachability.PUBLIC: "nodes outside reach this one: it is public",
    Reachability.PRIVATE: "nodes outside do not reach this one at any address: a NAT or firewall is between",
    Reachability.UNKNOWN: "whether nodes outside reach this one is not known now",
}

OnReport = Callable[[ReachabilityReport], None]


@dataclass(slots=True)
class _Expected:
    """A nonce that a server brings back over a transport."""

    transport: ObservedTransport | None
    arrived: trio.Event = field(default_factory=trio.Event)


class ReachabilityClient:
    """Asks members that are connected over the internet to dial this node's addresses.

    `report` says the outcome; while no such member is connected the last one stands. When the machine comes into
    another network all tests begin anew.
    """

    def __init__(
        self,
        host: ReachabilityHost,
        counters: Counters,
        observations: Observations,
        *,
        listened: Callable[[], Sequence[str]],
        advertised: Sequence[str],
        network: Callable[[], str],
    ) -> None:
        """``listened``: the multiaddrs that the host listens on, wildcards expanded. ``advertised``: those of the
        settings. ``network``: changes when the machine comes into another network."""
        self._host = host
        self._counters = counters
        self._observations = observations
        self._listened = listened
        self._advertised = tuple(advertised)
        self._network = network
        self._network_now: str | None = None
        self._verdicts = AddressVerdicts()
        self._expected: dict[int, _Expected] = {}
        self._overall = Reachability.UNKNOWN
        self._transports: tuple[tuple[ObservedTransport, Reachability], ...] = ()
        self._verified: tuple[str, ...] = ()
        self._changed = trio.Event()
        self._subscribers: list[OnReport] = []
        host.set_stream_handler(DIAL_BACK, self._serve_dial_back)

    # What is known

    def report(self) -> ReachabilityReport:
        """Return how the host is reached."""
        transports = tuple(
            TransportReachability(name, reachability, self._observations.nat_kind(name))
            for name, reachability in self._transports
        )
        return ReachabilityReport(self._overall, transports, self._verified, self._verdicts.tested_at_s)

    def verified(self) -> tuple[str, ...]:
        """Return the public addresses, without the peer id, at which others have reached the host."""
        return self._verified

    def subscribe(self, on_report: OnReport) -> Callable[[], None]:
        """Call ``on_report`` synchronously when the overall reachability or the verified addresses have changed.

        It must not block or raise. Returns a function that ends it.
        """
        self._subscribers.append(on_report)

        def end() -> None:
            if on_report in self._subscribers:
                self._subscribers.remove(on_report)

        return end

    def wake(self) -> None:
        """Look soon: a peer is identified or has proved its membership."""
        self._changed.set()

    # Tests

    async def run(self) -> None:
        """Test and conclude, until cancelled."""
        while True:
            self._changed = trio.Event()
            await self.look()
            with trio.move_on_after(_LOOK_S):
                await self._changed.wait()
                await trio.sleep(_SETTLE_S)

    async def look(self) -> None:
        """Make the tests that are due, and conclude."""
        self._set_candidates()
        servers = self._servers()
        self._conclude()
        due = self._verdicts.due(list(servers), trio.current_time())
        limiter = trio.CapacityLimiter(_AT_ONCE)
        async with trio.open_nursery() as nursery:
            for addr, peer in due:
                nursery.start_soon(partial(self._test, addr, servers[peer], limiter, servers=len(servers)))

    def _set_candidates(self) -> None:
        network = self._network()
        if network != self._network_now:
            self._network_now = network
            self._verdicts.clear()
            self._transports = tuple((name, Reachability.UNKNOWN) for name, _ in self._transports)
            self._report_change(Reachability.UNKNOWN, ())
        found = candidate_addrs(
            AddressSources(
                listened=tuple(self._listened()),
                advertised=self._advertised,
                observed=tuple(self._observations.addrs()),
                hosts=tuple(self._observations.hosts()),
                verified=self._verdicts.verified(),
            ),
            TESTED_TRANSPORTS,
        )
        self._verdicts.set_candidates(found)

    def _over_internet(self) -> list[Connection]:
        """Direct connections over the internet with members that are identified."""
        return [
            connection
            for connection in self._host.connections()
            if not is_relayed(connection)
            and address_scope(connection.remote_addr) is AddressScope.PUBLIC
            and self._host.is_protected(connection)
            and self._host.peer_protocols(connection.peer)
        ]

    def _servers(self) -> dict[PeerId, Connection]:
        """Members that can be asked: one of each address block first, then the others."""
        found = {
            connection.peer: connection
            for connection in self._over_internet()
            if DIAL_REQUEST in self._host.peer_protocols(connection.peer)
        }
        of_block: dict[str, PeerId] = {}
        for peer, connection in found.items():
            of_block.setdefault(address_block(connection.remote_addr), peer)
        return {peer: found[peer] for peer in [*of_block.values(), *found]}

    async def _test(self, addr: str, connection: Connection, limiter: trio.CapacityLimiter, *, servers: int) -> None:
        async with limiter:
            is_reached = await self._ask(addr, connection)
        outcome = {None: "silent", True: "reached", False: "not_reached"}[is_reached]
        self._counters.add(f"reachability_tests_{outcome}")
        self._verdicts.note(addr, connection.peer, is_reached, trio.current_time(), servers=servers)
        self._conclude()

    async def _ask(self, addr: str, connection: Connection) -> bool | None:
        """Whether the server has reached the address; None when it does not say."""
        nonce = secrets.randbits(64)
        expected = self._expected[nonce] = _Expected(transport_of(addr))
        response: DialResponse | None = None
        try:
            with trio.move_on_after(_ASK_S):
                response = await self._exchange(DialRequest((Multiaddr(addr).to_bytes(),), nonce), connection)
        except Dep2pError as error:
            logger.debug("asking %s to dial %s: %s", connection.peer, addr, error)
        finally:
            del self._expected[nonce]
        if expected.arrived.is_set():
            return True
        if response is None or response.status is not ResponseStatus.OK or response.addr_index:
            return None
        return False if response.dial_status is DialStatus.DIAL_ERROR else None

    async def _exchange(self, request: DialRequest, connection: Connection) -> DialResponse:
        stream = await connection.open_stream(DIAL_REQUEST)
        try:
            await send_dial_message(stream, request)
            answer = await read_dial_message(stream)
            if isinstance(answer, DialDataRequest):
                await self._send_data(stream, answer)
                answer = await read_dial_message(stream)
            if not isinstance(answer, DialResponse):
                raise ProtocolError("the server answered a dial request with another message")
            await stream.close()
            return answer
        finally:
            if not stream.is_write_closed:
                stream.reset()

    async def _send_data(self, stream: ByteStream, wanted: DialDataRequest) -> None:
        if wanted.addr_index or wanted.wanted_bytes > DIAL_DATA_MAX_BYTES:
            raise ProtocolError(f"the server wants {wanted.wanted_bytes} bytes of dial data: too much")
        left_bytes = wanted.wanted_bytes
        while left_bytes > 0:
            part_bytes = min(DATA_BYTES_MAX, left_bytes)
            await send_dial_message(stream, DialData(part_bytes))
            left_bytes -= part_bytes

    async def _serve_dial_back(self, stream: ByteStream) -> None:
        try:
            with trio.fail_after(_DIAL_BACK_S):
                nonce = decode_dial_back(await read_length_prefixed(stream, DIAL_BACK_BYTES_MAX))
                if not self._is_expected(nonce, stream.connection):
                    self._counters.add("dial_back_unexpected")
                    stream.reset()
                    return
                await stream.write(encode_length_prefixed(encode_dial_back_response()))
                await stream.close()
        except trio.TooSlowError:
            self._counters.add("dial_back_unexpected")
            stream.reset()

    def _is_expected(self, nonce: int, connection: Connection) -> bool:
        """Whether it is the nonce of a test, and came over a connection as that test wants it."""
        expected = self._expected.get(nonce)
        if expected is None or connection.direction != "inbound" or is_relayed(connection):
            return False
        if transport_of(connection.remote_addr) != expected.transport:
            return False
        expected.arrived.set()
        return True

    # Conclusions

    def _conclude(self) -> None:
        if not self._over_internet():
            return  # what was concluded stands
        own = dict.fromkeys(map(transport_of, self._listened()))
        has_untested = any(not is_testable(addr, TESTED_TRANSPORTS) for addr in self._advertised)
        self._transports = tuple(
            (name, self._verdicts.reachability(name, has_untested=has_untested))
            for name in TESTED_TRANSPORTS
            if name in own
        )
        self._report_change(
            overall_reachability([reachability for _, reachability in self._transports]), self._verdicts.verified()
        )

    def _report_change(self, overall: Reachability, verified: tuple[str, ...]) -> None:
        if (overall, verified) == (self._overall, self._verified):
            return
        if overall is not self._overall:
            logger.info(_SENTENCES[overall])
        self._overall, self._verified = overall, verified
        report = self.report()
        for on_report in list(self._subscribers):
            on_report(report)
