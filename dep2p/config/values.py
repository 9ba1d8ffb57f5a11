"""How one configuration value is read: from TOML, from text (environment, flags), and what is wrong when it is not."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import os
import textwrap
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args, get_origin, get_type_hints

from dep2p.encoding.shapes import is_sequence
from dep2p.errors import ConfigError

_TRUE: Final = {"true": True, "yes": True, "on": True, "1": True}
_FALSE: Final = {"false": False, "no": False, "off": False, "0": False}
_WORDS: Final[dict[object, str]] = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path",
}


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One configuration key, derived from a dataclass field."""

    section: str
    name: str
    kind: object
    """``str``, ``bool``, ``int``, ``float``, ``Path``, ``tuple[str, ...]`` or a ``Literal`` of texts."""
    default: object
    doc: str

    @property
    def path(self) -> str:
        """``section.name``, as flags and errors write it."""
        return f"{self.section}.{self.name}"

    @property
    def expected(self) -> str:
        """A value's type in words, for errors."""
        if get_origin(self.kind) is Literal:
            return "one of " + ", ".join(f'"{choice}"' for choice in get_args(self.kind))
        if get_origin(self.kind) is tuple:
            return "a list of texts"
        return _WORDS[self.kind]


def keys_of(section: str, cls: type) -> dict[str, ConfigKey]:
    """The keys of a section, by name, in the order of the dataclass."""
    hints = get_type_hints(cls)
    docs = field_docs(cls)
    return {
        field.name: ConfigKey(section, field.name, hints[field.name], field.default, docs.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.init
    }


@cache
def field_docs(cls: type) -> types.MappingProxyType[str, str]:
    """The texts that stand below the fields of a class in its source; empty when the source is not there."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return types.MappingProxyType({})
    docs: dict[str, str] = {}
    first = tree.body[0]
    for statement, following in itertools.pairwise(first.body if isinstance(first, ast.ClassDef) else ()):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = inspect.cleandoc(following.value.value)
    return types.MappingProxyType(docs)


def nearest(wrong: str, right: Iterable[str]) -> str:
    """A clause that names the nearest right name, or all of them when none is near."""
    names = list(right)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    if close:
        return f'did you mean "{close[0]}"?'
    return "there is: " + ", ".join(names)


def from_toml(key: ConfigKey, value: object, where: str) -> object:
    """Check a value that has a type already. Raises :class:`ConfigError` that starts with ``where``."""
    given = value
    _check_representable(value, where)
    origin = get_origin(key.kind)
    if origin is Literal:
        if isinstance(value, str) and value in get_args(key.kind):
            return value
    elif origin is tuple:
        if is_sequence(value):
            texts = tuple(item for item in value if isinstance(item, str))
            if len(texts) == len(value):
                return texts
    elif key.kind is Path:
        if isinstance(value, str | Path) and str(value):
            return Path(value).expanduser()
    elif key.kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    elif key.kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(value, str if key.kind is str else bool):
        return value
    raise ConfigError(f"{where}: {_shown(given)} is not {key.expected}. Write {example(key)}.")


def _check_representable(value: object, where: str) -> None:
    """Raises :class:`ConfigError` for numbers beyond TOML's, and for texts that no file name can hold."""
    for item in value if is_sequence(value) else (value,):
        if isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise ConfigError(f"{where}: a number of {item.bit_length()} bits: at most 64 are read")
        if isinstance(item, str | Path):
            text = str(item)
            if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(f"{where}: the text holds a NUL character, or bytes that are not UTF-8")
            if text.startswith("~") and os.path.expanduser(text) == text:
                raise ConfigError(f"{where}: no user of that name has a home directory here")


def from_text(key: ConfigKey, text: str, where: str) -> object:
    """Read a value from the text of a variable or flag; lists are separated by commas.

    Raises :class:`ConfigError` that starts with ``where``.
    """
    stripped = text.strip()
    value: object = stripped
    if get_origin(key.kind) is tuple:
        value = [item.strip() for item in stripped.split(",") if item.strip()]
    elif key.kind is bool:
        value = {**_TRUE, **_FALSE}.get(stripped.lower(), stripped)
    elif key.kind is int or key.kind is float:
        try:
            value = int(stripped) if key.kind is int else float(stripped)
        except ValueError:
            value = stripped
    return from_toml(key, value, where)


def as_toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:_}"
    if isinstance(value, int | float):
        return str(value)
    if is_sequence(value):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def example(key: ConfigKey) -> str:
    """A line that would be right, with the default."""
    return f"`{key.name} = {as_toml(key.default)}`, for example"


def _shown(value: object) -> str:
    shown = as_toml(value) if isinstance(value, str | bool | int | float) else f"a {type(value).__name__}"
    return shown if len(shown) <= 80 else shown[:77] + "..."
