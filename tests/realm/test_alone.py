"""A node that reaches no member of its realm says so: whom it has tried, and why that failed."""

import pytest
import trio
from trio.testing import MockClock

from dep2p import Identity, Node, Realm
from dep2p.testing import MemoryNetwork
from tests.realm.realm_nodes import until


async def test_a_join_that_reaches_no_member_is_a_problem_and_one_line_of_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork(latency_s=0.0)
    realm = Realm.generate("team")
    mine, absent = Identity.generate(), Identity.generate()
    async with Node.open(identity=mine, host=network.host(mine)) as node:
        await node.join_realm(realm, [f"/ip4/192.0.2.1/tcp/4001/p2p/{absent.peer_id}"])
        await until(lambda: bool(node.realms()[0].problems))
        (problem,) = node.realms()[0].problems
        assert absent.peer_id in problem and "no member of the realm is connected" in problem
        await trio.sleep(120)
        warned = [record.getMessage() for record in caplog.records if "no member of the realm" in record.getMessage()]
        assert len(warned) == 1 and absent.peer_id in warned[0] and "team" in warned[0]
        async with Node.open(realm, identity=absent, host=network.host(absent), bootstrap=node.listen_addrs()):
            await until(lambda: node.realms()[0].members_up == 1)
            assert node.realms()[0].problems == ()
