"""Circuits of a relay: strangers share by address block and take no place of a member."""

from dep2p.protocols.relay.bounds import CircuitBounds, RelayAsker
from dep2p.protocols.relay.circuits import Circuit, Circuits
from dep2p.types import PeerId

SMALL = CircuitBounds(total_max=8, unproven_max=6, per_source_max=3, per_target_max=5, unproven_per_target_max=3)


class Relay:
    """Circuits of peers whose names begin with their block, members in capitals: "A1" is a member in block "a"."""

    def __init__(self, bounds: CircuitBounds = SMALL) -> None:
        self.table = Circuits(bounds)

    def dial(self, name: str, target: str, *, carried_bytes: int = 0, opens: bool = True) -> str:
        """ "ok" and the circuits that ended, or the refusal."""
        wanted = Circuit(RelayAsker(PeerId(name), name[0].lower(), name[0].isupper()), PeerId(target))
        wanted.carried_bytes, wanted.is_open = carried_bytes, opens
        outcome = self.table.add(wanted)
        if isinstance(outcome, str):
            return outcome
        return " ".join(["ok", *(f"{ended.source.peer}>{ended.target} {why}" for ended, why in outcome)])


def test_a_further_circuit_of_the_same_two_peers_ends_the_oldest_of_them() -> None:
    relay = Relay()
    assert [relay.dial("a1", "t") for _ in range(3)] == ["ok", "ok", "ok a1>t pair"]


def test_circuits_that_are_not_open_yet_count_and_are_not_ended() -> None:
    relay = Relay()
    assert [relay.dial("a1", "t", opens=False) for _ in range(3)] == ["ok", "ok", "circuits_max"]


def test_one_peer_dials_a_part() -> None:
    relay = Relay()
    assert [relay.dial("a1", target) for target in "tuvw"] == ["ok", "ok", "ok", "circuits_max"]


def test_a_member_reaches_a_peer_though_strangers_hold_all_circuits_to_it() -> None:
    relay = Relay()
    assert [relay.dial(f"a{number}", "t") for number in range(4)] == ["ok"] * 3 + ["circuits_max"]
    assert [relay.dial(f"A{number}", "t") for number in range(2)] == ["ok"] * 2
    assert relay.dial("A3", "t") == "ok a0>t block"
    assert relay.table.members == 3


def test_a_member_finds_a_place_though_strangers_hold_all_that_strangers_may_hold() -> None:
    relay = Relay()
    for number in range(6):
        assert relay.dial(f"a{number}", f"t{number}", carried_bytes=100 - number) == "ok"
    assert relay.dial("a7", "t7") == "circuits_max"
    assert relay.dial("A1", "t1") == relay.dial("A2", "t2") == "ok"
    assert relay.dial("A3", "t3") == "ok a5>t5 block", "the one that carried least"
    assert len(relay.table) == SMALL.total_max


def test_no_stranger_ends_the_circuit_of_a_member() -> None:
    relay = Relay()
    for number in range(8):
        assert relay.dial(f"A{number}", f"t{number}") == "ok"
    assert relay.dial("b1", "t") == "circuits_max"
    assert relay.dial("A1", "u") == "circuits_max", "all are members"


def test_the_block_that_holds_most_gives_way_to_one_that_holds_less() -> None:
    relay = Relay()
    for number in range(4):
        relay.dial(f"a{number}", f"t{number}")
    for number in range(2):
        relay.dial(f"b{number}", f"t{number}")
    assert relay.dial("c1", "t") == "ok a0>t0 block"
    assert relay.dial("b2", "t") == "ok a1>t1 block"
    assert relay.dial("b3", "t") == "circuits_max", "block b holds most now"


def test_a_refused_circuit_ends_no_other() -> None:
    relay = Relay(CircuitBounds(per_pair_max=1, per_source_max=2, total_max=2, unproven_max=2))
    relay.dial("a1", "t")
    relay.dial("a1", "u")
    assert relay.dial("a2", "t") == "circuits_max"
    assert len(relay.table) == 2 and relay.table.open_from(PeerId("a1")) == 2


def test_strangers_of_a_block_ask_at_a_rate_and_a_member_of_that_block_has_its_own() -> None:
    relay = Relay(CircuitBounds(asks_per_s=1.0, asks_burst=2))
    stranger, member = RelayAsker(PeerId("a1"), "a", False), RelayAsker(PeerId("A1"), "a", True)
    assert [relay.table.may_ask(stranger, 0.0) for _ in range(3)] == [True, True, False]
    assert relay.table.may_ask(member, 0.0)
    assert relay.table.may_ask(stranger, 1.1)


def test_strangers_that_dial_are_counted_once_each() -> None:
    relay = Relay()
    for name, target in (("a1", "t"), ("a1", "u"), ("a2", "t"), ("b1", "t"), ("A1", "t")):
        relay.dial(name, target)
    assert relay.table.sources("a") == 2
