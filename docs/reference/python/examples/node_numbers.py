"""Look into a node, and drain it.

Shows: Node.counters, Node.stats, Node.quotas, Node.drain, Node.is_draining, Node.messaging, Node.pubsub,
Node.delivery, Node.realm, Realm.realm_id, MemberUsage, Limits, Messaging
"""

import trio

from dep2p import Limits
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2, limits=Limits(request_timeout_s=5)) as (ann, bob):
        print(ann.counters()["realm_handshake_ok"], len(ann.quotas()))  # 1 0
        print(sorted(ann.stats())[:2])  # ['connections', 'public_pubsub']
        print(ann.messaging().realm_id == ann.realm().realm_id == ann.pubsub().realm_id)  # True
        print(ann.delivery().stats().lost_items)  # 0
        await ann.drain()
        print(ann.is_draining, bob.limits.request_timeout_s)  # True 5


trio.run(main)
