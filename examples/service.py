"""Make pictures smaller on whichever members offer it.

    python examples/service.py offer                # on each machine that shall work, as often as you like
    ls *.pgm | python examples/service.py shrink    # on any member: writes NAME.small.pgm beside each picture

The pictures are grey ones (PGM, binary), so that the example needs no library of pictures.
"""

import asyncio
import re
import sys
from contextlib import suppress
from pathlib import Path

from dep2p.client import (
    Client,
    DaemonUnreachableError,
    Dep2pError,
    HandlerError,
    Request,
    RequestTimeoutError,
    ServiceNotFoundError,
    ServiceUnavailableError,
)

AT_ONCE = 4
PATIENCE_S = 60.0


def halve(picture: bytes) -> bytes:
    """Leave out every second row and column. Raises ValueError for other bytes than those of a picture."""
    head = re.match(rb"P5\s+(\d+)\s+(\d+)\s+255\s", picture)
    if head is None:
        raise ValueError("this is no binary PGM picture")
    width, height, pixels = int(head[1]), int(head[2]), picture[head.end() :]
    kept = [pixels[row * width : (row + 1) * width : 2] for row in range(0, height, 2)]
    return b"P5\n%d %d\n255\n" % ((width + 1) // 2, len(kept)) + b"".join(kept)


async def offer() -> None:
    """Answer requests until the program ends. Programs with the same group share them."""
    async with Client.open() as client:

        @client.on_request("resize", group="pictures", version="1")
        async def resize(request: Request) -> bytes:
            try:
                return await asyncio.to_thread(halve, request.body)
            except ValueError as error:
                raise HandlerError(str(error)) from None

        await client.handlers_ready()
        print("offering", flush=True)
        await asyncio.Event().wait()


async def ask(client: Client, picture: bytes) -> bytes:
    """Ask any member. Halving twice gives the same, so a request may be sent again while members come and go."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(ServiceNotFoundError, ServiceUnavailableError, RequestTimeoutError, DaemonUnreachableError):
                return await client.request_any("resize", picture, version="1", idempotent=True, timeout_s=10)
            await asyncio.sleep(0.5)


def read_unless_done(path: Path, small: Path) -> bytes | None:
    """Return the picture; None when there is a small one already."""
    return None if small.exists() else path.read_bytes()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that other programs see whole or not at all."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


async def shrink() -> None:
    """Shrink the pictures whose names standard input has, a few at once. A second run does what is left."""

    reading = asyncio.Lock()  # threads cannot share a text stream

    async def next_name() -> str:
        async with reading:
            line: str = await asyncio.to_thread(sys.stdin.readline)
            return line.rstrip("\n")

    async def shrink_next(client: Client) -> None:
        while name := await next_name():
            small = Path(name).with_suffix(".small.pgm")
            try:
                if (picture := await asyncio.to_thread(read_unless_done, Path(name), small)) is not None:
                    await asyncio.to_thread(write_whole, small, await ask(client, picture))
                print(small, flush=True)
            except (Dep2pError, OSError) as error:
                print(f"{name}: {error}", file=sys.stderr)

    async with Client.open() as client, asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(shrink_next(client))


if __name__ == "__main__":
    commands = {"offer": offer, "shrink": shrink}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(commands[sys.argv[1]]())
    except Dep2pError as failed:
        sys.exit(f"service: {failed}")
