"""Which node of a set a member asks: owners and terms that it hears of, nodes that do not answer."""

import pytest

from dep2p.protocols.queues.failover_group import AWAY_S, NODES_MAX, STANDBY_S, FailoverGroup


def test_a_member_alone_is_always_asked() -> None:
    group = FailoverGroup("a")
    group.failed("a", 0.0)
    group.refused("a", "", 0, (), 0.0)
    assert (group.at(0.0), group.is_set, group.pause_s(0.0)) == ("a", False, 0.0)


def test_the_owner_of_the_latest_term_is_asked_whoever_told_of_it() -> None:
    group = FailoverGroup("a")
    assert not group.notified("a", 3, ("a", "b", "c")) or group.owner == "a"
    assert group.at(0.0) == "a"
    assert group.notified("b", 4, ("b",))
    assert group.at(0.0) == "b"
    assert not group.notified("a", 3, ("a",))  # late news of one that woke up
    assert group.at(0.0) == "b"
    assert not group.notified("b", 4, ())
    assert group.nodes == ("a", "b", "c")


def test_one_that_stands_by_sends_on_and_is_not_asked_again_at_once() -> None:
    group = FailoverGroup("a")
    group.refused("a", "b", 2, ("a", "b"), 10.0)
    assert group.at(10.0) == "b"
    group.failed("b", 10.0)  # the owner is gone, and nobody else has it yet
    assert group.at(10.0) == "a"
    assert group.pause_s(10.0) == STANDBY_S
    group.refused("a", "b", 2, ("a", "b"), 11.0)
    assert group.at(11.1) == "a"
    group.failed("a", 12.0)
    assert group.at(10.0 + AWAY_S) == "b"  # it may be there again
    group.refused("a", "a", 2, (), 12.0)  # "not the owner" from whom is named as the owner: nobody is
    assert group.owner == ""


def test_an_owner_that_answers_stays_and_a_new_one_is_asked_at_once_whatever_it_was_before() -> None:
    group = FailoverGroup("a", "b")
    group.failed("b", 0.0)
    assert group.notified("b", 7, ())
    assert group.at(0.0) == "b"
    group.failed("b", 0.0)
    assert group.at(0.0) == "a"
    group.worked("b")
    assert group.at(0.0) == "b"
    group.notified("", 7, ())  # it does not know whether it still is
    assert group.at(0.0) == "b"


@pytest.mark.parametrize("every_s", [0.01, STANDBY_S, 1.0, AWAY_S, 2 * AWAY_S, 100.0])
@pytest.mark.parametrize("is_owner", [True, False])
def test_a_dead_node_hides_no_other_one_however_seldom_it_is_tried(every_s: float, is_owner: bool) -> None:
    group = FailoverGroup("dead", "b", "c", "alive")
    if is_owner:
        group.notified("dead", 1, ())
    now, asked = 0.0, list[str]()
    while "alive" not in asked:
        assert len(asked) < 4, asked
        asked.append(group.at(now))
        if asked[-1] == "dead":
            group.failed("dead", now)
        elif asked[-1] != "alive":
            group.refused(asked[-1], "", 0, (), now)  # they are on standby, and know of no other
        now += every_s
    assert set(asked) == {"dead", "b", "c", "alive"}


def test_what_is_told_is_bounded_and_strangers_are_no_owners() -> None:
    group = FailoverGroup("a")
    group.notified("a", 1, tuple(f"n{number}" for number in range(100)))
    assert len(group.nodes) == NODES_MAX
    assert group.nodes[0] == "a"
    group.notified("z", 2, ())
    assert (group.owner, group.term) == ("", 2)
    assert group.at(0.0) == "a"
    group.failed("z", 0.0)
    group.worked("z")
    group.add(["z"])
    assert "z" not in group.nodes
