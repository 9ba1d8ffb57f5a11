"""A peer is released when the last one that needs it says so."""

from dep2p.host.connection_interest import ConnectionInterest
from dep2p.types import PeerId

PEER, OTHER = PeerId("peer"), PeerId("other")


def test_a_peer_is_needed_until_each_that_asked_has_released_it() -> None:
    interest = ConnectionInterest()
    for by in ("realm", "node", "realm"):
        interest.add(PEER, by)
    interest.add(OTHER, "node")
    assert not interest.remove(PEER, "realm")
    assert not interest.remove(PEER, "realm")
    assert interest.remove(PEER, "node")
    assert not interest.remove(OTHER, "realm")


def test_all_interest_ends_at_once_when_nobody_is_named() -> None:
    interest = ConnectionInterest()
    interest.add(PEER, "realm")
    interest.add(PEER, "node")
    assert interest.remove(PEER, None)
    interest.add(PEER, "node")
    assert interest.remove(PEER, "node")
    assert interest.remove(OTHER, None)
