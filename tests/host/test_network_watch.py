"""A change of this machine's network is told once, with what it is."""

import socket

import pytest
import trio
import trio.testing

from dep2p.host import network_watch
from dep2p.host.counters import Counters
from dep2p.host.network_watch import LOOK_S, PAUSE_S, NetworkWatch, State, difference, network_state

HOME: State = frozenset({"address 192.168.1.10", "route eth0 00000000 0101A8C0 00000000"})
CAFE: State = frozenset({"address 10.0.0.7", "route eth0 00000000 0100000A 00000000"})


def test_a_difference_names_addresses_and_says_when_only_routes_have_changed() -> None:
    assert difference(HOME, HOME) == ""
    assert difference(HOME, CAFE) == "gone: 192.168.1.10; new: 10.0.0.7"
    assert difference(HOME, HOME - {"route eth0 00000000 0101A8C0 00000000"}) == "routes"
    many = HOME | {f"address 10.0.0.{number}" for number in range(9)}
    assert difference(HOME, many) == "new: 10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3 …"


def test_the_state_of_this_machine_has_no_loopback_or_link_local_address() -> None:
    assert not [
        text for text in network_state() if "127.0.0.1" in text or "address fe80" in text or text == "address ::1"
    ]


class Machine:
    """A network that the test changes, with the news of it."""

    def __init__(self) -> None:
        self.state = HOME
        self.looks = 0
        self.told: list[str] = []
        self.far, self.near = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.near.setblocking(False)

    def look(self) -> State:
        self.looks += 1
        return self.state

    def news(self, count: int = 1) -> None:
        for _ in range(count):
            self.far.send(b"news")

    async def settle(self) -> None:
        """Wait until the watch has read the news."""
        with trio.fail_after(5):
            before = self.looks
            while self.looks == before:
                await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(network_watch, "_news", lambda: made.near)
    monkeypatch.setattr(network_watch, "SETTLE_S", 0.01)
    monkeypatch.setattr(network_watch, "PAUSE_S", 0.01)
    return made


async def test_news_that_change_nothing_are_not_told_and_many_are_told_once(machine: Machine) -> None:
    watch = NetworkWatch(machine.told.append, Counters(), machine.look)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.testing.wait_all_tasks_blocked()
        machine.news()
        await machine.settle()
        assert machine.told == []
        machine.state = CAFE
        machine.news(20)
        await machine.settle()
        assert machine.told == ["gone: 192.168.1.10; new: 10.0.0.7"]
        nursery.cancel_scope.cancel()
    machine.far.close()


async def test_without_news_the_network_is_looked_at_every_few_seconds(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_watch, "_news", lambda: None)
    state, told = HOME, list[str]()
    watch = NetworkWatch(told.append, Counters(), lambda: state)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.sleep(2 * LOOK_S)
        state = CAFE
        await trio.sleep(LOOK_S + 0.1)
        assert told == ["gone: 192.168.1.10; new: 10.0.0.7"]
        state = HOME
        await trio.sleep(PAUSE_S + LOOK_S)
        assert len(told) == 2
        nursery.cancel_scope.cancel()


async def test_a_pause_of_the_machine_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s = 0.0
    monkeypatch.setattr(network_watch, "_news", lambda: None)
    monkeypatch.setattr(network_watch, "_asleep_s", lambda: slept_s)
    told: list[str] = []
    watch = NetworkWatch(told.append, Counters(), lambda: HOME)
    monkeypatch.setattr(network_watch, "LOOK_S", 0.01)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.run)
        await trio.testing.wait_all_tasks_blocked()
        slept_s = 3_600.0
        with trio.fail_after(5):
            while not told:
                await trio.lowlevel.checkpoint()
        assert told == ["a pause of 3600 s"]
        nursery.cancel_scope.cancel()
