"""A synthetic trace of any size for the Spark benchmark: a mesh of nodes, messages that spread over it, copies, RPCs.

Made by numpy, not by the simulator: ten million events in half a minute, with the proportions of a real GossipSub trace
(six copies for each delivery, RPC events of one message in five). Memory holds the events of 500 messages at a time.
"""

import base64
from bisect import bisect_left
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard

from dep2p.traces.files import FileName, partition_of

START_US: Final = 1_577_836_800_000_000
_NODES: Final = 200
_DEGREE: Final = 6
_TOPICS: Final = ("blocks", "votes", "chat")
_FRAME: Final = 1024
_SPAN_US: Final = 3_500_000_000


@dataclass(frozen=True, slots=True)
class _Publishes:
    """All publishes, in the order of time, as columns."""

    t_us: Any
    publisher: Any
    """Numbers of nodes."""
    topic: Any
    """Places in `_TOPICS`."""
    ids: list[str]


def write_trace(directory: Path, events: int, seed: int = 1) -> int:
    """Write about so many events of 200 nodes over an hour; returns how many they are."""
    rng = np.random.default_rng(seed)
    names = [base64.b32encode(rng.bytes(30)).decode().rstrip("=").lower() for _ in range(_NODES)]
    count = max(20, round(events / (_NODES * 6.25)))
    edges = _mesh(rng)
    delay = rng.lognormal(np.log(15_000), 0.5, len(edges))
    publishes = _Publishes(
        t_us=np.sort(rng.integers(2_000_000, _SPAN_US, count)) + START_US,
        publisher=rng.integers(0, 20, count),
        topic=rng.choice(3, count, p=[0.05, 0.15, 0.8]),
        ids=[base64.b64encode(rng.bytes(20)).decode() for _ in range(count)],
    )
    lines: list[list[tuple[int, str]]] = [[] for _ in range(_NODES)]
    _set_up(names, edges, lines)
    with ExitStack() as stack:
        files = _Files(directory, names, stack)
        for first in range(0, count, 500):
            part = slice(first, min(count, first + 500))
            arrival, reach = _spread(rng, part.stop - first, edges, delay, publishes.publisher[part])
            _emit(part, publishes, names, edges, arrival, reach, lines)
            if part.stop < count:
                files.take(lines, int(publishes.t_us[part.stop]))  # nothing that comes is earlier
        return files.finish(lines)


def _spread(rng: Any, messages: int, edges: Any, delay: Any, publisher: Any) -> tuple[Any, Any]:
    """When each node has each message, and when each edge brought it, in µs after the publish; inf for never."""
    sources, targets = edges[:, 0], edges[:, 1]
    hop = delay * rng.lognormal(0, 0.25, (messages, len(edges)))
    # A copy that is lost arrives nowhere: no node may have a message before the node that it got it from.
    hop[rng.random(hop.shape) < 0.003] = np.inf
    arrival = np.full((messages, _NODES), np.inf)
    arrival[np.arange(messages), publisher] = 0.0
    while True:
        better = arrival.copy()
        np.minimum.at(better.T, targets, (arrival[:, sources] + hop).T)
        if np.array_equal(better, arrival):
            return arrival, arrival[:, sources] + hop
        arrival = better


def _mesh(rng: Any) -> Any:
    pairs: set[tuple[int, int]] = set()
    for node in range(_NODES):
        for other in [(node + 1) % _NODES, *rng.integers(0, _NODES, _DEGREE // 2 - 1)]:
            if other != node:
                pairs.add((min(node, int(other)), max(node, int(other))))
    both = [pair for a, b in sorted(pairs) for pair in ((a, b), (b, a))]
    return np.array(both)


def _set_up(names: list[str], edges: Any, lines: list[list[tuple[int, str]]]) -> None:
    for node in range(_NODES):
        for topic in _TOPICS:
            lines[node].append((START_US + 10, f'"kind":"join","topic":"{topic}"'))
        lines[node].append((START_US, '"kind":"node_start","version":"bench"'))
        lines[node].append((START_US + _SPAN_US + 60_000_000, '"kind":"node_stop","reason":"end"'))
    for a, b in edges.tolist():
        lines[a].append((START_US + 20, f'"kind":"add_peer","peer":"{names[b]}"'))
        for topic in _TOPICS:
            lines[a].append(
                (START_US + 1_000 + (a * 7919 + b) % 900_000, f'"kind":"graft","peer":"{names[b]}","topic":"{topic}"')
            )


def _emit(
    part: slice, publishes: _Publishes, names: list[str], edges: Any, arrival: Any, reach: Any,
    lines: list[list[tuple[int, str]]],
) -> None:  # fmt: skip
    sources = edges.tolist()
    for row, number in enumerate(range(part.start, part.stop)):
        t0, name = int(publishes.t_us[number]), _TOPICS[publishes.topic[number]]
        own, msg = int(publishes.publisher[number]), publishes.ids[number]
        body = f'"msg":"{msg}","topic":"{name}"'
        lines[own].append((t0, f'"kind":"publish",{body},"size":1024'))
        lines[own].append((t0, f'"kind":"deliver",{body},"size":1024'))
        first = arrival[row]
        times = reach[row]
        with_rpcs = number % 5 == 0
        dropped = ~np.isfinite(times)
        parents: dict[int, tuple[float, int]] = {}
        for place, (_, b) in enumerate(sources):
            if b != own and not dropped[place] and times[place] < parents.get(b, (np.inf, 0))[0]:
                parents[b] = (float(times[place]), place)
        for place, (a, b) in enumerate(sources):
            best = parents.get(a)
            if dropped[place] or (best is not None and sources[best[1]][0] == b) or (best is None and a != own):
                continue  # nothing goes back to where it came from
            at = t0 + int(times[place])
            kind = "deliver" if b in parents and parents[b][1] == place else "duplicate"
            lines[b].append((at, f'"kind":"{kind}",{body},"peer":"{names[a]}","size":1024'))
            if with_rpcs:
                rpc = f'"message_bytes":1024,"messages":[{{{body},"size":1024}}]'
                lines[a].append((t0 + int(first[a]) + 50, f'"kind":"send_rpc","peer":"{names[b]}",{rpc}'))
                lines[b].append((at, f'"kind":"recv_rpc","peer":"{names[a]}",{rpc}'))


class _Files:
    """The files of all nodes, written as far as nothing earlier can come."""

    def __init__(self, directory: Path, names: list[str], stack: ExitStack) -> None:
        self._heads = [f'"v":1,"node":"{name}"' for name in names]
        self._waiting: list[list[str]] = [[] for _ in names]
        self._seq = [0] * len(names)
        self._compressor = zstandard.ZstdCompressor(level=3)
        self._files: list[Any] = []
        for name in names:
            path = directory / partition_of(START_US) / str(FileName(name, START_US * 1000, 0))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files.append(stack.enter_context(path.open("wb")))

    def take(self, lines: list[list[tuple[int, str]]], before_us: int | None) -> None:
        """Take what happened before a time (None: all) out of each node's lines; write it, but for half a frame."""
        for node, mine in enumerate(lines):
            mine.sort(key=lambda item: item[0])
            until = len(mine) if before_us is None else bisect_left(mine, before_us, key=lambda item: item[0])
            waiting, head, seq = self._waiting[node], self._heads[node], self._seq[node]
            waiting += [f'{{{head},"seq":{seq + n},"t":{t},{body}}}\n' for n, (t, body) in enumerate(mine[:until])]
            self._seq[node] += until
            del mine[:until]
            while len(waiting) >= _FRAME or (before_us is None and waiting):
                self._files[node].write(self._compressor.compress("".join(waiting[:_FRAME]).encode()))
                del waiting[:_FRAME]

    def finish(self, lines: list[list[tuple[int, str]]]) -> int:
        """Write the rest; returns how many events there are in all."""
        self.take(lines, None)
        return sum(self._seq)
