"""Findings about the trace itself: clocks, gaps, samples, files."""

from typing import Final

from dep2p.spark_analytics.findings.model import Finding, capped, short
from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.figures import ESTIMATE_NAMES, Estimates, Figures
from dep2p.traces.schema import SCHEMA_VERSION

_CLOCK_US: Final = 1_000_000
"""Microseconds from which a clock that is off is a finding of its own."""


def of_trace(found: Analysis, figures: Figures) -> list[Finding]:
    """Faults of the trace itself, and limits of its figures."""
    return [
        *_clocks(found),
        *_gaps(found),
        *_samples(found, figures["estimated"]),
        *_lost_events(found),
        *_files(found),
        *_versions(found),
        *_rejected_lines(found),
        *_key_clashes(found),
    ]


def _clocks(found: Analysis) -> list[Finding]:
    result = [
        Finding(
            "look",
            "clock",
            f"the clock of {short(node)} is {abs(ahead) / 1e6:,.1f} s {'ahead' if ahead > 0 else 'behind'}; "
            f"its times are corrected (from {found.clocks_from})",
            node,
            evidence={"ahead_us": ahead},
        )
        for node, ahead in sorted(found.offsets.items(), key=lambda item: -abs(item[1]))
        if abs(ahead) >= _CLOCK_US
    ]
    small = sum(abs(ahead) < _CLOCK_US for ahead in found.offsets.values())
    if small:
        result.append(
            Finding(
                "note",
                "clock",
                f"{small} clocks were off by less than a second and are corrected (from {found.clocks_from})",
                evidence={"clocks": small},
            )
        )
    return capped(result, "clocks")


def _gaps(found: Analysis) -> list[Finding]:
    holes = found.tables["runs"][found.tables["runs"]["missing"] > 0].sort_values("missing", ascending=False)
    result = [
        Finding(
            "note",
            "gap",
            f"{int(row.missing):,} events of {short(row.node)} are missing in its files (cut, lost, or not copied yet)",
            str(row.node),
            evidence={"missing": int(row.missing), "run": int(row.run)},
        )
        for row in holes.itertuples(index=False)
    ]
    return capped(result, "nodes")


def _samples(found: Analysis, estimated: Estimates | None) -> list[Finding]:
    samples = found.tables["samples"]
    if len(samples) > 1:
        shares = ", ".join(f"{row.share:.3g} at {int(row.nodes)}" for row in samples.itertuples(index=False))
        return [
            Finding(
                "look",
                "mixed-samples",
                f"nodes traced different shares of the messages ({shares}): those that some left out look undelivered "
                "there",
                evidence={"shares": samples["share"].tolist(), "nodes": samples["nodes"].tolist()},
            )
        ]
    if not estimated:
        return []
    return [
        Finding(
            "note",
            "sampled",
            f"the nodes traced {estimated['share']:.3g} of the messages, the same ones everywhere. Of those alone "
            "are all counts of published, reliable and queued messages, their deliveries, copies, rejects, order "
            f"violations and RPCs{_totals(estimated)}. Latencies, ratios, hops, meshes, requests, streams and "
            "sessions are not changed by it",
            evidence={"share": estimated["share"]},
        )
    ]


def _totals(estimated: Estimates) -> str:
    known = [f"{estimated[name]['count']:,} {name.replace('_', ' ')}" for name in ESTIMATE_NAMES if name in estimated]
    return f"; about {', '.join(known)} in all, estimated" if known else ""


def _lost_events(found: Analysis) -> list[Finding]:
    return [
        Finding(
            "note",
            "not-written",
            f"{short(row.node)} did not write {int(row.lost):,} events ({row.reason})",
            str(row.node),
            evidence={"lost": int(row.lost), "reason": row.reason},
        )
        for row in found.tables["lost_events"].itertuples(index=False)
    ]


def _files(found: Analysis) -> list[Finding]:
    doubled = [
        Finding("note", "duplicate-file", f"counted once, left out: {path}", path) for path in found.duplicate_sources
    ]
    return capped(doubled, "files")


def _versions(found: Analysis) -> list[Finding]:
    result: list[Finding] = []
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
    return result


def _rejected_lines(found: Analysis) -> list[Finding]:
    return [
        Finding(
            "note",
            "bad-lines",
            f"{int(row.rows):,} lines in {row.source}: {row.error}",
            row.source,
            evidence={"rows": int(row.rows), "example": row.example},
        )
        for row in found.tables["rejected_lines"].itertuples(index=False)
    ]


def _key_clashes(found: Analysis) -> list[Finding]:
    return [
        Finding("note", "key-clash", f"{topic} and {clash} have the same key and are counted together")
        for topic, clash in found.key_clashes
    ]
