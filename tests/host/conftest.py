"""Real hosts on loopback for the tests of this folder."""

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from dep2p.host.host import HostOptions, LibP2PHost
from dep2p.host.interface import ByteStream, HostEvent, PeerConnected
from dep2p.host.noise.session import NoiseSession, NoiseTransport
from dep2p.host.yamux.connection import YamuxConnection
from dep2p.identity import Identity
from dep2p.limits import Limits

LOOPBACK = "/ip4/127.0.0.1/tcp/0"

OpenHost = Callable[..., AbstractAsyncContextManager[LibP2PHost]]
TwoHosts = Callable[..., AbstractAsyncContextManager[tuple[LibP2PHost, LibP2PHost]]]


async def echo(stream: ByteStream) -> None:
    """Send back what comes, then close."""
    while data := await stream.read():
        await stream.write(data)
    await stream.close()


@asynccontextmanager
async def _open_host(
    identity: Identity | None = None, *, trusts: bool = False, **options: Any
) -> AsyncGenerator[LibP2PHost, None]:
    """A host on loopback; ``trusts``: every peer counts as verified."""
    listen = options.pop("listen", [LOOPBACK])
    if options.get("limits", True) is None:
        del options["limits"]
    with trio.fail_after(60):
        async with LibP2PHost.open(
            identity or Identity.generate(), listen=listen, options=HostOptions(**options)
        ) as host:
            host.set_stream_handler("/echo/1", echo)
            if trusts:
                host.subscribe(lambda event: _protect(host, event))
            yield host


def _protect(host: LibP2PHost, event: HostEvent) -> None:
    if isinstance(event, PeerConnected):
        host.protect(event.connection, "test")


@asynccontextmanager
async def _two_hosts(
    limits: Limits | None = None, **options: Any
) -> AsyncGenerator[tuple[LibP2PHost, LibP2PHost], None]:
    async with _open_host(limits=limits, **options) as one, _open_host(limits=limits, **options) as other:
        yield one, other


@pytest.fixture
def open_host() -> OpenHost:
    return _open_host


@pytest.fixture
def two_hosts() -> TwoHosts:
    return _two_hosts


class EventLog:
    """The events of one host, and waiting for one of them."""

    def __init__(self, host: LibP2PHost) -> None:
        self.events: list[HostEvent] = []
        self._changed = trio.Event()
        host.subscribe(self._add)

    def _add(self, event: HostEvent) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed = trio.Event()

    def of(self, kind: type[HostEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, kind: type[HostEvent], count: int = 1, timeout_s: float = 10.0) -> Any:
        """The ``count``-th event of a kind."""
        with trio.fail_after(timeout_s):
            while len(self.of(kind)) < count:
                await self._changed.wait()
        return self.of(kind)[count - 1]


@pytest.fixture
def event_log() -> type[EventLog]:
    return EventLog


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds that no event announces."""
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - counters and task counts announce nothing
            await trio.sleep(0.005)


@pytest.fixture(name="eventually")
def _eventually() -> Any:
    return eventually


PEER_PROCESS = Path(__file__).with_name("peer_process.py")


class PeerProcess:
    """A host in a process of its own that serves /echo/1 and prints its address."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER_PROCESS), *arguments], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert self.process.stdout is not None
        self.addr = self.process.stdout.readline().strip()

    @property
    def peer(self) -> Any:
        return self.addr.rsplit("/", 1)[1]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def peer_process() -> Iterator[Callable[..., PeerProcess]]:
    started: list[PeerProcess] = []

    def start(*arguments: str) -> PeerProcess:
        started.append(PeerProcess(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()


# Two ends of a Noise and yamux connection, over a socket pair or over memory

QUIET = Limits(liveness_interval_s=0)
"""No liveness probes, so that a test sees only its own frames."""


class MemoryConnection(IRawConnection):
    """A raw connection that is no TCP socket, so that sessions use its read and write."""

    def __init__(self, stream: trio.abc.Stream, is_initiator: bool) -> None:
        self._stream = stream
        self.is_initiator = is_initiator
        self.is_frozen = False

    async def read(self, n: int | None = None) -> bytes:
        data = bytes(await self._stream.receive_some(n))
        if self.is_frozen:  # like a stopped process: what came is in its socket, and stays there
            await trio.sleep_forever()
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return []

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED


RawPair = tuple[IRawConnection, IRawConnection]


def socket_pair() -> RawPair:
    one, other = (TrioTCPStream(trio.SocketStream(end)) for end in trio.socket.socketpair())
    return RawConnection(one, True), RawConnection(other, False)


def memory_pair() -> RawPair:
    one, other = trio.testing.memory_stream_pair()
    return MemoryConnection(one, True), MemoryConnection(other, False)


_KINDS: dict[str, Callable[[], RawPair]] = {"socket": socket_pair, "memory": memory_pair}


async def secure(pair: RawPair) -> tuple[NoiseSession, NoiseSession]:
    """Both ends after the Noise handshake."""
    keys, other_keys = create_new_key_pair(), create_new_key_pair()
    sessions: list[NoiseSession] = []

    async def answer() -> None:
        sessions.append(await NoiseTransport(other_keys).secure_inbound(pair[1]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        first = await NoiseTransport(keys).secure_outbound(pair[0], ID.from_pubkey(other_keys.public_key))
    return first, sessions[0]


OpenPair = Callable[..., AbstractAsyncContextManager[tuple[YamuxConnection, YamuxConnection]]]


@asynccontextmanager
async def _open_pair(
    kind: str = "socket",
    *,
    limits: Limits = QUIET,
    other_limits: Limits | None = None,
    start_other: bool = True,
) -> AsyncGenerator[tuple[YamuxConnection, YamuxConnection], None]:
    sessions = await secure(_KINDS[kind]())
    one = YamuxConnection(sessions[0], sessions[0].get_remote_peer(), limits=limits)
    other = YamuxConnection(sessions[1], sessions[1].get_remote_peer(), limits=other_limits or limits)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        if start_other:
            nursery.start_soon(other.start)
        yield one, other
        await one.close()
        await other.close()


@pytest.fixture
def open_pair() -> OpenPair:
    return _open_pair


async def _closing(pair: RawPair) -> AsyncGenerator[RawPair, None]:
    yield pair
    for end in pair:
        await end.close()


@pytest.fixture(params=sorted(_KINDS))
async def raw_pair(request: pytest.FixtureRequest) -> AsyncGenerator[RawPair, None]:
    """Both kinds of raw connection in turn."""
    async for pair in _closing(_KINDS[request.param]()):
        yield pair


@pytest.fixture
async def sockets() -> AsyncGenerator[RawPair, None]:
    async for pair in _closing(socket_pair()):
        yield pair


@pytest.fixture
async def lockstep() -> AsyncGenerator[RawPair, None]:
    """A connection that buffers nothing."""
    one, other = trio.testing.lockstep_stream_pair()
    async for pair in _closing((MemoryConnection(one, True), MemoryConnection(other, False))):
        yield pair


@pytest.fixture
def secured() -> Callable[[RawPair], Any]:
    return secure
