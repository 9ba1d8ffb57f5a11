"""The first-delivery tree of every message, walked in numpy: one shuffle by message gives hops, latencies, coverage,
delays of links and what each node missed.

This file imports nothing of dep2p: it travels to workers by value, which need numpy and pyarrow only.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

PUBLISH, DELIVER = 0, 3
"""Codes of the two kinds of events in the input."""

MESSAGE, LINK, NODE, HOPS, LATENCY, TREE = 0, 1, 2, 3, 4, 5
"""The kinds of rows of the result; see `FIELDS`."""

FIELDS: dict[int, tuple[str, ...]] = {
    # Sums over all rows of a message, link, …; times in µs; -1 for what is not known or never happened.
    MESSAGE: (
        *("msg_id", "topic_id", "publisher_id", "t0", "eligible", "reached", "delivered"),
        *("t50", "t90", "t99", "t100"),
        *("last_us", "latency_sum", "last_hops", "parents", "unreached", "published"),
    ),
    LINK: ("from_id", "to_id", "firsts", "delay_sum", "delay_min", "delay_max"),
    NODE: ("node_id", "bucket", "eligible", "reached", "late_sum", "delivered"),
    HOPS: ("topic_id", "hops", "deliveries"),
    LATENCY: ("topic_id", "publisher_id", "latency_us", "deliveries"),
    # The publishes and deliveries of one message, in the order of time; its text, when known, is in ``text``.
    TREE: ("msg_id", "k", "node_id", "peer_id", "t"),
}
WIDTH = max(map(len, FIELDS.values()))
DDL = "what TINYINT, " + ", ".join(f"c{n} BIGINT" for n in range(WIDTH)) + ", text STRING"
_BITS = 7
_PAIRS_PER_STEP = 4_000_000

Intervals = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Arrays (topic, node, from, to): who was subscribed when; sorted by topic."""


def bucket_of(values: np.ndarray) -> np.ndarray:
    """Round values ≥ 0 down to 8 significant bits: buckets at most 0.8 % wide, exact below 256."""
    values = np.maximum(values, 0)
    shift = np.maximum(np.floor(np.log2(np.maximum(values, 1))).astype(np.int64) - _BITS, 0)
    return (values >> shift) << shift


class Events(NamedTuple):
    """Columns of the events of messages: ids of message, node, peer and topic, time in µs, kind."""

    msg: np.ndarray
    node: np.ndarray
    peer: np.ndarray
    topic: np.ndarray
    t: np.ndarray
    k: np.ndarray


class Publishes(NamedTuple):
    """Columns with a row for each message: topic, time in µs, number of the publisher (-1: unknown), 1 if traced."""

    topics: np.ndarray
    t0: np.ndarray
    publisher: np.ndarray
    published: np.ndarray


def walker(
    intervals: Intervals, settle_us: int, bucket_us: int, wanted: int | None = None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for ``mapInArrow``: rows (msg_id, node_id, peer_id, topic_id, t, k, msg), all of a message together.

    ``wanted``: the message whose tree is given; None for the slowest of those that are here.
    """

    def walk(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        given = list(batches)
        table = pa.Table.from_batches(given) if given else None
        if table is None or not table.num_rows:
            return
        events = Events(
            *(
                table[name].combine_chunks().fill_null(0).to_numpy(zero_copy_only=False)
                for name in ("msg_id", "node_id", "peer_id", "topic_id", "t", "k")
            )
        )
        found = walk_arrays(events, intervals=intervals, settle_us=settle_us, bucket_us=bucket_us)
        drawn = _slowest(found[0][1]) if wanted is None else wanted
        for what, rows in found:
            yield _batch(what, rows)
        if drawn is not None:
            rows, places = _tree(drawn, events)
            texts = [text for text in table["msg"].take(places).to_pylist() if text]
            yield _batch(TREE, rows, texts[0] if texts else None)

    return walk


def _batch(what: int, rows: list[np.ndarray], text: str | None = None) -> pa.RecordBatch:
    size = len(rows[0])
    filled = [pa.array(np.asarray(row, dtype=np.int64)) for row in rows]
    filled += [pa.nulls(size, pa.int64())] * (WIDTH - len(rows))
    texts = pa.array([text] * size, pa.string()) if text is not None else pa.nulls(size, pa.string())
    kinds = pa.array(np.full(size, what, dtype=np.int8))
    return pa.RecordBatch.from_arrays([kinds, *filled, texts], ["what", *(f"c{n}" for n in range(WIDTH)), "text"])


def _slowest(messages: list[np.ndarray]) -> int | None:
    """Return the published message whose last delivery came latest; of several the one with the lowest id."""
    table = dict(zip(FIELDS[MESSAGE], messages, strict=True))
    rows = np.flatnonzero((table["published"] == 1) & (table["delivered"] > 0))
    if not len(rows):
        return None
    return int(table["msg_id"][rows[np.lexsort((table["msg_id"][rows], -table["last_us"][rows]))[0]]])


def _tree(wanted: int, events: Events) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the columns of the events of one message, by time, and their rows."""
    rows = np.flatnonzero(events.msg == wanted)
    rows = rows[np.lexsort((events.k[rows], events.t[rows]))]
    return [column[rows] for column in (events.msg, events.k, events.node, events.peer, events.t)], rows


def walk_arrays(
    events: Events, *, intervals: Intervals, settle_us: int, bucket_us: int
) -> list[tuple[int, list[np.ndarray]]]:
    """Return the tables of `FIELDS`, each as a list of columns."""
    _, node, peer, _, t, k = events
    ids, m = _encoded(events.msg)
    count = len(ids)
    # Nodes of the intervals too: one that no event names is still due its messages.
    nodes, numbers = _encoded(np.concatenate([node, peer, intervals[1]]))
    width = len(nodes)
    n, p = numbers[: len(node)], numbers[len(node) : 2 * len(node)]
    order = np.argsort(t, kind="stable")
    publishes = _publishes(events, order, m, n, count)
    topics, t0, publisher, published = publishes

    # First deliveries elsewhere, sorted by (message, node).
    rows = order[(k[order] == DELIVER) & (peer[order] != 0)]
    rows = rows[n[rows] != publisher[m[rows]]]
    keys, first = np.unique(m[rows] * width + n[rows], return_index=True)
    # By message and time: the rows are in the order of time.
    by_time = np.argsort((keys // width) * len(rows) + first)
    rows = rows[first]
    dm, dn, dp, dt = m[rows], n[rows], p[rows], t[rows]
    latency = dt - t0[dm]
    hops, parent = _hops(keys, dm, dp, publisher, width)
    from_publisher = dp == publisher[dm]
    has_delay = from_publisher | (parent >= 0)
    delay = dt - np.where(from_publisher, t0[dm], dt[parent])

    due = _eligible(publishes, nodes, intervals, settle_us)
    in_due = _is_in(keys, due)
    eligible = np.bincount(due // width, minlength=count)
    delivered = np.bincount(dm, minlength=count)
    reached = np.bincount(dm[in_due], minlength=count)
    coverage = _coverage(dm[by_time], latency[by_time], in_due[by_time], eligible, count)

    last, last_us, latency_sum = (np.full(count, start, dtype=np.int64) for start in (-1, -1, 0))
    last[dm[by_time]] = hops[by_time]
    last_us[dm[by_time]] = latency[by_time]
    np.add.at(latency_sum, dm, latency)
    parents = np.bincount(_distinct(dm[has_delay] * width + dp[has_delay]) // width, minlength=count)
    unreached = np.bincount(dm[hops < 0], minlength=count)
    publishers = np.where(publisher >= 0, nodes[publisher], 0)
    known = published[dm] == 1
    middle = coverage[0][dm]
    late = np.where(middle >= 0, latency - middle, 0)
    return [
        (
            MESSAGE,
            [
                *(ids, topics, publishers, t0, eligible, reached, delivered, *coverage),
                *(last_us, latency_sum, last, parents, unreached, published),
            ],
        ),
        (LINK, _links(nodes, dp[has_delay], dn[has_delay], delay[has_delay], width)),
        (NODE, _per_node(nodes, due, keys, in_due, late, t0, bucket_us)),
        (HOPS, _counted(topics[dm], hops)),
        (LATENCY, _counted(topics[dm][known], publishers[dm][known], bucket_of(latency[known]))),
    ]


def _publishes(events: Events, order: np.ndarray, m: np.ndarray, n: np.ndarray, count: int) -> Publishes:
    """The publish of each message: its first; for one without, its earliest event stands in and is marked.

    ``order``: the rows by time; ``m``, ``n``: numbers of message and node of each row.
    """
    _, _, peer, topic, t, k = events
    topics = np.zeros(count, dtype=np.int64)
    topics[m[order[::-1]]] = topic[order[::-1]]
    t0 = np.zeros(count, dtype=np.int64)
    t0[m[order[::-1]]] = t[order[::-1]]
    publisher = np.full(count, -1, dtype=np.int64)
    own = order[(k[order] == DELIVER) & (peer[order] == 0)][::-1]
    first = order[k[order] == PUBLISH][::-1]
    published = np.zeros(count, dtype=np.int64)
    for rows in (own, first):
        t0[m[rows]] = t[rows]
        publisher[m[rows]] = n[rows]
        published[m[rows]] = 1
    return Publishes(topics, t0, publisher, published)


def _encoded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values, ascending, and the place of each value among them: by a hash table, without a sort."""
    encoded = pa.array(values).dictionary_encode()
    distinct = encoded.dictionary.to_numpy()
    order = np.argsort(distinct)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return distinct[order], rank[encoded.indices.to_numpy()]


def _distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values, ascending. numpy's own ``unique`` hashes, which takes five times as long here."""
    values = np.sort(values)
    keep = np.ones(len(values), dtype=bool)
    keep[1:] = values[1:] != values[:-1]
    return values[keep]


def _is_in(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Mark the values that are in an ascending array."""
    if not len(ascending):
        return np.zeros(len(values), dtype=bool)
    return ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values


def _hops(
    keys: np.ndarray, dm: np.ndarray, dp: np.ndarray, publisher: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    wanted = dm * width + dp
    at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
    found = keys[at] == wanted if len(keys) else np.zeros(0, dtype=bool)
    parent = np.where(found, at, -1)
    hops = np.where(dp == publisher[dm], 1, -1)
    open_rows = np.flatnonzero((hops < 0) & (parent >= 0))
    while True:
        above = hops[parent[open_rows]]
        ready = above > 0
        if not ready.any():
            return hops, parent
        hops[open_rows[ready]] = above[ready] + 1
        open_rows = open_rows[~ready]


def _eligible(publishes: Publishes, nodes: np.ndarray, intervals: Intervals, settle_us: int) -> np.ndarray:
    """Keys (message, node) of all that were subscribed from the publish to ``settle_us`` after it, sorted."""
    topics, t0, publisher, published = publishes
    width = len(nodes)
    at_topic, at_node, begins, ends = intervals
    place = np.searchsorted(nodes, at_node)
    found: list[np.ndarray] = []
    with_publish = np.flatnonzero(published)
    with_publish = with_publish[np.argsort(topics[with_publish], kind="stable")]
    topic_of = topics[with_publish]
    for topic in np.unique(topic_of):
        messages = with_publish[np.searchsorted(topic_of, topic) : np.searchsorted(topic_of, topic, side="right")]
        low, high = np.searchsorted(at_topic, topic), np.searchsorted(at_topic, topic, side="right")
        step = max(1, _PAIRS_PER_STEP // max(1, int(high - low)))
        for start in range(0, len(messages), step):
            part = messages[start : start + step]
            fits = (begins[None, low:high] <= t0[part, None]) & (ends[None, low:high] >= t0[part, None] + settle_us)
            which, interval = np.nonzero(fits)
            message, number = part[which], place[low + interval]
            keep = number != publisher[message]
            found.append(message[keep] * width + number[keep])
    return _distinct(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)


def _coverage(
    dm: np.ndarray, latency: np.ndarray, in_due: np.ndarray, eligible: np.ndarray, count: int
) -> list[np.ndarray]:
    """When 50, 90, 99 and 100 % of the eligible had the message; -1 where they never did. By message and latency."""
    m, late = dm[in_due], latency[in_due]
    reached = np.bincount(m, minlength=count)
    starts = np.concatenate([[0], np.cumsum(reached)[:-1]])
    found = []
    for share in (50, 90, 99, 100):
        needed = -(-eligible * share // 100)
        ok = (needed > 0) & (reached >= needed)
        at = np.where(ok, starts + needed - 1, 0)
        found.append(np.where(ok, late[at] if len(late) else -1, -1))
    return found


def _links(
    nodes: np.ndarray, sources: np.ndarray, targets: np.ndarray, delay: np.ndarray, width: int
) -> list[np.ndarray]:
    if not len(sources):
        return [np.zeros(0, dtype=np.int64)] * len(FIELDS[LINK])
    table = pa.table({"pair": sources * width + targets, "delay": delay})
    found = table.group_by("pair").aggregate([("delay", how) for how in ("count", "sum", "min", "max")])
    pair, *sums = (found[name].to_numpy() for name in ("pair", "delay_count", "delay_sum", "delay_min", "delay_max"))
    return [nodes[pair // width], nodes[pair % width], *sums]


def _per_node(
    nodes: np.ndarray,
    due: np.ndarray,
    keys: np.ndarray,
    in_due: np.ndarray,
    late: np.ndarray,
    t0: np.ndarray,
    bucket_us: int,
) -> list[np.ndarray]:
    """By node and bucket of the publish time: the messages that the node should have had and had, and their lateness.

    ``due`` and ``keys``: keys (message, node) of the deliveries that were due, and of those that came.
    """
    width = len(nodes)
    bucket = t0 // bucket_us
    low = int(bucket.min())
    buckets = bucket - low
    span = int(buckets.max()) + 1
    groups = (due % width) * span + buckets[due // width]
    got = (keys % width) * span + buckets[keys // width]
    every, inverse = _encoded(np.concatenate([groups, got]))
    size = len(every)
    from_due, from_got = inverse[: len(groups)], inverse[len(groups) :]
    eligible = np.bincount(from_due, minlength=size)
    reached = np.bincount(from_got[in_due], minlength=size)
    late_sum = np.zeros(size, dtype=np.int64)
    np.add.at(late_sum, from_got[in_due], late[in_due])
    return [
        *(nodes[every // span], every % span + low, eligible, reached, late_sum),
        np.bincount(from_got, minlength=size),
    ]


def _counted(*columns: np.ndarray) -> list[np.ndarray]:
    if not len(columns[0]):
        return [np.zeros(0, dtype=np.int64)] * (len(columns) + 1)
    names = [f"c{place}" for place in range(len(columns))]
    found = pa.table(list(columns), names).group_by(names).aggregate([([], "count_all")])
    return [found[name].to_numpy() for name in (*names, "count_all")]


def quantile_of(values: np.ndarray, counts: np.ndarray, share: float) -> float:
    """Return a quantile of a histogram (values are lower ends of buckets): the value at rank ``ceil(share · n)``."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(np.asarray(counts)[order])
    rank = max(1, math.ceil(share * total[-1] - 1e-9))
    return float(np.asarray(values)[order][int(np.searchsorted(total, rank))])
