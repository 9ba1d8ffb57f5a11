"""Strangers at a relay: repeated, silent and unused circuits and reservations give way to those of other peers."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.relay.circuit_v2.pb import circuit_pb2
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, StopMessage

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.errors import StreamClosedError
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream
from dep2p.host.transports import relay
from dep2p.testing import MemoryHost, MemoryNetwork
from dep2p.types import peer_id_bytes

Clock = trio.testing.MockClock


async def serve_circuit(stream: ByteStream) -> None:
    """Accept a circuit, and echo what comes through it."""
    await read_length_prefixed(stream, 4_096)
    await stream.write(
        encode_length_prefixed(StopMessage(type=StopMessage.STATUS, status=circuit_pb2.OK).SerializeToString())
    )
    with suppress(StreamClosedError):  # the relay ends circuits
        while data := await stream.read():
            await stream.write(data)
        await stream.close()


class Relayed:
    """A relay and a target that holds a reservation."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.middle, self.target, self.counters = self.network.host(), self.network.host(), Counters()
        self.server = relay.RelayServer(self.middle, self.counters, timeout_s=5.0)
        self.target.set_stream_handler(relay.STOP, serve_circuit)

    async def ask(self, host: MemoryHost, message: HopMessage) -> tuple[int, ByteStream]:
        stream = await (await host.dial(self.middle.peer_id, [self.middle.addr])).open_stream(relay.HOP)
        stream.write_nowait(encode_length_prefixed(message.SerializeToString()))
        return HopMessage.FromString(await read_length_prefixed(stream, 4_096)).status, stream

    async def reserve(self, host: MemoryHost) -> int:
        return (await self.ask(host, HopMessage(type=HopMessage.RESERVE)))[0]

    async def connect(self, host: MemoryHost) -> tuple[int, ByteStream]:
        ask = HopMessage(type=HopMessage.CONNECT)
        ask.peer.id = peer_id_bytes(self.target.peer_id)
        return await self.ask(host, ask)


async def is_alive(stream: ByteStream) -> bool:
    stream.write_nowait(b"?")
    return await stream.read() == b"?"


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The address block of each memory address; "one" for those that are not in it."""
    found: dict[str, str] = {}

    def block(addr: str) -> str:
        return found.get(addr, "one")

    monkeypatch.setattr(relay, "address_block", block)
    yield found


async def test_one_silent_stranger_does_not_take_the_circuits_to_a_member(autojump_clock: Clock) -> None:
    """It filled all 16 for an hour."""
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    stranger, member = relayed.network.host(), relayed.network.host()
    for _ in range(40):
        status, _ = await relayed.connect(stranger)
        assert status == circuit_pb2.OK
    status, stream = await relayed.connect(member)
    assert status == circuit_pb2.OK
    assert await is_alive(stream)
    assert relayed.counters["relay_circuit_ended_pair"] == 40 - relay.CIRCUITS_PER_PAIR_MAX


async def test_a_circuit_in_which_nothing_is_said_ends(autojump_clock: Clock) -> None:
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    _, stream = await relayed.connect(relayed.network.host())
    await trio.sleep(relay.CIRCUIT_FIRST_S + 1)
    assert relayed.counters["relay_circuit_ended_silent"] == 1
    with pytest.raises(StreamClosedError):
        await stream.read()


async def test_a_circuit_lives_while_it_is_used_and_ends_when_it_falls_silent(autojump_clock: Clock) -> None:
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    _, stream = await relayed.connect(relayed.network.host())
    for _ in range(30):
        assert await is_alive(stream)
        await trio.sleep(60)
    await trio.sleep(3 * relay.CIRCUIT_IDLE_S)
    assert relayed.counters["relay_circuit_ended_silent"] == 1


async def test_a_circuit_that_one_end_has_closed_ends(autojump_clock: Clock) -> None:
    relayed = Relayed()

    async def close_at_once(stream: ByteStream) -> None:
        await read_length_prefixed(stream, 4_096)
        status = StopMessage(type=StopMessage.STATUS, status=circuit_pb2.OK)
        await stream.write(encode_length_prefixed(status.SerializeToString()))
        await stream.close_write()

    relayed.target.set_stream_handler(relay.STOP, close_at_once)
    await relayed.reserve(relayed.target)
    _, stream = await relayed.connect(relayed.network.host())
    stream.write_nowait(b"x")
    await trio.sleep(relay.CIRCUIT_FIRST_S + relay.CIRCUIT_HALF_CLOSED_S + 1)
    assert relayed.counters["relay_circuit_ended_half_closed"] == 1


async def test_circuits_of_one_address_block_give_way_to_those_of_another(
    autojump_clock: Clock, blocks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CIRCUITS_PER_TARGET_MAX", 6)
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    for _ in range(6):
        assert (await relayed.connect(relayed.network.host()))[0] == circuit_pb2.OK
    assert (await relayed.connect(relayed.network.host()))[0] == circuit_pb2.RESOURCE_LIMIT_EXCEEDED
    member = relayed.network.host()
    connection = await member.dial(relayed.middle.peer_id, [relayed.middle.addr])
    (inbound,) = relayed.middle.connections(member.peer_id)
    assert not connection.is_closed
    blocks[inbound.remote_addr] = "two"
    status, stream = await relayed.connect(member)
    assert status == circuit_pb2.OK
    assert await is_alive(stream)
    assert relayed.counters["relay_circuit_ended_block"] == 1


async def test_one_address_block_asks_for_circuits_at_a_rate(autojump_clock: Clock) -> None:
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    stranger = relayed.network.host()
    refused = 0
    for _ in range(300):
        status, _ = await relayed.connect(stranger)
        refused += status == circuit_pb2.RESOURCE_LIMIT_EXCEEDED
    assert refused > 100
    assert relayed.counters["relay_refused_circuits_rate"] == refused
    await trio.sleep(10)
    assert (await relayed.connect(stranger))[0] == circuit_pb2.OK


async def test_unused_reservations_of_an_address_block_are_replaced_and_used_ones_stay(
    autojump_clock: Clock, blocks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 strangers took all reservations."""
    monkeypatch.setattr(relay, "RESERVATIONS_PER_BLOCK_MAX", 4)
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    await relayed.connect(relayed.network.host())
    strangers = [relayed.network.host() for _ in range(3)]
    assert [await relayed.reserve(each) for each in strangers] == [circuit_pb2.OK] * 3
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.RESERVATION_REFUSED
    await trio.sleep(relay.RESERVATION_UNUSED_S)
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.OK
    await trio.sleep(1)
    assert not relayed.middle.connections(strangers[0].peer_id), "the stranger does not learn of its loss"
    assert relayed.counters["relay_reservations_replaced"] == 1
    assert (await relayed.connect(relayed.network.host()))[0] == circuit_pb2.OK
    assert await relayed.reserve(relayed.target) == circuit_pb2.OK  # a renewal needs no place


async def test_a_full_relay_takes_the_place_of_the_block_that_holds_most(
    autojump_clock: Clock, blocks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RESERVATIONS_MAX", 4)
    relayed = Relayed()
    for _ in range(4):
        await relayed.reserve(relayed.network.host())
    await trio.sleep(relay.RESERVATION_UNUSED_S)
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.RESERVATION_REFUSED
    other: Any = relayed.network.host()
    await other.dial(relayed.middle.peer_id, [relayed.middle.addr])
    blocks[relayed.middle.connections(other.peer_id)[0].remote_addr] = "two"
    assert await relayed.reserve(other) == circuit_pb2.OK
