"""Meshes at the end of each bucket of time, in numpy: degree, one-way links, islands.

As `dep2p.spark_analytics.metrics.delivery_trees`, this file travels to workers by value and imports nothing of dep2p.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

NAMES = (
    *("topic_id", "bucket", "nodes", "degree_sum", "lowest", "highest", "without"),
    *("links", "one_way", "meshed", "islands", "largest"),
)
DDL = ", ".join(f"{name} BIGINT" for name in NAMES)
_Row = tuple[int, ...]


def sampler(traced: np.ndarray, bucket_us: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for ``mapInArrow``: rows (topic_id, node_id, peer_id, begin, end), all of a topic together.

    A row without a peer says when a node was subscribed. The end of bucket b is ``(b + 1) * bucket_us``; a span covers
    it when ``begin <= it < end``.
    """

    def sample(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        given = list(batches)
        table = pa.Table.from_batches(given) if given else None
        if table is None or not table.num_rows:
            return
        topic, node, peer, begin, end = (
            table[name].combine_chunks().fill_null(0).to_numpy(zero_copy_only=False)
            for name in ("topic_id", "node_id", "peer_id", "begin", "end")
        )
        order = np.argsort(topic, kind="stable")
        edges = np.flatnonzero(np.diff(topic[order])) + 1
        rows: list[_Row] = []
        for part in np.split(order, edges):
            rows += _of_topic(int(topic[part[0]]), node[part], peer[part], begin[part], end[part], traced, bucket_us)
        if rows:
            yield pa.RecordBatch.from_arrays(
                [pa.array(column, pa.int64()) for column in zip(*rows, strict=True)], NAMES
            )

    return sample


def _of_topic(
    topic: int,
    node: np.ndarray,
    peer: np.ndarray,
    begin: np.ndarray,
    end: np.ndarray,
    traced: np.ndarray,
    bucket_us: int,
) -> Iterator[_Row]:
    nodes, numbers = np.unique(np.concatenate([node, peer]), return_inverse=True)
    size = len(nodes)
    n, p = numbers[: len(node)], numbers[len(node) :]
    known = np.isin(nodes, traced)
    inner = known[n] & known[p]
    is_link = peer != 0
    first, last = (begin - 1) // bucket_us, (end - 1) // bucket_us - 1
    for bucket in range(int(first.min()), int(last.max()) + 1):
        here = (first <= bucket) & (bucket <= last)
        if not here.any():
            continue
        pairs = np.unique(n[here & is_link] * size + p[here & is_link])
        one, other = pairs // size, pairs % size
        due = np.unique(n[here & ~is_link])
        degrees = np.bincount(one, minlength=size)[due]
        inner_pairs = np.unique((n * size + p)[here & is_link & inner])
        back = (inner_pairs % size) * size + inner_pairs // size
        one_way = int((~np.isin(back, inner_pairs)).sum())
        yield (
            *(topic, bucket, len(due), int(degrees.sum())),
            *((int(degrees.min()), int(degrees.max())) if len(due) else (0, 0)),
            *(int((degrees == 0).sum()), len(inner_pairs), one_way, *_islands(one, other, size)),
        )


def _islands(one: np.ndarray, other: np.ndarray, size: int) -> tuple[int, int, int]:
    """Nodes in links, connected parts of them, nodes in the largest: labels fall to the lowest that is reached."""
    if not len(one):
        return 0, 0, 0
    labels = np.arange(size)
    while True:
        before = labels.copy()
        lower = np.minimum(labels[one], labels[other])
        np.minimum.at(labels, one, lower)
        np.minimum.at(labels, other, lower)
        labels = labels[labels]
        if (labels == before).all():
            break
    there = np.zeros(size, dtype=bool)
    there[one] = there[other] = True
    sizes = np.unique(labels[there], return_counts=True)[1]
    return int(there.sum()), len(sizes), int(sizes.max())
