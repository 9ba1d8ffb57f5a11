"""The datagrams of a QUIC connection leave in order, in batches, and wake the loop that keeps the timers."""

# pyright: reportPrivateUsage=false

import errno
import socket
import time
from itertools import pairwise

import pytest
import trio

from dep2p.host.upstream.quic_sending import Datagram, OneSender, batches

ADDR = ("192.0.2.1", 4003)
OTHER = ("192.0.2.2", 4003)


def test_a_batch_is_of_one_destination_and_one_size_but_for_its_last() -> None:
    datagrams: list[Datagram] = [
        (b"a" * 1200, ADDR),
        (b"b" * 1200, ADDR),
        (b"c" * 40, ADDR),
        (b"d" * 40, ADDR),
        (b"e" * 1200, ADDR),
        (b"f" * 1200, OTHER),
    ]
    found = list(batches(datagrams))
    assert [(len(batch), addr) for batch, addr in found] == [(3, ADDR), (1, ADDR), (1, ADDR), (1, OTHER)]
    assert [(data, addr) for batch, addr in found for data in batch] == datagrams


def test_a_batch_is_bounded() -> None:
    found = list(batches([(bytes(1200), ADDR)] * 100 + [(bytes(30_000), ADDR)] * 3))
    assert all(len(batch) <= 32 and sum(map(len, batch)) <= 60_000 for batch, _ in found)
    assert sum(len(batch) for batch, _ in found) == 103


class FakeQuic:
    """aioquic's connection, as far as the sender sees it: the bytes of each call are new ones."""

    def __init__(self) -> None:
        self.number = 0
        self.timer_s: float | None = None
        self._pacing_at: float | None = None

    def datagrams_to_send(self, now: float) -> list[Datagram]:
        first, self.number = self.number, self.number + 3
        return [(f"{number:06}".encode(), ADDR) for number in range(first, self.number)]

    def get_timer(self) -> float | None:
        return self.timer_s


class FakeSocket:
    """A socket in which each datagram takes a while."""

    def __init__(self, *, refuses: int = 0) -> None:
        self.sent: list[bytes] = []
        self.refuses = refuses
        self.calls: list[str] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, value) == (socket.SOL_SOCKET, 4_194_304)

    async def sendmsg(self, parts: list[bytes], control: list[object], flags: int, addr: object) -> None:
        self.calls.append("sendmsg")
        if self.refuses:
            raise OSError(self.refuses, "no")
        await trio.lowlevel.checkpoint()
        self.sent += parts

    async def sendto(self, data: bytes, addr: object) -> None:
        self.calls.append("sendto")
        await trio.lowlevel.checkpoint()
        self.sent.append(data)


class FakeConnection:
    """py-libp2p's connection, as far as the sender sees it."""

    def __init__(self, *, refuses: int = 0) -> None:
        self._quic = FakeQuic()
        self._socket: FakeSocket | None = FakeSocket(refuses=refuses)
        self.signals = 0
        self.errors: list[Exception] = []

    async def _transmit(self) -> None:
        raise AssertionError("the sender takes its place")

    async def _handle_timer_events(self) -> None:
        await trio.lowlevel.checkpoint()

    async def _handle_connection_error(self, error: Exception) -> None:
        self.errors.append(error)

    def _refresh_send_backpressure(self) -> None: ...

    def _signal_activity(self) -> None:
        self.signals += 1


def sender(connection: FakeConnection) -> OneSender:
    return OneSender(connection)  # type: ignore[arg-type]


@pytest.mark.parametrize("segments", [True, False])
async def test_datagrams_of_many_tasks_do_not_overtake_each_other(
    segments: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneSender, "segments", segments)
    connection = FakeConnection()
    one = sender(connection)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.transmit)
        while not connection._quic.number:
            await trio.lowlevel.checkpoint()
        for _ in range(50):
            nursery.start_soon(one.transmit)
    assert connection._socket is not None
    sent = connection._socket.sent
    assert len(sent) == 6 and all(a < b for a, b in pairwise(sent))
    # A task that asks while another sends shares the next turn with all that ask meanwhile.
    assert connection._quic.number == 6


async def test_a_kernel_that_cannot_cut_gets_each_datagram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneSender, "segments", True)
    connection = FakeConnection(refuses=errno.EIO)
    one = sender(connection)
    await one.transmit()
    await one.transmit()
    assert connection._socket is not None and connection._socket.calls == ["sendmsg", *["sendto"] * 6]
    assert connection.errors == []


async def test_another_error_of_the_socket_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneSender, "segments", True)
    connection = FakeConnection(refuses=errno.EPERM)
    await sender(connection).transmit()
    assert [type(error) for error in connection.errors] == [PermissionError]


async def test_an_earlier_timer_wakes_the_loop_and_a_later_one_does_not() -> None:
    connection = FakeConnection()
    one = sender(connection)
    soon_s = time.time() + 100

    async def loop_turn() -> None:
        await connection._handle_timer_events()
        await one.transmit()

    connection._quic.timer_s = soon_s
    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop_turn)
    assert connection.signals == 0, "the loop looks at the timer itself"
    connection._quic.timer_s = soon_s + 1
    await one.transmit()
    assert connection.signals == 0
    connection._quic.timer_s = soon_s - 1
    await one.transmit()
    assert connection.signals == 1, "the loop waits for a later one"
    await one.transmit()
    assert connection.signals == 1


async def test_the_pacing_of_a_connection_wakes_the_loop_once_a_millisecond_at_most() -> None:
    connection = FakeConnection()
    sender(connection)
    due_s = time.time() - 1
    connection._quic.timer_s = connection._quic._pacing_at = due_s
    assert (connection._quic.get_timer() or 0.0) > due_s + 1
    connection._quic._pacing_at = None
    assert connection._quic.get_timer() == due_s, "a loss is not put off"


async def test_a_closed_connection_sends_nothing() -> None:
    connection = FakeConnection()
    connection._socket = None
    await sender(connection).transmit()
    assert connection._quic.number == 0
