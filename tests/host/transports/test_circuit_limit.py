"""The limits of a relay: which are narrow, and that a circuit keeps to them."""

import pytest
import trio
from libp2p.io.exceptions import ConnectionClosedError
from trio.testing import MockClock

from dep2p.host.connections.circuit_limit import CircuitLimit, CircuitMeter, meter_of
from dep2p.host.counters import Counters
from dep2p.host.interface import CircuitUse
from dep2p.host.transports.relay.circuit import RelayedTransport
from dep2p.testing import MemoryNetwork, MemoryStream
from dep2p.types import PeerId

KIB_128 = 131_072


@pytest.mark.parametrize(
    ("data_bytes", "duration_s", "narrow"),
    [
        (KIB_128, 120.0, True),  # go-libp2p's default
        (KIB_128, 0.0, True),
        (0, 120.0, True),
        (268_435_456, 3_600.0, False),  # ours
        (0, 0.0, False),
        (4_294_967_296, 1_800.0, False),
    ],
)
def test_a_limit_is_narrow_when_traffic_that_nobody_asked_for_would_use_it_up(
    data_bytes: int, duration_s: float, narrow: bool
) -> None:
    assert CircuitLimit(data_bytes, duration_s).is_narrow is narrow


def test_a_limit_says_what_the_relay_carries() -> None:
    assert str(CircuitLimit(KIB_128, 120.0)) == "131072 bytes in each direction and 120 s"
    assert str(CircuitLimit(0, 120.0)) == "120 s"
    assert str(CircuitLimit(0, 0.0)) == "no limit"
    assert meter_of(object()) is None


async def circuit(limit: CircuitLimit) -> tuple[RelayedTransport, Counters]:
    network = MemoryNetwork()
    one, other = network.host(), network.host()

    async def keep(stream: MemoryStream) -> None:
        while await stream.read():
            pass

    other.set_stream_handler("/t", keep)  # type: ignore[arg-type]
    connection = await one.dial(other.peer_id, other.listen_addrs())
    counters = Counters()
    return RelayedTransport(await connection.open_stream("/t"), limit, counters), counters


async def test_no_byte_more_is_sent_than_the_relay_carries(autojump_clock: MockClock) -> None:
    transport, counters = await circuit(CircuitLimit(1_000, 0.0))
    meter = meter_of(transport)
    assert meter is not None and meter.limit == CircuitLimit(1_000, 0.0)
    await transport.write(bytes(600))
    await transport.write(bytes(400))
    with pytest.raises(ConnectionClosedError, match="the relay carries at most 1000 bytes in each direction"):
        await transport.write(b"x")
    assert counters["relay_limit_reached"] == 1


async def test_a_circuit_ends_when_its_time_is_over(autojump_clock: MockClock) -> None:
    transport, _ = await circuit(CircuitLimit(0, 120.0))
    started = trio.current_time()
    with pytest.raises(ConnectionClosedError, match="the relay carries at most 120 s"):
        await transport.read()
    assert trio.current_time() - started == pytest.approx(120.0)
    with pytest.raises(ConnectionClosedError):
        await transport.write(b"x")


def test_a_meter_says_what_is_left_and_which_limit_is_used_up() -> None:
    relay = PeerId("relay")
    meter = CircuitMeter(relay, CircuitLimit(KIB_128, 120.0), opened_s=10.0)
    assert meter.left(10.0) == CircuitUse(relay, True, KIB_128, 120.0)
    meter.sent_bytes, meter.received_bytes = 1_000, 2_000
    assert meter.left(40.0) == CircuitUse(relay, True, KIB_128 - 2_000, 90.0)
    assert meter.spent(40.0) == ""
    assert meter.spent(129.9) == "the relay carries a connection for 120 s"
    assert meter.left(1_000.0).time_left_s == 0.0
    meter.received_bytes = KIB_128
    assert meter.spent(40.0) == "the relay carries 131072 bytes in each direction of a connection"
    meter.received_bytes = 0
    assert meter.may_send(KIB_128 - 1_000) and meter.spent(40.0) == ""
    assert not meter.may_send(KIB_128)
    assert "131072 bytes" in meter.spent(40.0), "this end had more to send"
    wide = CircuitMeter(relay, CircuitLimit(0, 0.0), opened_s=10.0)
    wide.sent_bytes = 10**12
    assert (wide.left(10**9), wide.spent(10**9)) == (CircuitUse(relay, False, None, None), "")


async def test_a_transport_counts_both_directions(autojump_clock: MockClock) -> None:
    transport, _ = await circuit(CircuitLimit(1_000, 50.0))
    await transport.write(bytes(600))
    assert (transport.meter.sent_bytes, transport.meter.received_bytes) == (600, 0)
    await trio.sleep(20)
    left = transport.meter.left(trio.current_time())
    assert left.data_left_bytes == 400
    assert left.time_left_s == pytest.approx(30.0, abs=0.1)


async def test_without_a_limit_all_is_carried(autojump_clock: MockClock) -> None:
    transport, counters = await circuit(CircuitLimit(0, 0.0))
    for _ in range(100):
        await transport.write(bytes(100_000))
    assert counters["relay_limit_reached"] == 0
