"""A report of live nodes: the numbers in it are those that the nodes counted themselves."""

import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from dep2p.spark_analytics.findings.findings import findings
from dep2p.spark_analytics.ingest.silver import raw_files, write_silver
from dep2p.spark_analytics.job import check_places
from dep2p.spark_analytics.metrics.analysis import AnalysisOptions, analyse
from dep2p.spark_analytics.metrics.summary import estimate, summary
from dep2p.spark_analytics.report.page import page
from dep2p.tracing.event_log import sample_below
from dep2p.tracing.settings import TraceSettings
from tests.pubsub.nodes import joined, pubsub_nodes, take, until

MESSAGES = 60


async def _traced(directory: Path, *, rpcs: bool) -> dict[str, dict[str, int]]:
    """Three nodes publish to each other; what each counted, by its id."""
    settings = TraceSettings(rpcs=rpcs, snapshot_s=0.5, clock_s=1.0)
    async with pubsub_nodes(3, trace_dir=directory, trace_settings=settings) as nodes:
        topics = await joined(nodes)
        program = await nodes[0].join("chat")  # it hears the node's own messages, too
        async with topics[0].subscribe() as a, topics[1].subscribe() as b, topics[2].subscribe() as c:
            async with program.subscribe() as at_program:
                for number in range(MESSAGES):
                    await topics[number % 3].publish(b"message %d" % number)
                for messages in (a, b, c):
                    await take(messages, MESSAGES * 2 // 3)
                await take(at_program, MESSAGES)
        await until(lambda: all(node.counters().get("clocks_readings", 0) >= 2 for node in nodes), within_s=60)
        await trio.sleep(0.6)
        return {node.peer_id: node.pubsub().counters() for node in nodes}


def test_the_report_of_live_nodes_has_their_own_numbers(spark: Any, tmp_path: Path) -> None:
    counted = trio.run(lambda: _traced(tmp_path / "traces", rpcs=True))
    assert check_places([str(tmp_path / "traces")]) == []
    write_silver(raw_files(spark, [str(tmp_path / "traces")]), str(tmp_path / "silver"))
    found = analyse(spark, str(tmp_path / "silver"), AnalysisOptions(settle_s=0.5))
    figures = summary(found)
    assert figures["nodes"] == 3 and figures["missing_events"] == 0 and len(found.tables["rejected_lines"]) == 0
    (topic,) = figures["topics"]
    assert topic["topic"] == "chat" and topic["messages"] == MESSAGES and topic["reliability"] == 1.0
    assert topic["deliveries"] == MESSAGES * 2 and topic["local_deliveries"] == MESSAGES // 3
    assert "to own programs" in page(found, figures, [], title="t", made_by="m")
    copies = found.tables["copies"].groupby("node")[["publishes", "firsts", "duplicates", "rejects"]].sum()
    for node, counts in counted.items():
        row = copies.loc[node]
        assert row["publishes"] == counts["router_published"] == MESSAGES // 3
        assert row["firsts"] == counts["messages_delivered"] == MESSAGES * 2 // 3
        assert row["duplicates"] == counts["router_duplicates"]
        assert row["rejects"] == 0
    assert sum(counts.get("messages_delivered_local", 0) for counts in counted.values()) == MESSAGES // 3
    rpcs = figures["rpcs"]
    assert rpcs is not None and rpcs["sent"] and rpcs["received"] and not rpcs["dropped"]
    assert len(found.tables["peer_scores"]) == 3 and len(found.tables["mesh_sessions"])
    worst = [item for item in findings(found, figures) if item.level == "bad"]
    assert not worst, worst
    assert not found.offsets, "one machine, one clock"


def test_without_rpcs_the_rest_of_the_report_is_the_same(spark: Any, tmp_path: Path) -> None:
    trio.run(lambda: _traced(tmp_path / "traces", rpcs=False))
    write_silver(raw_files(spark, [str(tmp_path / "traces")]), str(tmp_path / "silver"))
    found = analyse(spark, str(tmp_path / "silver"), AnalysisOptions(settle_s=0.5))
    figures = summary(found)
    assert figures["topics"][0]["reliability"] == 1.0 and figures["rpcs"] is None
    assert not [item for item in findings(found, figures) if item.level == "bad"]


async def _sampled(directory: Path, shares: tuple[float, ...]) -> None:
    async with pubsub_nodes(len(shares)) as nodes:
        topics = await joined(nodes)
        for node, share in zip(nodes, shares, strict=True):
            await node.tracer.start(directory, TraceSettings(sample=share, snapshot_s=0, clock_s=0))
        async with topics[1].subscribe() as messages:
            for number in range(MESSAGES):
                await topics[0].publish(b"message %d" % number)
            await take(messages, MESSAGES)
        await trio.sleep(2)
        for node in nodes:
            await node.tracer.stop("enough")


@pytest.mark.parametrize(("shares", "word"), [((0.5, 0.5), "sampled"), ((1.0, 0.5), "mixed-samples")])
def test_a_report_of_a_sample_says_so(spark: Any, tmp_path: Path, shares: tuple[float, ...], word: str) -> None:
    trio.run(lambda: _sampled(tmp_path / "traces", shares))
    write_silver(raw_files(spark, [str(tmp_path / "traces")]), str(tmp_path / "silver"))
    found = analyse(spark, str(tmp_path / "silver"), AnalysisOptions(settle_s=0.5))
    figures = summary(found)
    kinds = [item.kind for item in findings(found, figures)]
    assert figures["sample"] == 0.5 and word in kinds and len({"sampled", "mixed-samples"} & {*kinds}) == 1
    (topic,) = figures["topics"]
    estimated = figures["estimated"]
    assert (estimated is not None) == (word == "sampled")
    if estimated is not None:
        (said,) = [item.text for item in findings(found, figures) if item.kind == "sampled"]
        assert estimated["messages"]["count"] == 2 * topic["messages"]
        assert estimated["topics"] == [{"topic": topic["topic"], **estimated["messages"]}]
        assert f"about {2 * topic['messages']:,} messages, {2 * topic['deliveries']:,} deliveries" in said
        assert f"of about {2 * topic['messages']:,}" in page(found, figures, [], title="t", made_by="m")
        assert 0 < topic["messages"] < MESSAGES and topic["reliability"] == 1.0
    else:
        assert topic["messages"] == MESSAGES and topic["reliability"] is not None and topic["reliability"] < 1.0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_what_is_estimated_is_right_within_the_error_19_times_of_20(share: float) -> None:
    right = 0
    for seed in range(400):
        rng = Random(seed)
        kept = sum(zlib.crc32(rng.randbytes(20)) < sample_below(share) for _ in range(3_000))
        found = estimate(kept, share)
        right += abs(found["count"] - 3_000) <= found["error"]
    assert 0.91 < right / 400 < 0.985
