"""Names in the source use the words of docs/explanation/glossary.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = (ROOT / "docs/explanation/glossary.md").read_text()
FOLDERS = ("dep2p", "protocols", "gossipsub", "cli", "spark_analytics", "bench", "examples")

# Names that may use a word of the table, each with its reason.
EXCEPTIONS = {
    "_VERBS": "verbs is what NSQ's protocol calls its commands",
}


def words_of(name: str) -> list[str]:
    """The words of an identifier, in lower case: `_SetTold2` is `set`, `told`, `2`."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def refused_terms() -> list[str]:
    """The left column of the table of words that are not used."""
    _, _, table = GLOSSARY.partition("## Words that we do not use")
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return [term for row in rows for term in re.findall(r"`(\w+)`", row)]


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case _:
                pass


@pytest.fixture(scope="module")
def names() -> dict[str, str]:
    """Each name that the source defines, with one place where it does."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = str(path.relative_to(ROOT))
            found.setdefault(path.stem, where)
            for name, line in defined_names(ast.parse(path.read_text())):
                found.setdefault(name, f"{where}:{line}")
    return found


@pytest.mark.parametrize("term", refused_terms())
def test_no_name_has_a_word_that_the_glossary_replaces(term: str, names: dict[str, str]) -> None:
    refused = "_" + "_".join(words_of(term)) + "_"
    used = {
        name: where
        for name, where in names.items()
        if refused in "_" + "_".join(words_of(name)) + "_" and name not in EXCEPTIONS
    }
    assert not used, f"docs/explanation/glossary.md has another word for {term!r}"


def test_each_word_of_the_glossary_has_a_meaning_and_stands_there_once() -> None:
    tables, _, _ = GLOSSARY.partition("## Words that we do not use")
    rows = [row.split(" | ") for row in re.findall(r"^\| (?!Word)(.*) \|$", tables, re.MULTILINE)]
    assert all(len(row) in (2, 3) and row[1] for row in rows)
    terms = [term for row in rows for term in row[0].split(", ")]
    assert len(terms) == len({*terms}) > 100
