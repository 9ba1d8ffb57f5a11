"""docs/reference/python/ is what the docstrings say, and has every public name; errors can be imported."""

import builtins
import functools
import inspect
import re
import typing
from pathlib import Path

import pytest

import dep2p
import dep2p.client
from dep2p import api_reference

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/reference/python"
NAMES = list(api_reference.public_names())
PAGES = ["README.md", *(f"{page}.md" for page in api_reference.PAGES)]
GUIDES = sorted([*(ROOT / "docs/howto").glob("*.md"), *(ROOT / "docs/tutorial").glob("*.md"), ROOT / "README.md"])
ERROR = re.compile(r"(?<![\w.])([A-Z]\w*Error)\b")


@functools.cache
def made() -> dict[str, str]:
    return api_reference.reference(FOLDER)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_what_the_generator_makes(page: str) -> None:
    assert (FOLDER / page).read_text("utf-8") == made()[page], "python -m dep2p.api_reference docs/reference/python"


def test_no_page_is_left_that_the_generator_does_not_make() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == {*made()} == {*PAGES}


def test_every_public_name_has_one_entry() -> None:
    headings = [name for text in made().values() for name in re.findall(r"^## (\w+)$", text, re.MULTILINE)]
    assert sorted(name for name in headings if name in NAMES) == sorted(NAMES)
    assert all(f"[{name}](" in made()["README.md"] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_and_its_methods_have_docstrings(name: str) -> None:
    value = api_reference.value_of(name)
    if isinstance(value, str) or typing.get_origin(value):
        return  # a version, or a choice of texts
    text = value.__doc__ or ""
    # Dataclasses and named tuples without a docstring get their signature as one.
    assert text and not text.startswith(f"{name}("), "write a docstring"
    if inspect.isclass(value):
        members = api_reference.public_members(value)
        assert not [each for each in members if not api_reference.documentation(value, each, members[each])]


def test_names_of_parts_exist() -> None:
    """A method that is gone must not stay in the table of those that apps do not call."""
    for cls, methods in api_reference.PARTS.items():
        value = api_reference.value_of(cls)
        assert inspect.isclass(value)
        source = "".join(inspect.getsource(base) for base in api_reference.own_bases(value))
        gone = [each for each in methods.split() if not hasattr(value, each) and f"self.{each}: " not in source]
        assert not gone, cls
    assert not [name for name in (*api_reference.OTHER_PAGES, *api_reference.FIRST) if name not in NAMES]


def documented_errors() -> dict[str, list[str]]:
    """The errors that guides, reference pages and docstrings of public names write, with the places."""
    found: dict[str, list[str]] = {}
    pages = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in GUIDES}
    for place, text in {**pages, **made()}.items():
        for name in ERROR.findall(text):
            found.setdefault(name, []).append(place)
    return found


def test_every_error_that_a_page_names_can_be_imported() -> None:
    named = documented_errors()
    assert len(named) > 60
    errors = {name: named[name] for name in named if name not in dep2p.__all__ and not hasattr(builtins, name)}
    assert not errors, "export it from dep2p, or name an error that is exported"


def test_a_client_s_errors_come_from_its_module_too() -> None:
    """Those in the docstrings of dep2p.client's names."""
    named: set[str] = set()
    for name in dep2p.client.__all__:
        value = api_reference.value_of(name)
        if inspect.isclass(value) and value.__module__.startswith("dep2p.client"):
            members = api_reference.public_members(value).values()
            named |= {error for each in (value, *members) for error in ERROR.findall(each.__doc__ or "")}
    named = {name for name in named if not hasattr(builtins, name)}
    assert len(named) > 20
    assert not named - set(dep2p.client.__all__)


def test_each_error_of_the_page_has_a_code_and_advice_or_is_a_base_or_local() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\(#\w+\) \| .*? \| (D\d{4})? ?\| (.*?) ?\|$", made()["errors.md"], re.MULTILINE)
    without = {name for name, code, advice in rows if not code or not advice}
    assert len(rows) > 60
    bases = {"Dep2pError", "WireError", "QueueError", "ControlError"}
    local = {"WrongTypeError", "LocalProtocolError", "HostFailedError", "RejectMessage", "RetryMessage"}
    assert without == bases | local
