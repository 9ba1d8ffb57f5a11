"""Two people behind home routers find a direct path where their routers allow one, and stay on the relay elsewhere."""

from pathlib import Path

import msgspec
import pytest

from dep2p.control_api.replies import PeerList
from tests.network.daemons import LabDaemon, daemons_on, wait_for
from tests.network.lab import Host, Lab
from tests.network.translation import Kind

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("network-lab"), pytest.mark.timeout(120)]

TCP = "/ip4/0.0.0.0/tcp/4001"
QUIC = "/ip4/0.0.0.0/udp/4001/quic-v1"


def homes(lab: Lab, kinds: tuple[Kind, Kind]) -> tuple[Host, Host, Host]:
    """A machine on the internet, and two behind routers."""
    outer = lab.switch("outer")
    public = lab.host("public", ["203.0.113.1/24"], outer)
    made: list[Host] = []
    for number, (name, kind) in enumerate(zip(("ann", "bob"), kinds, strict=True), 1):
        router = lab.router(
            f"r{number}", kind, outer, outside=[f"203.0.113.1{number}/24"], inside=[f"192.168.{number}.1/24"]
        )
        made.append(lab.host(name, [f"192.168.{number}.10/24"], router.inside, gateways=[f"192.168.{number}.1"]))
    return public, made[0], made[1]


def join(middle: LabDaemon, members: tuple[LabDaemon, LabDaemon], *listen: str) -> None:
    middle.start("--set", "node.relay=server", listen=listen)
    for each in members:
        each.start("--set", "node.relay=client", listen=listen)
    for each in (middle, *members):
        each.wait_started()
    middle.run("realm", "new", "team")
    invite = middle.run("realm", "invite", "team").stdout
    for each in members:
        each.run("realm", "join", "-", stdin=invite)


def addrs_of(daemon: LabDaemon, peer: str) -> list[str]:
    """The remote addresses of the connections to a peer."""
    listed = msgspec.json.decode(daemon.run("peer", "ls", "--json").stdout, type=PeerList)
    return [one.addr for each in listed.peers if each.peer == peer for one in each.connections]


@pytest.mark.parametrize("listen", [TCP, QUIC], ids=["tcp", "quic"])
@pytest.mark.parametrize("kinds", [("cone", "cone"), ("restricted", "restricted")], ids="-".join)
def test_two_homes_find_a_direct_path(lab: Lab, tmp_path: Path, listen: str, kinds: tuple[Kind, Kind]) -> None:
    with daemons_on(tmp_path, *homes(lab, kinds)) as (middle, ann, bob):
        join(middle, (ann, bob), listen)
        bob.background("reply", "greet", "--command", "printf 'hi from bob'")
        bob_id = bob.peer_id

        def is_answered() -> bool:
            return ann.run("request", bob_id, "greet", "x", "-t", "5", is_checked=False).stdout.strip() == "hi from bob"

        wait_for("Bob's answer to Ann", is_answered)
        wait_for("a direct path", lambda: any("p2p-circuit" not in addr for addr in addrs_of(ann, bob_id)))
        assert is_answered()


def test_two_homes_that_speak_both_find_a_direct_path_over_tcp(lab: Lab, tmp_path: Path) -> None:
    with daemons_on(tmp_path, *homes(lab, ("restricted", "restricted"))) as (middle, ann, bob):
        join(middle, (ann, bob), TCP, QUIC)
        ann_id, bob_id = ann.peer_id, bob.peer_id

        def is_direct() -> bool:
            return any("p2p-circuit" not in addr for addr in addrs_of(ann, bob_id) + addrs_of(bob, ann_id))

        wait_for("a direct path", is_direct)
        assert all("/tcp/" in addr for addr in addrs_of(ann, bob_id))


@pytest.mark.parametrize("listen", [TCP, QUIC], ids=["tcp", "quic"])
def test_a_home_behind_a_symmetric_router_stays_on_the_relay(lab: Lab, tmp_path: Path, listen: str) -> None:
    with daemons_on(tmp_path, *homes(lab, ("restricted", "symmetric"))) as (middle, ann, bob):
        join(middle, (ann, bob), listen)
        bob.background("reply", "greet", "--command", "printf 'hi from bob'")
        bob_id = bob.peer_id

        def is_answered() -> bool:
            return ann.run("request", bob_id, "greet", "x", "-t", "5", is_checked=False).stdout.strip() == "hi from bob"

        wait_for("Bob's answer to Ann", is_answered)
        wait_for("a failed search", lambda: "no direct path" in bob.log() + ann.log())
        assert is_answered()
        assert all("p2p-circuit" in addr for addr in addrs_of(ann, bob_id))
