"""Circuit relay v2 between real hosts."""

import logging
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel

from dep2p.errors import PeerNotFoundError, StreamClosedError
from dep2p.host.connections.circuit_limit import CircuitLimit
from dep2p.host.interface import PeerConnected, PeerDisconnected
from dep2p.host.transports.relay import client, messages, server
from dep2p.host.transports.relay.messages import HOP
from dep2p.protocols.relay.bounds import ReservationBounds

pytestmark = pytest.mark.real


async def relayed_addrs(relay_host: Any, target: Any, eventually: Any) -> list[str]:
    await target.dial(relay_host.peer_id, relay_host.listen_addrs())
    await eventually(lambda: any("/p2p-circuit" in addr for addr in target.listen_addrs()))
    return [addr for addr in target.listen_addrs() if "/p2p-circuit" in addr]


async def test_client_reserves_and_is_dialled_through_the_relay(
    open_host: Any, event_log: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client", listen=[]) as target,
        open_host(relay="client") as dialler,
    ):
        addrs = await relayed_addrs(middle, target, eventually)
        log = event_log(target)
        connection = await dialler.dial(target.peer_id, addrs)
        assert connection.peer == target.peer_id
        assert "/p2p-circuit" in connection.remote_addr
        inbound = (await log.wait(PeerConnected)).connection
        assert inbound.peer == dialler.peer_id  # authenticated end to end, not what the relay says

        stream = await connection.open_stream("/echo/1")
        sent = bytes(range(256)) * 4_000
        received = bytearray()
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                await stream.write(sent)
                await stream.close_write()

            nursery.start_soon(write)
            while data := await stream.read():
                received += data
        assert received == sent
        assert middle.counters()["relay_circuits"] == 1
        assert await dialler.ping(target.peer_id) > 0

        # The relay goes: both sides notice.
        await middle.disconnect(target.peer_id)
        await eventually(lambda: connection.is_closed and inbound.is_closed)
        assert not any("/p2p-circuit" in addr for addr in target.listen_addrs())
    # A circuit ends whenever the relay or the peer likes: that is no failure of ours to fill the log with.
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_relay_refuses_a_peer_without_a_reservation(open_host: Any) -> None:
    async with (
        open_host(relay="server") as middle,
        open_host() as target,
        open_host(relay="client") as dialler,
    ):
        await target.dial(middle.peer_id, middle.listen_addrs())
        addr = f"{middle.listen_addrs()[0]}/p2p-circuit/p2p/{target.peer_id}"
        with pytest.raises(PeerNotFoundError, match="no reservation"):
            await dialler.dial(target.peer_id, [addr])
        assert middle.counters()["relay_refused_no_reservation"] == 1


async def test_relay_is_off_by_default(two_hosts: Any) -> None:
    async with two_hosts() as (one, other):
        addr = f"{other.listen_addrs()[0]}/p2p-circuit/p2p/{other.peer_id}"
        with pytest.raises(PeerNotFoundError, match="no relay client"):
            await one.dial(other.peer_id, [addr])


async def test_reservations_are_bounded_and_counted(
    open_host: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ReservationBounds", partial(ReservationBounds, total_max=1))
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client") as first,
        open_host(relay="client") as second,
    ):
        await relayed_addrs(middle, first, eventually)
        await second.dial(middle.peer_id, middle.listen_addrs())
        await eventually(lambda: middle.counters().get("relay_refused_reservations_max", 0) >= 1)
        await eventually(lambda: second.counters().get("relay_reservation_failed", 0) >= 1)


@pytest.mark.parametrize("junk", [b"\x00", b"\xff\xff\xff\xff\xff", b"\x05hello", b"\x02\x08\x07"])
async def test_junk_to_a_relay_costs_the_stream_only(open_host: Any, junk: bytes) -> None:
    async with open_host(relay="server") as middle, open_host() as other:
        connection = await other.dial(middle.peer_id, middle.listen_addrs())
        stream = await connection.open_stream(HOP)
        await stream.write(junk)
        await stream.close_write()
        with trio.fail_after(5):
            try:
                while await stream.read():
                    pass
            except StreamClosedError:
                pass  # a reset is an answer too
        assert not connection.is_closed
        await other.ping(middle.peer_id)


async def test_circuit_over_its_bytes_is_ended(
    open_host: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CIRCUIT_BYTES_MAX", 50_000)

    def no_limit(_message: object) -> CircuitLimit:
        return CircuitLimit(0, 0.0)

    monkeypatch.setattr(client, "limit_of", no_limit)  # peers that do not keep to the limit
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client", listen=[]) as target,
        open_host(relay="client") as dialler,
    ):
        addrs = await relayed_addrs(middle, target, eventually)
        connection = await dialler.dial(target.peer_id, addrs)
        stream = await connection.open_stream("/echo/1")
        with trio.fail_after(5), pytest.raises(StreamClosedError):
            while True:
                await stream.write(bytes(10_000))
                await stream.read()
        assert middle.counters()["relay_circuit_ended_bytes"] == 1


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (("CIRCUIT_BYTES_MAX", 60_000), "the relay carries 60000 bytes in each direction of a connection"),
        (("CIRCUIT_S", 2), "the relay carries a connection for 2 s"),
    ],
)
async def test_a_connection_says_what_its_relay_still_carries_and_the_log_says_when_the_limit_ends_it(
    open_host: Any,
    event_log: Any,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: tuple[str, int],
    said: str,
) -> None:
    monkeypatch.setattr(messages, *limit)
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client", listen=[]) as target,
        open_host(relay="client", listen=[]) as dialler,
    ):
        addrs = await relayed_addrs(middle, target, eventually)
        log = event_log(dialler)
        connection = await dialler.dial(target.peer_id, addrs)
        assert connection.is_limited and connection.circuit.relay == middle.peer_id
        (direct,) = dialler.connections(middle.peer_id)
        assert direct.circuit is None
        before = connection.circuit
        stream = await connection.open_stream("/echo/1")
        await stream.write(bytes(10_000))
        assert len(await stream.read()) > 0
        after = connection.circuit
        assert after.data_left_bytes <= before.data_left_bytes - 10_000
        assert after.time_left_s <= before.time_left_s
        with caplog.at_level(logging.INFO, "dep2p.host"), trio.fail_after(10):
            with suppress(StreamClosedError):
                while limit[0] == "CIRCUIT_BYTES_MAX":
                    await stream.write(bytes(10_000))
                    await trio.lowlevel.checkpoint()
            ended = (await log.wait(PeerDisconnected)).reason
        assert said in ended
        assert any(said in record.message and target.peer_id in record.message for record in caplog.records)
        assert dialler.counters()["connections_ended_relay_limit"] == 1
