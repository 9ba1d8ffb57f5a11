"""Our host against js-libp2p over TCP, Noise and yamux, both ways."""

import json
import os
import signal
import struct
from collections.abc import Callable
from typing import Any

import pytest
import trio

from dep2p.errors import StreamClosedError
from dep2p.limits import Limits
from dep2p.types import PeerId

pytestmark = [pytest.mark.interop, pytest.mark.real]

BULK_BYTES = 100_000_000
_STREAMS = 100
"""At once: fewer than the 128 that a peer without a proof may hold open here."""


async def read_to_end(stream: Any) -> bytes:
    data = bytearray()
    while more := await stream.read():
        data += more
    return bytes(data)


async def until(is_true: Callable[[], bool]) -> None:
    """Look until it is so; the test's own limit bounds it."""
    while not is_true():  # noqa: ASYNC110 - another process does it, and nothing here is told
        await trio.sleep(0.01)


async def test_js_dials_identifies_and_pings_us(js_peer: Any, our_host: Any, traffic: Any) -> None:
    with trio.fail_after(60):
        async with our_host() as host, js_peer() as js:
            addr = host.listen_addrs()[0]
            dialed = await js.call("dial", addr)
            assert dialed == {
                "command": "dial",
                "peer": host.peer_id,
                "encryption": "/noise",
                "multiplexer": "/yamux/1.0.0",
            }
            seen = await js.line(event="identify", peer=host.peer_id)
            assert traffic.ECHO in seen["protocols"]
            assert seen["agent"].startswith("dep2p/")
            for _ in range(3):
                assert (await js.call("ping", addr))["ms"] < 5_000
            assert [connection.peer for connection in host.connections()] == [js.peer]


async def test_we_dial_identify_and_ping_js(js_peer: Any, our_host: Any, traffic: Any) -> None:
    with trio.fail_after(60):
        async with our_host() as host, js_peer() as js:
            connection = await host.dial(PeerId(js.peer), [js.addr])
            assert connection.peer == js.peer
            await js.line(event="connect", peer=host.peer_id)
            for _ in range(3):
                assert 0 < await host.ping(PeerId(js.peer)) < 5
            await until(lambda: traffic.ECHO in host.peer_protocols(PeerId(js.peer)))
            assert "js-libp2p" in host.peer_agent(PeerId(js.peer))
            await js.call("hangup", host.peer_id)
            await until(lambda: not host.connections())


async def test_liveness_probes_are_answered_by_js(js_peer: Any, our_host: Any) -> None:
    with trio.fail_after(60):
        async with our_host() as host, js_peer() as js:
            connection = await host.dial(PeerId(js.peer), [js.addr])
            await until(lambda: connection.rtt_s is not None)
            assert 0 < connection.rtt_s < 5


async def test_a_stopped_process_is_noticed_while_we_write_to_it(js_peer: Any, our_host: Any, traffic: Any) -> None:
    limits = Limits(liveness_interval_s=0.5, liveness_timeout_s=0.5)
    with trio.fail_after(60):
        async with our_host(limits) as host, js_peer() as js:
            connection = await host.dial(PeerId(js.peer), [js.addr])
            streams = [await connection.open_stream(traffic.SINK) for _ in range(40)]
            os.kill(js.pid, signal.SIGSTOP)
            try:
                for stream in streams:
                    stream.write_nowait(bytes(1_000_000))
                began_s = trio.current_time()
                await until(lambda: connection.is_closed)
                assert trio.current_time() - began_s < 10
                for stream in streams:
                    with pytest.raises(StreamClosedError):
                        await stream.drain()
            finally:
                os.kill(js.pid, signal.SIGCONT)


@pytest.mark.parametrize("count", [1, 65_535, 3_000_000])
async def test_echo_through_js_and_through_us(js_peer: Any, our_host: Any, traffic: Any, count: int) -> None:
    with trio.fail_after(60):
        async with our_host() as host, js_peer() as js:
            echoed = await js.call("echo", host.listen_addrs()[0], count)
            assert (echoed["bytes"], echoed["sha256"]) == (count, echoed["sent"]) == (count, traffic.digest(count))
            connection = await host.dial(PeerId(js.peer), [js.addr])
            stream = await connection.open_stream(traffic.ECHO)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(traffic.send, stream, count)
                assert await traffic.receive(stream) == (count, traffic.digest(count))


async def test_a_hundred_megabytes_arrive_intact_both_ways_when_js_dials(
    js_peer: Any, our_host: Any, traffic: Any
) -> None:
    with trio.fail_after(110):
        async with our_host() as host, js_peer() as js:
            addr, expected = host.listen_addrs()[0], traffic.digest(BULK_BYTES)
            sent = await js.call("send", addr, BULK_BYTES)
            assert sent["answer"] == {"bytes": BULK_BYTES, "sha256": expected}
            fetched = await js.call("fetch", addr, BULK_BYTES)
            assert (fetched["bytes"], fetched["sha256"]) == (BULK_BYTES, expected)


async def test_a_hundred_megabytes_arrive_intact_both_ways_when_we_dial(
    js_peer: Any, our_host: Any, traffic: Any
) -> None:
    with trio.fail_after(110):
        async with our_host() as host, js_peer() as js:
            connection, expected = await host.dial(PeerId(js.peer), [js.addr]), traffic.digest(BULK_BYTES)
            stream = await connection.open_stream(traffic.SINK)
            await traffic.send(stream, BULK_BYTES)
            assert json.loads(await read_to_end(stream)) == {"bytes": BULK_BYTES, "sha256": expected}
            stream = await connection.open_stream(traffic.SOURCE)
            await stream.write(struct.pack("!Q", BULK_BYTES))
            assert await traffic.receive(stream) == (BULK_BYTES, expected)


async def test_a_hundred_streams_at_once(js_peer: Any, our_host: Any, traffic: Any) -> None:
    right: list[int] = []
    with trio.fail_after(60):
        async with our_host() as host, js_peer() as js:
            assert (await js.call("many", host.listen_addrs()[0], _STREAMS))["right"] == _STREAMS
            connection = await host.dial(PeerId(js.peer), [js.addr])

            async def ask(number: int) -> None:
                stream = await connection.open_stream(traffic.ECHO)
                await stream.write(b"stream %d" % number)
                await stream.close_write()
                if await read_to_end(stream) == b"stream %d" % number:
                    right.append(number)

            async with trio.open_nursery() as nursery:
                for number in range(_STREAMS):
                    nursery.start_soon(ask, number)
            assert len(right) == _STREAMS
