"""From tables to the figures of a run, topic by topic and in total: what JSON output and `compare` work on."""

import math
from typing import Any

import pandas as pd

from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.delivery_trees import quantile_of

SCHEMA = 1
"""Version of the JSON that `summary` gives."""


def ratio(part: float, whole: float) -> float | None:
    """``part / whole``, or None when there is nothing."""
    return round(part / whole, 6) if whole else None


def histogram(table: pd.DataFrame, value: str, count: str) -> dict[str, float] | None:
    """n, p50, p90, p99 and max of a histogram in µs, as ms; None when it is empty."""
    if not len(table) or not table[count].sum():
        return None
    values, counts = table[value].to_numpy(), table[count].to_numpy()
    quantiles = {f"p{share}": quantile_of(values, counts, share / 100) / 1000 for share in (50, 90, 99)}
    return {"n": int(counts.sum()), **quantiles, "max": float(values.max()) / 1000}


def topic_figures(found: Analysis) -> list[dict[str, Any]]:
    """One object for each topic, those with most deliveries first."""
    tables = found.tables
    copies = (
        tables["copies"].groupby("topic")[["publishes", "firsts", "duplicates", "rejects", "duplicate_bytes"]].sum()
    )
    recovered = dict(tables["recovered"].itertuples(index=False, name=None))
    spread_of = dict(tuple(tables["spread"].groupby("topic")))
    latency_of = dict(tuple(tables["latency"].groupby("topic")))
    hops_of = dict(tuple(tables["hops"].groupby("topic")))
    figures = []
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


def _mean(column: "pd.Series[Any]") -> float | None:
    return round(float(column.mean()), 6) if len(column) else None


def rpc_figures(found: Analysis) -> dict[str, Any] | None:
    """Control overhead, IHAVE and IWANT, drops; None without RPC events."""
    rpcs = found.tables["rpcs"]
    if not len(rpcs):
        return None
    sums = rpcs.drop(columns=["node", "peer"]).groupby("k").sum().to_dict("index")
    empty = dict.fromkeys(rpcs.columns, 0)
    received, sent, dropped = (sums.get(k, empty) for k in (6, 7, 8))
    told = found.tables["idontwant"]
    return {
        "sent": int(sent["rpcs"]),
        "received": int(received["rpcs"]),
        "dropped": int(dropped["rpcs"]),
        # A trace may hold dropped RPCs only: then nobody knows how many were sent.
        "drop_ratio": ratio(dropped["rpcs"], dropped["rpcs"] + sent["rpcs"]) if sent["rpcs"] else None,
        "message_bytes": int(sent["message_bytes"]),
        "control_bytes": int(sent["control_bytes"]),
        "control_overhead": ratio(sent["control_bytes"], sent["control_bytes"] + sent["message_bytes"]),
        "ihave_ids": int(sent["ihave"]),
        "iwant_ids": int(sent["iwant"]),
        "iwant_per_ihave": ratio(sent["iwant"], sent["ihave"]),
        "idontwant_told": int(told["told"].sum()) if len(told) else 0,
        "idontwant_answered": int(told["answered"].sum()) if len(told) else 0,
        "idontwant_obeyed": ratio(int((told["told"] - told["answered"]).sum()), int(told["told"].sum()))
        if len(told)
        else None,
        "late_copies": int(told["late_copies"].sum()) if len(told) else 0,
    }


def mesh_figures(found: Analysis) -> list[dict[str, Any]]:
    """Of each topic: degree, one-way links, churn, islands, how long links last."""
    tables = found.tables
    minutes = max(1e-9, (found.last_t - found.first_t) / 60e6)
    sessions_of = dict(tuple(tables["mesh_sessions"].groupby("topic")))
    figures = []
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


def app_figures(found: Analysis) -> dict[str, Any]:
    """Reliable delivery, queues, requests and sessions."""
    tables = found.tables
    delivery, arrival = tables["delivery"], tables["arrival"]
    result: dict[str, Any] = {}
    if len(delivery):
        sums = {name: int(delivery[name].sum()) for name in delivery.columns if name not in ("node", "peer")}
        result["delivery"] = sums | {
            "ack_ms": histogram(tables["ack_latency"], "latency_us", "messages"),
            "loss": ratio(sums["lost"], sums["messages"]),
            **{name: int(arrival[name].sum()) for name in ("received", "repeated", "reordered")},
        }
    violations = {
        (row.namespace, row.queue, row.channel): row for row in tables["order_violations"].itertuples(index=False)
    }
    result["queues"] = []
    for row in tables["queues"].itertuples(index=False):
        key = (row.namespace, row.queue, row.channel)
        times = tables["queue_times"]
        mine = times[(times["namespace"] == key[0]) & (times["queue"] == key[1]) & (times["channel"] == key[2])]
        wrong = violations.get(key)
        result["queues"].append(
            row._asdict()
            | {
                "redelivered_share": ratio(row.redelivered, row.messages),
                "wait_ms": histogram(mine[mine["what"] == "wait"], "time_us", "messages"),
                "service_ms": histogram(mine[mine["what"] == "service"], "time_us", "messages"),
                "order_violations": int(wrong.violations) if wrong is not None else 0,
            }
        )
    requests = tables["requests"]
    result["requests"] = [
        {
            "name": name,
            "side": side,
            "requests": int(rows["requests"].sum()),
            "failed": int(rows[rows["outcome"] != "ok"]["requests"].sum()),
            "duration_ms": histogram(rows[rows["outcome"] == "ok"], "duration_us", "requests"),
        }
        for (name, side), rows in requests.groupby(["name", "side"])
    ]
    result["streams"] = [row._asdict() for row in tables["streams"].fillna({"mean_us": 0}).itertuples(index=False)]
    result["pushes"] = {"latency_ms": histogram(tables["push_latency"], "latency_us", "pushes")}
    changes = tables["session_changes"]
    result["sessions"] = {
        state: {"times": int(rows["times"].sum()), "items": int(rows["items"].sum())}
        for state, rows in changes.groupby("state")
    }
    return result


def estimate(count: int, share: float) -> dict[str, int]:
    """How many there are in all when ``count`` were kept, each with the probability ``share``; 95 % of the time within
    ``error`` of that, if they were kept independently of each other.
    """
    return {"count": round(count / share), "error": round(1.96 * math.sqrt(count * (1 - share)) / share)}


def in_all(found: Analysis, figures: dict[str, Any]) -> dict[str, Any] | None:
    """What counts of a sample make in all, estimated; None when all was traced, or not the same share everywhere."""
    samples = found.tables["samples"]
    if len(samples) != 1 or samples["share"].iloc[0] >= 1:
        return None
    share, topics = float(samples["share"].iloc[0]), figures["topics"]
    messages = {
        "messages": sum(topic["messages"] for topic in topics),
        "reliable_messages": figures["delivery"]["messages"] if "delivery" in figures else 0,
        "queued_messages": sum(queue["messages"] for queue in figures["queues"]),
    }
    # Copies of a message are kept or left out together: how far off their counts are depends on how they spread.
    copies = {
        "deliveries": sum(topic["deliveries"] for topic in topics),
        "duplicates": int(found.tables["copies"]["duplicates"].sum()),
    }
    return {
        "share": share,
        **{name: estimate(count, share) for name, count in messages.items() if count},
        **{name: {"count": round(count / share)} for name, count in copies.items() if count},
        "topics": [{"topic": topic["topic"], **estimate(topic["messages"], share)} for topic in topics],
    }


def summary(found: Analysis) -> dict[str, Any]:
    """All figures as one JSON object."""
    runs = found.tables["runs"]
    samples = found.tables["samples"]
    figures = {
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
        "topics": topic_figures(found),
        "mesh": mesh_figures(found),
        "rpcs": rpc_figures(found),
        **app_figures(found),
    }
    return figures | {"estimated": in_all(found, figures)}
