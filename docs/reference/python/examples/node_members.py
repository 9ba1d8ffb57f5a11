"""See the members, and say things about yourself (node).

Shows: Node.members, Node.set_fields, Node.fields, Node.watch_members, Node.subscribe_members, Node.membership,
Node.realm, Realm.realm_id, MemberSummary, MemberUpdate, MemberEvent
"""

import trio

from dep2p import MemberUpdate
from dep2p.testing import open_nodes


async def main() -> None:
    async with open_nodes(2) as (ann, bob):
        print([member.state for member in bob.members() if member.peer == ann.peer_id])  # ['up']
        end = bob.subscribe_members(lambda realm, event: print(event.kind))  # changed
        async with bob.watch_members() as changes:
            print(dict(ann.set_fields({"app": "mailer", "load": "0.5"})))  # {'app': 'mailer', 'load': '0.5'}
            change = await anext(changes)
            if isinstance(change, MemberUpdate):
                print(change.kind, change.fields["app"])  # changed mailer
        end()
        print(ann.fields()["load"], bob.membership().realm_id == ann.realm().realm_id)  # 0.5 True


trio.run(main)
