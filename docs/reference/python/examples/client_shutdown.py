"""Drain and stop the daemon (client).

Shows: Client.drain, Client.shutdown, Client.ready, Client.status, DaemonUnreachableError
"""

import asyncio

from dep2p.client import Client, DaemonUnreachableError


async def main() -> None:
    async with Client.open() as client:
        await client.drain()  # takes no new work, and finishes what is under way
        print(await client.ready())  # (False, ['the daemon is draining'])
        await client.shutdown()
        try:
            while True:
                await client.status()
        except DaemonUnreachableError as error:
            print(error.code in ("D3001", "D3006"))  # True


asyncio.run(main())
