"""A stream of another muxer that is closed while its bytes still go: they arrive, however long that takes."""

from types import SimpleNamespace
from typing import Any

import trio

from dep2p.host.resources.ledger import unbounded
from dep2p.host.upstream.byte_stream import MuxedByteStream


class SlowMuxedStream:
    """Takes 20,000 bytes in a second; the peer ends its side when it has the end of ours."""

    def __init__(self) -> None:
        self.taken = 0
        self.was_reset = False
        self.ended = trio.Event()

    async def write(self, data: bytes) -> None:
        await trio.sleep(len(data) / 20_000)
        self.taken += len(data)

    async def close_write(self) -> None:
        self.ended.set()

    async def read(self, n: int | None = None) -> bytes:
        await self.ended.wait()
        return b""

    async def reset(self) -> None:
        self.was_reset = True


async def test_a_stream_that_is_closed_while_its_bytes_go_is_not_reset(autojump_clock: trio.abc.Clock) -> None:
    muxed: Any = SlowMuxedStream()
    connection: Any = SimpleNamespace(resources=unbounded(1_000_000))
    done: list[MuxedByteStream] = []
    async with trio.open_nursery() as nursery:
        stream = MuxedByteStream(muxed, connection, nursery, on_done=done.append, close_timeout_s=5.0)
        for _ in range(60):
            stream.write_nowait(bytes(60_000 // 60 * 3))
        await stream.close()
    assert muxed.taken == 180_000
    assert not muxed.was_reset
    assert done == [stream]


async def test_a_stream_whose_bytes_do_not_go_is_reset_when_it_is_closed(autojump_clock: trio.abc.Clock) -> None:
    muxed: Any = SlowMuxedStream()
    connection: Any = SimpleNamespace(resources=unbounded(1_000_000))

    async def hold(data: bytes) -> None:
        await trio.sleep_forever()

    muxed.write = hold
    async with trio.open_nursery() as nursery:
        stream = MuxedByteStream(muxed, connection, nursery, on_done=lambda _stream: None, close_timeout_s=5.0)
        stream.write_nowait(b"x")
        await stream.close()
        await trio.sleep(20)
        assert muxed.was_reset
        nursery.cancel_scope.cancel()
