"""The client of relays: which it uses, and how it keeps its reservations."""

import logging

import pytest
import trio
import trio.testing
from libp2p.relay.circuit_v2.pb import circuit_pb2
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage

from dep2p.encoding.length_prefixed import encode_length_prefixed, read_length_prefixed
from dep2p.host.counters import Counters
from dep2p.host.interface import ByteStream
from dep2p.host.transports.relay import client as relay_client
from dep2p.host.transports.relay.client import RELAYS_MAX, RelayClient
from dep2p.host.transports.relay.messages import HOP, RESERVATION_S
from dep2p.host.transports.relay.server import RelayServer
from dep2p.protocols.relay.bounds import ReservationBounds
from dep2p.testing import MemoryHost, MemoryNetwork
from dep2p.types import PeerId

Clock = trio.testing.MockClock


class Client:
    """A host that reserves at relays; every peer that speaks HOP counts as identified."""

    def __init__(self, network: MemoryNetwork, nursery: trio.Nursery) -> None:
        self.network, self.counters = network, Counters()
        self.host = network.host()

        async def accept(*_: object) -> None:
            raise AssertionError("no circuit is expected")

        self.client = RelayClient(self.host, self.counters, accept, self._protocols, reserves=True, timeout_s=5.0)
        nursery.start_soon(self.client.run)

    def _protocols(self, peer: PeerId) -> tuple[str, ...]:
        found = self.network.find(peer)
        return () if found is None else tuple(found.handlers)

    async def meet(self, relay: MemoryHost) -> None:
        await self.host.dial(relay.peer_id, [relay.addr])
        self.client.consider(relay.peer_id)

    def at(self) -> list[str]:
        """The relays at which it can be dialled."""
        return [text.removesuffix("/p2p-circuit").rpartition("/")[2] for text in self.client.addrs()]


def new_relay(network: MemoryNetwork, bounds: ReservationBounds | None = None) -> MemoryHost:
    host = network.host()
    RelayServer(host, Counters(), timeout_s=5.0, reservations=bounds)
    return host


async def test_a_lost_relay_is_dialled_again_and_gives_its_reservation_again(autojump_clock: Clock) -> None:
    """A relay ended a member's connection, and others could not reach the member until it was started again."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        client, relay = Client(network, nursery), new_relay(network)
        await client.meet(relay)
        await trio.sleep(0.1)
        assert client.at() == [relay.peer_id]
        await relay.disconnect(client.host.peer_id)
        await trio.sleep(0.1)
        assert client.at() == [] and client.client.values() == {"relay_reserved_held": 0}
        await trio.sleep(2.0)
        client.client.consider(relay.peer_id)  # identify does so on the new connection
        await trio.sleep(0.1)
        assert client.at() == [relay.peer_id]
        assert client.counters["relay_reservation_lost"] == 1
        nursery.cancel_scope.cancel()


async def test_a_refused_client_asks_again_soon_and_then_ever_more_rarely(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay verifies its membership between the two tries."""
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        client = Client(network, nursery)
        relay = new_relay(network, ReservationBounds(unproven_max=0))
        with caplog.at_level(logging.WARNING, "dep2p.host"):
            await client.meet(relay)
            await trio.sleep(60.0)
        assert 8 <= client.counters["relay_reservation_failed"] <= 12
        (said,) = [record.message for record in caplog.records]
        assert f"no reservation at the relay {relay.peer_id}" in said and "next try" in said
        for connection in relay.connections(client.host.peer_id):
            relay.protect(connection, "realm")
        await trio.sleep(61.0)
        assert client.at() == [relay.peer_id]
        nursery.cancel_scope.cancel()


async def test_a_member_that_is_verified_after_its_first_try_has_its_reservation_at_once(
    autojump_clock: Clock,
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        client = Client(network, nursery)
        relay = new_relay(network, ReservationBounds(unproven_max=0))
        await client.meet(relay)
        await trio.sleep(0.05)
        assert client.counters["relay_reservation_failed"] == 1
        for connection in relay.connections(client.host.peer_id):
            relay.protect(connection, "realm")
        await trio.sleep(0.3)
        assert client.at() == [relay.peer_id]
        nursery.cancel_scope.cancel()


async def test_a_stranger_that_connects_and_calls_itself_a_relay_is_not_used_and_a_member_is(
    autojump_clock: Clock,
) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        client, stranger, member = Client(network, nursery), new_relay(network), new_relay(network)
        for host in (stranger, member):
            await host.dial(client.host.peer_id, [client.host.addr])
        for connection in client.host.connections(member.peer_id):
            client.host.protect(connection, "realm")
        for host in (stranger, member):
            client.client.consider(host.peer_id)
        await trio.sleep(1.0)
        assert client.at() == [member.peer_id]
        nursery.cancel_scope.cancel()


async def test_a_relay_that_dials_its_client_after_a_loss_is_used_again(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        client, relay = Client(network, nursery), new_relay(network)
        await client.meet(relay)
        await trio.sleep(0.1)
        await relay.disconnect(client.host.peer_id)
        await relay.dial(client.host.peer_id, [client.host.addr])
        assert [each.direction for each in client.host.connections()] == ["inbound"]
        client.client.consider(relay.peer_id)
        await trio.sleep(0.1)
        assert client.at() == [relay.peer_id]
        nursery.cancel_scope.cancel()


async def test_relays_that_never_answer_hold_up_no_other(autojump_clock: Clock) -> None:
    network = MemoryNetwork()

    async def never_answer(_stream: ByteStream) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        client, relay, silent = Client(network, nursery), new_relay(network), network.host()
        silent.set_stream_handler(HOP, never_answer)
        await client.meet(silent)
        await client.meet(relay)
        await trio.sleep(0.1)
        assert client.at() == [relay.peer_id]
        nursery.cancel_scope.cancel()


async def test_a_client_reserves_at_three_relays_and_replaces_one_that_is_gone(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        client = Client(network, nursery)
        relays = [new_relay(network) for _ in range(RELAYS_MAX + 1)]
        for relay in relays:
            await client.meet(relay)
            await trio.sleep(0.1)
        assert client.at() == [relay.peer_id for relay in relays[:RELAYS_MAX]]
        relays[0].kill()
        await trio.sleep(1.0)
        assert client.at() == [relay.peer_id for relay in relays[1:]]
        nursery.cancel_scope.cancel()


async def test_a_renewal_that_fails_on_the_way_leaves_the_reservation_until_it_expires(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MemoryNetwork()
    monkeypatch.setattr(relay_client.time, "time", trio.current_time)  # type: ignore[attr-defined]
    answers = 1

    async def answer_once(stream: ByteStream) -> None:
        nonlocal answers
        await read_length_prefixed(stream, 4_096)
        if answers:
            answers -= 1
            granted = HopMessage(type=HopMessage.STATUS, status=circuit_pb2.OK)
            granted.reservation.expire = int(trio.current_time()) + RESERVATION_S
            await stream.write(encode_length_prefixed(granted.SerializeToString()))
            await stream.close()
        else:
            stream.reset()

    async with trio.open_nursery() as nursery:
        client, relay = Client(network, nursery), network.host()
        relay.set_stream_handler(HOP, answer_once)
        await client.meet(relay)
        await trio.sleep(0.8 * RESERVATION_S)
        assert client.counters["relay_reservation_failed"] >= 1
        assert client.at() == [relay.peer_id]
        await trio.sleep(0.25 * RESERVATION_S)
        assert client.at() == []
        nursery.cancel_scope.cancel()
