"""Test with a network in memory: partitions, latency, a kill.

Shows: MemoryNetwork.partition, MemoryNetwork.heal, MemoryNetwork.host, MemoryNetwork.find, MemoryHost.kill,
Node.on_request, Node.request, open_nodes, MemoryNetwork, MemoryHost, RequestTimeoutError
"""

import trio

from dep2p import Request, RequestTimeoutError
from dep2p.testing import MemoryNetwork, open_nodes


async def main() -> None:
    network = MemoryNetwork(latency_s=0.050)
    async with open_nodes(2, network=network) as (ann, bob):

        @ann.on_request("greet")
        async def greet(request: Request) -> bytes:
            return b"hello"

        network.partition(ann.peer_id, bob.peer_id)
        try:
            await bob.request(ann.peer_id, "greet", b"", timeout_s=2)
        except RequestTimeoutError:
            print("no answer")  # no answer
        network.heal()
        print(await bob.request(ann.peer_id, "greet", b"", timeout_s=5))  # b'hello'
        host = network.find(ann.peer_id)
        if host is not None:
            host.kill()  # as kill -9: no goodbye
        print(network.find(ann.peer_id))  # None


trio.run(main)
