"""Findings about nodes, meshes and deliveries."""

from typing import Final

import pandas as pd

from dep2p.spark_analytics.findings.model import Finding, capped, clock_time, short
from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.figures import Figures

SILENT_S: Final = 10.0
_RELIABLE: Final = 0.999


def of_pubsub(found: Analysis, figures: Figures) -> list[Finding]:
    """Nodes that ended or were silent, parted meshes, missing and late deliveries, and suspicious peers."""
    return [
        *_runs(found),
        *_silent(found),
        *_islands(found),
        *_topics(figures),
        *_lossy_nodes(found),
        *_late_nodes(found),
        *_mesh(found, figures),
        *_sources(found),
        *_rejects(found),
        *_drops(found, figures),
        *_scores(found),
    ]


def _runs(found: Analysis) -> list[Finding]:
    result: list[Finding] = []
    runs = found.tables["runs"].sort_values(["node", "first_t"])
    for node, rows in runs.groupby("node", sort=False):
        times = list(rows[["first_t", "last_t", "stopped"]].itertuples(index=False, name=None))
        for number, (_, last_t, stopped) in enumerate(times):
            later = times[number + 1][0] if number + 1 < len(times) else None
            if later is not None:
                how = "stopped" if stopped else "ended without a word (killed, or crashed)"
                result.append(
                    Finding(
                        "note" if stopped else "bad",
                        "restarted" if stopped else "killed",
                        f"{short(node)} {how} at {clock_time(last_t)}, back {(later - last_t) / 1e6:.1f} s later",
                        str(node),
                        int(last_t),
                        {"down_s": (later - last_t) / 1e6},
                    )
                )
            elif not stopped and found.last_t - last_t > SILENT_S * 1e6:
                result.append(
                    Finding(
                        "bad",
                        "killed",
                        f"{short(node)} ended without a word at {clock_time(last_t)}, "
                        f"{(found.last_t - last_t) / 1e6:.0f} s before the end of the trace: killed, crashed, "
                        "or its last file is missing",
                        str(node),
                        int(last_t),
                        {"last_t": int(last_t)},
                    )
                )
    return capped(result, "nodes")


def _silent(found: Analysis) -> list[Finding]:
    """Find nodes that wrote nothing for long, while they otherwise never paused so long, within one run."""
    result: list[tuple[float, Finding]] = []
    activity = found.tables["activity"].sort_values(["node", "run", "first_t"])
    for (node, _), rows in activity.groupby(["node", "run"], sort=False):
        pauses = (rows["first_t"].shift(-1) - rows["last_t"]).dropna() / 1e6
        usual = float(pauses.median()) if len(pauses) else 0.0
        for index, pause in pauses.items():
            if pause > max(SILENT_S, 4 * usual):
                start = int(rows["last_t"][index])
                finding = Finding(
                    "bad",
                    "silent",
                    f"{short(node)} was silent for {pause:.1f} s from {clock_time(start)} on (stopped, starved or "
                    f"without anything to write; its usual pause is {max(usual, 0):.1f} s)",
                    str(node),
                    start,
                    {"silent_s": float(pause), "usual_pause_s": usual},
                )
                result.append((float(pause), finding))
    return capped([finding for _, finding in sorted(result, key=lambda row: -row[0])], "pauses")


def _islands(found: Analysis) -> list[Finding]:
    result: list[Finding] = []
    parted = found.tables["islands"]
    for topic, rows in parted[parted["islands"] > 1].sort_values("bucket").groupby("topic"):
        buckets = rows["bucket"].tolist()
        start = previous = buckets[0]
        spans = []
        for bucket in buckets[1:]:
            if bucket != previous + 1:
                spans.append((start, previous))
                start = bucket
            previous = bucket
        spans.append((start, previous))
        for begin, end in spans:
            worst = rows[(rows["bucket"] >= begin) & (rows["bucket"] <= end)].sort_values("largest").iloc[0]
            begin_us, end_us = (begin + 1) * found.bucket_us, (end + 1) * found.bucket_us
            outside = int(worst["nodes"] - worst["largest"])
            result.append(
                Finding(
                    "bad",
                    "partition",
                    f"the mesh of {topic} was in {int(worst['islands'])} parts from about {clock_time(begin_us)} for "
                    f"{max(1, (end_us - begin_us) / 1e6):.0f} s: {outside} of {int(worst['nodes'])} nodes outside the "
                    "largest",
                    str(topic),
                    int(begin_us),
                    {"islands": int(worst["islands"]), "outside": outside, "seconds": (end_us - begin_us) / 1e6},
                )
            )
    return capped(result, "partitions")


def _topics(figures: Figures) -> list[Finding]:
    result: list[Finding] = []
    for topic in figures["topics"]:
        if topic["reliability"] is not None and topic["reliability"] < _RELIABLE:
            lost = round(topic["expected"] * (1 - topic["reliability"]))
            result.append(
                Finding(
                    "bad",
                    "undelivered",
                    f"{topic['topic']}: {lost:,} of {topic['expected']:,} deliveries are missing "
                    f"({topic['reliability']:.3%} arrived; the worst message reached {topic['worst_message']:.1%})",
                    topic["topic"],
                    evidence={
                        "reliability": topic["reliability"],
                        "expected": topic["expected"],
                        "worst_message": topic["worst_message"],
                    },
                )
            )
    return capped(result, "topics")


def _per_node(found: Analysis) -> pd.DataFrame:
    return found.tables["node_coverage"].groupby("node")[["eligible", "reached", "late_sum"]].sum()


def _lossy_nodes(found: Analysis) -> list[Finding]:
    nodes = _per_node(found)
    nodes = nodes[nodes["eligible"] >= 10]
    nodes = nodes.assign(share=nodes["reached"] / nodes["eligible"])
    usual = float(nodes["share"].median()) if len(nodes) else 1.0
    spread = float((nodes["share"] - usual).abs().median()) if len(nodes) else 0.0
    poor = nodes[nodes["share"] < min(0.99, usual - max(0.01, 6 * spread))].sort_values("share")
    return capped(
        [
            Finding(
                "bad",
                "lossy",
                f"{short(node)} got {row.share:.1%} of the {int(row.eligible):,} messages that it should have "
                f"(the middle of all: {usual:.1%})",
                str(node),
                evidence={"share": float(row.share), "expected": int(row.eligible), "median": usual},
            )
            for node, row in poor.iterrows()
        ],
        "nodes",
    )


def _late_nodes(found: Analysis) -> list[Finding]:
    """Find nodes that get messages much later than the median node: slow themselves, or badly connected."""
    nodes = _per_node(found)
    nodes = nodes[nodes["reached"] >= 10]
    if len(nodes) < 5:
        return []
    late = nodes["late_sum"] / nodes["reached"]
    middle = float(late.median())
    spread = float((late - middle).abs().median()) or 1.0
    slow = late[(late - middle > 6 * spread) & (late - middle > 50_000)].sort_values(ascending=False)
    return capped(
        [
            Finding(
                "look",
                "slow",
                f"{short(node)} gets messages {value / 1000:.0f} ms later than the middle of all nodes, on average",
                str(node),
                evidence={"late_ms": float(value) / 1000, "median_ms": middle / 1000, "mad_ms": spread / 1000},
            )
            for node, value in slow.items()
        ],
        "nodes",
    )


def _mesh(found: Analysis, figures: Figures) -> list[Finding]:
    result: list[Finding] = []
    for topic in figures["mesh"]:
        if topic["one_way"] is not None and topic["one_way"] > 0.05:
            result.append(
                Finding(
                    "look",
                    "one-way",
                    f"{topic['topic']}: {topic['one_way']:.1%} of the mesh links are known to one end only",
                    topic["topic"],
                    evidence={"one_way": topic["one_way"]},
                )
            )
    lonely = found.tables["degree"].groupby("topic")[["without", "nodes"]].sum()
    for topic, row in lonely[lonely["without"] > 0.02 * lonely["nodes"]].iterrows():
        result.append(
            Finding(
                "look",
                "no-mesh",
                f"{topic}: subscribed nodes have no mesh peer at {row['without'] / row['nodes']:.1%} of all times",
                str(topic),
                evidence={"share": float(row["without"] / row["nodes"])},
            )
        )
    return capped(result, "topics")


def _sources(found: Analysis) -> list[Finding]:
    """Suspect an eclipse: nearly all first deliveries from one peer, or a mesh of peers that trace nothing."""
    result: list[Finding] = []
    copies = found.tables["copies"].dropna(subset=["peer"])
    per_peer = copies.groupby(["node", "peer"])[["firsts", "duplicates"]].sum().reset_index()
    total = per_peer.groupby("node")["firsts"].sum()
    peers = per_peer.groupby("node")["peer"].nunique()
    top = per_peer.sort_values("firsts").groupby("node").tail(1).set_index("node")
    share = (top["firsts"] / total).fillna(0)
    for node in share[(share > 0.9) & (total >= 50) & (peers >= 3)].index:
        result.append(
            Finding(
                "look",
                "one-source",
                f"{short(node)} got {share[node]:.1%} of its {int(total[node]):,} first deliveries from one peer of "
                f"{int(peers[node])}, {short(top['peer'][node])}: eclipsed, or the others are slow",
                str(node),
                evidence={"share": float(share[node]), "source": str(top["peer"][node])},
            )
        )
    sessions = found.tables["mesh_sessions"]
    if len(sessions):
        traced = set(found.tables["runs"]["node"])
        length = (sessions["end"] - sessions["begin"]).clip(lower=1)
        untraced = length.where(~sessions["peer"].isin(traced), 0)
        by_node = pd.DataFrame({"node": sessions["node"], "all": length, "untraced": untraced}).groupby("node").sum()
        shares = by_node["untraced"] / by_node["all"]
        usual = float(shares.median())
        if usual < 0.5:
            for node in shares[shares > max(0.75, usual + 0.3)].index:
                result.append(
                    Finding(
                        "look",
                        "eclipse",
                        f"{shares[node]:.0%} of the mesh of {short(node)} are peers that trace nothing; in the middle "
                        f"of all nodes it is {usual:.0%}: an eclipse looks like this",
                        str(node),
                        evidence={"share": float(shares[node]), "median": usual},
                    )
                )
    return capped(result, "nodes")


def _rejects(found: Analysis) -> list[Finding]:
    rejects = found.tables["rejects"]
    rows = rejects[rejects["peer"].notna()].groupby("peer")
    result: list[tuple[int, Finding]] = []
    for peer, group in rows:
        count = int(group["rejects"].sum())
        reasons = group.groupby("reason")["rejects"].sum().sort_values(ascending=False)
        grave = reasons.drop(
            labels=["validation ignored", "validation throttled", "validation queue full"], errors="ignore"
        )
        if grave.sum() >= 3:
            words = ", ".join(f"{reason} {int(n)}" for reason, n in reasons.head(3).items())
            finding = Finding(
                "look",
                "misbehaving",
                f"{short(peer)} sent {count:,} messages that {group['node'].nunique()} nodes rejected ({words})",
                str(peer),
                evidence={"rejects": count, "reasons": {str(k): int(v) for k, v in reasons.items()}},
            )
            result.append((count, finding))
    return capped([finding for _, finding in sorted(result, key=lambda row: -row[0])], "peers")


def _drops(found: Analysis, figures: Figures) -> list[Finding]:
    rpcs = figures["rpcs"]
    if not rpcs or not rpcs["dropped"]:
        return []
    share = rpcs["drop_ratio"]
    of_all = "" if share is None else f" ({share:.2%})"
    worst = found.tables["drops"].groupby("peer")["drops"].sum().sort_values(ascending=False)
    return [
        Finding(
            "bad" if share is None or share > 0.001 else "look",
            "dropped-rpcs",
            f"{rpcs['dropped']:,} RPCs{of_all} found the queue of their peer full, most of them "
            f"({int(worst.iloc[0]):,}) that of {short(worst.index[0])}",
            str(worst.index[0]),
            evidence={"dropped": rpcs["dropped"], "ratio": share},
        )
    ]


def _scores(found: Analysis) -> list[Finding]:
    scores = found.tables["peer_scores"]
    low = scores[(scores["mean"] < 0) & (scores["raters"] >= 1)].sort_values("mean")
    return capped(
        [
            Finding(
                "look",
                "low-score",
                f"{short(row.peer)} is scored {row.mean:.1f} on average by {int(row.raters)} nodes "
                f"(lowest {row.lowest:.1f})",
                str(row.peer),
                evidence={"mean": float(row.mean), "lowest": float(row.lowest), "raters": int(row.raters)},
            )
            for row in low.itertuples(index=False)
        ],
        "peers",
    )
