"""Look at the daemon (client).

Shows: Client.status, Client.config, Client.bounds, Client.metrics, Client.healthy, Client.ready, Client.events,
Client.watch_feeds, Client.tracer, ClientTracer.start, ClientTracer.status, ClientTracer.stop, ClientTracer,
DaemonStatus, Configuration, LimitsSummary, TraceState, Event, FeedInterrupted, FeedResumed
"""

import asyncio
import tempfile

from dep2p.client import Client, FeedInterrupted, FeedResumed


def changed(change: FeedInterrupted | FeedResumed) -> None:
    print("the daemon is away" if isinstance(change, FeedInterrupted) else "the daemon is back")


async def main() -> None:
    async with (
        Client.open(reconnect_s=60, call_reconnect_s=10) as client,
        client.events(["member_up", "member_down"]) as events,
    ):
        end = client.watch_feeds(changed)
        print([realm.name for realm in (await client.status()).realms])  # ['team']
        print((await client.config()).origins["node.listen"])  # flag
        print((await client.bounds()).node["realms_max"])  # 16
        print("dep2p_uptime_seconds" in await client.metrics())  # True
        print(await client.healthy(), await client.ready())  # True (True, [])
        with tempfile.TemporaryDirectory() as folder:
            await client.tracer.start(folder)
            print((await client.tracer.status()).is_on, (await client.tracer.stop()).is_on)  # True False
        end()
        watching = asyncio.ensure_future(anext(events))  # waits for a member to come or go
        watching.cancel()


asyncio.run(main())
