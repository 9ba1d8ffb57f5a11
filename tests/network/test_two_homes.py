"""Two people behind home routers, with a public member that relays by its setting."""

from pathlib import Path

import pytest

from tests.network.daemons import daemons_on, wait_for
from tests.network.lab import Host, Lab

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("network-lab"), pytest.mark.timeout(120)]


def test_two_homes_behind_cone_routers_talk_through_a_public_member(lab: Lab, tmp_path: Path) -> None:
    outer = lab.switch("outer")
    public = lab.host("public", ["203.0.113.1/24"], outer)
    homes: list[Host] = []
    for number, name in enumerate(("ann", "bob"), 1):
        router = lab.router(
            f"r{number}", "cone", outer, outside=[f"203.0.113.1{number}/24"], inside=[f"192.168.{number}.1/24"]
        )
        homes.append(lab.host(name, [f"192.168.{number}.10/24"], router.inside, gateways=[f"192.168.{number}.1"]))
    with daemons_on(tmp_path, public, *homes) as (middle, ann, bob):
        middle.start("--set", "node.relay=server")
        for each in (ann, bob):
            each.start("--set", "node.relay=client")
        for each in (middle, ann, bob):
            each.wait_started()
        middle.run("realm", "new", "team")
        invite = middle.run("realm", "invite", "team").stdout
        for each in (ann, bob):
            each.run("realm", "join", "-", stdin=invite)
        bob.background("reply", "greet", "--command", "printf 'hi from bob'")
        bob_id = bob.peer_id

        def is_answered() -> bool:
            return ann.run("request", bob_id, "greet", "x", "-t", "5", is_checked=False).stdout.strip() == "hi from bob"

        wait_for("Bob's answer to Ann", is_answered)
        assert "works in this network only" not in middle.run("realm", "invite", "team").stderr
        named = ann.run("realm", "members", "--json").stdout
        assert "/ip4/203.0.113.1/tcp/4001" in named and "/ip4/127." not in named


def test_an_invite_from_a_home_without_a_public_member_says_that_nobody_outside_can_join(
    lab: Lab, tmp_path: Path
) -> None:
    outer = lab.switch("outer")
    router = lab.router("r1", "cone", outer, outside=["203.0.113.11/24"], inside=["192.168.1.1/24"])
    home = lab.host("ann", ["192.168.1.10/24"], router.inside, gateways=["192.168.1.1"])
    with daemons_on(tmp_path, home) as (ann,):
        ann.start()
        ann.wait_started()
        ann.run("realm", "new", "team")
        invited = ann.run("realm", "invite", "team")
        assert "192.168.1.10/tcp/4001  from the same network only" in invited.stderr
        assert "it works in this network only" in invited.stderr and "127.0.0.1" not in invited.stderr
