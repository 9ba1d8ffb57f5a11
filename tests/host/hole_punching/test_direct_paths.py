"""Real hosts on loopback that meet through a relay, and find a direct path. Addresses of loopback pass for public."""

import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest
import trio
from libp2p.io.trio import TrioTCPStream

from dep2p.errors import ProtocolNotSupportedError, StreamClosedError
from dep2p.host.addresses import parse_address
from dep2p.host.connections.upgrade import UpgradeError, upgrade_outbound
from dep2p.host.counters import Counters
from dep2p.host.hole_punching import dials, service
from dep2p.host.interface import ByteStream
from dep2p.identity import Identity
from dep2p.protocols.hole_punching.messages import DCUTR, HolePunch, MessageType, encode

pytestmark = pytest.mark.real

TCP = "/ip4/127.0.0.1/tcp/0"
QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
APP = "/dep2p/app/realm/stream/1.0.0"
"""A stream of an app, as the host knows it by its name."""
CONNECT = encode(HolePunch(MessageType.CONNECT, (bytes.fromhex("047f00000106" + "0fa1"),)))
SYNC = encode(HolePunch(MessageType.SYNC))


def is_direct(host: Any, peer: Any) -> bool:
    return any("/p2p-circuit" not in one.remote_addr for one in host.connections(peer.peer_id))


async def echo(stream: ByteStream) -> None:
    while data := await stream.read():
        await stream.write(data)
    await stream.close()


async def meet(middle: Any, target: Any, dialler: Any, eventually: Any) -> Any:
    """The connection of the dialler through the relay."""
    await target.dial(middle.peer_id, middle.listen_addrs())
    await eventually(lambda: any("/p2p-circuit" in addr for addr in target.listen_addrs()))
    return await dialler.dial(target.peer_id, [addr for addr in target.listen_addrs() if "/p2p-circuit" in addr])


@pytest.fixture
def loopback_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host is seen at its addresses on loopback, and they are dialed; identify names none over the relay."""

    def is_punchable(addr: str) -> bool:
        return "/p2p-circuit" not in addr

    def punch_targets(addrs: Iterable[str], own: Iterable[str]) -> tuple[str, ...]:
        own = list(own)
        return tuple(addr for addr in addrs if addr and addr not in own and "/p2p-circuit" not in addr)

    monkeypatch.setattr(service, "is_punchable", is_punchable)
    monkeypatch.setattr(service, "punch_targets", punch_targets)


@pytest.fixture
def no_reversal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts know no address of each other but the relayed ones."""
    original = service.HolePunching._try  # pyright: ignore[reportPrivateUsage]

    async def punch_only(self: Any, upgrade: Any, kind: Any) -> None:
        if kind.value == "punch":
            await original(self, upgrade, kind)

    monkeypatch.setattr(service.HolePunching, "_try", punch_only)


@pytest.mark.parametrize("listen", [TCP, QUIC], ids=["tcp", "quic"])
@pytest.mark.usefixtures("loopback_is_public", "no_reversal")
async def test_a_relayed_pair_becomes_direct_and_leaves_the_relay(
    open_host: Any, eventually: Any, caplog: pytest.LogCaptureFixture, listen: str
) -> None:
    caplog.set_level(logging.INFO, "dep2p.host")
    async with (
        open_host(relay="server", listen=[listen]) as middle,
        open_host(relay="client", listen=[listen]) as target,
        open_host(relay="client", listen=[listen]) as dialler,
    ):
        relayed = await meet(middle, target, dialler, eventually)
        assert "/p2p-circuit" in relayed.remote_addr
        await eventually(lambda: is_direct(target, dialler) and is_direct(dialler, target))
        # The dialler of the relayed connection is the client of the direct one.
        await eventually(lambda: len(target.connections(dialler.peer_id)) == 1, 20.0)
        await eventually(lambda: len(dialler.connections(target.peer_id)) == 1, 20.0)
        assert [one.direction for one in dialler.connections(target.peer_id)] == ["outbound"]
        assert [one.direction for one in target.connections(dialler.peer_id)] == ["inbound"]
        assert relayed.is_closed
        stream = await (await dialler.dial(target.peer_id)).open_stream("/echo/1")
        await stream.write(b"hello")
        assert await stream.read() == b"hello"
        assert target.counters()["hole_punch_succeeded"] == 1
        assert dialler.counters()["hole_punch_answered_succeeded"] == 1
        assert f"{dialler.peer_id} is reached directly now" in caplog.text


@pytest.mark.usefixtures("loopback_is_public", "no_reversal")
async def test_what_is_under_way_on_the_relay_goes_on_and_a_direct_path_that_fails_is_looked_for_again(
    open_host: Any, eventually: Any
) -> None:
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client") as target,
        open_host(relay="client") as dialler,
    ):
        target.set_stream_handler(APP, echo)
        relayed = await meet(middle, target, dialler, eventually)
        stream = await relayed.open_stream(APP)
        for times in (1, 2):
            await eventually(lambda times=times: target.counters().get("hole_punch_succeeded") == times)
            await eventually(lambda: is_direct(dialler, target))
            await stream.write(b"still here")
            assert await stream.read() == b"still here"
            assert "/p2p-circuit" not in (await dialler.dial(target.peer_id)).remote_addr
            if times == 1:
                for one in dialler.connections(target.peer_id):
                    if "/p2p-circuit" not in one.remote_addr:
                        await one.close()
                assert await dialler.dial(target.peer_id) is relayed
        await stream.close()
        await eventually(lambda: relayed.is_closed, 20.0)
        assert is_direct(dialler, target)


@pytest.mark.usefixtures("loopback_is_public")
async def test_a_peer_that_can_be_reached_is_dialed_back_without_an_exchange(open_host: Any, eventually: Any) -> None:
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client", listen=[]) as target,
        open_host(relay="client") as dialler,
    ):
        await meet(middle, target, dialler, eventually)
        await eventually(lambda: is_direct(target, dialler))
        await eventually(lambda: target.counters().get("hole_punch_succeeded") == 1)
        assert dialler.counters().get("hole_punch_answered_succeeded", 0) == 0


async def test_addresses_of_this_machine_are_not_dialed(open_host: Any, eventually: Any) -> None:
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client") as target,
        open_host(relay="client") as dialler,
    ):
        relayed = await meet(middle, target, dialler, eventually)
        await eventually(lambda: target.counters().get("hole_punch_not_ready", 0) >= 2)  # the reversal was before
        assert not is_direct(target, dialler) and not relayed.is_closed


async def test_a_direct_connection_does_not_show_the_protocol(open_host: Any) -> None:
    async with open_host(relay="server") as one, open_host(relay="client") as other:
        connection = await other.dial(one.peer_id, one.listen_addrs())
        with pytest.raises(ProtocolNotSupportedError):
            await connection.open_stream(DCUTR)
        assert DCUTR not in other.peer_protocols(one.peer_id)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00",
        b"\xff\xff\xff\xff\xff",
        b"\x80\x40",
        b"\x05hello",
        bytes([len(SYNC)]) + SYNC,
        bytes([len(CONNECT)]) + CONNECT + bytes([len(CONNECT)]) + CONNECT,
    ],
)
async def test_what_is_no_exchange_costs_the_stream_only(open_host: Any, eventually: Any, sent: bytes) -> None:
    async with (
        open_host(relay="server") as middle,
        open_host(relay="client") as target,
        open_host(relay="client") as dialler,
    ):
        relayed = await meet(middle, target, dialler, eventually)
        stream = await relayed.open_stream(DCUTR)
        await stream.write(sent)
        await stream.close_write()
        with trio.fail_after(10):
            try:
                while await stream.read():
                    pass
            except StreamClosedError:
                pass
        assert await dialler.ping(target.peer_id) > 0
        await eventually(lambda: not target._hole_punching._bounds._under_way)


@pytest.mark.usefixtures("loopback_is_public")
async def test_a_peer_that_punches_too_often_is_refused_and_counted(open_host: Any, eventually: Any) -> None:
    smaller, larger = sorted((Identity.generate(), Identity.generate()), key=lambda one: one.peer_id)
    async with (
        open_host(relay="server") as middle,
        open_host(smaller, relay="client", listen=[]) as target,
        open_host(larger, relay="client", listen=[]) as dialler,
    ):
        relayed = await meet(middle, target, dialler, eventually)
        for _ in range(20):
            try:
                stream = await relayed.open_stream(DCUTR)
                await stream.write(b"\x05hello")
                await stream.read()
            except StreamClosedError:
                await trio.lowlevel.checkpoint()
        await eventually(lambda: target.counters().get("hole_punch_refused_rate", 0) >= 1)


@pytest.mark.parametrize("is_expected", [True, False])
async def test_the_server_of_a_simultaneous_open_answers_from_its_port(open_host: Any, is_expected: bool) -> None:
    async with open_host(listen=["/ip4/0.0.0.0/tcp/0"]) as one, open_host() as other:
        own_port = parse_address(one.listen_addrs()[0]).port
        with socket.socket() as sock:
            sock.bind(("127.0.0.2", 0))
            sock.listen()
            address = parse_address(f"/ip4/127.0.0.2/tcp/{sock.getsockname()[1]}")
            listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock))

            async def act_as_client() -> None:
                async with await listener.accept() as stream:
                    assert stream.socket.getpeername()[1] == own_port
                    with suppress(UpgradeError):
                        await upgrade_outbound(other._swarm.upgrader, TrioTCPStream(stream), one.peer_id)
                        await trio.sleep_forever()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(act_as_client)
                if is_expected:
                    connection = await one._transports.answer_once(address, other.peer_id)
                    assert (connection.peer, connection.direction) == (other.peer_id, "inbound")
                    assert connection.listening_port == own_port
                else:
                    with pytest.raises(UpgradeError, match="another node answers there"):
                        await one._transports.answer_once(address, Identity.generate().peer_id)
                nursery.cancel_scope.cancel()


PEER = Identity.generate().peer_id


class FakeTransports:
    """Records what a try asks for. Dials to port 1 connect after a while, others never."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.connects_after_s = 2.0
        self.datagrams: list[float] = []

    async def connect_once(self, address: Any, peer: Any) -> Any:
        self.asked.append(f"client {address.text}")
        if address.port != 1:
            raise OSError("refused")
        await trio.sleep(self.connects_after_s)
        return "connection"

    async def answer_once(self, address: Any, peer: Any) -> Any:
        self.asked.append(f"server {address.text}")
        await trio.sleep_forever()

    async def send_random(self, address: Any, size_bytes: int) -> bool:
        self.datagrams.append(trio.current_time())
        return True


ADDRS = [parse_address(text) for text in ("/ip4/198.51.100.1/tcp/1", "/ip4/198.51.100.1/udp/2/quic-v1")]


class Half:
    """A random source in the middle."""

    def random(self) -> float:
        return 0.5

    def randbytes(self, n: int, /) -> bytes:
        return bytes(n)


async def test_the_client_dials_all_and_the_first_wins(autojump_clock: Any) -> None:
    transports = FakeTransports()
    found = await dials.DirectDials(transports, Counters(), Half()).dial(PEER, ADDRS)
    assert str(found) == "connection" and trio.current_time() == pytest.approx(autojump_clock.current_time())
    assert sorted(transports.asked) == [f"client {each.text}" for each in ADDRS]
    assert await dials.DirectDials(transports, Counters(), Half()).dial(PEER, ADDRS[1:]) is None


async def test_a_peer_that_answers_over_tcp_soon_is_not_dialed_over_quic(autojump_clock: Any) -> None:
    transports = FakeTransports()
    transports.connects_after_s = dials.TCP_FIRST_S / 2
    found = await dials.DirectDials(transports, Counters(), Half()).dial(PEER, ADDRS)
    assert str(found) == "connection" and transports.asked == [f"client {ADDRS[0].text}"]


async def test_the_server_dials_over_tcp_and_sends_random_datagrams_for_quic(autojump_clock: Any) -> None:
    transports = FakeTransports()
    begun_s = trio.current_time()
    await dials.DirectDials(transports, Counters(), Half()).answer(PEER, ADDRS, trio.Event())
    assert trio.current_time() - begun_s == pytest.approx(dials.DIAL_S)
    assert transports.asked == [f"server {ADDRS[0].text}"]
    gaps = [after - before for before, after in zip(transports.datagrams, transports.datagrams[1:], strict=False)]
    assert len(gaps) > 20 and all(0.01 <= gap <= 0.2 for gap in gaps)


async def test_the_server_stops_when_the_connection_is_there(autojump_clock: Any) -> None:
    transports = FakeTransports()
    connected = trio.Event()
    begun_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dials.DirectDials(transports, Counters(), Half()).answer, PEER, ADDRS, connected)
        await trio.sleep(1)
        connected.set()
    assert trio.current_time() - begun_s == pytest.approx(1)
