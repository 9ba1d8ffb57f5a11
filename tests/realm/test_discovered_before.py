"""Peers that discovery has named at a moment at which the realm could not use it are found all the same."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from random import Random

import pytest
import trio
from trio.abc import Clock

from dep2p.errors import PeerNotFoundError
from dep2p.host.discovery.mdns import MdnsServices
from dep2p.host.discovery.named_peers import NamedPeers
from dep2p.host.interface import Connection, PeerDiscovered
from dep2p.realm.handshake_scheduler import DISCOVERED_MAX, HandshakeScheduler
from dep2p.types import PeerId
from tests.realm.realm_nodes import realm_nodes, until


async def test_peers_that_were_named_before_the_realm_was_joined_are_found(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        first, second = nodes.network.host(), nodes.network.host()
        first.discover(second.peer_id, [second.addr])
        second.discover(first.peer_id, [first.addr])
        await trio.sleep(3_000)
        a = await nodes.add(host=first)
        await trio.sleep(1)
        b = await nodes.add(host=second)
        await until(lambda: a.state(b) == b.state(a) == "up", timeout_s=5)


async def test_more_peers_than_can_wait_are_all_found(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        strangers = [nodes.network.host() for _ in range(2 * DISCOVERED_MAX)]
        b = await nodes.add()
        host = nodes.network.host()
        for each in [*strangers, b.host]:
            host.discover(each.peer_id, [each.addr])
        a = await nodes.add(host=host)
        await until(lambda: a.state(b) == "up", timeout_s=120)


async def test_a_peer_that_could_not_be_reached_when_it_was_named_is_tried_again(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        a, b = await nodes.add(), await nodes.add()
        nodes.network.partition(a.host.peer_id, b.host.peer_id)
        a.host.discover(b.host.peer_id, [b.host.addr])
        await trio.sleep(20)
        nodes.network.heal()
        await until(lambda: a.state(b) == "up", timeout_s=120)


async def test_a_peer_that_is_gone_is_dialed_ever_more_seldom(autojump_clock: Clock) -> None:
    async with realm_nodes() as nodes:
        gone = nodes.network.host()
        gone.kill()
        a = await nodes.add()
        dials: list[float] = []
        dial = a.host.dial

        async def counted(peer: str, *arguments: object, **options: object) -> object:
            dials.append(trio.current_time())
            return await dial(peer, *arguments, **options)  # type: ignore[arg-type]

        a.host.dial = counted  # type: ignore[method-assign, assignment]
        a.host.discover(gone.peer_id, [gone.addr])
        for _ in range(10):  # a source that repeats the name
            await trio.sleep(1_800)
            a.host.discover(gone.peer_id, [gone.addr])
        assert 8 < len(dials) < 16
        assert dials[-1] - dials[-2] >= 3_600


class _Network:
    """What the scheduler knows of peers, of whom only `living` answer; a dial at any other takes ten seconds."""

    def __init__(self, living: str) -> None:
        self.living = living
        self.named = NamedPeers(4_096)
        self.dialed = trio.Event()
        self.dials = Counter[str]()

    def name(self, peer: str) -> PeerDiscovered:
        event = PeerDiscovered(PeerId(peer), ("/ip4/192.0.2.1/tcp/1",), "test")
        self.named.note(event, trio.current_time())
        return event

    def discovered(self) -> list[PeerDiscovered]:
        return self.named.events(trio.current_time())

    def verified_connection(self, peer: PeerId) -> Connection | None:
        return None

    def is_up(self, peer: PeerId) -> bool:
        return peer == self.living and self.dialed.is_set()

    def link_refused(self, connection: Connection, *, is_gone: bool) -> None:
        raise AssertionError("no link")

    async def connect(self, peer: PeerId, addrs: Sequence[str] = (), *, timeout_s: float | None = None) -> Connection:
        self.dials[peer] += 1
        if peer == self.living:
            self.dialed.set()
        else:
            await trio.sleep(10)
        raise PeerNotFoundError("nobody answers")


@asynccontextmanager
async def _dialing(network: _Network) -> AsyncGenerator[HandshakeScheduler, None]:
    async with realm_nodes() as nodes, trio.open_nursery() as nursery:
        node = await nodes.add()
        scheduler = HandshakeScheduler(
            network,
            node.membership._handshakes,  # pyright: ignore[reportPrivateUsage]
            node.host.peer_id,
            Counter(),
            rng=Random(1),
        )
        scheduler.start(nursery)
        yield scheduler
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("dead", [300, 400, 4_000])
async def test_names_that_nobody_can_reach_hold_up_no_new_one(autojump_clock: Clock, dead: int) -> None:
    network = _Network("living")
    async with _dialing(network) as scheduler:
        for hour in range(3):
            for number in range(dead):
                scheduler.discovered(network.name(f"dead {number}"))
            await trio.sleep(1_800 + hour)
        scheduler.discovered(network.name("living"))
        with trio.fail_after(30):
            await network.dialed.wait()


@pytest.mark.parametrize("dead", [300, 400])
async def test_a_living_peer_named_before_the_dead_ones_is_dialed(autojump_clock: Clock, dead: int) -> None:
    network = _Network("living")
    network.name("living")
    for number in range(dead):
        network.name(f"dead {number}")
    async with _dialing(network):
        with trio.fail_after(dead / 4 * 10 + 60):  # each dead one is dialed once before it
            await network.dialed.wait()


async def test_names_that_are_not_repeated_are_dialed_no_more(autojump_clock: Clock) -> None:
    network = _Network("living")
    for number in range(100):
        network.name(f"dead {number}")
    async with _dialing(network):
        await trio.sleep(3_700)
        dials = network.dials.total()
        assert dials >= 100 and not network.discovered()
        await trio.sleep(86_400)
        assert network.dials.total() == dials


async def test_mdns_reports_a_service_again_until_it_is_gone(autojump_clock: Clock) -> None:
    reports: list[list[str]] = []
    services = MdnsServices(reports.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(services.repeat)
        services.heard("a", ["here"])
        await trio.sleep(3_600 * 3)
        assert len(reports) >= 4 and all(each == ["here"] for each in reports)
        services.heard("a", [])
        known = len(reports)
        await trio.sleep(3_600 * 3)
        assert len(reports) == known
        nursery.cancel_scope.cancel()
