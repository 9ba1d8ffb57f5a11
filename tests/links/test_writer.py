"""The output of a link: its bounds hold whatever the order of its callers, and no caller waits for nothing."""

from typing import Any

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dep2p.limits import Limits
from dep2p.links.writer import LinkOutput

FRAME = bytes(100)


class HeldStream:
    """A stream that takes nothing until `let_go`."""

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self.written = bytearray()
        self.may_go = trio.Event()

    def write_nowait(self, data: bytes, *, urgent: bool = False) -> None:
        self.written += data
        if not self.may_go.is_set():
            self.unsent_bytes = 1 << 30

    async def drain(self, low_bytes: int = 0) -> None:
        await self.may_go.wait()
        self.unsent_bytes = 0


def output_of(stream: Any, items_max: int) -> LinkOutput:
    return LinkOutput(stream, Limits(link_out_items_max=items_max), lambda: None)


async def test_a_new_caller_does_not_pass_those_that_were_admitted(autojump_clock: MockClock) -> None:
    stream = HeldStream()
    out = output_of(stream, 2)
    most = 0

    async def send() -> None:
        nonlocal most
        if out.is_full:
            await out.wait_for_space(len(FRAME))
        out.put((FRAME,), len(FRAME))
        most = max(most, out.items)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(out.run)
        for _ in range(3):
            out.put((FRAME,), len(FRAME))
        await wait_all_tasks_blocked()  # the first is in the stream, which takes no more
        for _ in range(2):
            out.put((FRAME,), len(FRAME))
        for _ in range(2):
            nursery.start_soon(send)
        await wait_all_tasks_blocked()
        assert out.is_full
        out.discard()
        out._admit()  # pyright: ignore[reportPrivateUsage]  # both that wait may put their frames now, in the next step
        assert out.is_full, "two admitted callers fill it"
        nursery.start_soon(send)
        await wait_all_tasks_blocked()
        assert most == 2
        nursery.cancel_scope.cancel()


async def test_admitted_callers_that_put_nothing_let_the_next_ones_in(autojump_clock: MockClock) -> None:
    stream = HeldStream()
    out = output_of(stream, 2)
    done: list[int] = []

    async def ask(number: int) -> None:
        """Waits for space and puts nothing, as an answer does that is wanted no more; but for the last."""
        await out.wait_for_space(len(FRAME))
        done.append(number)
        if number == 9:
            out.put((b"last",), 4)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(out.run)
        await wait_all_tasks_blocked()
        out.put((FRAME,), len(FRAME))
        await wait_all_tasks_blocked()
        for _ in range(2):
            out.put((FRAME,), len(FRAME))
        for number in range(10):
            nursery.start_soon(ask, number)
        await wait_all_tasks_blocked()
        assert done == []
        stream.may_go.set()
        await wait_all_tasks_blocked()
        assert len(done) == 10
        assert stream.written.endswith(b"last")
        nursery.cancel_scope.cancel()
