"""Make, share, join and leave a realm (node).

Shows: Node.open, Node.join_realm, Node.leave_realm, Node.realms, Node.realm, Node.invite, Node.listen_addrs,
Realm.generate, Realm.from_invite, Realm.save, Realm.from_psk_file, Realm.realm_id, Identity.generate,
MemoryNetwork.host, Realm.invite, Realm, Invite, RealmSummary, Identity
"""

import tempfile
from pathlib import Path

import trio

from dep2p import Identity, Node, Realm
from dep2p.testing import MemoryNetwork


async def main() -> None:
    network = MemoryNetwork()  # without `host` and `identity`, Node.open listens on a real address
    ann_id, bob_id = Identity.generate(), Identity.generate()
    async with (
        Node.open(Realm.generate("team"), host=network.host(ann_id), identity=ann_id) as ann,
        Node.open(host=network.host(bob_id), identity=bob_id) as bob,
    ):
        invite = Realm.from_invite(ann.invite())  # a text to send as you would send a password
        print(invite.realm.name, list(invite.addrs) == ann.listen_addrs())  # team True
        await bob.join_realm(invite.realm, invite.addrs)
        print([realm.name for realm in bob.realms()], bob.realm() == ann.realm())  # ['team'] True
        with tempfile.TemporaryDirectory() as folder:
            bob.realm().save(Path(folder) / "team.realm")
            print(Realm.from_psk_file(Path(folder) / "team.realm").realm_id == ann.realm().realm_id)  # True
        await bob.leave_realm("team")
        print(bob.realms())  # []


trio.run(main)
