"""The members that a node stays connected to, and how many that it never met it dials."""

from dep2p.identity import Identity
from dep2p.protocols.addresses.dialable import DialTarget, dial_target
from dep2p.protocols.realm.peer_selection import (
    GOOD_TARGET_FAILURES_MAX,
    PROBE_ADDRS_MAX,
    PROBE_S,
    PROBES_MAX,
    PROBES_PER_HOST_MAX,
    PeerSelection,
    SelectionChange,
)
from dep2p.types import PeerId

PEERS = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 301)]
OWN, OTHER = PEERS[0], PEERS[1]


def addr(number: int) -> str:
    """An address on a host of its own."""
    return f"/ip4/198.51.{100 + number // 256}.{number % 256}/tcp/4001"


def offer_proved(choice: PeerSelection, peer: PeerId) -> SelectionChange:
    return choice.offer(peer, [addr(1)], is_proved=True, now=0.0)


def run(choice: PeerSelection, seconds: float, *, start: float = 0.0) -> list[tuple[float, str]]:
    """Return the dials of so many seconds, when no probe succeeds."""
    dialed: list[tuple[float, str]] = []
    while (due := choice.next_deadline()) is not None and due <= start + seconds:
        dialed += [(due, one) for probe in choice.on_deadline(due).probes for one in probe.addrs]
    return dialed


def test_favourites_are_bounded_and_replaced_by_better_ones() -> None:
    kept: dict[PeerId, None] = {}
    choice = PeerSelection(OWN, kept_max=16)
    for peer in PEERS[2:]:
        change = offer_proved(choice, peer)
        kept.update(dict.fromkeys(change.keep))
        for gone in change.release:
            del kept[gone]
        assert len(kept) <= 16 and all(name in choice for name in kept)
    # The order of arrival does not matter, the node does.
    again, other = PeerSelection(OWN, kept_max=16), PeerSelection(OTHER, kept_max=16)
    for peer in reversed(PEERS[2:]):
        offer_proved(again, peer)
        offer_proved(other, peer)
    assert [peer for peer in PEERS if peer in again] == [peer for peer in PEERS if peer in kept]
    assert [peer for peer in PEERS if peer in other] != [peer for peer in PEERS if peer in again]
    for gone in [peer for peer in PEERS if peer in again]:
        change = again.discard(gone, 0.0)
        assert change.release == [gone] and len(change.keep) == 1
    assert again.discard(OWN, 0.0) == SelectionChange()
    assert offer_proved(PeerSelection(OWN, kept_max=0), OTHER) == SelectionChange()


def test_a_member_that_was_never_met_is_dialed_once_and_kept_when_it_proves_itself() -> None:
    choice = PeerSelection(OWN)
    change = choice.offer(OTHER, [addr(1)], is_proved=False, now=0.0)
    assert [(probe.peer, probe.addrs) for probe in change.probes] == [(OTHER, (addr(1),))] and OTHER not in choice
    assert choice.proved(OTHER, 0.1).keep == [OTHER] and OTHER in choice
    assert choice.proved(OTHER, 0.2) == choice.on_deadline(PROBE_S) == SelectionChange()
    assert choice.next_deadline() is None


def test_real_members_behind_one_address_are_met_at_once() -> None:
    """Twenty nodes of one machine, or behind one router."""
    choice, now, met = PeerSelection(OWN), 0.0, 0
    queue = [
        probe
        for number, peer in enumerate(PEERS[1:21])
        for probe in choice.offer(peer, [f"/ip4/127.0.0.1/tcp/{4001 + number}"], is_proved=False, now=now).probes
    ]
    while met < 20:
        assert now < 10.0
        for probe in queue:
            assert choice.proved(probe.peer, now).keep == [probe.peer]
            met += 1
        due = choice.next_deadline()
        if due is None:
            break
        now = max(due, now)
        queue = choice.on_deadline(now).probes
    assert met == 20


def test_invented_members_at_one_address_get_a_few_dials_and_fewer_as_time_passes() -> None:
    choice, victim = PeerSelection(OWN), "/ip4/203.0.113.9/tcp/24500"
    dialed = [
        (0.0, one)
        for peer in PEERS[1:]
        for probe in choice.offer(peer, [victim], is_proved=False, now=0.0).probes
        for one in probe.addrs
    ]
    dialed += run(choice, 600.0)
    assert 1 <= sum(when < 60.0 for when, _ in dialed) <= 2 and len(dialed) <= 6


def test_invented_members_at_all_ports_of_a_host_get_a_few_dials_too() -> None:
    choice = PeerSelection(OWN)
    dialed = 0
    for number, peer in enumerate(PEERS[1:]):
        ports = [f"/ip4/203.0.113.9/tcp/{number * 16 + port + 1}" for port in range(16)]
        dialed += sum(len(probe.addrs) for probe in choice.offer(peer, ports, is_proved=False, now=0.0).probes)
    assert dialed <= PROBES_PER_HOST_MAX**2
    assert len(run(choice, 300.0)) <= (300.0 / PROBE_S) * PROBES_PER_HOST_MAX**2


def test_probes_are_bounded_whatever_the_records_say() -> None:
    choice = PeerSelection(OWN)
    probes = [
        probe
        for number, peer in enumerate(PEERS[1:])
        for probe in choice.offer(peer, [addr(16 * number + n) for n in range(16)], is_proved=False, now=0.0).probes
    ]
    assert len(probes) == PROBES_MAX and all(len(probe.addrs) <= PROBE_ADDRS_MAX for probe in probes)
    # Records that are issued anew and anew change nothing.
    for number, peer in enumerate(PEERS[1:]):
        assert not choice.offer(peer, [addr(16 * number)], is_proved=False, now=1.0).probes
    due = choice.next_deadline()
    assert due == PROBE_S
    assert len(choice.on_deadline(PROBE_S).probes) == PROBES_MAX


def test_inventions_take_no_place_of_a_real_member() -> None:
    choice = PeerSelection(OWN, kept_max=8)
    for number, peer in enumerate(PEERS[1:200]):
        choice.offer(peer, [addr(number)], is_proved=False, now=0.0)
    real = PEERS[200:208]
    for peer in real:
        assert choice.offer(peer, [addr(500)], is_proved=True, now=0.0).keep == [peer]
    assert all(peer in choice for peer in real)


def test_a_relay_is_asked_on_when_some_members_behind_it_are_away() -> None:
    choice, relay = PeerSelection(OWN), "/ip4/203.0.113.1/tcp/4001/p2p/QmRelay/p2p-circuit"
    (probe,) = choice.offer(PEERS[1], [relay], is_proved=False, now=0.0).probes
    choice.proved(probe.peer, 0.0)
    away = [choice.offer(peer, [relay], is_proved=False, now=1.0).probes for peer in PEERS[2:8]]
    assert sum(map(len, away)) == GOOD_TARGET_FAILURES_MAX + 1
    choice.proved(PEERS[2], 2.0)
    assert len(choice.on_deadline(2.5).probes) == 2, "one was there: the others are tried at once"


def test_nothing_is_left_of_members_that_are_gone() -> None:
    choice = PeerSelection(OWN)
    for number, peer in enumerate(PEERS[1:100]):
        choice.offer(peer, [addr(number)], is_proved=number % 2 == 0, now=0.0)
    for peer in PEERS[1:100]:
        choice.discard(peer, 1.0)
    choice.on_deadline(2.0)
    assert choice.next_deadline() is None and dial_target(addr(1)) == DialTarget("198.51.100.1", 4001)
