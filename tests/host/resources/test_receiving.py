"""Bytes that a transport's library holds are accounted for, and over their bounds the connection ends."""

import pytest

from dep2p.host.resources.ledger import ConnectionResources, Ledger
from dep2p.host.resources.receiving import (
    CRYPTO_BYTES_MAX,
    RANGES_MAX,
    RANGES_UNPROVEN_MAX,
    WINDOW_BYTES,
    WINDOW_UNPROVEN_BYTES,
    Held,
    Receiving,
    TooMuchHeldError,
)
from dep2p.limits import Limits
from dep2p.types import PeerId

LIMITS = Limits(memory_bytes_per_unproven_connection_max=10_000, memory_bytes_per_peer_max=100_000)


class Connections:
    """Connections of strangers in one ledger, and the names of what happened to them."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.events: list[str] = []
        self.ledger = Ledger(limits, lambda name, _text: self.events.append(name))

    def open(self, number: int = 0) -> tuple[Receiving, ConnectionResources]:
        addr = f"/ip4/192.0.2.{number}/udp/1/quic-v1"
        resources = self.ledger.open_connection(PeerId("A"), addr, is_inbound=True, end=lambda _reason: None)
        receiving = Receiving()
        receiving.bind(resources)
        return receiving, resources

    @property
    def unproven_bytes(self) -> int:
        return self.ledger.values()["memory_bytes_unproven"]


def test_everything_that_is_held_is_charged_and_given_back() -> None:
    connections = Connections()
    receiving, resources = connections.open()
    everything = Held(waiting_bytes=1_000, crypto_bytes=100, ranges=2, streams_unseen=3)
    receiving.check(everything)
    receiving.check(everything)
    assert everything.memory_bytes > 1_100
    assert resources.account.memory_bytes == connections.unproven_bytes == everything.memory_bytes
    receiving.check(Held(waiting_bytes=10))
    assert resources.account.memory_bytes == 10
    receiving.check(Held())
    assert resources.account.memory_bytes == 0


def test_an_unproven_connection_over_its_memory_ends() -> None:
    connections = Connections()
    receiving, resources = connections.open()
    with pytest.raises(TooMuchHeldError, match="10001 bytes"):
        receiving.check(Held(waiting_bytes=10_001))
    assert resources.account.is_closed
    assert connections.events == ["resources_ended_connection"]
    receiving.check(Held())  # a datagram that was on its way
    with pytest.raises(TooMuchHeldError):
        receiving.check(Held(waiting_bytes=1))


def test_all_unproven_connections_together_are_bounded() -> None:
    connections = Connections(Limits(memory_bytes_unproven_max=4 * WINDOW_UNPROVEN_BYTES))
    opened = [connections.open(number) for number in range(32)]
    for receiving, resources in opened:
        if not resources.account.is_closed:
            receiving.check(Held(waiting_bytes=WINDOW_UNPROVEN_BYTES))
        assert connections.unproven_bytes <= 4 * WINDOW_UNPROVEN_BYTES
    assert connections.events == ["resources_ended_unproven"] * 28
    assert [resources.account.is_closed for _, resources in opened] == [True] * 28 + [False] * 4


@pytest.mark.parametrize(
    "held", [Held(crypto_bytes=CRYPTO_BYTES_MAX), Held(ranges=RANGES_UNPROVEN_MAX)], ids=["crypto", "ranges"]
)
def test_bounds_hold_before_the_handshake_is_complete_too(held: Held) -> None:
    receiving = Receiving()
    receiving.check(held)
    over = Held(crypto_bytes=held.crypto_bytes and held.crypto_bytes + 1, ranges=held.ranges and held.ranges + 1)
    with pytest.raises(TooMuchHeldError):
        receiving.check(over)


def test_a_verified_peer_has_a_wider_window_and_more_gaps() -> None:
    connections = Connections(Limits())
    receiving, resources = connections.open()
    assert receiving.window_bytes == WINDOW_UNPROVEN_BYTES
    connections.ledger.prove(resources)
    assert receiving.window_bytes == WINDOW_BYTES
    receiving.check(Held(waiting_bytes=WINDOW_BYTES, ranges=RANGES_MAX))
    with pytest.raises(TooMuchHeldError, match="gaps"):
        receiving.check(Held(ranges=RANGES_MAX + 1))


def test_a_verified_peer_over_its_memory_is_refused() -> None:
    connections = Connections()
    receiving, resources = connections.open()
    connections.ledger.prove(resources)
    with pytest.raises(TooMuchHeldError):
        receiving.check(Held(waiting_bytes=100_001))
    assert connections.events == ["resources_refused_peer"] or connections.events == ["resources_refused_connection"]
    assert not resources.account.is_closed  # the caller ends it, and says why


def test_the_defaults_leave_room_for_a_whole_window_of_an_honest_stranger() -> None:
    """Half of the datagrams of a window may be lost, and the connection goes on."""
    held = Held(waiting_bytes=WINDOW_UNPROVEN_BYTES, ranges=WINDOW_UNPROVEN_BYTES // 1_200 // 2, streams_unseen=64)
    receiving, resources = Connections(Limits()).open()
    receiving.check(held)
    assert not resources.account.is_closed
