"""Floods of QUIC Initial packets cost a bounded amount of memory, which they give back."""

import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.lowlevel
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from dep2p.host.transports import quic
from dep2p.host.transports.quic_admission import (
    PENDING_MAX,
    PENDING_WITHOUT_TOKEN_MAX,
    QuicAdmission,
    Start,
)
from dep2p.host.upstream.quic_internals import registry_sizes
from dep2p.limits import Limits

QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
HERE, THERE = ("192.0.2.1", 4_001), ("203.0.113.1", 4_001)


def test_the_first_handshakes_begin_at_once_and_later_ones_prove_their_address() -> None:
    admission = QuicAdmission()
    for key in range(PENDING_WITHOUT_TOKEN_MAX):
        assert admission.decide(HERE, b"%08d" % key, b"", 0.0) == Start(b"%08d" % key, None)
        admission.begin(key, HERE, 0.0)
    assert admission.decide(HERE, b"original", b"", 0.0) == "retry"
    token = admission.token(HERE, b"original", b"retrycid", 1.0)
    assert admission.decide(HERE, b"retrycid", token, 2.0) == Start(b"original", b"retrycid")
    for wrong in (
        admission.decide(THERE, b"retrycid", token, 2.0),
        admission.decide(HERE, b"othercid", token, 2.0),
        admission.decide(HERE, b"retrycid", token[:-1] + b"x", 2.0),
        admission.decide(HERE, b"retrycid", b"x", 2.0),
        admission.decide(HERE, b"retrycid", token, 1_000.0),
    ):
        assert wrong == "token"
    admission.end(0)
    admission.end(0)
    assert isinstance(admission.decide(HERE, b"original", b"", 3.0), Start)


def test_one_address_block_begins_handshakes_at_a_rate() -> None:
    admission = QuicAdmission()
    begun = sum(isinstance(admission.decide(HERE, b"original", b"", 0.0), Start) for _ in range(1_000))
    assert begun == 64
    token = admission.token(HERE, b"original", b"retrycid", 0.0)
    assert admission.decide(HERE, b"retrycid", token, 0.0) == "rate"
    assert isinstance(admission.decide(THERE, b"original", b"", 0.0), Start)
    assert isinstance(admission.decide(HERE, b"retrycid", token, 1.0), Start)


def test_above_the_bound_the_oldest_handshake_of_the_largest_block_ends() -> None:
    admission = QuicAdmission()
    admission.begin(-1, THERE, 0.0)
    ended = [admission.begin(key, HERE, 0.0) for key in range(PENDING_MAX + 3)]
    assert ended[-4:] == [0, 1, 2, 3]
    assert len(admission) == PENDING_MAX
    assert -1 in admission.keys()


def junk() -> bytes:
    return (
        b"\xc0"
        + struct.pack("!I", 1)
        + b"\x08"
        + os.urandom(8)
        + b"\x08"
        + os.urandom(8)
        + b"\x00\x44\x00"
        + os.urandom(1_175)
    )


def other_version() -> bytes:
    return b"\xc0" + struct.pack("!I", 0x0A0A0A0A) + b"\x08" + os.urandom(8) + b"\x08" + os.urandom(8) + b"\0" * 1_200


def tiny() -> bytes:
    return b"\xc0" + struct.pack("!I", 1) + b"\x08" + os.urandom(8) + b"\x00\x00"


def hello() -> bytes:
    client = QuicConnection(
        configuration=QuicConfiguration(is_client=True, alpn_protocols=["libp2p"], verify_mode=ssl.CERT_NONE)
    )
    client.connect(("127.0.0.1", 1), now=time.time())
    return client.datagrams_to_send(time.time())[0][0]


@pytest.mark.real
@pytest.mark.parametrize("packet", [junk, other_version, tiny, hello])
async def test_a_flood_leaves_nothing_and_the_next_peer_is_served(
    open_host: Any, eventually: Any, packet: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners: list[Any] = []
    made = quic.ExclusiveListener.__init__

    def note(self: Any, *args: Any) -> None:
        made(self, *args)
        listeners.append(self)

    monkeypatch.setattr(quic.ExclusiveListener, "__init__", note)
    limits = Limits(handshake_timeout_s=3.0)
    async with open_host(listen=[QUIC], limits=limits) as host, open_host(listen=[QUIC], limits=limits) as other:
        port = int(host.listen_addrs()[0].split("/")[4])
        (listener,) = [one for one in listeners if one.bound.port == port]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect(("127.0.0.1", port))
            for _ in range(150):
                stranger.send(packet())
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert max(registry_sizes(listener)) <= 10 * PENDING_MAX
            await other.dial(host.peer_id, host.listen_addrs())  # answers a Retry, if the flood makes one necessary
            assert await other.ping(host.peer_id) > 0
        await eventually(lambda: len(listener.admission) == 0, 15)
        await other.disconnect(host.peer_id)
        await eventually(lambda: max(registry_sizes(listener)) <= 16, 15)
        counters = host.counters()
        assert sum(amount for name, amount in counters.items() if name.startswith("inbound_quic")) >= 100
