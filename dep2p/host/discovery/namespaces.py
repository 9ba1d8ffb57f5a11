"""The rounds of a source that announces this host under names and looks for others under them."""

import logging
from collections.abc import Awaitable, Callable

import trio

from dep2p.host.discovery.interface import Emit
from dep2p.types import PeerId

logger: logging.Logger = logging.getLogger("dep2p.host")

DEFAULT_NAMESPACE = "dep2p"
ROUND_S = 60.0
_FIRST_ROUNDS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between the first rounds: a node that starts together with others finds them soon."""


async def run_rounds(
    namespaces: Callable[[], list[str]],
    advertise: Callable[[str], Awaitable[None]],
    find: Callable[[str], Awaitable[dict[PeerId, list[str]]]],
    emit: Emit,
    wake: Callable[[], trio.Event],
) -> None:
    """Advertise and find each namespace in turn, forever; sooner when ``wake()`` is set. Raises what those raise."""
    count = 0
    while True:
        for namespace in namespaces():
            await advertise(namespace)
            for peer, addrs in (await find(namespace)).items():
                emit(peer, addrs)
        with trio.move_on_after(_FIRST_ROUNDS_S[count] if count < len(_FIRST_ROUNDS_S) else ROUND_S):
            await wake().wait()
        count += 1
