"""The wheel holds every module of the checkout, and only under dep2p/."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("protocols", "gossipsub", "cli", "spark_analytics")


def checkout_modules() -> set[str]:
    """Module paths as the wheel must hold them."""
    own = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "dep2p").rglob("*.py")
        if path.relative_to(ROOT / "dep2p").parts[0] not in LINKED
    }
    linked = {f"dep2p/{path.relative_to(ROOT).as_posix()}" for name in LINKED for path in (ROOT / name).rglob("*.py")}
    return own | linked


@pytest.mark.real
def test_wheel_contents(tmp_path: Path) -> None:
    # A copy, since setuptools ships whatever an earlier build left in build/lib.
    tree = tmp_path / "tree"
    leftovers = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "node_modules", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=leftovers)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == checkout_modules()
    assert {re.sub(r"^dep2p-.*\.dist-info$", "dist-info", name.split("/")[0]) for name in names} == {
        "dep2p",
        "dist-info",
    }
    assert "dep2p/py.typed" in names
