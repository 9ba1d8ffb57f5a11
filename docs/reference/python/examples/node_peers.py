"""Connect, ping and disconnect (node).

Shows: Node.connect, Node.disconnect, Node.ping, Node.peers, Node.subscribe_peers, Node.remember, Node.listen_addrs,
Node.unreached_bootstrap, ConnectedPeer, PeerSummary, ConnectionSummary
"""

import trio

from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):
        kinds: list[str] = []
        end = bob.subscribe_peers(lambda event: kinds.append(type(event).__name__))
        print(await bob.ping(ann.peer_id, timeout_s=5) < 1)  # True
        print([peer.realms for peer in bob.peers()])  # [('test',)]
        print(await bob.disconnect(ann.peer_id))  # True
        connected = await bob.connect(ann.listen_addrs()[0], timeout_s=5)
        print(connected.peer == ann.peer_id, connected.realms)  # True ('test',)
        bob.remember(ann.peer_id, ann.listen_addrs())  # stays connected to it from now on
        print(bob.unreached_bootstrap())  # ()
        end()
        print("PeerDisconnected" in kinds, "PeerConnected" in kinds)  # True True


trio.run(main)
