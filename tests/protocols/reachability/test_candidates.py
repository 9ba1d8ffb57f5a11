"""The addresses of a node that are worth a test."""

from dep2p.protocols.reachability.candidates import CANDIDATES_MAX, AddressSources, candidate_addrs

ALL = ("tcp", "ws", "quic")


def test_public_addresses_of_all_sources_come_once_the_likeliest_first() -> None:
    sources = AddressSources(
        listened=["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.7/tcp/1", "/ip4/198.51.100.1/tcp/1"],
        advertised=["/dns4/example.org/tcp/1", "/ip4/198.51.100.2/tcp/1"],
        observed=["/ip4/198.51.100.1/tcp/1", "/ip4/198.51.100.3/tcp/1"],
        verified=["/ip4/198.51.100.4/tcp/1"],
    )
    assert candidate_addrs(sources, ALL) == tuple(f"/ip4/198.51.100.{number}/tcp/1" for number in range(1, 5))


def test_a_guess_has_the_public_ip_address_and_the_ports_of_this_node() -> None:
    sources = AddressSources(
        listened=[
            "/ip4/127.0.0.1/tcp/7",
            "/ip4/192.168.1.7/tcp/1",
            "/ip4/192.168.1.7/udp/2/quic-v1",
            "/ip6/fd00::1/tcp/3",
        ],
        hosts=["198.51.100.1", "2001:db8::1"],
    )
    assert candidate_addrs(sources, ALL) == (
        "/ip4/198.51.100.1/tcp/1",
        "/ip4/198.51.100.1/udp/2/quic-v1",
        "/ip6/2001:db8::1/tcp/3",
    )
    assert candidate_addrs(sources, ["quic"]) == ("/ip4/198.51.100.1/udp/2/quic-v1",)


def test_a_bounded_number_is_tested() -> None:
    listened = [f"/ip4/198.51.100.{number}/tcp/1" for number in range(1, 50)]
    assert candidate_addrs(AddressSources(listened=listened), ALL) == tuple(listened[:CANDIDATES_MAX])
