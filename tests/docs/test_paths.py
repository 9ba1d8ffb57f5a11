"""Documents name files that exist, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = "dep2p|protocols|gossipsub|cli|spark_analytics|bench|tests|docs|packaging"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)(?: -> [\w./-]+)?`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in target]
    assert not [target for target in targets if not (document.parent / target).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_of_this_repository_exist(document: Path) -> None:
    """`dep2p/host/host.py`, `dep2p/daemon/http/` or `tests/queues`, written between back-quotes."""
    missing = [path for path in PATH.findall(document.read_text()) if not (ROOT / path).exists()]
    assert not missing


def test_each_package_is_on_the_page_about_architecture() -> None:
    page = (ROOT / "docs/ARCHITECTURE.md").read_text()
    packages = {path.parent.name for path in (ROOT / "dep2p").glob("*/__init__.py")}
    assert not [name for name in sorted(packages) if not re.search(rf"\b{name}\b", page)]


def test_the_table_of_contributing_names_modules_that_exist() -> None:
    """`…/topics.py` stands for the folder of the first path of its column."""
    (table,) = re.findall(r"\n\n\| \| pure core \|.*?\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    rows = [line.split("|")[2:-1] for line in table.strip().splitlines()[2:]]
    missing: list[str] = []
    for cells in zip(*rows, strict=True):
        folder = Path()
        for name in re.findall(r"`(.+?)`", "".join(cells)):
            if not name.startswith("…/") and folder == Path():
                folder = Path(name).parent
            path = folder / name.removeprefix("…/") if name.startswith("…/") else Path(name)
            if not (ROOT / path).exists():
                missing.append(str(path))
    assert not missing


def test_tests_that_documents_name_exist() -> None:
    """`part: `a_name`` in tables of bug reports, and `test_a_name`; `…` stands for the rest of a name."""
    there = "\n".join(
        f"{name}\n"
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r"^\s*(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE)
    )
    missing: list[str] = []
    for document in (ROOT / "docs/explanation").glob("*.md"):
        text = document.read_text()
        names = re.findall(r"`test_([a-z0-9_…]+)`", text)
        if document.stem in ("queues", "ordering"):
            names += re.findall(r"(?<=[a-z]: )`([0-9a-z]+_[a-z0-9_…]+)`", text)
        for name in names:
            pattern = rf"^(?:\w*_)?{re.escape(name.removesuffix('…'))}" + (r"\w*$" if name.endswith("…") else "$")
            if not re.search(pattern, there, re.MULTILINE):
                missing.append(f"{document.name}: {name}")
    assert not missing
