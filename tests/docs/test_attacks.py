"""The page about attacks has a row for each attack of the benchmark, with code and tests that exist."""

import re
from pathlib import Path

import pytest

from bench.hostile.benchmark import SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explanation/attacks.md").read_text()
_, _, SECTION = PAGE.partition("## Each attack of the benchmark\n")
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in SECTION.partition("\n## ")[0].splitlines()
    if line.startswith("| `") and (cells := [cell.strip() for cell in line.strip("|").split(" | ")])
}
BY = {"stranger": "stranger", "member": "member", "caller": "own program"}


def test_the_table_has_the_attacks_of_the_benchmark_in_their_order() -> None:
    assert list(ROWS) == list(SCENARIOS)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_row_says_who_attacks_what_stops_it_where_and_which_test_holds_it(name: str) -> None:
    by, does, defence, where, held_by, _result = ROWS[name]
    assert by == BY[SCENARIOS[name].by]
    assert does.endswith(".")
    assert defence.endswith(".")
    paths = re.findall(r"`([\w/.]+)`", where)
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert re.findall(r"`test_\w+`", held_by)  # tests/docs/test_paths.py looks for them
