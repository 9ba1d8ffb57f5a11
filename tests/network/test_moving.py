"""A machine whose network changes is back among its realm soon."""

from pathlib import Path

import pytest

from tests.network.daemons import LabDaemon, daemons_on, wait_for
from tests.network.lab import Lab

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("network-lab"), pytest.mark.timeout(120)]


def answers(asker: LabDaemon, peer: str) -> bool:
    return asker.run("request", peer, "echo", "hello", "-t", "1", is_checked=False).returncode == 0


def test_a_machine_that_gets_another_address_and_one_whose_cable_was_out_are_back(lab: Lab, tmp_path: Path) -> None:
    switch = lab.switch("office")
    hosts = [lab.host(name, [f"203.0.113.{number}/24"], switch) for number, name in enumerate(("ann", "bob"), 1)]
    with daemons_on(tmp_path, *hosts) as (ann, bob):
        for daemon in (ann, bob):
            daemon.start()
        for daemon in (ann, bob):
            daemon.wait_started()
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", stdin=ann.run("realm", "invite", "team").stdout)
        ann.background("reply", "echo", "--command", "cat")
        wait_for("the first answer", lambda: answers(bob, ann.peer_id))

        bob.host.run("ip", "addr", "del", "203.0.113.2/24", "dev", "eth0")
        bob.host.run("ip", "addr", "add", "203.0.113.7/24", "dev", "eth0")
        wait_for("an answer at the new address", lambda: answers(bob, ann.peer_id))
        assert "gone: 203.0.113.2" in bob.log() and "new: 203.0.113.7" in bob.log()
        wait_for("the announcement", lambda: "203.0.113.7" in ann.run("realm", "members", "--json").stdout)

        bob.host.run("ip", "link", "set", "eth0", "down")
        wait_for("the news", lambda: bob.log().count("the network has changed") >= 2)
        assert not answers(bob, ann.peer_id)
        bob.host.run("ip", "link", "set", "eth0", "up")
        wait_for("an answer after the cable was out", lambda: answers(bob, ann.peer_id))
