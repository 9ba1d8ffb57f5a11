"""Two ends of a Noise and yamux connection, over a socket pair or over memory, and two cores without any I/O."""

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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

from dep2p.host.noise.session import NoiseSession, NoiseTransport
from dep2p.host.yamux.connection import YamuxConnection
from dep2p.host.yamux.session import YamuxCore
from dep2p.host.yamux.stream_state import StreamState
from dep2p.limits import Limits

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


class Recorder:
    """The owner of a core: notes what it is told."""

    def __init__(self) -> None:
        self.pongs: list[int] = []
        self.go_aways: list[int] = []
        self.stuck: list[str] = []
        self.outputs = 0

    def on_output(self) -> None:
        self.outputs += 1

    def on_inbound_stream(self) -> None:
        pass

    def on_acknowledged(self) -> None:
        pass

    def on_pong(self, value: int) -> None:
        self.pongs.append(value)

    def on_go_away(self, code: int) -> None:
        self.go_aways.append(code)

    def on_stuck(self, reason: str) -> None:
        self.stuck.append(reason)


class End:
    """A core with its owner."""

    def __init__(self, *, is_initiator: bool, streams_max: int = 1_024, backlog_max: int = 256) -> None:
        self.owner = Recorder()
        self.core: YamuxCore[StreamState] = YamuxCore(
            self.owner,
            StreamState,
            is_initiator=is_initiator,
            streams_max=streams_max,
            accept_backlog_max=backlog_max,
        )

    def output(self, room: int = 65_519) -> bytes:
        """All that the core wants to send now."""
        buffer = memoryview(bytearray(room))
        parts: list[bytes] = []
        while size := self.core.outbox.fill(buffer):
            parts.append(bytes(buffer[:size]))
        return b"".join(parts)

    def feed(self, data: bytes, step: float = math.inf) -> None:
        """Give the core ``data``, ``step`` bytes at a time."""
        view = memoryview(data)
        while view:
            size = int(min(step, len(view)))
            self.core.receive(view[:size])
            view = view[size:]


class Ends:
    """Two cores back to back."""

    def __init__(self, **options: Any) -> None:
        self.one = End(is_initiator=True, **options)
        self.other = End(is_initiator=False, **options)

    def pump(self, step: float = math.inf) -> None:
        """Carry bytes both ways until neither has any."""
        while self.one.core.outbox.has_output or self.other.core.outbox.has_output:
            self.other.feed(self.one.output(), step)
            self.one.feed(self.other.output(), step)

    def stream(self) -> tuple[StreamState, StreamState]:
        """A stream opened by the first end, and its other side."""
        mine = self.one.core.open_stream()
        self.pump()
        theirs = self.other.core.accept_stream()
        self.pump()
        assert theirs is not None
        return mine, theirs


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture(scope="session")
def make_ends() -> Callable[..., Ends]:
    return Ends
