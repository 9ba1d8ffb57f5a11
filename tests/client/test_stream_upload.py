"""The upload of a stream of the client: what the daemon has taken can be seen while it flows."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import trio

from dep2p.client.streams import ClientStream
from dep2p.control_api.replies import StreamOpenedReply
from dep2p.types import PeerId, RealmId


class SlowTransport:
    """Takes one piece in a second."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def upload(self, path: str, pieces: AsyncIterator[bytes], *, params: Mapping[str, str]) -> dict[str, object]:
        async for piece in pieces:
            await trio.sleep(1)
            self.sizes.append(len(piece))
        return {}

    async def ask(self, *arguments: object, **options: object) -> None:
        return


async def test_what_the_daemon_has_taken_rises_piece_by_piece(autojump_clock: trio.abc.Clock) -> None:
    transport: Any = SlowTransport()
    opened = StreamOpenedReply(id="1", peer=PeerId("ann"), name="x", realm_id=RealmId("ab" * 32))
    seen: list[int] = []
    async with trio.open_nursery() as nursery:
        tasks: Any = nursery
        stream = ClientStream(transport, tasks, opened)
        await stream.send(bytes(1_000_000))
        nursery.start_soon(stream.send_eof)
        for _ in range(20):
            await trio.sleep(1)
            seen.append(stream.sent_bytes)
    assert max(transport.sizes) <= 65_536
    assert stream.sent_bytes == 1_000_004
    assert len(set(seen)) > 10
