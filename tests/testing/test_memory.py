"""The in-memory network keeps the promises of the host interface."""

import pytest
import trio
import trio.testing

from dep2p.errors import PeerNotFoundError, ProtocolNotSupportedError, StreamClosedError
from dep2p.host.interface import ByteStream, Host, HostEvent, PeerConnected, PeerDisconnected
from dep2p.testing import MemoryHost, MemoryNetwork
from dep2p.testing.memory import WINDOW_BYTES


def as_host(host: MemoryHost) -> Host:
    """Type checkers compare the fake with the Protocol here."""
    return host


async def pair(network: MemoryNetwork) -> tuple[MemoryHost, MemoryHost]:
    a, b = network.host(), network.host()
    await as_host(a).dial(b.peer_id, b.listen_addrs())
    return a, b


async def test_streams_echo_and_half_close(autojump_clock: trio.testing.MockClock) -> None:
    a, b = await pair(MemoryNetwork(latency_s=0.5))

    async def echo(stream: ByteStream) -> None:
        while data := await stream.read():
            await stream.write(data)
        await stream.close_write()

    b.set_stream_handler("/echo", echo)
    stream = await a.connections()[0].open_stream("/echo")
    sent = bytes(range(256)) * 4096
    received = bytearray()

    async def send() -> None:
        await stream.write(sent)
        await stream.close_write()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while data := await stream.read():
            received += data
    assert bytes(received) == sent


async def test_a_paused_receiver_stops_the_sender_at_the_window(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b = await pair(MemoryNetwork())
    got: list[bytes] = []
    ended: list[BaseException | None] = []
    streams: list[ByteStream] = []

    async def take(stream: ByteStream) -> None:
        stream.pause_receiving()
        stream.set_receiver(lambda data: got.append(bytes(data)), ended.append)
        streams.append(stream)

    b.set_stream_handler("/take", take)
    stream = await a.connections()[0].open_stream("/take")
    stream.write_nowait(b"x" * (WINDOW_BYTES + 1000))
    with trio.move_on_after(60) as scope:
        await stream.drain()
    assert scope.cancelled_caught
    assert stream.unsent_bytes == 1000
    assert got == []
    streams[0].resume_receiving()
    await stream.drain()
    await stream.close_write()
    await trio.sleep(1)
    assert sum(map(len, got)) == WINDOW_BYTES + 1000
    assert ended == [None]


async def test_unknown_protocol_and_unknown_peer_are_named_errors(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network = MemoryNetwork()
    a, b = await pair(network)
    with pytest.raises(ProtocolNotSupportedError):
        await a.connections()[0].open_stream("/nothing")
    with pytest.raises(PeerNotFoundError):
        await b.dial(network.host().peer_id)


async def test_kill_breaks_both_ends_and_reports_once(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    a, b = network.host(), network.host()
    events: list[HostEvent] = []
    a.subscribe(events.append)
    connection = await a.dial(b.peer_id, b.listen_addrs())

    async def hold(stream: ByteStream) -> None:
        await stream.read()

    b.set_stream_handler("/hold", hold)
    stream = await connection.open_stream("/hold")
    b.kill()
    with pytest.raises(StreamClosedError):
        await stream.read()
    assert [type(e) for e in events] == [PeerConnected, PeerDisconnected]
    assert network.host(b.identity).peer_id == b.peer_id
    await a.dial(b.peer_id, network.find(b.peer_id).listen_addrs())  # type: ignore[union-attr]


async def test_partition_holds_and_heal_delivers(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork()
    a, b = await pair(network)
    got: list[bytes] = []

    async def take(stream: ByteStream) -> None:
        got.append(await stream.read())

    b.set_stream_handler("/take", take)
    stream = await a.connections()[0].open_stream("/take")
    network.partition(a.peer_id, b.peer_id)
    stream.write_nowait(b"late")
    await trio.sleep(100)
    assert got == []
    network.heal()
    await trio.sleep(1)
    assert got == [b"late"]


async def test_small_and_large_writes_in_turn_do_not_fragment_the_window(
    autojump_clock: trio.testing.MockClock,
) -> None:
    a, b = await pair(MemoryNetwork())
    received = deliveries = 0
    ended = trio.Event()

    def take(data: bytes | memoryview) -> None:
        nonlocal received, deliveries
        received += len(data)
        deliveries += 1

    async def serve(stream: ByteStream) -> None:
        stream.set_receiver(take, lambda _error: ended.set())
        await ended.wait()

    b.set_stream_handler("/bulk", serve)
    stream = await a.connections()[0].open_stream("/bulk")
    large = bytes(262_144)
    for _ in range(100):
        await stream.write(b"twelve bytes")
        await stream.write(large)
    await stream.close_write()
    with trio.fail_after(60):
        await ended.wait()
    assert received == 100 * (12 + 262_144)
    assert deliveries < 1_000  # 64 KiB each would be 400


@pytest.mark.parametrize("read_bytes", [1, 1_000, 200_000])
async def test_a_reader_of_any_size_gets_everything(autojump_clock: trio.testing.MockClock, read_bytes: int) -> None:
    a, b = await pair(MemoryNetwork())
    sent = bytes(range(256)) * (4 if read_bytes == 1 else 4_096)
    received = bytearray()
    ended = trio.Event()

    async def serve(stream: ByteStream) -> None:
        while data := await stream.read(read_bytes):
            received.extend(data)
        ended.set()

    b.set_stream_handler("/slow", serve)
    stream = await a.connections()[0].open_stream("/slow")
    await stream.write(sent)
    await stream.close_write()
    with trio.fail_after(60):
        await ended.wait()
    assert bytes(received) == sent
