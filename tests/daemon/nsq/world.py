"""An NSQ server in memory, and a client that speaks to it frame by frame."""

import json
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import trio
import trio.testing

from dep2p.config.nsq import NsqConfig
from dep2p.daemon.nsq.connection import NsqConnection
from dep2p.daemon.nsq.server import NsqServer
from dep2p.protocols.nsq.limits import NsqLimits
from dep2p.protocols.queues.options import QueueOptions
from dep2p.queues.broker.engine import QueueEngine
from dep2p.queues.broker.ownership import StoreOwnership
from dep2p.storage.memory import MemoryStore
from dep2p.storage.queue_store import QueueStore


class Frame(NamedTuple):
    kind: int
    data: bytes


class Message(NamedTuple):
    message_id: bytes
    attempts: int
    timestamp_ns: int
    body: bytes


class NsqClient:
    """Answers heartbeats only when asked to."""

    def __init__(self, stream: trio.abc.HalfCloseableStream) -> None:
        self.stream = stream
        self._buffer = b""
        self.heartbeats = 0

    async def send(self, line: str, body: bytes | None = None) -> None:
        data = line.encode() + b"\n"
        if body is not None:
            data += struct.pack(">i", len(body)) + body
        await self.stream.send_all(data)

    async def frame(self) -> Frame | None:
        """The next frame but heartbeats, which are answered; None at the end."""
        while True:
            while len(self._buffer) < 4 or len(self._buffer) < 4 + struct.unpack_from(">i", self._buffer)[0]:
                data = bytes(await self.stream.receive_some(65_536))
                if not data:
                    assert not self._buffer
                    return None
                self._buffer += data
            size, kind = struct.unpack_from(">ii", self._buffer)
            data, self._buffer = self._buffer[8 : 4 + size], self._buffer[4 + size :]
            if data == b"_heartbeat_":
                self.heartbeats += 1
                await self.send("NOP")
                continue
            return Frame(kind, data)

    async def response(self) -> str:
        """An answer or an error, as text."""
        frame = await self.frame()
        assert frame is not None
        assert frame.kind in (0, 1), frame
        return frame.data.decode()

    async def message(self) -> Message:
        frame = await self.frame()
        assert frame is not None
        assert frame.kind == 2, frame
        timestamp_ns, attempts, message_id = struct.unpack_from(">qH16s", frame.data)
        return Message(message_id, attempts, timestamp_ns, frame.data[26:])

    async def ask(self, line: str, body: bytes | None = None) -> str:
        await self.send(line, body)
        return await self.response()

    async def identify(self, **fields: object) -> dict[str, Any]:
        answer = await self.ask("IDENTIFY", json.dumps({"feature_negotiation": True, **fields}).encode())
        return cast(dict[str, Any], json.loads(answer))

    async def subscribe(self, topic: str = "t", channel: str = "c", ready: int = 1) -> None:
        assert await self.ask(f"SUB {topic} {channel}") == "OK"
        await self.send(f"RDY {ready}")

    async def finish(self, message: Message) -> None:
        await self.send(f"FIN {message.message_id.decode()}")

    async def silent(self, seconds: float = 1.0) -> bool:
        """Whether nothing comes for so long."""
        with trio.move_on_after(seconds):
            raise AssertionError(f"unexpected: {await self.frame()}")
        return True


class NsqWorld:
    def __init__(self, server: NsqServer, nursery: trio.Nursery) -> None:
        self.server = server
        self.engine = server.engine
        self._nursery = nursery

    async def client(self, *, magic: bytes = b"  V2", is_lockstep: bool = False) -> NsqClient:
        """``is_lockstep``: what one side does not read keeps the other from sending on."""
        ours: trio.abc.HalfCloseableStream
        theirs: trio.abc.HalfCloseableStream
        ours, theirs = trio.testing.lockstep_stream_pair() if is_lockstep else trio.testing.memory_stream_pair()
        connection = NsqConnection(self.server, theirs, "client")

        async def run() -> None:
            self.server.connections[connection] = None
            try:
                await connection.run()
            finally:
                del self.server.connections[connection]

        self._nursery.start_soon(run)
        if magic:
            await ours.send_all(magic)
        return NsqClient(ours)


@asynccontextmanager
async def nsq_world(
    *,
    store: QueueStore | None = None,
    limits: NsqLimits | None = None,
    config: NsqConfig | None = None,
    **options: Any,
) -> AsyncGenerator[NsqWorld]:
    """Options are those of every queue."""
    engine = QueueEngine(store or MemoryStore(), defaults=replace(QueueOptions(), **options))
    await engine.open()
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            yield NsqWorld(NsqServer(StoreOwnership(engine), lambda: "", limits=limits, config=config), nursery)
            nursery.cancel_scope.cancel()
    finally:
        await engine.aclose()
