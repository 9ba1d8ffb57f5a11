"""Verdicts on addresses: by tests of several servers, none by silence."""

import pytest

from dep2p.protocols.reachability.model import Reachability
from dep2p.protocols.reachability.verdicts import (
    RETEST_S,
    SERVERS_MAX,
    SILENT_RETEST_S,
    AddressVerdicts,
    overall_reachability,
)
from dep2p.types import PeerId

TCP, QUIC = "/ip4/198.51.100.7/tcp/1", "/ip4/198.51.100.7/udp/1/quic-v1"
SERVERS = [PeerId(name) for name in "abcdefg"]


def after_tests(outcomes: str, *, servers: int, addr: str = TCP) -> AddressVerdicts:
    """Outcomes of one server after the other: + reached, - not reached, . silent."""
    verdicts = AddressVerdicts()
    verdicts.set_candidates([addr])
    for number, outcome in enumerate(outcomes):
        said = {"+": True, "-": False, ".": None}[outcome]
        verdicts.note(addr, SERVERS[number % len(SERVERS)], said, float(number), servers=servers)
    return verdicts


@pytest.mark.parametrize(
    ("outcomes", "servers", "verdict"),
    [
        ("", 1, None),
        ("+", 1, True),
        ("-", 1, False),
        (".", 1, None),
        ("+", 2, None),
        ("++", 2, True),
        ("+-", 2, None),
        ("--", 2, False),
        ("++", 3, None),
        ("+++", 3, True),
        ("---", 7, False),
        ("+-++", 7, None),
        ("+-+++", 7, True),
        ("-.-.-", 7, False),
        ("....", 7, None),
        ("+++--", 7, True),
        ("+++----", 7, False),  # of the last five
    ],
)
def test_a_verdict_needs_three_more_or_all_servers(outcomes: str, servers: int, verdict: bool | None) -> None:
    assert after_tests(outcomes, servers=servers).verdict(TCP) is verdict


def test_the_latest_test_of_a_server_counts_and_its_silence_changes_nothing() -> None:
    verdicts = after_tests("+", servers=1)
    verdicts.note(TCP, SERVERS[0], None, 5.0, servers=1)
    assert (verdicts.verdict(TCP), verdicts.tested_at_s) == (True, 0.0)
    verdicts.note(TCP, SERVERS[0], False, 9.0, servers=1)
    assert (verdicts.verdict(TCP), verdicts.tested_at_s) == (False, 9.0)


def test_a_verdict_stands_while_further_servers_are_asked() -> None:
    verdicts = after_tests("-", servers=1)
    verdicts.note(TCP, SERVERS[1], True, 5.0, servers=2)
    assert verdicts.verdict(TCP) is False


def test_old_tests_of_servers_that_are_gone_count_no_more() -> None:
    verdicts = after_tests("---", servers=3)
    verdicts.note(TCP, SERVERS[5], True, 3 * RETEST_S, servers=1)
    assert verdicts.verdict(TCP) is True


def test_servers_are_asked_until_the_verdict_is_sure() -> None:
    verdicts = AddressVerdicts()
    verdicts.set_candidates([TCP, QUIC])
    first = [(addr, server) for addr in (TCP, QUIC) for server in SERVERS[:3]]
    assert verdicts.due(SERVERS, 0.0) == first
    for server, said in zip(SERVERS, (True, True, False), strict=False):
        verdicts.note(TCP, server, said, 0.0, servers=7)
    assert [server for addr, server in verdicts.due(SERVERS, 1.0) if addr == TCP] == SERVERS[3:5]
    for server in SERVERS[3:5]:
        verdicts.note(TCP, server, False, 1.0, servers=7)
    assert [server for addr, server in verdicts.due(SERVERS, 2.0) if addr == TCP] == []


def test_no_more_than_five_servers_are_asked_though_they_disagree() -> None:
    verdicts = after_tests("+-+-+", servers=7)
    assert SERVERS_MAX == 5
    assert verdicts.due(SERVERS, 6.0) == []


def test_servers_are_asked_again_after_half_an_hour_and_silent_ones_sooner() -> None:
    verdicts = after_tests("+.", servers=2)
    assert verdicts.due(SERVERS[:2], SILENT_RETEST_S) == []
    assert verdicts.due(SERVERS[:2], 1 + SILENT_RETEST_S) == [(TCP, SERVERS[1])]
    assert verdicts.due(SERVERS[:2], RETEST_S) == [(TCP, SERVERS[0]), (TCP, SERVERS[1])]


def test_what_is_known_of_a_candidate_stays_and_of_others_goes() -> None:
    verdicts = after_tests("+", servers=1)
    verdicts.set_candidates([QUIC, TCP])
    assert (verdicts.candidates, verdicts.verified()) == ([QUIC, TCP], (TCP,))
    verdicts.set_candidates([QUIC])
    verdicts.note(TCP, SERVERS[0], True, 9.0, servers=1)  # a test that was under way
    verdicts.set_candidates([TCP])
    assert (verdicts.verified(), verdicts.due(SERVERS[:1], 9.0)) == ((), [(TCP, SERVERS[0])])


def test_another_network_begins_anew() -> None:
    verdicts = after_tests("+", servers=1)
    verdicts.clear()
    assert (verdicts.candidates, verdicts.verified(), verdicts.verdict(TCP)) == ([], (), None)


def test_a_transport_is_public_by_one_address_and_private_by_all() -> None:
    verdicts = after_tests("-", servers=1)
    assert verdicts.reachability("tcp", has_untested=False) is Reachability.PRIVATE
    assert verdicts.reachability("tcp", has_untested=True) is Reachability.UNKNOWN
    assert verdicts.reachability("quic", has_untested=False) is Reachability.PRIVATE  # no address at all
    verdicts.set_candidates([TCP, QUIC, "/ip4/198.51.100.8/tcp/1"])
    assert verdicts.reachability("tcp", has_untested=False) is Reachability.UNKNOWN
    verdicts.note("/ip4/198.51.100.8/tcp/1", SERVERS[0], True, 9.0, servers=1)
    assert verdicts.reachability("tcp", has_untested=False) is Reachability.PUBLIC
    assert verdicts.reachability("quic", has_untested=False) is Reachability.UNKNOWN


@pytest.mark.parametrize(
    ("transports", "overall"),
    [
        ("", Reachability.PRIVATE),
        ("private private", Reachability.PRIVATE),
        ("private unknown", Reachability.UNKNOWN),
        ("private unknown public", Reachability.PUBLIC),
    ],
)
def test_one_public_transport_makes_a_node_public(transports: str, overall: Reachability) -> None:
    assert overall_reachability([Reachability(word) for word in transports.split()]) is overall
