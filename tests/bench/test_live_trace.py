"""The check of a live run's report: it is right, or the run says what is wrong in it."""

from typing import Any

import pytest

from bench.tracing.live import Scene, wrong

T = 1_800_000_000_000_000


def scene() -> Scene:
    made = Scene()
    made.stopped, made.killed = "stopped", "killed"
    made.stop_us, made.continue_us, made.kill_us = T, T + 60_000_000, T + 200_000_000
    return made


def silent(node: str = "stopped", at_us: int = T - 400_000, seconds: float = 61.0) -> dict[str, Any]:
    return {"kind": "silent", "subject": node, "at_us": at_us, "text": "silent", "evidence": {"silent_s": seconds}}


def killed(node: str = "killed", at_us: int = T + 198_500_000) -> dict[str, Any]:
    return {"kind": "killed", "subject": node, "at_us": at_us, "text": "ended", "evidence": {}}


def test_a_report_that_names_both_is_right() -> None:
    other: dict[str, Any] = {"kind": "lossy", "subject": "stopped", "at_us": None, "text": "", "evidence": {}}
    assert wrong(scene(), [killed(), silent(), other]) == []


@pytest.mark.parametrize(
    ("findings", "fault"),
    [
        ([killed()], "the stopped node stopped has 0 findings"),
        ([silent()], "the killed node killed has 0 findings"),
        ([killed(), silent(), silent()], "2 findings of silence"),
        ([killed(), silent(), silent("other")], "said of a node that went on: silent"),
        ([killed(), silent(), killed("stopped")], "said of a node that went on: ended"),
        ([killed(), silent(at_us=T - 5_000_000, seconds=66)], "silence began 5.0 s before SIGSTOP"),
        ([killed(), silent(at_us=T + 1_000_000, seconds=60)], "silence began -1.0 s before SIGSTOP"),
        ([killed(), silent(seconds=75.0)], "ended 14.6 s after SIGCONT"),
        ([killed(), silent(seconds=50.0)], "ended -10.4 s after SIGCONT"),
        ([killed(at_us=T + 150_000_000), silent()], "the last event was 50.0 s before the kill"),
        ([killed(at_us=T + 201_000_000), silent()], "the last event was -1.0 s before the kill"),
    ],
)
def test_what_is_missing_or_wrong_is_reported(findings: list[dict[str, Any]], fault: str) -> None:
    assert any(fault in line for line in wrong(scene(), findings)), wrong(scene(), findings)
