"""An AutoNAT server: rates of members and strangers, the address that it dials, and the cost of a foreign one."""

import random

import pytest

from dep2p.protocols.reachability.serving import (
    DIAL_DATA_MAX_BYTES,
    DIAL_DATA_MIN_BYTES,
    DialBackAdmission,
    DialBackRates,
    choose_address,
    dial_data_bytes,
)
from dep2p.types import PeerId

PUBLIC = "/ip4/198.51.100.7/tcp/4001"


class Server:
    """Admission of peers whose names begin with their block, members in capitals."""

    def __init__(self, **rates: float) -> None:
        self.admission = DialBackAdmission(DialBackRates(**rates))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self.now_s = 0.0

    def ask(self, name: str, *, ends: bool = True) -> bool:
        is_member = name[0].isupper()
        admitted = self.admission.admit(PeerId(name), name[0], is_member=is_member, now_s=self.now_s)
        if admitted and ends:
            self.admission.release(is_member=is_member)
        return admitted


def test_a_member_tests_its_addresses_at_once_and_then_at_a_rate() -> None:
    server = Server(member_per_s=0.1, member_burst=3)
    assert [server.ask("A1") for _ in range(4)] == [True, True, True, False]
    assert server.ask("A2")
    server.now_s = 10.1
    assert [server.ask("A1"), server.ask("A1")] == [True, False]


def test_strangers_of_a_block_share_a_rate() -> None:
    server = Server(block_burst=2)
    assert [server.ask(name) for name in ("a1", "a2", "a3", "b1")] == [True, True, False, True]


def test_all_strangers_share_a_rate_that_members_do_not_need() -> None:
    server = Server(unproven_burst=2)
    assert [server.ask(name) for name in ("a1", "b1", "c1", "C1")] == [True, True, False, True]
    server.now_s = 6.0  # one further stranger; the one that was refused has its own rate still
    assert server.ask("c1")


def test_strangers_hold_a_part_of_the_requests_under_way() -> None:
    server = Server(at_once_max=3, unproven_at_once_max=2)
    assert [server.ask(name, ends=False) for name in ("a1", "b1", "c1", "A1", "B1")] == [True, True, False, True, False]
    server.admission.release(is_member=False)
    assert server.ask("B1")


def test_rates_of_many_peers_are_bounded_and_forgotten_oldest_first() -> None:
    server = Server(member_burst=1)
    assert server.ask("A1")
    for number in range(2_000):
        assert server.ask(f"B{number}")
    assert not server.ask("B1999")
    assert server.ask("A1")


@pytest.mark.parametrize(
    ("addrs", "index"),
    [
        ([PUBLIC], 0),
        (["", "/ip4/10.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1", PUBLIC, "/ip4/198.51.100.8/tcp/1"], 3),
        (["/ip4/203.0.113.1/tcp/22"], None),  # the server's own machine
        (["/dns4/example.org/tcp/1", "/ip4/198.51.100.7/tcp/1/p2p/x/p2p-circuit"], None),
        (["/ip4/198.51.100.7/udp/1/quic-v1"], None),  # a transport that it does not speak
        (["/ip6/2001:db8::7/tcp/1"], 0),
        ([], None),
    ],
)
def test_the_first_public_address_that_is_not_the_server_s_is_dialed(addrs: list[str], index: int | None) -> None:
    assert choose_address(addrs, ["203.0.113.1", "10.0.0.2"], ["tcp"]) == index


def test_another_ip_address_than_the_asker_s_costs_dial_data() -> None:
    rng = random.Random(1)
    assert dial_data_bytes(PUBLIC, "/ip4/198.51.100.7/udp/9/quic-v1", rng) == 0
    for asked_from in ("/ip4/198.51.100.8/tcp/4001", "/dns4/example.org/tcp/1", ""):
        assert DIAL_DATA_MIN_BYTES <= dial_data_bytes(PUBLIC, asked_from, rng) <= DIAL_DATA_MAX_BYTES
