"""A relayed connection beside a direct one ends when it is idle, or quiet after its grace, on one side first."""

from typing import Any

import pytest
import trio

from dep2p.host.connections.duplicates import LATE_S, Duplicates
from dep2p.host.connections.relay_grace import QUIET_BYTES, QUIET_S, RELAYED_GRACE_S, RelayGrace
from dep2p.types import PeerId

SMALLER, LARGER = PeerId("A"), PeerId("B")
APP = "/dep2p/app/realm/stream/1.0.0"


def test_within_the_grace_nothing_ends_it() -> None:
    grace = RelayGrace(now_s=100.0)
    assert not grace.is_over(0, now_s=100.0)
    assert not grace.is_over(0, now_s=100.0 + RELAYED_GRACE_S - 0.1)
    assert grace.is_over(0, now_s=100.0 + RELAYED_GRACE_S)


def test_after_the_grace_what_flows_goes_on_and_probes_do_not_count() -> None:
    grace, carried = RelayGrace(now_s=0.0), 0
    for second in range(600):
        carried += QUIET_BYTES
        assert not grace.is_over(carried, now_s=float(second))
    for second in range(600, 600 + int(QUIET_S) - 1):
        carried += 10
        assert not grace.is_over(carried, now_s=float(second))
    assert grace.is_over(carried, now_s=600.0 + QUIET_S)


class Fake:
    """A connection as `Duplicates` sees it."""

    def __init__(self, number: int, addr: str, protocols: list[str]) -> None:
        self.id = number
        self.peer = LARGER
        self.direction: Any = "inbound"
        self.remote_addr = addr
        self.rtt_s = 0.01
        self.is_closed = False
        self.is_superseded = False
        self.carried_bytes = 0
        self.protocols = protocols

    def open_protocols(self) -> list[str]:
        return self.protocols

    def abort(self, reason: str) -> None:
        self.is_closed = True

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(("own", "late_s"), [(SMALLER, 0.0), (PeerId("C"), LATE_S)])
async def test_a_direct_connection_takes_over_and_the_relayed_one_ends(
    autojump_clock: Any, own: PeerId, late_s: float
) -> None:
    relayed, direct = Fake(1, "/ip4/192.0.2.1/tcp/1/p2p/R/p2p-circuit", [APP]), Fake(2, "/ip4/192.0.2.2/tcp/1", [])

    async def answers(_connection: Fake, _within_s: float) -> None:
        await trio.lowlevel.checkpoint()

    duplicates = Duplicates[Fake](own, answers, lambda _event: None, lambda _name: None)
    duplicates.admitted(direct, [relayed])
    assert relayed.is_superseded and not direct.is_superseded
    begun_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(duplicates.settle, direct, [relayed])
        await trio.sleep(RELAYED_GRACE_S - 1.0)
        assert not relayed.is_closed  # a stream of an app is open
    assert relayed.is_closed and not direct.is_closed
    assert trio.current_time() - begun_s == pytest.approx(RELAYED_GRACE_S + late_s, abs=1.0)


async def test_a_relayed_connection_that_comes_later_takes_no_place_of_a_direct_one(
    autojump_clock: Any,
) -> None:
    direct, relayed = Fake(1, "/ip4/192.0.2.2/tcp/1", [APP]), Fake(2, "/ip4/192.0.2.1/tcp/1/p2p/R/p2p-circuit", [])
    preferred: list[object] = []

    async def answers(_connection: Fake, _within_s: float) -> None:
        await trio.lowlevel.checkpoint()

    duplicates = Duplicates[Fake](SMALLER, answers, preferred.append, lambda _name: None)
    duplicates.admitted(relayed, [direct])
    await duplicates.settle(relayed, [direct])
    assert len(preferred) == 1 and not direct.is_superseded and not direct.is_closed and relayed.is_closed
