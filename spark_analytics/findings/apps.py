"""Findings about reliable messages, queues and requests."""

from dep2p.spark_analytics.findings.model import Finding, capped, short
from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.figures import Figures, QueueFigures


def of_apps(found: Analysis, figures: Figures) -> list[Finding]:
    """Lost messages, dead letters, broken order, redelivery and failing requests."""
    result = _lost_messages(found, figures)
    for queue in figures["queues"]:
        result += _of_queue(queue)
    return capped(result + _failing_requests(found), "findings about apps")


def _lost_messages(found: Analysis, figures: Figures) -> list[Finding]:
    delivery = figures.get("delivery")
    if not delivery or not delivery["lost"]:
        return []
    worst = found.tables["delivery"].sort_values("lost", ascending=False).iloc[0]
    return [
        Finding(
            "bad",
            "lost-messages",
            f"{delivery['lost']:,} of {delivery['messages']:,} reliable messages were given up (failed "
            f"{delivery['failed']:,}, expired {delivery['expired']:,}, dropped {delivery['dropped']:,}); most from "
            f"{short(worst['node'])} to {short(worst['peer'])}: {int(worst['lost']):,}",
            evidence={
                "lost": delivery["lost"],
                "messages": delivery["messages"],
                "failed": delivery["failed"],
                "expired": delivery["expired"],
                "dropped": delivery["dropped"],
            },
        )
    ]


def _of_queue(queue: QueueFigures) -> list[Finding]:
    """Findings about one channel of a queue."""
    name = f"{queue['queue']}/{queue['channel']}"
    result: list[Finding] = []
    if queue["dead"]:
        result.append(
            Finding(
                "bad",
                "dead-letters",
                f"{name}: {queue['dead']:,} messages became dead letters",
                name,
                evidence={"dead": queue["dead"], "messages": queue["messages"]},
            )
        )
    if queue["order_violations"]:
        result.append(
            Finding(
                "bad",
                "order",
                f"{name}: {queue['order_violations']:,} messages were handed out after a later one of the same key",
                name,
                evidence={"violations": queue["order_violations"]},
            )
        )
    if queue["redelivered_share"] and queue["redelivered_share"] > 0.05:
        result.append(
            Finding(
                "look",
                "redelivery",
                f"{name}: {queue['redelivered_share']:.1%} of the messages were handed out "
                f"more than once ({queue['timeouts']:,} timeouts, {queue['requeues']:,} requeues)",
                name,
                evidence={"share": queue["redelivered_share"]},
            )
        )
    return result


def _failing_requests(found: Analysis) -> list[Finding]:
    answers = found.tables["answers"]
    failing = answers[(answers["asked"] >= 10) & (answers["failed"] > 0.05 * answers["asked"])]
    return [
        Finding(
            "look",
            "failing-requests",
            f"{int(row.failed):,} of {int(row.asked):,} requests to {short(row.peer)} failed",
            str(row.peer),
            evidence={"failed": int(row.failed), "asked": int(row.asked)},
        )
        for row in failing.itertuples(index=False)
    ]
