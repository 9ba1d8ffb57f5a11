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
from dep2p.host.transports.relay import server as relay
from dep2p.host.transports.relay.messages import HOP, STOP
from dep2p.protocols.relay.bounds import CircuitBounds, ReservationBounds
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

    def __init__(self, reservations: ReservationBounds | None = None, circuits: CircuitBounds | None = None) -> None:
        self.network = MemoryNetwork()
        self.middle, self.target, self.counters = self.network.host(), self.network.host(), Counters()
        self.server = relay.RelayServer(
            self.middle, self.counters, timeout_s=5.0, reservations=reservations, circuits=circuits
        )
        self.target.set_stream_handler(STOP, serve_circuit)

    async def ask(self, host: MemoryHost, message: HopMessage) -> tuple[int, ByteStream]:
        stream = await (await host.dial(self.middle.peer_id, [self.middle.addr])).open_stream(HOP)
        stream.write_nowait(encode_length_prefixed(message.SerializeToString()))
        return HopMessage.FromString(await read_length_prefixed(stream, 4_096)).status, stream

    async def reserve(self, host: MemoryHost) -> int:
        return (await self.ask(host, HopMessage(type=HopMessage.RESERVE)))[0]

    async def become_member(self, host: MemoryHost) -> None:
        """The relay verifies a host as a member of one of its realms."""
        await host.dial(self.middle.peer_id, [self.middle.addr])
        for connection in self.middle.connections(host.peer_id):
            self.middle.protect(connection, "realm")

    def keeps_place(self, host: MemoryHost) -> bool:
        """Whether all connections of a host to the relay keep their places."""
        return all(connection.keeps_place for connection in self.middle.connections(host.peer_id))

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
    assert relayed.counters["relay_circuit_ended_pair"] == 40 - CircuitBounds().per_pair_max


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

    relayed.target.set_stream_handler(STOP, close_at_once)
    await relayed.reserve(relayed.target)
    _, stream = await relayed.connect(relayed.network.host())
    stream.write_nowait(b"x")
    await trio.sleep(relay.CIRCUIT_FIRST_S + relay.CIRCUIT_HALF_CLOSED_S + 1)
    assert relayed.counters["relay_circuit_ended_half_closed"] == 1


async def test_a_circuit_that_one_end_has_closed_is_kept_while_the_other_sends(autojump_clock: Clock) -> None:
    relayed = Relayed()
    got = 0

    async def take_all(stream: ByteStream) -> None:
        nonlocal got
        await read_length_prefixed(stream, 4_096)
        status = StopMessage(type=StopMessage.STATUS, status=circuit_pb2.OK)
        await stream.write(encode_length_prefixed(status.SerializeToString()))
        await stream.close_write()
        while data := await stream.read():
            got += len(data)

    relayed.target.set_stream_handler(STOP, take_all)
    await relayed.reserve(relayed.target)
    _, stream = await relayed.connect(relayed.network.host())
    for _ in range(60):
        await stream.write(bytes(100_000))
        await trio.sleep(1)
    assert got == 6_000_000
    await trio.sleep(2 * relay.CIRCUIT_HALF_CLOSED_S + 1)
    assert relayed.counters["relay_circuit_ended_half_closed"] == 1


async def test_circuits_of_one_address_block_give_way_to_those_of_another(
    autojump_clock: Clock, blocks: dict[str, str]
) -> None:
    relayed = Relayed(circuits=CircuitBounds(per_target_max=6))
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
    autojump_clock: Clock, blocks: dict[str, str]
) -> None:
    """256 strangers took all reservations."""
    relayed = Relayed(ReservationBounds(per_block_max=4))
    await relayed.reserve(relayed.target)
    await relayed.connect(relayed.network.host())
    strangers = [relayed.network.host() for _ in range(3)]
    assert [await relayed.reserve(each) for each in strangers] == [circuit_pb2.OK] * 3
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.RESERVATION_REFUSED
    await trio.sleep(ReservationBounds().unused_s)
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.OK
    await trio.sleep(1)
    assert not relayed.middle.connections(strangers[0].peer_id), "the stranger does not learn of its loss"
    assert relayed.counters["relay_reservations_replaced"] == 1
    assert (await relayed.connect(relayed.network.host()))[0] == circuit_pb2.OK
    assert await relayed.reserve(relayed.target) == circuit_pb2.OK  # a renewal needs no place


async def test_a_full_relay_takes_the_place_of_the_block_that_holds_most(
    autojump_clock: Clock, blocks: dict[str, str]
) -> None:
    relayed = Relayed(ReservationBounds(total_max=4))
    for _ in range(4):
        await relayed.reserve(relayed.network.host())
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.RESERVATION_REFUSED
    other: Any = relayed.network.host()
    await other.dial(relayed.middle.peer_id, [relayed.middle.addr])
    blocks[relayed.middle.connections(other.peer_id)[0].remote_addr] = "two"
    assert await relayed.reserve(other) == circuit_pb2.OK


async def test_a_member_gets_in_at_once_though_strangers_hold_all_that_strangers_may_hold(
    autojump_clock: Clock, blocks: dict[str, str]
) -> None:
    """Reservations, circuits to the member, all circuits, the rates of its block, and streams that say nothing."""
    bounds = ReservationBounds(total_max=8, unproven_max=6, per_block_max=6, asks_per_s=0.01, asks_burst=20)
    relayed = Relayed(
        bounds, CircuitBounds(total_max=8, unproven_max=6, per_target_max=6, unproven_per_target_max=4, asks_burst=20)
    )
    await relayed.become_member(relayed.target)
    assert await relayed.reserve(relayed.target) == circuit_pb2.OK
    statuses = [await relayed.reserve(relayed.network.host()) for _ in range(30)]
    assert statuses.count(circuit_pb2.OK) == 6
    assert relayed.counters["relay_refused_reservations_max"] == 14
    assert relayed.counters["relay_refused_reservations_rate"] == 10
    circuits = [(await relayed.connect(relayed.network.host()))[0] for _ in range(30)]
    assert circuits.count(circuit_pb2.OK) == 4
    silent = [await relayed.network.host().dial(relayed.middle.peer_id, [relayed.middle.addr]) for _ in range(10)]
    for connection in silent:
        for _ in range(relay.UNREAD_PER_PEER_MAX):
            await connection.open_stream(HOP)

    began_s = trio.current_time()
    members = [relayed.network.host() for _ in range(3)]
    for member in members:
        await relayed.become_member(member)
        assert await relayed.reserve(member) == circuit_pb2.OK
        status, stream = await relayed.connect(member)
        assert status == circuit_pb2.OK and await is_alive(stream)
    assert trio.current_time() - began_s < 1.0
    values = relayed.server.values()
    assert (values["relay_reservations_held"], values["relay_reservations_held_members"]) == (8, 4)
    assert values["relay_circuits_held_members"] == 3
    assert relayed.counters["relay_reservations_replaced"] == 2
    assert relayed.counters["relay_circuit_ended_block"] == 1


async def test_peers_that_use_the_relay_keep_their_places_and_no_longer(autojump_clock: Clock) -> None:
    """The relay ended the connections of members to make room for strangers of their address block."""
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    assert relayed.keeps_place(relayed.target)
    dialler, idle = relayed.network.host(), relayed.network.host()
    await idle.dial(relayed.middle.peer_id, [relayed.middle.addr])
    status, stream = await relayed.connect(dialler)
    assert status == circuit_pb2.OK
    assert relayed.keeps_place(dialler) and not relayed.keeps_place(idle)
    stream.reset()
    await trio.sleep(1)
    assert not relayed.keeps_place(dialler)
    assert relayed.server.values()["relay_circuits_held"] == 0


async def test_diallers_of_one_block_keep_a_part_of_its_places(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "DIALLERS_KEPT_PER_BLOCK_MAX", 2)
    relayed = Relayed()
    await relayed.reserve(relayed.target)
    diallers = [relayed.network.host() for _ in range(3)]
    for dialler in diallers:
        await relayed.connect(dialler)
    assert [relayed.keeps_place(dialler) for dialler in diallers] == [True, True, False]


async def test_streams_that_send_no_message_give_way_to_others(autojump_clock: Clock) -> None:
    relayed = Relayed()
    silent = [relayed.network.host() for _ in range(2 + relay.UNREAD_MAX // relay.UNREAD_PER_PEER_MAX)]
    for host in silent:
        connection = await host.dial(relayed.middle.peer_id, [relayed.middle.addr])
        for _ in range(relay.UNREAD_PER_PEER_MAX + 1):
            await connection.open_stream(HOP)
    assert await relayed.reserve(relayed.target) == circuit_pb2.OK
    own, others = len(silent), 2 * relay.UNREAD_PER_PEER_MAX + 1
    assert relayed.counters["relay_refused_unread"] == own + others
    await trio.sleep(6)
    assert relayed.counters["relay_refused_timeout"] == relay.UNREAD_MAX - 1


async def test_a_holder_that_has_dialled_keeps_its_reservation_and_its_circuits(autojump_clock: Clock) -> None:
    """A stranger took the reservation of a member that others had not dialled yet, and with its connection its circuits
    ended."""
    relayed = Relayed(ReservationBounds(per_block_max=2))
    member = relayed.network.host()
    assert await relayed.reserve(member) == await relayed.reserve(relayed.target) == circuit_pb2.OK
    _, stream = await relayed.connect(member)
    await trio.sleep(ReservationBounds().unused_s)
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.RESERVATION_REFUSED
    assert await is_alive(stream)
    stream.reset()
    await trio.sleep(1)
    assert await relayed.reserve(relayed.network.host()) == circuit_pb2.RESERVATION_REFUSED, "it was used"
