"""Findings about reliable messages, queues and requests, and about the trace itself."""

from typing import Any

from dep2p.spark_analytics.findings.model import Finding, capped, short
from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.traces.schema import SCHEMA_VERSION


def of_apps(found: Analysis, figures: dict[str, Any]) -> list[Finding]:
    result: list[Finding] = []
    delivery = figures.get("delivery")
    if delivery and delivery["lost"]:
        worst = found.tables["delivery"].sort_values("lost", ascending=False).iloc[0]
        result.append(
            Finding(
                "bad",
                "lost-messages",
                f"{delivery['lost']:,} of {delivery['messages']:,} reliable messages were given up (failed "
                f"{delivery['failed']:,}, expired {delivery['expired']:,}, dropped {delivery['dropped']:,}); most from "
                f"{short(worst['node'])} to {short(worst['peer'])}: {int(worst['lost']):,}",
                evidence={name: delivery[name] for name in ("lost", "messages", "failed", "expired", "dropped")},
            )
        )
    for queue in figures["queues"]:
        name = f"{queue['queue']}/{queue['channel']}"
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
    answers = found.tables["answers"]
    for row in answers[(answers["asked"] >= 10) & (answers["failed"] > 0.05 * answers["asked"])].itertuples(
        index=False
    ):
        result.append(
            Finding(
                "look",
                "failing-requests",
                f"{int(row.failed):,} of {int(row.asked):,} requests to {short(row.peer)} failed",
                str(row.peer),
                evidence={"failed": int(row.failed), "asked": int(row.asked)},
            )
        )
    return capped(result, "findings about apps")


def _about(estimated: dict[str, Any]) -> str:
    known = [
        f"{estimated[name]['count']:,} {name.replace('_', ' ')}"
        for name in ("messages", "reliable_messages", "queued_messages", "deliveries", "duplicates")
        if name in estimated
    ]
    return f"; about {', '.join(known)} in all, estimated" if known else ""


def of_trace(found: Analysis, figures: dict[str, Any]) -> list[Finding]:
    """What is wrong with the trace itself."""
    result: list[Finding] = []
    for node, ahead in sorted(found.offsets.items(), key=lambda item: -abs(item[1])):
        if abs(ahead) >= 1_000_000:
            result.append(
                Finding(
                    "look",
                    "clock",
                    f"the clock of {short(node)} is {abs(ahead) / 1e6:,.1f} s {'ahead' if ahead > 0 else 'behind'}; "
                    f"its times are corrected (from {found.clocks_from})",
                    node,
                    evidence={"ahead_us": ahead},
                )
            )
    small = sum(abs(ahead) < 1_000_000 for ahead in found.offsets.values())
    if small:
        result.append(
            Finding(
                "note",
                "clock",
                f"{small} clocks were off by less than a second and are corrected (from {found.clocks_from})",
                evidence={"clocks": small},
            )
        )
    result = capped(result, "clocks")
    holes = found.tables["runs"][found.tables["runs"]["missing"] > 0].sort_values("missing", ascending=False)
    result += capped(
        [
            Finding(
                "note",
                "gap",
                f"{int(row.missing):,} events of {short(row.node)} are missing in its files (cut, lost, "
                "or not copied yet)",
                str(row.node),
                evidence={"missing": int(row.missing), "run": int(row.run)},
            )
            for row in holes.itertuples(index=False)
        ],
        "nodes",
    )
    samples, estimated = found.tables["samples"], figures["estimated"]
    if len(samples) > 1:
        shares = ", ".join(f"{row.share:.3g} at {int(row.nodes)}" for row in samples.itertuples(index=False))
        result.append(
            Finding(
                "look",
                "mixed-samples",
                f"nodes traced different shares of the messages ({shares}): those that some left out look undelivered "
                "there",
                evidence={"shares": samples["share"].tolist(), "nodes": samples["nodes"].tolist()},
            )
        )
    elif estimated:
        result.append(
            Finding(
                "note",
                "sampled",
                f"the nodes traced {estimated['share']:.3g} of the messages, the same ones everywhere. Of those alone "
                "are all counts of published, reliable and queued messages, their deliveries, copies, rejects, order "
                f"violations and RPCs{_about(estimated)}. Latencies, ratios, hops, meshes, requests, streams and "
                "sessions are not changed by it",
                evidence={"share": estimated["share"]},
            )
        )
    for row in found.tables["lost_events"].itertuples(index=False):
        result.append(
            Finding(
                "note",
                "not-written",
                f"{short(row.node)} did not write {int(row.lost):,} events ({row.reason})",
                str(row.node),
                evidence={"lost": int(row.lost), "reason": row.reason},
            )
        )
    if found.duplicate_sources:
        result += capped(
            [
                Finding("note", "duplicate-file", f"counted once, left out: {path}", path)
                for path in found.duplicate_sources
            ],
            "files",
        )
    runs = found.tables["runs"]
    newer = runs[runs["version"] > SCHEMA_VERSION]
    if len(newer):
        result.append(
            Finding(
                "note",
                "newer-schema",
                f"{len(newer)} runs wrote schema version {int(newer['version'].max())}, this "
                f"program knows {SCHEMA_VERSION}: what it knows of them is counted",
                str(newer.iloc[0]["node"]),
                evidence={"versions": sorted({int(v) for v in runs["version"]}), "nodes": newer["node"].tolist()[:20]},
            )
        )
    if len(runs[runs["oldest_version"] < 1]):
        result.append(Finding("note", "no-version", "some events have no schema version"))
    for row in found.tables["strangers"].itertuples(index=False):
        result.append(
            Finding(
                "note",
                "bad-lines",
                f"{int(row.rows):,} lines in {row.source}: {row.trouble}",
                row.source,
                evidence={"rows": int(row.rows), "example": row.example},
            )
        )
    for topic, clash in found.key_clashes:
        result.append(Finding("note", "key-clash", f"{topic} and {clash} have the same key and are counted together"))
    return result
