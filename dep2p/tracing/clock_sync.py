"""Readings of the clocks of a realm's members, with which traces compare the times of several nodes."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import trio

from dep2p.errors import Dep2pError, ProtocolError, ProtocolNotSupportedError
from dep2p.host.interface import ByteStream, Connection, Host
from dep2p.limits import Limits
from dep2p.protocols.timing.clock_sync import (
    ANSWER_BYTES,
    ASK_BYTES,
    ROUNDS,
    ROUNDS_MAX,
    ClockExchange,
    best,
    decode_answer,
    encode_answer,
    encode_ask,
)
from dep2p.realm.interface import RealmGate
from dep2p.types import PeerId, RealmId

_TIMEOUT_S: Final = 5.0
_ANSWERING_MAX: Final = 64
"""Streams of all peers that are answered at once; further ones are reset."""
_ASKING_MAX: Final = 4


def clock_protocol(realm_id: RealmId) -> str:
    """The libp2p protocol id."""
    return f"/dep2p/app/{realm_id}/clock/1.0.0"


class Clocks:
    """Answers with the time of this node's clock, and asks other nodes for theirs."""

    def __init__(
        self,
        host: Host,
        gate: RealmGate,
        realm_id: RealmId,
        limits: Limits,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``wall``: seconds since the Unix epoch."""
        self._host = host
        self._gate = gate
        self._limits = limits
        self._wall = wall
        self._protocol = clock_protocol(realm_id)
        self._counts: Counter[str] = Counter()
        self._answering: dict[PeerId, None] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled."""
        self._host.set_stream_handler(self._protocol, self._answer)
        try:
            task_status.started()
            await trio.sleep_forever()
        finally:
            self._host.remove_stream_handler(self._protocol)

    async def drain(self) -> None:
        """Do nothing: no exchange is worth waiting for."""
        await trio.lowlevel.checkpoint()

    def counters(self) -> dict[str, int]:
        """Monotonic counts by name."""
        return dict(self._counts)

    def stats(self) -> dict[str, object]:
        """The present state."""
        return {"answering": len(self._answering)}

    def set_wall(self, wall: Callable[[], float]) -> None:
        """Set another clock to answer and ask by, in seconds since the Unix epoch: for tests under a virtual clock."""
        self._wall = wall

    def _now_us(self) -> int:
        return int(self._wall() * 1e6)

    async def _answer(self, stream: ByteStream) -> None:
        peer = stream.connection.peer
        if (
            not self._gate.is_verified(stream.connection)
            or peer in self._answering
            or len(self._answering) >= _ANSWERING_MAX
        ):
            self._counts["refused"] += 1
            stream.reset()
            return
        self._answering[peer] = None
        try:
            with trio.move_on_after(_TIMEOUT_S):
                for _ in range(ROUNDS_MAX):
                    ask = await _read(stream, ASK_BYTES)
                    received_us = self._now_us()
                    if not ask:
                        await stream.close()
                        return
                    stream.write_nowait(encode_answer(ask, received_us, self._now_us()), urgent=True)
                    self._counts["answers"] += 1
            stream.reset()
        except Dep2pError:
            stream.reset()
        finally:
            del self._answering[peer]

    # Asking

    async def ask_all(self, on_reading: Callable[[PeerId, ClockExchange], None]) -> None:
        """Read the clock of each connected member, a few at a time; failures are counted."""
        limiter = trio.CapacityLimiter(_ASKING_MAX)
        members: dict[PeerId, Connection] = {}
        for connection in self._host.connections():
            if self._gate.is_verified(connection):
                members.setdefault(connection.peer, connection)

        async def ask(connection: Connection) -> None:
            async with limiter:
                exchange = await self.ask(connection)
            if exchange is not None:
                on_reading(connection.peer, exchange)

        async with trio.open_nursery() as nursery:
            for connection in members.values():
                nursery.start_soon(ask, connection)

    async def ask(self, connection: Connection) -> ClockExchange | None:
        """Return the best of some exchanges on a verified connection; None, and counted, when none succeeded."""
        stream: ByteStream | None = None
        try:
            with trio.fail_after(_TIMEOUT_S):
                stream = await connection.open_stream(self._protocol, timeout_s=self._limits.stream_open_timeout_s)
                exchanges: list[ClockExchange] = []
                for _ in range(ROUNDS):
                    asked_us = self._now_us()
                    stream.write_nowait(encode_ask(asked_us), urgent=True)
                    answer = await _read(stream, ANSWER_BYTES)
                    exchanges.append(decode_answer(answer, asked_us, self._now_us()))
                await stream.close()
        except ProtocolNotSupportedError:
            self._counts["readings_failed_not_supported"] += 1
        except ProtocolError:
            self._counts["readings_failed_malformed"] += 1
        except (Dep2pError, trio.TooSlowError):
            self._counts["readings_failed"] += 1
        else:
            self._counts["readings"] += 1
            return best(exchanges)
        if stream is not None:
            stream.reset()
        return None


async def _read(stream: ByteStream, size: int) -> bytes:
    """Read so many bytes; return nothing at the stream's end."""
    data = b""
    while len(data) < size:
        part = await stream.read(size - len(data))
        if not part:
            return b""
        data += part
    return data
