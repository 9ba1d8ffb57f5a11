"""The sender of a file gives up when nothing moves, and not while the daemon takes anything."""

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from dep2p.cli.commands.stream.send import _Sending  # pyright: ignore[reportPrivateUsage]


async def test_a_sender_gives_up_only_when_nothing_moves(autojump_clock: trio.abc.Clock) -> None:
    stream: Any = SimpleNamespace(sent_bytes=0)
    nothing: Any = None
    sending = _Sending(nothing, nothing, 60.0, nothing)

    async def move() -> None:
        for _ in range(20):
            await trio.sleep(50)
            stream.sent_bytes += 65_536

    async with trio.open_nursery() as nursery:
        nursery.start_soon(move)
        with pytest.raises(TimeoutError):
            await sending._watch(stream)  # pyright: ignore[reportPrivateUsage]
    assert 1_060 <= trio.current_time() <= 1_120
