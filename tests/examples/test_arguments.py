"""The examples say how to run them when their arguments are wrong, and do nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("words", [[], ["explode", "a", "b", "c", "d"]], ids=["none", "wrong"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_wrong_arguments_are_answered_with_what_to_type(path: Path, words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(path), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode in (1, 2)
    assert path.stem in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
