"""A session with an unproven peer: what it holds and the control frames that it sends are bounded."""

from collections.abc import Callable
from typing import Any

import pytest

from dep2p.errors import ProtocolError
from dep2p.host.resources.ledger import STREAM_BYTES, ConnectionResources, Ledger
from dep2p.host.resources.scopes import Account
from dep2p.host.yamux.frames import ACK, DATA, FIN, PING, RST, SYN, WINDOW_INITIAL_BYTES, WINDOW_UPDATE, encode_header
from dep2p.host.yamux.session import SYN_FRAMES
from dep2p.limits import Limits
from dep2p.types import PeerId

RATE = 100
BURST = 4 * RATE


def unproven(end: Any, **limits: float) -> tuple[Ledger, ConnectionResources]:
    """Let ``end`` account for its peer as a host does for a stranger."""
    ledger = Ledger(Limits(**({"control_frames_unproven_per_s": float(RATE)} | limits)))  # type: ignore[arg-type]
    held = ledger.open_connection(PeerId("stranger"), "/ip4/192.0.2.1/tcp/1", is_inbound=True, end=end.core.fail)
    end.core.resources = held
    return ledger, held


FLOODS: dict[str, Callable[[int], bytes]] = {
    "reset": lambda _n: encode_header(WINDOW_UPDATE, RST, 1, 0),
    "reset of a new stream": lambda n: encode_header(WINDOW_UPDATE, SYN | RST, 2 * n + 1, 0),
    "syn": lambda n: encode_header(WINDOW_UPDATE, SYN, 2 * n + 1, 0),
    "syn with data": lambda n: encode_header(DATA, SYN, 2 * n + 1, 1) + b"x",
    "syn and fin": lambda n: encode_header(WINDOW_UPDATE, SYN | FIN, 2 * n + 1, 0),
    "ping": lambda n: encode_header(PING, SYN, 0, n),
    "pong": lambda n: encode_header(PING, ACK, 0, n),
    "empty data": lambda _n: encode_header(DATA, 0, 1, 0),
    "window by one byte": lambda _n: encode_header(WINDOW_UPDATE, 0, 1, 1),
    "window by nothing": lambda _n: encode_header(WINDOW_UPDATE, 0, 1, 0),
    "data of an ended stream": lambda _n: encode_header(DATA, 0, 999_999, 1) + b"x",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_frames_that_carry_nothing_ends_the_session(ends: Any, flood: str) -> None:
    _, held = unproven(ends.other)
    ends.other.feed(encode_header(WINDOW_UPDATE, SYN, 1, 0))
    frame = FLOODS[flood]
    for number in range(1, BURST // (SYN_FRAMES + 1) - 1):
        ends.other.feed(frame(number))
        ends.other.output()
    with pytest.raises(ProtocolError, match="control frames"):
        for number in range(BURST, 3 * BURST):
            ends.other.feed(frame(number))
            ends.other.output()
    assert ends.other.core.counts["control_rate_exceeded"] == 1
    assert not held.is_proven


@pytest.mark.parametrize("flood", FLOODS)
def test_the_same_frames_over_time_are_no_flood(ends: Any, flood: str) -> None:
    unproven(ends.other)
    ends.other.feed(encode_header(WINDOW_UPDATE, SYN, 1, 0))
    for number in range(1, 4 * BURST):
        ends.other.owner.clock_s += (SYN_FRAMES + 1) / RATE
        ends.other.feed(FLOODS[flood](number))
        ends.other.output()
    assert ends.other.core.error is None


def test_a_proof_allows_the_frames_of_a_busy_member(ends: Any) -> None:
    ledger, held = unproven(ends.other, control_frames_per_s=100.0 * RATE)
    ledger.prove(held)
    for number in range(50 * BURST):
        ends.other.feed(encode_header(PING, ACK, 0, number))
    assert ends.other.core.error is None


def test_window_updates_of_a_peer_that_is_sent_much_are_no_flood(ends: Any) -> None:
    unproven(ends.other)
    mine, theirs = ends.stream()
    received = bytearray()
    mine.set_receiver(received.extend, [].append)
    for _ in range(5 * BURST):
        theirs.enqueue(bytes(8_192))
        ends.pump()
        ends.other.feed(encode_header(WINDOW_UPDATE, 0, theirs.id, 1))
    assert ends.other.core.error is None
    assert len(received) == 5 * BURST * 8_192


def test_unread_bytes_of_an_unproven_peer_end_the_connection(ends: Any) -> None:
    _, held = unproven(ends.other, memory_bytes_per_unproven_connection_max=600_000)
    for mine, _ in [ends.stream() for _ in range(3)]:
        mine.enqueue(bytes(WINDOW_INITIAL_BYTES))
        ends.pump()
    assert held.account.is_closed
    assert "memory" in str(ends.other.core.error)
    assert all(not stream.buffer for stream in ends.other.core.streams.values())


def test_what_was_read_or_reset_is_released(ends: Any) -> None:
    ledger, held = unproven(ends.other)
    pairs = [ends.stream() for _ in range(4)]
    for mine, _ in pairs:
        mine.enqueue(bytes(10_000))
    ends.pump()
    assert held.account.memory_bytes == 4 * (10_000 + STREAM_BYTES)
    pairs[0][1].take_received(10_000)
    pairs[1][1].reset_state("enough")
    pairs[2][0].reset_state("enough")
    ends.pump()
    assert held.account.memory_bytes == 10_000 + 2 * STREAM_BYTES
    pairs[3][1].discard_input()
    pairs[3][1].end_writing()
    pairs[3][0].end_writing()
    pairs[0][1].end_writing()
    pairs[0][0].end_writing()
    ends.pump()
    assert ledger.values()["memory_bytes"] == 0


def test_streams_of_an_unproven_peer_take_half_of_its_memory(ends: Any) -> None:
    _, held = unproven(ends.other, memory_bytes_per_unproven_connection_max=20 * STREAM_BYTES)
    for _ in range(15):
        ends.one.core.open_stream()
    ends.pump()
    assert len(ends.other.core.streams) == 10
    assert ends.other.core.counts["streams_refused_memory"] == 5
    assert not held.account.is_closed


def test_the_window_of_an_unproven_peer_does_not_grow(ends: Any) -> None:
    ledger, held = unproven(ends.other)
    mine, theirs = ends.stream()
    for is_proven in (False, True):
        if is_proven:
            ledger.prove(held)
        for _ in range(20):
            mine.enqueue(bytes(100_000))
            ends.pump()
            theirs.take_received(1_000_000)
        assert (theirs.receive_window > WINDOW_INITIAL_BYTES) is is_proven


def test_a_stream_can_be_accounted_for_by_itself(ends: Any) -> None:
    """A relay's circuits do not count for the connections that carry them."""
    _, held = unproven(ends.other)
    mine, theirs = ends.stream()
    mine.enqueue(bytes(10_000))
    ends.pump()
    circuit = Account("a circuit", 15_000)
    ends.other.core.charge_to(theirs, circuit)
    assert (circuit.memory_bytes, held.account.memory_bytes) == (10_000, STREAM_BYTES)
    theirs.take_received(4_000)
    mine.enqueue(bytes(9_000))
    ends.pump()
    assert circuit.memory_bytes == 15_000
    mine.enqueue(bytes(1))
    ends.pump()
    assert theirs.error is not None
    assert (circuit.memory_bytes, held.account.memory_bytes) == (0, 0)


@pytest.mark.parametrize("frames_max", [1, 2, 7])
def test_frames_that_one_step_leaves_are_taken_by_the_next(ends: Any, frames_max: int) -> None:
    mine, theirs = ends.stream()
    for number in range(20):
        mine.enqueue(bytes([number]) * 5_000)
        ends.one.core.ping(number)
    wire = memoryview(ends.one.output())
    while wire:
        before = ends.other.core.frames_in
        taken = ends.other.core.receive(wire, frames_max)
        assert 0 < taken <= len(wire)
        assert ends.other.core.frames_in - before <= frames_max
        wire = wire[taken:]
    assert theirs.take_received(200_000) == b"".join(bytes([number]) * 5_000 for number in range(20))
    assert ends.other.core.bytes_in == ends.one.core.send_queue.bytes_out
