"""Requests that a control client answers, over real messaging: every caller hears soon that its answerer has gone."""

import json

import trio
import trio.testing

from dep2p import Node, Realm
from dep2p.config.loader import load_config
from dep2p.daemon.api.context import open_control
from dep2p.errors import Dep2pError
from dep2p.testing import MemoryNetwork


async def test_requests_that_wait_for_their_turn_fail_at_once_when_the_answering_program_goes_away(
    autojump_clock: trio.testing.MockClock,
) -> None:
    network, realm = MemoryNetwork(), Realm.generate("team")
    hosts = network.host(), network.host()
    async with (
        Node.open(realm, host=hosts[0], identity=hosts[0].identity) as node,
        Node.open(realm, host=hosts[1], identity=hosts[1].identity, bootstrap=node.listen_addrs()) as caller,
        open_control(node, load_config(flags={"node.data_dir": "/nowhere"})) as control,
        trio.open_nursery() as nursery,
    ):
        queue, end = await control.replies.subscribe("greet", None, concurrency=1)
        failed: list[tuple[float, str]] = []

        async def ask() -> None:
            try:
                await caller.request(node.peer_id, "greet", b"", timeout_s=60)
            except Dep2pError as error:
                failed.append((trio.current_time(), str(error)))

        for _ in range(3):
            nursery.start_soon(ask)
        assert json.loads(await queue.take())["name"] == "greet"
        await trio.sleep(1)
        ended_s = trio.current_time()
        end()
        await trio.sleep(30)
        assert len(failed) == 3, failed
        assert all(at_s - ended_s < 1 and "went away" in text for at_s, text in failed), failed
