"""The queries beside trees and meshes: when each is worth asking, and its columns when it is not."""

from collections.abc import Callable
from typing import Final, NamedTuple

import pandas as pd
from pyspark.sql import DataFrame

from dep2p.spark_analytics.ingest.silver import Silver
from dep2p.spark_analytics.metrics import apps, mesh, propagation, traffic

_CHANNEL: Final = "namespace string, queue string, channel string"
COLUMNS: Final[dict[str, str]] = {
    "rejects": "node_id bigint, peer_id bigint, topic_id bigint, reason string, rejects bigint",
    "recovered": "topic_id bigint, recovered bigint",
    "idontwant": "sent bigint, answered bigint, late_copies bigint",
    "drops": "bucket bigint, node_id bigint, peer_id bigint, reason string, drops bigint, messages bigint",
    "delivery": "node_id bigint, peer_id bigint, messages bigint, acknowledged bigint, lost bigint, failed bigint, "
    "expired bigint, dropped bigint, under_way bigint, retries bigint, retried bigint",
    "ack_latency": "latency_us bigint, messages bigint",
    "arrival": "node_id bigint, peer_id bigint, received bigint, repeated bigint, reordered bigint",
    "queues": _CHANNEL + ", messages bigint, finished bigint, redelivered bigint, hand_outs bigint, timeouts bigint, "
    "requeues bigint, dead bigint, expired bigint, rejected bigint",
    "queue_times": _CHANNEL + ", what string, time_us bigint, messages bigint",
    "order_violations": _CHANNEL + ", violations bigint, keys bigint",
    "requests": "name string, side string, outcome string, duration_us bigint, requests bigint",
    "answers": "peer_id bigint, asked bigint, failed bigint, mean_us double",
    "push_latency": "from_id bigint, to_id bigint, latency_us bigint, pushes bigint",
    "session_changes": "session string, node_id bigint, peer_id bigint, side string, state string, times bigint, "
    "items bigint",
    "streams": "name string, side string, state string, streams bigint, bytes_in bigint, bytes_out bigint, "
    "mean_us double",
    "samples": "share double, nodes bigint",
    "lost_events": "node_id bigint, reason string, lost bigint",
    "score_spread": "bucket bigint, readings bigint, lowest double, p10 double, p50 double, p90 double, "
    "highest double, negative bigint",
    "peer_scores": "peer string, raters bigint, mean double, lowest double",
    "rejected_lines": "source string, error string, rows bigint, example string",
    "copies_by_kind": "node_id bigint, peer_id bigint, topic_id bigint, k tinyint, n bigint, bytes bigint",
    "rpcs": "node_id bigint, peer_id bigint, k int, rpcs bigint, messages bigint, message_bytes bigint, "
    "control_bytes bigint, ihave bigint, grafts bigint, prunes bigint, iwant bigint, idontwant bigint",
    "changes": "k tinyint, node_id bigint, run bigint, topic_id bigint, peer_id bigint, t bigint, seq bigint",
    "readings": "node_id bigint, peer_id bigint, ahead_us bigint, error_us bigint",
}
"""Columns by query: to build a query only to see its columns costs half a second of planning in all."""


class Query(NamedTuple):
    """``worth``: whether there is anything to find; ``frame`` builds it."""

    worth: bool
    frame: Callable[[], DataFrame]


def first_queries(silver: Silver) -> dict[str, Query]:
    """Queries that others build upon, or that need no times."""
    return {
        "copies_by_kind": Query("messages" in silver.filled, lambda: propagation.copies_by_kind(silver.messages)),
        "rpcs": Query("rpcs" in silver.filled, lambda: traffic.rpc_totals(silver.rpcs)),
        "changes": Query("mesh" in silver.filled, lambda: mesh.changes(silver.mesh)),
        "readings": Query("node" in silver.filled, lambda: traffic.clock_readings(silver.node)),
    }


def later_queries(silver: Silver, kinds: frozenset[str], rpcs: pd.DataFrame, bucket_us: int) -> dict[str, Query]:
    """The other queries for a trace with events of these kinds. ``rpcs``: the table of that name."""
    delivered, queued, asked = "delivery" in kinds, "queue" in kinds, "request" in kinds
    scored = "scores" in kinds
    wanted, unwanted = bool(rpcs["iwant"].sum() > 0), bool(rpcs["idontwant"].sum() > 0)
    return {
        "recovered": Query(wanted, lambda: propagation.recovered(silver.messages, silver.rpcs)),
        "idontwant": Query(unwanted, lambda: propagation.after_idontwant(silver.messages, silver.rpcs)),
        "rejects": Query("reject" in kinds, lambda: traffic.rejects(silver.messages)),
        "drops": Query("drop_rpc" in kinds, lambda: traffic.drops(silver.rpcs, bucket_us)),
        "delivery": Query(delivered, lambda: apps.delivery(apps.sent(silver.app))),
        "ack_latency": Query(delivered, lambda: apps.ack_latency(apps.sent(silver.app))),
        "arrival": Query(delivered, lambda: apps.arrival(silver.app)),
        "queues": Query(queued, lambda: apps.queues(apps.handled(silver.app))),
        "queue_times": Query(queued, lambda: apps.queue_times(apps.handled(silver.app))),
        "order_violations": Query(queued, lambda: apps.order_violations(silver.app)),
        "requests": Query(asked, lambda: apps.requests(silver.app)),
        "answers": Query(asked, lambda: apps.slow_answers(silver.app)),
        "session_changes": Query("session" in kinds, lambda: apps.session_changes(silver.app)),
        "streams": Query("stream" in kinds, lambda: apps.streams(silver.app)),
        "samples": Query("node_start" in kinds, lambda: traffic.samples(silver.node)),
        "lost_events": Query("dropped" in kinds, lambda: traffic.lost_events(silver.node)),
        "score_spread": Query(scored, lambda: apps.score_spread(apps.scores(silver.node), bucket_us)),
        "peer_scores": Query(scored, lambda: apps.scores_of_peers(apps.scores(silver.node))),
        "rejected_lines": Query("bad" in silver.filled, lambda: traffic.rejected_lines(silver.bad)),
    }


def empty(name: str) -> pd.DataFrame:
    """The table of a query that found nothing, with its columns."""
    numbers = {"bigint": "int64", "int": "int32", "tinyint": "int8", "double": "float64"}
    columns = [column.split() for column in COLUMNS[name].split(", ")]
    return pd.DataFrame({column: pd.Series(dtype=numbers.get(kind, "object")) for column, kind in columns})
