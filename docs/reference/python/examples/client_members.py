"""Realms, members and peers (client).

Shows: Client.ping, Client.realms, Client.join_realm, Client.leave_realm, Client.invite, Client.members,
Client.set_fields, Client.fields, Client.watch_members, Client.listen_addrs, Client.peers, Client.connect,
Realm.from_invite, Realm.generate, PeerNotFoundError
"""

import asyncio

from dep2p import PeerId, Realm
from dep2p.client import Client, PeerNotFoundError, RequestTimeoutError


async def main() -> None:
    async with Client.open() as client:
        print([realm.name for realm in await client.realms()])  # ['team']
        await client.join_realm(Realm.generate("second"))
        print(Realm.from_invite(await client.invite("second")).realm.name)  # second
        await client.leave_realm("second")

        async with client.watch_members() as changes:  # list the members inside, to miss no change
            watching = asyncio.ensure_future(anext(changes))
            print(await client.members("team"))  # []
            watching.cancel()
        await client.set_fields({"app": "mailer"})
        print(dict(await client.fields()))  # {'app': 'mailer'}

        print(len(await client.listen_addrs()), await client.peers())  # 1 []
        stranger = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
        try:
            await client.connect(f"/ip4/127.0.0.1/tcp/9/p2p/{stranger}", timeout_s=5)
        except PeerNotFoundError:
            print("not there")  # not there
        try:
            print(await client.ping(PeerId(stranger), timeout_s=1))
        except (PeerNotFoundError, RequestTimeoutError):
            print("no answer")  # no answer


asyncio.run(main())
