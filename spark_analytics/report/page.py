"""The page: figures, findings and plots of one analysis, in one HTML file that fetches nothing."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from dep2p.spark_analytics.findings.model import Finding, clock_time
from dep2p.spark_analytics.metrics.analysis import Analysis
from dep2p.spark_analytics.metrics.figures import Figures
from dep2p.spark_analytics.report import sections, tables
from dep2p.spark_analytics.report.svg import escape
from dep2p.spark_analytics.report.tables import ms_text, share_text

_OF_A_KIND: Final = 4
"""Findings of a kind that are shown at once: a partition alone makes dozens of nodes lossy."""

_STYLE: Final = """
:root{--ink:#1c2430;--soft:#5a6675;--line:#dfe4ea;--paper:#fff;--card:#f7f9fb;--bad:#b3261e;--look:#a86200;--note:#3d6b8f}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa6b4;--line:#333c48;--paper:#14181e;--card:#1c222a;
--bad:#ff8a80;--look:#ffc266;--note:#8fc1e8}}
*{box-sizing:border-box}body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;
max-width:1240px;padding:24px}h1{font-size:24px;margin:0}h2{font-size:18px;margin:36px 0 10px}
h3{font-size:15px;margin:0 0 2px}details{margin:8px 0}
summary{cursor:pointer;color:var(--soft)}.sub{color:var(--soft);margin:2px 0 18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:21px;font-weight:600}.tile span{color:var(--soft);font-size:13px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(500px,1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}
figure p.why{color:var(--soft);font-size:13px;margin:0 0 6px}svg{width:100%;height:auto;display:block}
table{border-collapse:collapse;width:100%;font-size:13.5px}th,td{text-align:left;padding:5px 9px;
border-bottom:1px solid var(--line);vertical-align:top}th{color:var(--soft);font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.wide{overflow-x:auto}
.bad{color:var(--bad);font-weight:600}.look{color:var(--look);font-weight:600}.note{color:var(--note)}
code{font-size:12.5px;color:var(--soft);overflow-wrap:anywhere}
.legend{margin:0 0 2px;font-size:12.5px;color:var(--soft)}.legend span{margin-right:12px;white-space:nowrap}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.nothing{color:var(--soft);padding:40px 0;text-align:center}
svg .grid{stroke:var(--line);stroke-width:1}svg .axis,svg .frame{stroke:var(--soft);fill:none}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}svg .label{font-size:12px}svg .small{font-size:10px}
svg .mark{stroke:var(--bad);stroke-dasharray:3 3}footer{margin-top:40px;color:var(--soft);font-size:13px}
"""


def page(found: Analysis, figures: Figures, findings: Sequence[Finding], *, title: str, made_by: str) -> str:
    """Return the whole HTML text."""
    seconds = figures["seconds"]
    sub = (
        f"{clock_time(found.first_t)} to {clock_time(found.last_t)} UTC ({_duration(seconds)}), "
        f"{figures['events']:,} events of {figures['nodes']:,} nodes"
    )
    body = [
        f"<h1>{escape(title)}</h1><p class=sub>{escape(sub)}</p>",
        _tiles(figures),
        "<h2 id=findings>Findings</h2>",
        listed(findings),
        "<h2 id=spread>How messages spread</h2>",
        _grid(sections.propagation(found, figures)),
        "<h2 id=mesh>Mesh</h2>",
        _grid(sections.meshes(found)),
        "<h2 id=loss>Loss</h2>",
        _grid(sections.losses(found)),
        *(["<h2 id=apps>Apps</h2>", _grid(cards)] if (cards := sections.apps(found)) else []),
        "<h2 id=numbers>Numbers</h2>",
        *tables.all_tables(found, figures),
        f"<footer>{escape(made_by)}. The numbers behind the plots: <code>tables/*.parquet</code>, "
        "<code>summary.json</code> and <code>findings.json</code> beside this file. What each figure means: "
        "docs/reference/traces.md.</footer>",
    ]
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _grid(items: Iterable[tuple[str, str, str]]) -> str:
    cards = "".join(
        f"<figure><h3>{escape(name)}</h3><p class=why>{escape(why)}</p>{content}</figure>"
        for name, why, content in items
    )
    return f"<div class=grid2>{cards}</div>"


def _tiles(figures: Figures) -> str:
    topics = figures["topics"]
    expected = sum(topic["expected"] for topic in topics)
    reached = sum((topic["reliability"] or 0) * topic["expected"] for topic in topics)
    deliveries = sum(topic["deliveries"] for topic in topics)
    copies = sum((topic["duplicates_per_delivery"] or 0) * topic["deliveries"] for topic in topics)
    slowest = max(topics, key=lambda topic: (topic["latency_ms"] or {"p99": -1.0})["p99"], default=None)
    latency = slowest["latency_ms"] if slowest else None
    rpcs = figures["rpcs"]
    estimated = figures["estimated"]
    tiles = [
        (
            f"{figures['nodes']:,}",
            "nodes" + (f", {figures['runs']:,} runs" if figures["runs"] != figures["nodes"] else ""),
        ),
        (
            f"{sum(topic['messages'] for topic in topics):,}",
            (
                f"traced messages of about {estimated['messages']['count']:,}"
                if estimated and "messages" in estimated
                else "messages"
            )
            + f" on {len(topics):,} topic{'s' if len(topics) != 1 else ''}",
        ),
        (share_text(reached / expected if expected else None), f"delivered, of {expected:,} due"),
        (ms_text(latency["p50"]) if latency else "–", "latency p50" + (", slowest topic" if len(topics) > 1 else "")),
        (ms_text(latency["p99"]) if latency else "–", "latency p99" + (", slowest topic" if len(topics) > 1 else "")),
        (f"{copies / deliveries:.2f}" if deliveries else "–", "duplicates per delivery"),
        (share_text(rpcs["control_overhead"]) if rpcs else "–", "of bytes are control"),
    ]
    delivery = figures.get("delivery")
    if delivery:
        tiles.append((share_text(delivery["loss"]), f"of {delivery['messages']:,} reliable messages lost"))
    cells = "".join(f"<div class=tile><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in tiles)
    return f"<div class=tiles>{cells}</div>"


def listed(findings: Sequence[Finding]) -> str:
    """The findings as tables: the first of each kind, the others behind a click."""
    if not findings:
        return "<p>Nothing that needs a look: everything was delivered, no node was silent, no mesh was parted.</p>"
    seen: Counter[str] = Counter()
    shown: list[Finding] = []
    more: list[Finding] = []
    for item in findings:
        seen[item.kind] += 1
        (shown if seen[item.kind] <= _OF_A_KIND else more).append(item)
    found = _finding_table(shown)
    if more:
        kinds = ", ".join(dict.fromkeys(item.kind for item in more))
        found += f"<details><summary>{len(more):,} more: {escape(kinds)}</summary>{_finding_table(more)}</details>"
    return found


def _finding_table(findings: Sequence[Finding]) -> str:
    rows = "".join(
        f"<tr><td class={item.level}>{item.level}</td><td>{escape(item.kind)}</td><td>{escape(item.text)}</td>"
        f"<td><code>{escape(_evidence(item.evidence))}</code></td></tr>"
        for item in findings
    )
    return f"<div class=wide><table><tr><th><th>what<th>finding<th>evidence</tr>{rows}</table></div>"


def _evidence(evidence: dict[str, object]) -> str:
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in evidence.items()
    )[:400]
