"""Which node of a set a member asks: owners and terms that it hears of, nodes that do not answer."""

import pytest

from dep2p.protocols.queues.failover_group import AWAY_S, NODES_MAX, STANDBY_S, Keepers


def test_a_member_alone_is_always_asked() -> None:
    keepers = Keepers("a")
    keepers.failed("a", 0.0)
    keepers.refused("a", "", 0, (), 0.0)
    assert (keepers.at(0.0), keepers.is_set, keepers.pause_s(0.0)) == ("a", False, 0.0)


def test_the_owner_of_the_latest_term_is_asked_whoever_told_of_it() -> None:
    keepers = Keepers("a")
    assert not keepers.told("a", 3, ("a", "b", "c")) or keepers.owner == "a"
    assert keepers.at(0.0) == "a"
    assert keepers.told("b", 4, ("b",))
    assert keepers.at(0.0) == "b"
    assert not keepers.told("a", 3, ("a",))  # late news of one that woke up
    assert keepers.at(0.0) == "b"
    assert not keepers.told("b", 4, ())
    assert keepers.nodes == ("a", "b", "c")


def test_one_that_stands_by_sends_on_and_is_not_asked_again_at_once() -> None:
    keepers = Keepers("a")
    keepers.refused("a", "b", 2, ("a", "b"), 10.0)
    assert keepers.at(10.0) == "b"
    keepers.failed("b", 10.0)  # the owner is gone, and nobody else has it yet
    assert keepers.at(10.0) == "a"
    assert keepers.pause_s(10.0) == STANDBY_S
    keepers.refused("a", "b", 2, ("a", "b"), 11.0)
    assert keepers.at(11.1) == "a"
    keepers.failed("a", 12.0)
    assert keepers.at(10.0 + AWAY_S) == "b"  # it may be there again
    keepers.refused("a", "a", 2, (), 12.0)  # "not the owner" from whom is named as the owner: nobody is
    assert keepers.owner == ""


def test_an_owner_that_answers_stays_and_a_new_one_is_asked_at_once_whatever_it_was_before() -> None:
    keepers = Keepers("a", "b")
    keepers.failed("b", 0.0)
    assert keepers.told("b", 7, ())
    assert keepers.at(0.0) == "b"
    keepers.failed("b", 0.0)
    assert keepers.at(0.0) == "a"
    keepers.worked("b")
    assert keepers.at(0.0) == "b"
    keepers.told("", 7, ())  # it does not know whether it still is
    assert keepers.at(0.0) == "b"


@pytest.mark.parametrize("every_s", [0.01, STANDBY_S, 1.0, AWAY_S, 2 * AWAY_S, 100.0])
@pytest.mark.parametrize("is_owner", [True, False])
def test_a_dead_node_hides_no_other_one_however_seldom_it_is_tried(every_s: float, is_owner: bool) -> None:
    keepers = Keepers("dead", "b", "c", "alive")
    if is_owner:
        keepers.told("dead", 1, ())
    now, asked = 0.0, list[str]()
    while "alive" not in asked:
        assert len(asked) < 4, asked
        asked.append(keepers.at(now))
        if asked[-1] == "dead":
            keepers.failed("dead", now)
        elif asked[-1] != "alive":
            keepers.refused(asked[-1], "", 0, (), now)  # they stand by, and know of no other
        now += every_s
    assert set(asked) == {"dead", "b", "c", "alive"}


def test_what_is_told_is_bounded_and_strangers_are_no_owners() -> None:
    keepers = Keepers("a")
    keepers.told("a", 1, tuple(f"n{number}" for number in range(100)))
    assert len(keepers.nodes) == NODES_MAX
    assert keepers.nodes[0] == "a"
    keepers.told("z", 2, ())
    assert (keepers.owner, keepers.epoch) == ("", 2)
    assert keepers.at(0.0) == "a"
    keepers.failed("z", 0.0)
    keepers.worked("z")
    keepers.add(["z"])
    assert "z" not in keepers.nodes
