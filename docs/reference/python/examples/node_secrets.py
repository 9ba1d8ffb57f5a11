"""Keep the identity of a node and the secret of a realm.

Shows: Identity.load_or_create, Identity.load, Identity.save, Identity.generate, Identity.sign,
Realm.from_passphrase, Realm.from_psk, Realm.invite, Realm.with_bootstrap, Realm.to_file_bytes,
Realm.from_file_bytes, Realm.from_invite, Realm.realm_id, PeerId, RealmId, RealmSecretError, RealmFileError,
IdentityError
"""

import tempfile
from pathlib import Path

from dep2p import Identity, Realm, RealmFileError, RealmSecretError

with tempfile.TemporaryDirectory() as folder:
    key = Path(folder) / "node.key"
    me = Identity.load_or_create(key)  # a file of mode 0600
    print(Identity.load(key).peer_id == me.peer_id, len(me.sign(b"text")))  # True 64
    Identity.generate().save(Path(folder) / "other.key")

team = Realm.from_psk(bytes(range(32)), "team")
print(team == Realm.from_file_bytes(team.to_file_bytes()))  # True
print(team.with_bootstrap([f"/ip4/192.0.2.1/tcp/4001/p2p/{me.peer_id}"]).bootstrap != ())  # True
print(Realm.from_invite(team.invite()).realm.realm_id == team.realm_id)  # True
print(Realm.from_passphrase("four words that only we have", "team") == team)  # False
try:
    Realm.from_passphrase("short", "team")
except RealmSecretError:
    print("too easy to guess")  # too easy to guess
try:
    Realm.from_invite("not an invite")
except RealmFileError:
    print("not an invite")  # not an invite
