"""A connection of an unproven peer: its turns, and the account of what it does not read."""

from typing import Any

import pytest
import trio
import trio.testing

from dep2p.host.resources.ledger import ConnectionResources, Ledger
from dep2p.host.resources.turns import EARLY_WEIGHT_MAX, Turns
from dep2p.host.yamux.byte_stream import YamuxByteStream
from dep2p.host.yamux.connection import (
    RECEIVE_BYTES_UNPROVEN_MAX,
    TURN_FRAMES,
    UNSENT_HELD_BYTES_MAX,
    YamuxConnection,
)
from dep2p.host.yamux.frames import WINDOW_INITIAL_BYTES
from dep2p.host.yamux.session import ACCEPT_BACKLOG_UNPROVEN_MAX
from dep2p.limits import Limits
from dep2p.types import PeerId

NO_CONNECTION: Any = None


class CountedTurns(Turns):
    """Turns that note their weights."""

    def __init__(self) -> None:
        super().__init__(8)
        self.weights: list[int] = []
        self.early = 0

    async def next(self, weight: int = 1, *, is_early: bool = False) -> None:
        self.weights.append(weight)
        self.early += is_early * weight
        await super().next(weight, is_early=is_early)


def hold(connection: YamuxConnection, turns: Turns, **limits: int) -> tuple[Ledger, ConnectionResources]:
    """Make the peer of a connection that does not run yet an unproven one."""
    ledger = Ledger(Limits(**limits))
    held = ledger.open_connection(PeerId("stranger"), "/ip4/192.0.2.7/tcp/1", is_inbound=True, end=connection.fail)
    connection.bind(held, turns)
    return ledger, held


@pytest.mark.parametrize("kind", ["socket", "memory"])
async def test_each_read_of_an_unproven_peer_waits_for_its_turn(open_pair: Any, kind: str) -> None:
    turns = CountedTurns()
    with trio.fail_after(10):
        async with open_pair(kind) as (one, other):
            ledger, held = hold(other, turns)
            mine = YamuxByteStream(await one.open_stream(), NO_CONNECTION)
            theirs = YamuxByteStream(await other.accept_stream(), NO_CONNECTION)
            await mine.write(bytes(200_000))
            received = 0
            while received < 200_000:
                received += len(await theirs.read())
            if kind == "socket":
                assert len(turns.weights) >= 200_000 // RECEIVE_BYTES_UNPROVEN_MAX
            else:
                assert turns.weights
            assert turns.early == min(sum(turns.weights), EARLY_WEIGHT_MAX)
            ledger.prove(held)
            await mine.write(b"x")
            await theirs.read()
            turns.weights.clear()
            await mine.write(bytes(100_000))
            while received < 300_000:
                received += len(await theirs.read())
            assert not turns.weights, "a proven peer waits for strangers"


async def test_a_step_of_many_frames_makes_the_next_turn_longer(open_pair: Any) -> None:
    turns = CountedTurns()
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            hold(other, turns)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(200):
                one._core.ping(number)
            await trio.testing.wait_all_tasks_blocked()
            turns.weights.clear()
            for number in range(2):
                one._core.ping(number)
                await trio.testing.wait_all_tasks_blocked()
            assert turns.weights == [1 + 200 // TURN_FRAMES, 1]
            assert other.is_early
            for number in range(EARLY_WEIGHT_MAX):
                one._core.ping(number)
                await trio.testing.wait_all_tasks_blocked()
            assert not other.is_early
            assert turns.early < EARLY_WEIGHT_MAX + turns.weights[0]


async def test_small_reads_of_what_an_unproven_peer_sent_let_others_run(open_pair: Any) -> None:
    """A stranger sent 8,192 pings at once, and the node answered all of them in one step."""
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            ledger, held = hold(other, Turns())
            mine = YamuxByteStream(await one.open_stream(), NO_CONNECTION)
            theirs = YamuxByteStream(await other.accept_stream(), NO_CONNECTION)
            await mine.write(bytes(1_000))
            await trio.testing.wait_all_tasks_blocked()
            with trio.testing.assert_checkpoints():
                assert await theirs.read(32)
            ledger.prove(held)
            with trio.testing.assert_no_checkpoints():
                assert await theirs.read(32)


async def test_what_an_unproven_peer_does_not_read_is_in_its_account(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair(start_other=False) as (one, other), trio.open_nursery() as nursery:
            _, held = hold(one, Turns())
            streams = [await one.open_stream() for _ in range(6)]
            for stream in streams:
                stream.write_nowait(bytes(WINDOW_INITIAL_BYTES))
            await trio.testing.wait_all_tasks_blocked()
            assert one.unsent_bytes > UNSENT_HELD_BYTES_MAX
            assert held.account.memory_bytes == UNSENT_HELD_BYTES_MAX, "what we want to send ends no connection"
            assert one.is_established
            nursery.start_soon(other.start)
            for _ in streams:
                theirs = await other.accept_stream()
                received = 0
                while received < WINDOW_INITIAL_BYTES:
                    received += len(await theirs.read())
            await trio.testing.wait_all_tasks_blocked()
            assert one.unsent_bytes == 0
            assert held.account.memory_bytes == 0
            nursery.cancel_scope.cancel()


async def test_an_unproven_peer_that_never_reads_ends_at_its_bound(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair(start_other=False) as (one, _):
            _, held = hold(one, Turns(), memory_bytes_per_unproven_connection_max=100_000)
            for _ in range(6):
                (await one.open_stream()).write_nowait(bytes(WINDOW_INITIAL_BYTES))
            await one.event_closed.wait()
            assert held.account.is_closed
            assert "this node's memory" in one.close_reason


async def test_the_unsent_bytes_of_a_connection_are_those_of_its_streams(open_pair: Any) -> None:
    """They are kept as a sum: each way in which bytes leave a stream has to take them off it."""
    with trio.fail_after(10):
        async with open_pair(start_other=False) as (one, _):
            streams = [await one.open_stream() for _ in range(4)]
            for stream in streams:
                stream.write_nowait(bytes(2 * WINDOW_INITIAL_BYTES))
            await trio.testing.wait_all_tasks_blocked()
            streams[0].reset_nowait()
            streams[1].end_writing()
            assert one._core.unsent_bytes == sum(stream.unsent_bytes for stream in streams) > 0
            one.fail("lost")
            assert one._core.unsent_bytes == 0


async def test_an_unproven_peer_has_few_streams_that_wait_to_be_accepted(open_pair: Any) -> None:
    with trio.fail_after(10):
        async with open_pair() as (one, other):
            ledger, held = hold(other, Turns())
            for _ in range(ACCEPT_BACKLOG_UNPROVEN_MAX + 10):
                await one.open_stream()
            await trio.testing.wait_all_tasks_blocked()
            assert one.stream_count == other.stream_count == ACCEPT_BACKLOG_UNPROVEN_MAX
            assert other.counters()["streams_refused_backlog"] == 10
            ledger.prove(held)
            await one.open_stream()
            await trio.testing.wait_all_tasks_blocked()
            assert other.stream_count == ACCEPT_BACKLOG_UNPROVEN_MAX + 1
