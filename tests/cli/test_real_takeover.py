"""Two daemons that stand by for each other, and the command line of a member that comes while the first is away."""

import json
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.test_real_daemons import DEP2P, Person, finish, see_each_other, wait_for
from tests.services import servers

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("cli-real"), pytest.mark.timeout(180)]


def test_a_member_that_comes_while_the_first_node_is_away_names_both(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = servers.postgres()
        stack.callback(server.remove)
        server.start()
        ann, bob, carl = (stack.enter_context(Person(tmp_path, name)) for name in ("ann", "bob", "carl"))
        for broker in (ann, bob):
            (broker.directory / "config.toml").write_text(f'[queues]\nstore = "{server.url}"\nstandby = true\n')
            with socket.create_server(("127.0.0.1", 0)) as free:
                broker.listen = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
            broker.start()
        ann.run("realm", "new", "team")
        bob.run("realm", "join", "-", data=ann.run("realm", "invite", "team").stdout)
        see_each_other(ann, bob)
        assert ann.json("status")["queues"]["owner"] == ann.peer_id
        ann.run("queue", "create", "jobs", "--realm", "team")
        ann.run("queue", "put", "jobs", "one", "--realm", "team")
        ann.kill(signal.SIGTERM)
        wait_for("the failover", lambda: bob.json("status")["queues"]["owner"] == bob.peer_id)

        carl.start()
        carl.run("realm", "join", "-", data=bob.run("realm", "invite", "team").stdout)
        see_each_other(carl, bob)
        both = ("--realm", "team", "--peer", f"{ann.peer_id},{bob.peer_id[-6:]}")
        alone = [*DEP2P, "queue", "put", "jobs", "two", "--realm", "team", "--peer", ann.peer_id]
        waiting = subprocess.Popen(
            alone, env=carl.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        carl.children.append(waiting)
        carl.run("queue", "put", "jobs", "three", *both)
        finish(waiting)  # it has heard of the other one, too
        lines = carl.run("queue", "consume", "jobs", "c", "--count", "3", "--json", *both).stdout.splitlines()
        assert {json.loads(line)["text"] for line in lines} == {"one", "two", "three"}
        error = carl.run("queue", "info", "jobs", "--peer", f"{ann.peer_id},nobody", expect=4).stderr
        assert "no known peer fits 'nobody'" in error
