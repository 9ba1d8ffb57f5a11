"""How far the clocks of nodes are apart, from readings that nodes wrote or from the delays of messages. Pure."""

import heapq
import statistics
from collections.abc import Iterable
from typing import Final, NamedTuple

READING_FLOOR_US: Final = 1_000
"""Readings that say less than this change nothing."""
TRAFFIC_FLOOR_US: Final = 50_000
"""Delays tell less than readings: only clocks that are further off than this are corrected by them."""
_ONE_WAY_FLOOR_US: Final = 1_000_000


class Edge(NamedTuple):
    """The clock of ``other`` is ahead of that of ``node`` by ``ahead_us``, give or take ``error_us``."""

    node: int
    other: int
    ahead_us: float
    error_us: float


def offsets(edges: Iterable[Edge], *, floor_us: int) -> dict[int, int]:
    """How far each node's clock is ahead of the middle of all, in µs; only those beyond ``floor_us`` and their error.

    The error adds up along the way, so paths that are slower one way than the other make no offsets. Nodes are
    reached over the most exact edges first. Parts without an edge between them keep their own middle.
    """
    around: dict[int, list[Edge]] = {}
    for edge in edges:
        around.setdefault(edge.node, []).append(edge)
        around.setdefault(edge.other, []).append(Edge(edge.other, edge.node, -edge.ahead_us, edge.error_us))
    found: dict[int, tuple[float, float]] = {}
    result: dict[int, int] = {}
    for start in sorted(around, key=lambda node: (-len(around[node]), node)):
        if start in found:
            continue
        part: list[int] = []
        heap: list[tuple[float, int, float, float]] = [(0.0, start, 0.0, 0.0)]
        while heap:
            _, node, ahead, error = heapq.heappop(heap)
            if node in found:
                continue
            found[node] = (ahead, error)
            part.append(node)
            for edge in around[node]:
                if edge.other not in found:
                    reached = (ahead + edge.ahead_us, error + edge.error_us)
                    heapq.heappush(heap, (edge.error_us, edge.other, *reached))
        middle, doubt = statistics.median_low([found[node] for node in part])
        for node in part:
            ahead, error = found[node][0] - middle, found[node][1] + doubt
            if abs(ahead) >= max(floor_us, error):
                result[node] = round(ahead)
    return result


def edges_of_delays(links: Iterable[tuple[int, int, int]]) -> list[Edge]:
    """From (from, to, smallest delay seen): half the difference of both directions is the offset.

    Where one direction only is known, a delay of more than a second either way counts as one.
    """
    delays = {(source, target): delay for source, target, delay in links}
    found: list[Edge] = []
    for (source, target), delay in delays.items():
        back = delays.get((target, source))
        if back is None:
            if abs(delay) >= _ONE_WAY_FLOOR_US:
                found.append(Edge(source, target, delay, _ONE_WAY_FLOOR_US))
            else:
                found.append(Edge(source, target, 0, _ONE_WAY_FLOOR_US))
        elif source < target:
            found.append(Edge(source, target, (delay - back) / 2, abs(delay + back) / 2))
    return found
