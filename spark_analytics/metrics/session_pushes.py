"""From the sending of each push of a session to its receipt, matched in numpy by the numbers of the pushes.

This file imports of dep2p only what travels to workers by value with it: they need pyarrow and numpy.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from dep2p.spark_analytics.metrics.delivery_trees import bucket_of

DDL = "from_id BIGINT, to_id BIGINT, latency_us BIGINT, pushes BIGINT"
_ORDER = ("seq", "t", "received", "client_id", "server_id", "session_id")


def matcher() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for ``mapInArrow``: rows (session_id, server_id, client_id, received, t, seq, epoch, position, count)
    of the events at both ends of sessions, all of a session together. Those with a ``count`` are runs of so many pushes
    up to the number ``position``, sent or (``received``) received; the others tell the ``epoch``.
    """

    def match(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        given = list(batches)
        table = pa.Table.from_batches(given) if given else None
        if table is None or not table.num_rows:
            return
        known = table["epoch"].is_valid().to_numpy()
        names = ("epoch", "position", "count", *_ORDER)
        columns = {
            name: table[name].combine_chunks().cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            for name in names
        }
        order = np.lexsort([columns[name] for name in _ORDER])
        columns = {name: values[order] for name, values in columns.items()}
        ends = np.stack([columns[name] for name in ("session_id", "server_id", "client_id")])
        edges = np.flatnonzero((ends[:, 1:] != ends[:, :-1]).any(axis=0)) + 1
        found: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        for rows in np.split(np.arange(len(order)), edges):
            mine = {name: values[rows] for name, values in columns.items()}
            latency, pushes = _of_session(mine, known[order][rows])
            same = [np.full(len(latency), mine[name][0]) for name in ("server_id", "client_id")]
            found.append((*same, bucket_of(latency), pushes))
        made = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        result = ["from_id", "to_id", "latency_us", "pushes"]
        sums = pa.table(made, result).group_by(result[:3]).aggregate([("pushes", "sum")])
        yield from sums.rename_columns(result).to_batches()

    return match


def _of_session(rows: dict[str, np.ndarray], known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(µs, how many pushes took so long) of one session, whose rows are in the order of time at either end."""
    received = rows["received"] == 1
    epochs = np.empty(len(received), dtype=np.int64)
    only = np.unique(rows["epoch"][known])
    for end in (False, True):
        at = np.flatnonzero(received == end)
        last = np.maximum.accumulate(np.where(known[at], np.arange(len(at)), -1))
        # A trace that begins within a session does not say the epoch: it is the one that is known, if it is one.
        first = only[0] if len(only) == 1 else 0
        epochs[at] = np.where(last >= 0, rows["epoch"][at][last], first)
    runs = (rows["count"] > 0) & (rows["count"] <= rows["position"])
    found: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    for epoch in np.unique(epochs[runs & received]):
        sent, taken = (
            _firsts(*(rows[name][runs & (received == end) & (epochs == epoch)] for name in ("position", "count", "t")))
            for end in (False, True)
        )
        bounds = np.unique(np.concatenate([*sent[:2], *taken[:2]]))
        places = [_holding(bounds[1:], low, high) for low, high, _ in (sent, taken)]
        both = (places[0] >= 0) & (places[1] >= 0)
        latency = taken[2][places[1][both]] - sent[2][places[0][both]]
        found.append((latency, np.diff(bounds)[both]))
    return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])


def _firsts(high: np.ndarray, count: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(low, high, t) of runs, ascending: what an earlier run held is not in a later one."""
    before = np.concatenate([[0], np.maximum.accumulate(high)[:-1]]) if len(high) else high
    low = np.maximum(high - count, before)
    keep = low < high
    return low[keep], high[keep], t[keep]


def _holding(numbers: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The run that holds each number, or -1."""
    if not len(high):
        return np.full(len(numbers), -1)
    at = np.minimum(np.searchsorted(high, numbers), len(high) - 1)
    return np.where((low[at] < numbers) & (numbers <= high[at]), at, -1)
