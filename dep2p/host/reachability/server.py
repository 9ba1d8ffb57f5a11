"""The server of AutoNAT version 2: dials an address of a peer that asks for it, and says whether it got there."""

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dep2p.errors import ProtocolError
from dep2p.host.addresses import Address, parse_address
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream, Connection
from dep2p.host.reachability.interface import (
    TESTED_TRANSPORTS,
    ReachabilityHost,
    is_relayed,
    read_dial_message,
    send_dial_message,
)
from dep2p.host.resources.ledger import address_block
from dep2p.protocols.addresses.dialable import dial_target
from dep2p.protocols.reachability.messages import (
    DIAL_REQUEST,
    DialData,
    DialDataRequest,
    DialRequest,
    DialResponse,
    DialStatus,
    ResponseStatus,
)
from dep2p.protocols.reachability.serving import DialBackAdmission, choose_address, dial_data_bytes
from dep2p.types import PeerId, Rng

logger: logging.Logger = logging.getLogger("dep2p.host")

REQUEST_S = 5.0
"""Seconds for the request."""
DIAL_DATA_S = 20.0
"""Seconds for the dial data: 100 kB at 5 kB a second."""

BringNonce = Callable[[Address, PeerId, int], Awaitable[DialStatus]]
"""Dials a peer at an address and brings it the nonce."""
HasRoute = Callable[[Address], bool]
"""Whether this machine knows a way to an address."""


class DialBackServer:
    """Serves members of this node's realms, and strangers at a low rate.

    It dials public addresses only, one for a request, and not for nothing another IP address than the asker's own.
    """

    def __init__(
        self,
        host: ReachabilityHost,
        counters: Counters,
        *,
        own_addrs: Callable[[], Sequence[str]],
        bring: BringNonce,
        has_route: HasRoute,
        rng: Rng,
    ) -> None:
        """``own_addrs``: the multiaddrs of this host, which it never dials for others."""
        self._host = host
        self._counters = counters
        self._own_addrs = own_addrs
        self._bring = bring
        self._has_route = has_route
        self._rng = rng
        self._admission = DialBackAdmission()
        host.set_stream_handler(DIAL_REQUEST, self._serve)

    async def _serve(self, stream: ByteStream) -> None:
        connection = stream.connection
        is_member = self._host.is_protected(connection)
        now_s = trio.current_time()
        block = address_block(connection.remote_addr)
        is_admitted = not is_relayed(connection) and self._admission.admit(
            connection.peer, block, is_member=is_member, now_s=now_s
        )
        try:
            if is_admitted:
                await self._answer(stream, await self._outcome(stream, connection))
            else:
                self._counters.add("dial_back_rejected")
                await self._answer(stream, DialResponse(ResponseStatus.REQUEST_REJECTED))
        except trio.TooSlowError:
            self._counters.add("dial_back_timeout")
            stream.reset()
        finally:
            if is_admitted:
                self._admission.release(is_member=is_member)

    async def _answer(self, stream: ByteStream, response: DialResponse) -> None:
        with trio.fail_after(REQUEST_S):
            await send_dial_message(stream, response)
            await stream.close()

    async def _outcome(self, stream: ByteStream, connection: Connection) -> DialResponse:
        with trio.fail_after(REQUEST_S):
            request = await read_dial_message(stream)
        if not isinstance(request, DialRequest):
            raise ProtocolError("a stream for dial requests begins with another message")
        addrs = [self._text_of(raw, connection.peer) for raw in request.addrs]
        own = [target.host for target in map(dial_target, self._own_addrs()) if target is not None]
        index = choose_address(addrs, own, TESTED_TRANSPORTS)
        if index is None:
            self._counters.add("dial_back_refused_address")
            return DialResponse(ResponseStatus.DIAL_REFUSED)
        wanted_bytes = dial_data_bytes(addrs[index], connection.remote_addr, self._rng)
        if wanted_bytes:
            self._counters.add("dial_back_data_wanted")
            await self._take_data(stream, index, wanted_bytes)
        status = await self._bring(parse_address(addrs[index]), connection.peer, request.nonce)
        self._counters.add(f"dial_back_{status.name.lower()}")
        logger.debug("dialing %s back at %s: status %d", connection.peer, addrs[index], status)
        return DialResponse(ResponseStatus.OK, index, status)

    async def _take_data(self, stream: ByteStream, index: int, wanted_bytes: int) -> None:
        with trio.fail_after(DIAL_DATA_S):
            await send_dial_message(stream, DialDataRequest(index, wanted_bytes))
            left_bytes = wanted_bytes
            while left_bytes > 0:
                part = await read_dial_message(stream)
                if not isinstance(part, DialData) or not part.data_bytes:
                    raise ProtocolError("another message stands where dial data belongs")
                left_bytes -= part.data_bytes

    def _text_of(self, raw: bytes, peer: PeerId) -> str:
        """The address as text without the peer id; "" for one that this host does not dial."""
        try:
            address = parse_address(str(Multiaddr(raw)))
        except (ValueError, TypeError, KeyError, MultiaddrError):
            return ""
        if address.peer not in (None, peer) or address.family == "dns" or address.transport == "circuit":
            return ""
        return address.text if self._has_route(address) else ""
