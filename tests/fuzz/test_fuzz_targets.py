"""Coverage-guided fuzzing of each reader of foreign bytes, from a kept corpus; what was found stays a case."""

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.engine import CORPUS, FINDINGS, FuzzFindingError, fuzz, load, replay, save
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", list(TARGETS))
def test_each_kept_input_and_each_earlier_finding_is_stood(name: str) -> None:
    """Fast, and without the marker: what was found once is a case of the ordinary tests."""
    replay(name, TARGETS[name], [*load(FINDINGS, name), *load(CORPUS, name), *TARGETS[name].seeds])


@pytest.mark.fuzz
@pytest.mark.parametrize("name", list(TARGETS))
def test_no_input_ends_in_an_error_that_is_not_promised(name: str) -> None:
    seed = random.SystemRandom().getrandbits(48)
    seconds = float(os.environ.get("DEP2P_FUZZ_S", "2"))
    try:
        report = fuzz(name, TARGETS[name], seconds, random.Random(seed))
    except FuzzFindingError as finding:
        if os.environ.get("DEP2P_FUZZ_KEEP"):
            save(FINDINGS, name, [*load(FINDINGS, name), finding.data])
        raise
    if os.environ.get("DEP2P_FUZZ_KEEP"):
        save(CORPUS, name, report.corpus)
    if place := os.environ.get("DEP2P_FUZZ_REPORT"):
        with Path(place).open("a", encoding="utf-8") as file:
            print(report, file=file)
    print(report)
    assert report.executions > 10 and report.lines > 0
