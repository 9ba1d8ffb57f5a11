"""docs/ARCHITECTURE.md is true: its classes are in the files that it names, and its arrows are the imports."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/ARCHITECTURE.md").read_text()
CORES = ("protocols", "gossipsub", "cli", "spark_analytics")


def top_level_names(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_classes_are_in_the_files_that_the_page_names() -> None:
    """`Messaging` (`dep2p/messaging/service.py`); a method, `Node.request`, stands for its class."""
    named = re.findall(r"`([A-Z]\w+)(?:\.\w+)?`\s+\(`([\w/]+\.py)`", PAGE)
    assert len(named) > 15
    assert not [(name, path) for name, path in named if name not in top_level_names(ROOT / path)]


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "dep2p" else parts[0]


def imports_between_packages() -> dict[tuple[str, str], str]:
    """(importing package, imported package) → a file that does it; imports for types only count too."""
    found: dict[tuple[str, str], str] = {}
    roots = {path.parent.name: path.parent for path in (ROOT / "dep2p").glob("*/__init__.py")}
    for name, folder in roots.items():
        for path in folder.resolve().rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for module in modules:
                    if module.startswith(("dep2p.", "libp2p")):
                        found[name, package_of(module)] = str(path.relative_to(ROOT))
    return found


def test_arrows_are_the_imports() -> None:
    diagram = re.search(r"```mermaid\n(.*?)```", PAGE, re.DOTALL)
    assert diagram is not None
    title = dict(re.findall(r"(\w+)\[+\(*\"([\w-]+)", diagram[1]))
    arrows = {(left, right) for left, right in re.findall(r"(\w+)(?:\[.*?\])? --> (\w+)", diagram[1])}
    arrows = {(title[left].removeprefix("py-"), title[right].removeprefix("py-")) for left, right in arrows}
    packages = {name for arrow in arrows for name in arrow}
    imports = {pair: path for pair, path in imports_between_packages().items() if {*pair} <= packages}
    assert not [arrow for arrow in sorted(arrows) if arrow not in imports], "arrows without an import"

    reached = set(arrows)
    while more := {(a, d) for a, b in reached for c, d in reached if b == c} - reached:
        reached |= more
    surprising = {pair: path for pair, path in imports.items() if pair not in reached and pair[0] != pair[1]}
    assert not surprising, "imports that no arrows lead to"
