"""Drop a file at a member. A transfer that is cut off goes on where it stopped.

    python examples/file_drop.py receive ./inbox
    python examples/file_drop.py send PEER video.mkv     # PEER: the id that `dep2p id` prints at the receiver

`dep2p stream send` and `receive` do more: they check the disk's space, many files and names. This shows the streams.
"""

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec

from dep2p import PeerId
from dep2p.client import (
    Client,
    ClientStream,
    DaemonUnreachableError,
    Dep2pError,
    NoHandlerError,
    NotMemberError,
    PeerNotFoundError,
    StreamClosedError,
)

CHUNK_BYTES = 262_144
LATER = (DaemonUnreachableError, NoHandlerError, NotMemberError, PeerNotFoundError, StreamClosedError, TimeoutError)
"""Errors of a transfer that may work later: a program, a daemon or the connection between two nodes is away."""


class Offer(msgspec.Struct, forbid_unknown_fields=True):
    """The first item from the sender."""

    name: str
    sha256: str


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """An item from the receiver: how much it has, and later whether it has stored all."""

    has_bytes: int = 0
    is_stored: bool = False


def sha256_of(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def next_answer(stream: ClientStream) -> Answer:
    """Wait for the receiver. Raises StreamClosedError when it ends without an answer."""
    if not (item := await anext(stream, b"")):
        raise StreamClosedError("the receiver ended the stream")
    return msgspec.json.decode(item, type=Answer)


async def send_rest(client: Client, peer: PeerId, path: Path, offer: Offer) -> bool:
    """Send what the receiver lacks. Return whether it has stored the file. Raises the errors of LATER."""
    async with client.stream(peer, "drop", msgspec.json.encode(offer)) as stream:
        answer = await next_answer(stream)
        if not answer.is_stored:
            async with await anyio.open_file(path, "rb") as file:
                await file.seek(answer.has_bytes)
                while chunk := await file.read(CHUNK_BYTES):
                    await stream.send(chunk)
            await stream.send_eof()
            answer = await next_answer(stream)
        return answer.is_stored


async def send(peer: PeerId, path: Path, offer: Offer) -> None:
    """Send a file, over restarts of both sides. Returns when the receiver has stored it."""
    async with Client.open() as client:
        while True:
            try:
                if await send_rest(client, peer, path, offer):
                    return
            except LATER as error:
                print(f"cut off, trying again: {error}", flush=True)
                await anyio.sleep(0.5)


async def take(stream: ClientStream, inbox: Path) -> None:
    """Take one file into a part file, which gets its name when it is whole and on disk."""
    offer = msgspec.json.decode(stream.body, type=Offer)
    target = inbox / (Path(offer.name).name.lstrip(".") or "file")  # a sender must not choose the folder
    part = inbox / f".{hashlib.sha256(stream.body).hexdigest()[:16]}.part"  # of this name and content
    if not target.exists() or await anyio.to_thread.run_sync(sha256_of, target) != offer.sha256:
        async with await anyio.open_file(part, "ab") as file:
            await stream.send(msgspec.json.encode(Answer(has_bytes=await file.tell())))
            async for chunk in stream:
                await file.write(chunk)
            await file.flush()
            os.fsync(file.wrapped.fileno())
        if await anyio.to_thread.run_sync(sha256_of, part) != offer.sha256:
            part.unlink()
            await stream.send(msgspec.json.encode(Answer()))  # again, from the start
            return
        part.replace(target)
        print(f"{stream.peer[-6:]} dropped {target.name}", flush=True)
    await stream.send(msgspec.json.encode(Answer(is_stored=True)))


async def receive(inbox: Path) -> None:
    """Take files until the program ends, one at a time, so that two tries do not write one part file."""
    async with Client.open() as client:

        @client.on_stream("drop", concurrency=1)
        async def drop(stream: ClientStream) -> None:
            await take(stream, inbox)

        await client.handlers_ready()
        print("receiving", flush=True)
        await anyio.sleep_forever()


def main(words: list[str]) -> None:
    """Run what the command line says."""
    if words[0] == "receive":
        inbox = Path(words[1])
        inbox.mkdir(parents=True, exist_ok=True)
        anyio.run(receive, inbox)
    else:
        path = Path(words[2])
        anyio.run(send, PeerId(words[1]), path, Offer(path.name, sha256_of(path)))


if __name__ == "__main__":
    if (sys.argv[1:2], len(sys.argv)) not in ((["receive"], 3), (["send"], 4)):
        sys.exit(__doc__)
    try:
        with suppress(KeyboardInterrupt):
            main(sys.argv[1:])
    except (Dep2pError, OSError) as failed:
        sys.exit(f"file_drop: {failed}")
