"""The js-libp2p peer, and the raw stream protocols that both sides of the interop tests serve."""

import hashlib
import json
import shutil
import struct
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from dep2p.host.host import HostOptions, LibP2PHost
from dep2p.host.interface import ByteStream
from dep2p.identity import Identity
from dep2p.limits import Limits

FOLDER = Path(__file__).parent
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
CHUNK_BYTES = 65_536
_ECHO, _SINK, _SOURCE = "/dep2p-test/echo/1", "/dep2p-test/sink/1", "/dep2p-test/source/1"


def generate(count: int) -> Iterator[bytes]:
    """The bytes that both sides send: chunks that start with their number, so that none can stand for another."""
    number = 0
    while count > 0:
        chunk = bytearray([number % 251]) * min(CHUNK_BYTES, count)
        if len(chunk) >= 4:
            struct.pack_into("!I", chunk, 0, number)
        yield bytes(chunk)
        count -= len(chunk)
        number += 1


def digest(count: int) -> str:
    """The sha256 of `generate`'s bytes."""
    seen = hashlib.sha256()
    for chunk in generate(count):
        seen.update(chunk)
    return seen.hexdigest()


async def send(stream: ByteStream, count: int) -> None:
    """Send `generate`'s bytes and half-close."""
    for chunk in generate(count):
        await stream.write(chunk)
    await stream.close_write()


async def receive(stream: ByteStream) -> tuple[int, str]:
    """Push mode up to the peer's half-close: the count and sha256 of what came."""
    seen, count, ended, ends = hashlib.sha256(), 0, trio.Event(), list[BaseException | None]()

    def on_data(data: bytes | memoryview) -> None:
        nonlocal count
        seen.update(data)
        count += len(data)

    def on_end(error: BaseException | None) -> None:
        ends.append(error)
        ended.set()

    stream.set_receiver(on_data, on_end)
    await ended.wait()
    if ends[0] is not None:
        raise ends[0]
    return count, seen.hexdigest()


async def _echo(stream: ByteStream) -> None:
    while data := await stream.read():
        await stream.write(data)
    await stream.close()


async def _sink(stream: ByteStream) -> None:
    count, sha256 = await receive(stream)
    await stream.write(json.dumps({"bytes": count, "sha256": sha256}).encode())
    await stream.close()


async def _source(stream: ByteStream) -> None:
    head = b""
    while len(head) < 8:
        more = await stream.read(8 - len(head))
        assert more
        head += more
    await send(stream, struct.unpack("!Q", head)[0])
    await stream.close()


class JsPeer:
    """A running js-libp2p peer. Commands run one at a time."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._lines: list[dict[str, Any]] = []
        self._arrived = trio.Event()
        self.pid = process.pid
        self.peer = ""
        self.addr = ""

    async def read_lines(self) -> None:
        """Read its output until it ends."""
        assert self._process.stdout is not None
        rest = b""
        async for data in self._process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            self._lines += [json.loads(line) for line in lines]
            self._arrived.set()
            self._arrived = trio.Event()

    async def line(self, **fields: object) -> dict[str, Any]:
        """Wait for a line of output with these fields, and take it."""
        while True:
            for line in self._lines:
                if all(line.get(name) == value for name, value in fields.items()):
                    self._lines.remove(line)
                    return line
            await self._arrived.wait()

    async def call(self, command: str, *args: object) -> dict[str, Any]:
        """Run a command; an error of the peer fails the test."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(" ".join((command, *map(str, args))).encode() + b"\n")
        answer = await self.line(command=command)
        assert answer.pop("ok"), f"{command}: {answer['error']}"
        return answer


@asynccontextmanager
async def run_js(script: str, *options: str) -> AsyncGenerator[JsPeer, None]:
    """A js node, as one of the scripts beside this file makes it."""
    process = await trio.lowlevel.open_process(
        ["node", "--import", "./polyfill.mjs", script, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=FOLDER,
    )
    try:
        async with trio.open_nursery() as nursery:
            peer = JsPeer(process)
            nursery.start_soon(peer.read_lines)
            ready = await peer.line(event="ready")
            peer.peer, peer.addr = ready["peer"], ready["addrs"][0]
            yield peer
            nursery.cancel_scope.cancel()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()


OpenJsPeer = Callable[[], AbstractAsyncContextManager[JsPeer]]


@pytest.fixture
def js_peer() -> OpenJsPeer:
    """Skips where the peer is not installed."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules").is_dir():
        pytest.skip("the js-libp2p peer is not installed: run `make interop-peer`")
    return lambda: run_js("peer.mjs")


@asynccontextmanager
async def _our_host(limits: Limits | None = None) -> AsyncGenerator[LibP2PHost, None]:
    async with LibP2PHost.open(
        Identity.generate(), listen=[LOOPBACK], options=HostOptions(limits=limits or Limits())
    ) as host:
        for protocol, handler in ((_ECHO, _echo), (_SINK, _sink), (_SOURCE, _source)):
            host.set_stream_handler(protocol, handler)
        yield host


OpenOurHost = Callable[..., AbstractAsyncContextManager[LibP2PHost]]


@pytest.fixture
def our_host() -> OpenOurHost:
    """A host of ours that serves the raw stream protocols."""
    return _our_host


class Traffic:
    """The raw stream protocols, for tests."""

    ECHO, SINK, SOURCE = _ECHO, _SINK, _SOURCE
    digest = staticmethod(digest)
    generate = staticmethod(generate)
    send = staticmethod(send)
    receive = staticmethod(receive)


@pytest.fixture
def traffic() -> type[Traffic]:
    return Traffic
