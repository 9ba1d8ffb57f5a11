"""Chat between the members of a realm. A message waits for a member who is away, over restarts of either side.

    python examples/chat.py ann        # on Ann's machine
    python examples/chat.py bob        # on Bob's; then type:  ann: hello

A sent message is on the disk of the sender's daemon until the receiver's daemon has handed it to this program. If this
program is killed with a message in hand, that one is lost. A queue loses none: workers.py.
"""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from uuid import uuid4

from dep2p import PeerId
from dep2p.client import Client, DaemonUnreachableError, Dep2pError, FeedResumed, Lagged, Notification

WEEK_S = 7 * 86_400
Names = dict[PeerId, str]


async def typed_lines() -> AsyncIterator[str]:
    """Yield the lines of standard input, without a thread that Ctrl-C would have to wait for."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode(errors="replace").strip()


async def know_names(client: Client, own: str, names: Names) -> None:
    """Say our name to all members, and remember theirs. A name ends with its daemon's process: say ours again then."""

    async def introduce() -> None:
        await client.set_fields({"name": own})
        for member in await client.members():
            names[member.peer] = member.fields.get("name") or names.get(member.peer) or member.peer[-6:]

    async with client.watch_members() as changes:
        await introduce()
        async for change in changes:
            if isinstance(change, FeedResumed):
                await introduce()
            elif not isinstance(change, Lagged) and "name" in change.fields:
                names[change.peer] = change.fields["name"]


async def deliver(client: Client, peer: PeerId, text: str) -> None:
    """Return when the message is on the daemon's disk; from then on it gets there."""
    headers = {"id": uuid4().hex}  # when the answer of our daemon is lost we send again, and the receiver shows one
    while True:
        try:
            await client.send(peer, "chat", text.encode(), reliable=True, ttl_s=WEEK_S, headers=headers)
            return
        except DaemonUnreachableError as error:
            if not error.was_sent:  # the client has waited for the daemon in vain
                raise


async def say(client: Client, names: Names, line: str) -> None:
    """Send a line like `bob: hello`; the end of a member's id does for its name."""
    to, _, text = line.partition(":")
    found = [peer for peer, name in names.items() if name == to or (to and peer.endswith(to))]
    if len(found) != 1:
        print(f"not sent: {len(found)} members are called {to!r} now", flush=True)
        return
    try:
        await deliver(client, found[0], text.strip())
        print(f"sent {line}", flush=True)
    except Dep2pError as error:
        print(f"not sent: {error}", flush=True)


async def main(own: str) -> None:
    """Chat until the end of standard input."""
    names: Names = {}
    shown: deque[object] = deque(maxlen=1_000)
    async with Client.open(call_reconnect_s=60) as client:

        @client.on_notify("chat")
        async def show(message: Notification) -> None:
            if message.headers.get("id") not in shown:
                shown.append(message.headers.get("id"))
                sender = names.get(message.peer, message.peer[-6:])
                print(f"{sender}: {message.body.decode(errors='replace')}", flush=True)

        async with asyncio.TaskGroup() as tasks:
            knowing = tasks.create_task(know_names(client, own, names))
            await client.handlers_ready()
            print(f"you are {own}", flush=True)
            async for line in typed_lines():
                await say(client, names, line)
            knowing.cancel()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(main(sys.argv[1]))
    except* Dep2pError as failed:
        sys.exit(f"chat: {failed.exceptions[0]}")
