"""The examples in docstrings, behind ``>>>``, hold."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORES = ("protocols", "gossipsub", "cli")


def modules_with_examples() -> list[str]:
    files = [path for folder in ("dep2p", *CORES) for path in sorted((ROOT / folder).rglob("*.py"))]
    named = [path.relative_to(ROOT).with_suffix("") for path in files if ">>> " in path.read_text("utf-8")]
    plain = [".".join(path.parts) for path in named]
    return [name if name.startswith("dep2p.") else f"dep2p.{name}" for name in plain]


@pytest.mark.parametrize("module", modules_with_examples())
def test_the_examples_of_a_module_hold(module: str) -> None:
    found = doctest.testmod(import_module(module))
    assert found.attempted and not found.failed
