"""From tables to the figures of a run, topic by topic and in total: what JSON output and `compare` work on."""

import math

import pandas as pd

from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.delivery_trees import quantile_of
from dep2p.spark_analytics.metrics.figures import (
    AppFigures,
    DeliveryFigures,
    Estimate,
    EstimateName,
    Estimates,
    Figures,
    Histogram,
    MeshFigures,
    QueueFigures,
    RequestFigures,
    RpcFigures,
    TopicFigures,
)

SCHEMA = 1
"""Version of the JSON that `summary` gives."""


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``, or None when there is nothing."""
    return round(part / whole, 6) if whole else None


def histogram(table: pd.DataFrame, value: str, count: str) -> Histogram | None:
    """n, p50, p90, p99 and max of a histogram in µs, as ms; None when it is empty."""
    if not len(table) or not table[count].sum():
        return None
    values, counts = table[value].to_numpy(), table[count].to_numpy()
    quantiles = {f"p{share}": quantile_of(values, counts, share / 100) / 1000 for share in (50, 90, 99)}
    return {"n": int(counts.sum()), **quantiles, "max": float(values.max()) / 1000}


def topic_figures(found: Analysis) -> list[TopicFigures]:
    """One object for each topic, those with most deliveries first."""
    tables = found.tables
    summed = ["publishes", "firsts", "local", "duplicates", "rejects", "duplicate_bytes"]
    copies = tables["copies"].groupby("topic")[summed].sum()
    recovered = dict(tables["recovered"].itertuples(index=False, name=None))
    spread_of = dict(tuple(tables["spread"].groupby("topic")))
    latency_of = dict(tuple(tables["latency"].groupby("topic")))
    hops_of = dict(tuple(tables["hops"].groupby("topic")))
    figures: list[TopicFigures] = []
    for topic, row in copies.sort_values("firsts", ascending=False, kind="stable").iterrows():
        spread = spread_of.get(topic, tables["spread"].head(0))
        known = spread[spread["published"] == 1]
        delivered = int(known["delivered"].sum())
        latency = histogram(latency_of.get(topic, tables["latency"].head(0)), "latency_us", "deliveries")
        if latency is not None:
            latency |= {
                "max": int(known["last_us"].max()) / 1000,
                "mean": int(known["latency_sum"].sum()) / delivered / 1000,
            }
        hops = hops_of.get(topic, tables["hops"].head(0))
        reachable = hops[hops["hops"] > 0]
        counted = int(reachable["deliveries"].sum())
        receivers = int(spread["delivered"].sum()) + len(known)
        figures.append(
            {
                "topic": topic,
                "messages": len(spread),
                "published_untraced": len(spread) - len(known),
                "local_deliveries": int(row["local"]),
                "deliveries": int(spread["delivered"].sum()),
                "expected": int(known["eligible"].sum()),
                "reliability": ratio(int(known["reached"].sum()), int(known["eligible"].sum())),
                "worst_message": _worst(known),
                "latency_ms": latency,
                "coverage_ms": {name: _coverage(known, name) for name in ("t50", "t90", "t99", "t100")},
                "hops_mean": ratio(int((reachable["hops"] * reachable["deliveries"]).sum()), counted),
                "hops_max": int(reachable["hops"].max()) if len(reachable) else None,
                "hops_unknown": int(spread["unreached"].sum()),
                "last_delivery_hops_mean": _mean(known[known["last_hops"] > 0]["last_hops"]),
                "branching": ratio(int(spread["delivered"].sum()), int(spread["parents"].sum())),
                "duplicates_per_delivery": ratio(int(row["duplicates"]), int(spread["delivered"].sum())),
                "rmr": _rmr(int(spread["delivered"].sum() + row["duplicates"]), receivers, len(known)),
                "iwant_recovered": ratio(int(recovered.get(topic, 0)), int(spread["delivered"].sum())),
                "rejects": int(row["rejects"]),
                "duplicate_bytes": int(row["duplicate_bytes"]),
            }
        )
    return figures


def _rmr(copies: int, receivers: int, messages: int) -> float | None:
    """Plumtree's relative message redundancy: copies / (nodes that have the message − 1) − 1, over all messages."""
    return round(copies / (receivers - messages) - 1, 6) if receivers > messages else None


def _worst(known: pd.DataFrame) -> float | None:
    due = known[known["eligible"] > 0]
    return round(float((due["reached"] / due["eligible"]).min()), 6) if len(due) else None


def _coverage(known: pd.DataFrame, name: str) -> float | None:
    """The median over messages of the time until the share had it; messages that never got there do not count."""
    times = known[known[name] >= 0][name]
    return float(times.quantile(0.5, interpolation="lower")) / 1000 if len(times) else None


def _mean(column: pd.Series) -> float | None:
    return round(float(column.mean()), 6) if len(column) else None


def rpc_figures(found: Analysis) -> RpcFigures | None:
    """Control overhead, IHAVE and IWANT, drops; None without RPC events."""
    rpcs = found.tables["rpcs"]
    if not len(rpcs):
        return None
    sums = rpcs.drop(columns=["node", "peer"]).groupby("k").sum().to_dict("index")
    empty = dict.fromkeys(rpcs.columns, 0)
    received, sent, dropped = (sums.get(k, empty) for k in (6, 7, 8))
    idontwant = found.tables["idontwant"]
    return {
        "sent": int(sent["rpcs"]),
        "received": int(received["rpcs"]),
        "dropped": int(dropped["rpcs"]),
        # A trace may hold dropped RPCs only: then the number of sent ones is unknown.
        "drop_ratio": ratio(dropped["rpcs"], dropped["rpcs"] + sent["rpcs"]) if sent["rpcs"] else None,
        "message_bytes": int(sent["message_bytes"]),
        "control_bytes": int(sent["control_bytes"]),
        "control_overhead": ratio(sent["control_bytes"], sent["control_bytes"] + sent["message_bytes"]),
        "ihave_ids": int(sent["ihave"]),
        "iwant_ids": int(sent["iwant"]),
        "iwant_per_ihave": ratio(sent["iwant"], sent["ihave"]),
        "idontwant_sent": int(idontwant["sent"].sum()) if len(idontwant) else 0,
        "idontwant_answered": int(idontwant["answered"].sum()) if len(idontwant) else 0,
        "idontwant_obeyed": ratio(int((idontwant["sent"] - idontwant["answered"]).sum()), int(idontwant["sent"].sum()))
        if len(idontwant)
        else None,
        "late_copies": int(idontwant["late_copies"].sum()) if len(idontwant) else 0,
    }


def mesh_figures(found: Analysis) -> list[MeshFigures]:
    """The mesh of each topic: degree, one-way links, churn, islands, how long links last."""
    tables = found.tables
    minutes = max(1e-9, (found.last_t - found.first_t) / 60e6)
    sessions_of = dict(tuple(tables["mesh_sessions"].groupby("topic")))
    figures: list[MeshFigures] = []
    for topic, degree in tables["degree"].groupby("topic"):
        sides = tables["symmetry"][tables["symmetry"]["topic"] == topic]
        churn = tables["churn"][tables["churn"]["topic"] == topic]
        parts = tables["islands"][tables["islands"]["topic"] == topic]
        sessions = sessions_of.get(topic, tables["mesh_sessions"].head(0))
        lengths = (sessions["end"] - sessions["begin"]) / 1e6
        figures.append(
            {
                "topic": topic,
                "degree_mean": round(float((degree["mean"] * degree["nodes"]).sum() / degree["nodes"].sum()), 6),
                "degree_lowest": int(degree["lowest"].min()),
                "degree_highest": int(degree["highest"].max()),
                "one_way": ratio(int(sides["one_way"].sum()), int(sides["links"].sum())) if len(sides) else None,
                "changes_per_node_minute": round(
                    float((churn["grafts"] + churn["prunes"]).sum() / max(1, len(churn)) / minutes), 6
                ),
                "session_s": {f"p{q}": float(lengths.quantile(q / 100)) for q in (10, 50, 90)}
                if len(lengths)
                else None,
                "islands_most": int(parts["islands"].max()) if len(parts) else None,
            }
        )
    return figures


def app_figures(found: Analysis) -> AppFigures:
    """Reliable delivery, queues, requests, streams and sessions."""
    tables = found.tables
    delivery = _delivery_figures(found)
    rest: AppFigures = {
        "queues": _queue_figures(found),
        "requests": [
            RequestFigures(
                name=name,
                side=side,
                requests=int(rows["requests"].sum()),
                failed=int(rows[rows["outcome"] != "ok"]["requests"].sum()),
                duration_ms=histogram(rows[rows["outcome"] == "ok"], "duration_us", "requests"),
            )
            for (name, side), rows in tables["requests"].groupby(["name", "side"])
        ],
        "streams": [row._asdict() for row in tables["streams"].fillna({"mean_us": 0}).itertuples(index=False)],
        "pushes": {"latency_ms": histogram(tables["push_latency"], "latency_us", "pushes")},
        "sessions": {
            state: {"times": int(rows["times"].sum()), "items": int(rows["items"].sum())}
            for state, rows in tables["session_changes"].groupby("state")
        },
    }
    return rest if delivery is None else {"delivery": delivery, **rest}


def _delivery_figures(found: Analysis) -> DeliveryFigures | None:
    delivery, arrival = found.tables["delivery"], found.tables["arrival"]
    if not len(delivery):
        return None
    sums = delivery.drop(columns=["node", "peer"]).sum()
    return DeliveryFigures(
        messages=int(sums["messages"]),
        acknowledged=int(sums["acknowledged"]),
        lost=int(sums["lost"]),
        failed=int(sums["failed"]),
        expired=int(sums["expired"]),
        dropped=int(sums["dropped"]),
        under_way=int(sums["under_way"]),
        retries=int(sums["retries"]),
        retried=int(sums["retried"]),
        ack_ms=histogram(found.tables["ack_latency"], "latency_us", "messages"),
        loss=ratio(int(sums["lost"]), int(sums["messages"])),
        received=int(arrival["received"].sum()),
        repeated=int(arrival["repeated"].sum()),
        reordered=int(arrival["reordered"].sum()),
    )


def _queue_figures(found: Analysis) -> list[QueueFigures]:
    tables = found.tables
    violations = {
        (row.namespace, row.queue, row.channel): row for row in tables["order_violations"].itertuples(index=False)
    }
    times = tables["queue_times"]
    figures: list[QueueFigures] = []
    for row in tables["queues"].itertuples(index=False):
        key = (row.namespace, row.queue, row.channel)
        mine = times[(times["namespace"] == key[0]) & (times["queue"] == key[1]) & (times["channel"] == key[2])]
        wrong = violations.get(key)
        figures.append(
            QueueFigures(
                namespace=row.namespace,
                queue=row.queue,
                channel=row.channel,
                messages=row.messages,
                finished=row.finished,
                redelivered=row.redelivered,
                hand_outs=row.hand_outs,
                timeouts=row.timeouts,
                requeues=row.requeues,
                dead=row.dead,
                expired=row.expired,
                rejected=row.rejected,
                redelivered_share=ratio(row.redelivered, row.messages),
                wait_ms=histogram(mine[mine["what"] == "wait"], "time_us", "messages"),
                service_ms=histogram(mine[mine["what"] == "service"], "time_us", "messages"),
                order_violations=int(wrong.violations) if wrong is not None else 0,
            )
        )
    return figures


def estimate(count: int, share: float) -> Estimate:
    """How many there are in all when ``count`` were kept, each with the probability ``share``; 95 % of the time within
    ``error`` of that, if they were kept independently of each other.
    """
    return {"count": round(count / share), "error": round(1.96 * math.sqrt(count * (1 - share)) / share)}


def estimates(found: Analysis, topics: list[TopicFigures], apps: AppFigures) -> Estimates | None:
    """Estimates from a sample; None when all was traced, or not the same share everywhere."""
    samples = found.tables["samples"]
    if len(samples) != 1 or samples["share"].iloc[0] >= 1:
        return None
    share = float(samples["share"].iloc[0])
    result: Estimates = {
        "share": share,
        "topics": [{"topic": topic["topic"], **estimate(topic["messages"], share)} for topic in topics],
    }
    messages: dict[EstimateName, int] = {
        "messages": sum(topic["messages"] for topic in topics),
        "reliable_messages": apps["delivery"]["messages"] if "delivery" in apps else 0,
        "queued_messages": sum(queue["messages"] for queue in apps["queues"]),
    }
    # Copies of a message are kept or left out together: how far off their counts are depends on how they spread.
    copies: dict[EstimateName, int] = {
        "deliveries": sum(topic["deliveries"] for topic in topics),
        "duplicates": int(found.tables["copies"]["duplicates"].sum()),
    }
    for name, count in messages.items():
        if count:
            result[name] = estimate(count, share)
    for name, count in copies.items():
        if count:
            result[name] = {"count": round(count / share)}
    return result


def summary(found: Analysis) -> Figures:
    """All figures as one JSON object."""
    runs = found.tables["runs"]
    samples = found.tables["samples"]
    topics, apps = topic_figures(found), app_figures(found)
    return {
        "schema": SCHEMA,
        "from_us": found.first_t,
        "to_us": found.last_t,
        "seconds": (found.last_t - found.first_t) / 1e6,
        "events": int(runs["events"].sum()),
        "nodes": int(runs["node"].nunique()),
        "runs": len(runs),
        "missing_events": int(runs["missing"].clip(lower=0).sum()),
        "sample": float(samples["share"].min()) if len(samples) else 1.0,
        "settle_s": found.settle_us / 1e6,
        "clocks_corrected": len(found.offsets),
        "topics": topics,
        "mesh": mesh_figures(found),
        "rpcs": rpc_figures(found),
        **apps,
        "estimated": estimates(found, topics, apps),
    }
