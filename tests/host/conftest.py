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

from dep2p.host.host import LibP2PHost
from dep2p.host.interface import ByteStream, HostEvent
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
async def _open_host(identity: Identity | None = None, **options: Any) -> AsyncGenerator[LibP2PHost, None]:
    options.setdefault("listen", [LOOPBACK])
    with trio.fail_after(60):
        async with LibP2PHost.open(identity or Identity.generate(), **options) as host:
            host.set_stream_handler("/echo/1", echo)
            yield host


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
