"""AutoNAT between real hosts on loopback, whose addresses count as public here."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio.testing
from multiaddr import Multiaddr

from dep2p.encoding.length_prefixed import encode_length_prefixed
from dep2p.errors import StreamClosedError
from dep2p.host.addresses import parse_address
from dep2p.host.host import LibP2PHost
from dep2p.host.interface import Connection
from dep2p.host.reachability import client as client_module
from dep2p.host.reachability.interface import read_dial_message, send_dial_message
from dep2p.protocols.addresses.dialable import AddressScope
from dep2p.protocols.reachability import candidates, observed, serving
from dep2p.protocols.reachability.candidates import AddressSources
from dep2p.protocols.reachability.messages import (
    DATA_BYTES_MAX,
    DIAL_BACK,
    DIAL_REQUEST,
    DialData,
    DialDataRequest,
    DialMessage,
    DialRequest,
    DialResponse,
    DialStatus,
    ResponseStatus,
    encode_dial_back,
)
from dep2p.protocols.reachability.model import Reachability

pytestmark = pytest.mark.real

OpenHost = Callable[..., AbstractAsyncContextManager[LibP2PHost]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
ASKER, SERVER = "/ip4/127.0.0.2/tcp/0", "/ip4/127.0.0.3/tcp/0"


@pytest.fixture
def public_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (candidates, observed, serving, client_module):
        monkeypatch.setattr(module, "address_scope", everywhere)


@asynccontextmanager
async def two(
    open_host: OpenHost, listen: str = ASKER, **options: Any
) -> AsyncGenerator[tuple[LibP2PHost, LibP2PHost, Connection]]:
    """An asker, a server, and the asker's connection with it."""
    async with AsyncExitStack() as stack:
        asker = await stack.enter_async_context(open_host(listen=[listen], **options))
        server = await stack.enter_async_context(open_host(listen=[SERVER], **options))
        yield asker, server, await asker.dial(server.peer_id, server.listen_addrs())


async def ask(connection: Connection, *messages: DialMessage) -> DialMessage:
    stream = await connection.open_stream(DIAL_REQUEST)
    for message in messages:
        await send_dial_message(stream, message)
    answer = await read_dial_message(stream)
    stream.reset()
    return answer


def request(*addrs: str, nonce: int = 7) -> DialRequest:
    return DialRequest(tuple(Multiaddr(addr).to_bytes() for addr in addrs), nonce)


def only(addr: str) -> Callable[[AddressSources, Collection[str]], tuple[str, ...]]:
    """A source of candidates that gives one address."""

    def candidate_addrs(_sources: AddressSources, _transports: Collection[str]) -> tuple[str, ...]:
        return (addr,)

    return candidate_addrs


def everywhere(_addr: str) -> AddressScope:
    return AddressScope.PUBLIC


def state(host: LibP2PHost) -> Reachability:
    return host.reachability().overall


@pytest.mark.parametrize("listen", [ASKER, "/ip4/127.0.0.2/udp/0/quic-v1", "/ip4/127.0.0.2/tcp/0/ws"])
@pytest.mark.usefixtures("public_loopback")
async def test_an_address_that_a_member_reaches_makes_a_node_public(
    open_host: OpenHost, eventually: Eventually, listen: str
) -> None:
    async with two(open_host, listen, trusts=True) as (asker, server, _connection):
        await eventually(lambda: state(asker) is Reachability.PUBLIC)
        report = asker.reachability()
        assert [f"{addr}/p2p/{asker.peer_id}" for addr in report.verified] == asker.listen_addrs()
        assert [each.reachability for each in report.transports] == [Reachability.PUBLIC]
        assert report.tested_at_s is not None
        assert server.counters()["dial_back_ok"] >= 1
        # The connection that brought the nonce is none of either host.
        await eventually(lambda: len(asker.connections()) == 1)
        assert [one.peer for one in server.connections()] == [asker.peer_id]


@pytest.mark.usefixtures("public_loopback")
async def test_an_address_at_which_nobody_answers_makes_a_node_private(
    open_host: OpenHost, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "candidate_addrs", only("/ip4/127.0.0.9/tcp/9"))
    reports: list[Reachability] = []
    async with two(open_host, trusts=True) as (asker, server, _connection):
        asker.subscribe_reachability(lambda report: reports.append(report.overall))
        await eventually(lambda: state(asker) is Reachability.PRIVATE)
        assert reports[-1] is Reachability.PRIVATE
        assert asker.counters()["reachability_tests_not_reached"] == 1
        assert asker.reachability().verified == ()
        # The address is not the one that asks, so the dial had its price.
        assert server.counters()["dial_back_data_wanted"] >= 1


@pytest.mark.usefixtures("public_loopback")
async def test_a_verified_address_is_announced(
    open_host: OpenHost, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(open_host, listen="/ip4/0.0.0.0/tcp/0", trusts=True) as (asker, server, connection):
        port = asker.listen_addrs()[0].split("/")[4]
        mapped = f"/ip4/127.0.0.77/tcp/{port}"
        assert f"{mapped}/p2p/{asker.peer_id}" not in asker.listen_addrs()
        monkeypatch.setattr(client_module, "candidate_addrs", only(mapped))
        asker.protect(connection, "again")
        await eventually(lambda: f"{mapped}/p2p/{asker.peer_id}" in asker.listen_addrs())
        await eventually(lambda: mapped in server.addrs(asker.peer_id))  # by an identify push


async def test_without_members_and_without_the_internet_nothing_is_known(
    open_host: OpenHost, eventually: Eventually
) -> None:
    async with two(open_host, trusts=True) as (asker, server, connection):
        answer = await ask(connection, request("/ip4/127.0.0.2/tcp/9"))
        assert answer == DialResponse(ResponseStatus.DIAL_REFUSED)  # loopback is not public
        assert server.counters()["dial_back_refused_address"] == 1
        await eventually(lambda: DIAL_REQUEST in asker.peer_protocols(server.peer_id))
        assert state(asker) is Reachability.UNKNOWN
        assert asker.reachability().verified == ()


@pytest.mark.usefixtures("public_loopback")
async def test_strangers_are_not_asked(open_host: OpenHost, eventually: Eventually) -> None:
    async with two(open_host) as (asker, server, _connection):
        await eventually(lambda: DIAL_REQUEST in asker.peer_protocols(server.peer_id))
        await asker._reachability.look()  # pyright: ignore[reportPrivateUsage]
        assert "dial_back_ok" not in server.counters()
        assert state(asker) is Reachability.UNKNOWN


@pytest.mark.usefixtures("public_loopback")
async def test_strangers_are_served_at_a_low_rate(open_host: OpenHost) -> None:
    async with two(open_host) as (asker, server, connection):
        own = server.listen_addrs()
        answers = [await ask(connection, request(*own)) for _ in range(3)]
        assert answers == [
            DialResponse(ResponseStatus.DIAL_REFUSED),
            DialResponse(ResponseStatus.DIAL_REFUSED),
            DialResponse(ResponseStatus.REQUEST_REJECTED),
        ]
        assert server.counters()["dial_back_rejected"] == 1
        assert asker.counters().get("dial_back_unexpected", 0) == 0


@pytest.mark.usefixtures("public_loopback")
async def test_a_server_asks_for_dial_data_before_it_dials_another_ip_address(
    open_host: OpenHost, eventually: Eventually
) -> None:
    async with two(open_host) as (_asker, server, connection):
        foreign = "/ip4/127.0.0.9/tcp/9"
        stream = await connection.open_stream(DIAL_REQUEST)
        await send_dial_message(stream, request(foreign))
        wanted = await read_dial_message(stream)
        assert isinstance(wanted, DialDataRequest)
        assert 30_000 <= wanted.wanted_bytes <= 100_000
        for _ in range((wanted.wanted_bytes - 1) // DATA_BYTES_MAX):
            await send_dial_message(stream, DialData(DATA_BYTES_MAX))
        await trio.testing.wait_all_tasks_blocked()
        assert [name for name in server.counters() if name.startswith("dial_back_")] == ["dial_back_data_wanted"]
        await send_dial_message(stream, DialData(DATA_BYTES_MAX))
        assert await read_dial_message(stream) == DialResponse(ResponseStatus.OK, 0, DialStatus.DIAL_ERROR)


@pytest.mark.parametrize("part", [DialData(0), request("/ip4/127.0.0.9/tcp/9")])
@pytest.mark.usefixtures("public_loopback")
async def test_another_message_in_place_of_dial_data_ends_the_stream(open_host: OpenHost, part: DialMessage) -> None:
    async with two(open_host) as (_asker, _server, connection):
        stream = await connection.open_stream(DIAL_REQUEST)
        await send_dial_message(stream, request("/ip4/127.0.0.9/tcp/9"))
        assert isinstance(await read_dial_message(stream), DialDataRequest)
        await send_dial_message(stream, part)
        with pytest.raises(StreamClosedError):
            await read_dial_message(stream)


async def test_a_nonce_that_nobody_waits_for_ends_its_stream(open_host: OpenHost) -> None:
    async with two(open_host) as (asker, server, connection):
        stream = await connection.open_stream(DIAL_BACK)
        await stream.write(encode_length_prefixed(encode_dial_back(1)))
        with pytest.raises(StreamClosedError):
            await stream.read()
        assert server.counters()["dial_back_unexpected"] == 1
        assert asker.reachability().overall is Reachability.UNKNOWN


@pytest.mark.usefixtures("public_loopback")
async def test_a_server_that_says_ok_without_the_nonce_proves_nothing(
    open_host: OpenHost, eventually: Eventually
) -> None:
    async with two(open_host) as (asker, server, connection):

        async def lie(stream: Any) -> None:
            await read_dial_message(stream)
            await send_dial_message(stream, DialResponse(ResponseStatus.OK, 0, DialStatus.OK))
            await stream.close()

        server.set_stream_handler(DIAL_REQUEST, lie)
        await eventually(lambda: DIAL_REQUEST in asker.peer_protocols(server.peer_id))
        asker.protect(connection, "test")
        await eventually(lambda: asker.counters().get("reachability_tests_silent", 0) >= 1)
        assert state(asker) is Reachability.UNKNOWN


@pytest.mark.usefixtures("public_loopback")
async def test_a_server_that_wants_too_much_dial_data_gets_none(open_host: OpenHost, eventually: Eventually) -> None:
    async with two(open_host) as (asker, server, connection):

        async def want(stream: Any) -> None:
            await read_dial_message(stream)
            await send_dial_message(stream, DialDataRequest(0, 100_001))
            await stream.read()

        server.set_stream_handler(DIAL_REQUEST, want)
        await eventually(lambda: DIAL_REQUEST in asker.peer_protocols(server.peer_id))
        asker.protect(connection, "test")
        await eventually(lambda: asker.counters().get("reachability_tests_silent", 0) >= 1)


async def test_the_connection_of_a_nonce_ends_with_it(open_host: OpenHost, eventually: Eventually) -> None:
    async with open_host(listen=[ASKER]) as asker, open_host(listen=[SERVER]) as server:
        dialer = server._back_dialer  # pyright: ignore[reportPrivateUsage]
        assert dialer is not None
        status = await dialer.bring(parse_address(asker.listen_addrs()[0]), asker.peer_id, 1)
        assert status is DialStatus.DIAL_BACK_ERROR  # nobody waits for the nonce
        await eventually(partial(has_no_connection, asker))
        other = await dialer.bring(parse_address(asker.listen_addrs()[0]), server.peer_id, 1)
        assert other is DialStatus.DIAL_ERROR  # another node answers there


def has_no_connection(host: LibP2PHost) -> bool:
    return not host.connections()
