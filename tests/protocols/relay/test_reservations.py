"""Reservations of a relay: strangers share by address block and take no place of a member."""

import random

import pytest

from dep2p.protocols.relay.bounds import RelayAsker, ReservationBounds
from dep2p.protocols.relay.reservations import ReservationGranted, Reservations
from dep2p.types import PeerId

SMALL = ReservationBounds(
    total_max=8, unproven_max=6, per_block_max=3, members_per_block_max=4, asks_per_s=1_000.0, asks_burst=10_000
)


class Relay:
    """Reservations, with peers whose names begin with their block: "a1" is in block "a"."""

    def __init__(self, bounds: ReservationBounds = SMALL) -> None:
        self.members: dict[PeerId, None] = {}
        self.table = Reservations(bounds, lambda peer: peer in self.members)
        self.now_s = 0.0

    def asker(self, name: str) -> RelayAsker:
        return RelayAsker(PeerId(name), name[0], PeerId(name) in self.members)

    def ask(self, name: str) -> str:
        """ "ok", "ok for" and the one that is replaced, or the refusal."""
        outcome = self.table.ask(self.asker(name), self.now_s)
        if not isinstance(outcome, ReservationGranted):
            return outcome
        return "ok" if outcome.replaced is None else f"ok for {outcome.replaced}"

    def member(self, name: str) -> str:
        self.members[PeerId(name)] = None
        return self.ask(name)

    def use(self, name: str) -> None:
        found = self.table.find(PeerId(name), self.now_s)
        assert found is not None
        found.circuit_opened(self.now_s)

    def unuse(self, name: str) -> None:
        found = self.table.find(PeerId(name), self.now_s)
        assert found is not None
        found.circuit_ended(self.now_s)


def full_of_strangers() -> Relay:
    """Strangers hold all that strangers may hold, three of block a and three of block b."""
    relay = Relay()
    assert [relay.ask(name) for name in ("a1", "a2", "a3", "b1", "b2", "b3")] == ["ok"] * 6
    return relay


def test_strangers_of_one_block_hold_a_part_and_all_strangers_another() -> None:
    relay = full_of_strangers()
    assert relay.ask("a4") == "reservations_max"
    assert len(relay.table) == 6


def test_a_member_gets_a_place_though_strangers_hold_all_that_strangers_may_hold() -> None:
    relay = full_of_strangers()
    assert [relay.member(name) for name in ("a8", "c8")] == ["ok", "ok"]  # the places kept for members
    assert relay.member("d8") == "ok for a1"  # all are taken: a stranger gives way at once
    relay.use("a2")
    relay.use("b1")
    assert [relay.member(f"e{number}") for number in range(4)] == ["ok for b2", "ok for a3", "ok for b3", "ok for a2"]
    assert relay.member("f8") == "ok for b1", "a circuit of a stranger does not keep a member out"
    assert relay.member("g8") == "reservations_max", "all are members now"


def test_a_member_never_gives_way() -> None:
    relay = Relay()
    for name in ("a1", "a2", "a3", "a4"):
        assert relay.member(name) == "ok"
    relay.now_s = 3_000.0
    for number in range(200):
        relay.ask(f"{chr(ord('b') + number % 20)}{number}")
        relay.now_s += 1.0
    assert all(relay.table.find(PeerId(name), relay.now_s) for name in ("a1", "a2", "a3", "a4"))


def test_members_of_one_block_hold_a_part() -> None:
    relay = Relay()
    assert [relay.member(f"a{number}") for number in range(5)] == ["ok"] * 4 + ["reservations_max"]
    assert relay.member("b1") == "ok"


def test_a_holder_that_proves_itself_later_is_a_member_from_then_on() -> None:
    relay = full_of_strangers()
    relay.members[PeerId("a1")] = None
    assert relay.table.members == 1
    relay.now_s = SMALL.unused_s
    assert relay.ask("a4") == "ok", "its place is a member's now"
    assert relay.ask("a5") == "ok for a2", "the oldest stranger gives way, not the member"


def test_a_new_reservation_has_time_to_be_used_before_its_own_block_replaces_it() -> None:
    relay = full_of_strangers()
    relay.now_s = SMALL.unused_s - 0.1
    assert relay.ask("a4") == "reservations_max"
    relay.use("a1")
    relay.unuse("a1")
    relay.now_s = SMALL.unused_s
    assert relay.ask("a4") == "ok for a2", "a1 was used"


def test_a_block_that_holds_less_gets_a_place_of_the_block_that_holds_most() -> None:
    relay = full_of_strangers()
    for name in ("a1", "a2", "a3", "b1", "b2", "b3"):
        relay.use(name)
    assert relay.ask("c1") == "reservations_max", "circuits run through all of them"
    for name in ("a1", "a2", "b3"):
        relay.now_s += 1.0
        relay.unuse(name)
    assert relay.ask("c1") == "ok for a1", "the one whose circuit ended first"
    assert relay.ask("c2") == "ok for b3", "block b holds most now"
    assert relay.ask("c3") == "reservations_max", "the shares are equal"


def test_a_released_or_expired_reservation_is_a_free_place() -> None:
    relay = full_of_strangers()
    relay.table.release(PeerId("a1"))
    assert relay.ask("a4") == "ok"
    relay.now_s = SMALL.lasts_s
    assert relay.table.find(PeerId("a2"), relay.now_s) is None
    assert relay.ask("a5") == "ok"
    assert len(relay.table) == 1


def test_strangers_of_a_block_ask_at_a_rate_and_a_member_of_that_block_has_its_own() -> None:
    relay = Relay(ReservationBounds(asks_per_s=1.0, asks_burst=5, renewals_burst=2))
    assert relay.ask("a0") == "ok"
    assert [relay.ask(f"a{number}") for number in range(1, 8)] == ["ok"] * 4 + ["reservations_rate"] * 3
    assert relay.ask("b1") == "ok"
    assert relay.member("a8") == "ok"
    assert relay.ask("a0") == "ok", "a renewal has a rate of its own"
    assert [relay.ask("a0"), relay.ask("a0")] == ["ok", "reservations_rate"]
    assert relay.table.find(PeerId("a0"), relay.now_s), "a refused renewal costs nothing"
    relay.now_s = 2.0
    assert [relay.ask(f"a{number}") for number in range(20, 23)] == ["ok", "ok", "reservations_rate"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_bounds_hold_and_members_come_first(seed: int) -> None:
    rng = random.Random(seed)
    relay = Relay()
    used: dict[str, int] = {}
    for _ in range(600):
        relay.now_s += rng.choice((0.0, 0.5, 5.0))
        name = rng.choice("abcd") + str(rng.randrange(6))
        match rng.randrange(6):
            case 0:
                if relay.table.find(PeerId(name), relay.now_s) is not None:
                    relay.use(name)
                    used[name] = used.get(name, 0) + 1
                continue
            case 1:
                relay.table.release(PeerId(name))
                used.pop(name, None)
                continue
            case 2 if rng.random() < 0.3:
                relay.members[PeerId(name)] = None
            case _:
                pass
        held = relay.table.holders
        members = [each for each in held if each in relay.members]
        outcome = relay.ask(name)
        replaced = outcome.removeprefix("ok for ") if outcome.startswith("ok for ") else ""
        now_held = relay.table.holders
        assert len(now_held) <= SMALL.total_max
        assert replaced not in relay.members, f"seed {seed}"
        if PeerId(name) not in relay.members:
            assert not used.get(replaced), f"seed {seed}: a circuit runs through it"
            if outcome != "ok" or PeerId(name) not in held:
                strangers = [each for each in now_held if each not in relay.members]
                assert len(strangers) <= SMALL.unproven_max
                assert sum(each[0] == name[0] for each in strangers) <= SMALL.per_block_max or PeerId(name) in held
        elif outcome == "reservations_max":
            of_block = sum(each[0] == name[0] for each in members)
            assert of_block >= SMALL.members_per_block_max or len(members) == SMALL.total_max, f"seed {seed}"
        used.pop(replaced, None)
