"""What strangers can make a host hold or do: pings, identify messages, relayed circuits, places."""

from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing

from dep2p.errors import StreamClosedError
from dep2p.host.counting import Counters
from dep2p.host.identify import IDENTIFY_PUSH, PING, PingServer
from dep2p.testing import MemoryHost, MemoryNetwork

Clock = trio.testing.MockClock


def pinged_host(network: MemoryNetwork) -> tuple[MemoryHost, Counters]:
    host, counters = network.host(), Counters()
    host.set_stream_handler(PING, PingServer(counters).serve)
    return host, counters


async def test_pings_whose_answers_nobody_reads_are_not_kept(autojump_clock: Clock) -> None:
    """A whole window of pings waits in memory behind each answer that cannot be sent."""
    network = MemoryNetwork()
    host, _ = pinged_host(network)
    stream = await (await network.host().dial(host.peer_id, [host.addr])).open_stream(PING)
    stream.write_nowait(bytes(1_000_000))
    await trio.sleep(15)
    (connection,) = host.connections()
    assert connection.streams == {}
    with pytest.raises(StreamClosedError):
        await stream.drain()


async def test_ping_streams_of_one_connection_are_bounded(autojump_clock: Clock) -> None:
    network = MemoryNetwork()
    host, counters = pinged_host(network)
    connection = await network.host().dial(host.peer_id, [host.addr])
    streams = [await connection.open_stream(PING) for _ in range(9)]
    await trio.sleep(1)
    assert counters["ping_stream_refused"] == 1
    await streams[0].close()
    await trio.sleep(1)
    again = await connection.open_stream(PING)
    again.write_nowait(bytes(32))
    assert await again.read() == bytes(32)


@pytest.mark.real
async def test_identify_pushes_without_end_are_refused_and_leave_nothing(two_hosts: Any, eventually: Any) -> None:
    async with two_hosts() as (host, stranger):
        connection = await stranger.dial(host.peer_id, host.listen_addrs())
        await eventually(lambda: bool(host.peer_protocols(stranger.peer_id)))
        for _ in range(40):
            with suppress(StreamClosedError):  # refused
                stream = await connection.open_stream(IDENTIFY_PUSH)
                stream.write_nowait(b"\x00")
                await stream.close()
        await eventually(lambda: host.counters().get("identify_push_refused_rate", 0) >= 20)
        await stranger.disconnect(host.peer_id)
        await eventually(lambda: not host.connections())
        assert host.peer_protocols(stranger.peer_id) == ()
