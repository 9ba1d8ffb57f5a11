"""Nodes for tests of apps: they see each other up, and keep what the test names."""

import pytest
import trio.testing

from dep2p import Limits, Realm
from dep2p.testing import MemoryNetwork, open_nodes

Clock = trio.testing.MockClock


async def test_each_node_sees_all_others_up_when_the_block_begins(autojump_clock: Clock) -> None:
    async with open_nodes(4) as nodes:
        for node in nodes:
            up = {member.peer for member in node.members() if member.state == "up"} - {node.peer_id}
            assert up == {each.peer_id for each in nodes} - {node.peer_id}


async def test_nodes_take_the_realm_the_network_and_the_limits_that_are_named(autojump_clock: Clock) -> None:
    realm, network = Realm.generate("team"), MemoryNetwork(latency_s=0.5)
    async with open_nodes(1, realm=realm, network=network, limits=Limits(request_timeout_s=3)) as (ann,):
        assert ann.realm() == realm and network.find(ann.peer_id) is ann.host and ann.limits.request_timeout_s == 3
        async with open_nodes(1, realm=realm, network=network) as (bob,):
            await bob.connect(ann.listen_addrs()[0])
            assert bob.realm() == realm and ann.limits is not bob.limits


async def test_no_node_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="1 or more, not 0"):
        async with open_nodes(0):
            pass
