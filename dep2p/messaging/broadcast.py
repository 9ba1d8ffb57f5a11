"""One call for many peers, with a result for each."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import trio

from dep2p.errors import Dep2pError
from dep2p.types import PeerId

R = TypeVar("R")


async def to_each(
    peers: Iterable[PeerId], call: Callable[[PeerId], Awaitable[R]], concurrency: int
) -> dict[PeerId, R | Dep2pError]:
    """Call for every peer, at most ``concurrency`` at a time; a failed peer's result is its error.

    The results are in the order of ``peers``; a peer that is named twice is called once. Any other error is one of the
    arguments, the same for every peer: it ends the calls and is raised itself, not in a group.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}: it must be at least 1")
    results: dict[PeerId, R | Dep2pError | None] = dict.fromkeys(peers)
    todo = iter(list(results))
    failed: list[Exception] = []

    async def work() -> None:
        for peer in todo:
            try:
                results[peer] = await call(peer)
            except Dep2pError as error:
                results[peer] = error
            except Exception as error:
                failed.append(error)
                nursery.cancel_scope.cancel()
                return

    async with trio.open_nursery() as nursery:
        for _ in range(min(concurrency, len(results))):
            nursery.start_soon(work)
    if failed:
        raise failed[0]
    return {peer: result for peer, result in results.items()}  # type: ignore[misc]
