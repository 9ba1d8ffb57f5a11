"""The README's examples run as written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_two_commands_are_make_targets() -> None:
    first_block = re.search(r"```\n(.*?)```", README, re.DOTALL)
    assert first_block is not None
    commands = [line.split("#")[0].split() for line in first_block[1].splitlines()]
    assert commands == [["make", "run"], ["make", "test"]]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"run", "test"} <= set(targets)


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.real
def test_the_node_example_prints_its_answers() -> None:
    (example,) = [block for block in PYTHON_BLOCKS if "Node.open" in block]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", example], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["b'hello bob'", "b'abab'"]
