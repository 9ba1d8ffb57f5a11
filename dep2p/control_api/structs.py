"""Reads structs from JSON objects, with one sentence that names the wrong field and the expected value. Pure."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, TypeVar

import msgspec
from msgspec import Struct, inspect

S = TypeVar("S", bound=Struct)

_AT: Final = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_STEP: Final = re.compile(r"\.?([^.\[\]]+)|\[[^\]]*\]")
_NAME_CHARS: Final = 80


class FieldError(ValueError):
    """The error for a field that is unknown, missing, or of a wrong type or bounds."""

    def __init__(self, text: str, field: str) -> None:
        super().__init__(text)
        self.field = field
        """The field's name; empty when several fields do not go together."""


def convert_fields(fields: Mapping[str, object], kind: type[S], label: str) -> S:
    """Make a ``kind`` from the fields of a JSON object. ``label`` begins the sentence of a refusal.

    Raises :class:`FieldError` with a sentence that names the field and what is expected.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), kind, label) from None


def _field_error(text: str, kind: type[Struct], label: str) -> FieldError:
    found = _AT.fullmatch(text)
    assert found is not None
    what, path = str(found["what"]), str(found["path"] or "")
    before = f"{path}." if path else ""
    if unknown := _UNKNOWN.fullmatch(what):
        names = _names_at(kind, path)
        near = get_close_matches(unknown[1], names, 1)
        known = f"there are {', '.join(names)}" if names else "there are none"
        hint = f'did you mean "{near[0]}"?' if near else known
        name = f"{before}{unknown[1]}"[:_NAME_CHARS]
        return FieldError(f"{label}: there is no field {name!r}: {hint}", name)
    if missing := _MISSING.fullmatch(what):
        name = before + missing[1]
        return FieldError(f"{label}: the field {name!r} is missing", name)
    if path:
        path = path[:_NAME_CHARS]
        return FieldError(f"{label}: the field {path!r}: {what[0].lower()}{what[1:]}", path)
    return FieldError(f"{label}: {what}", "")


def _names_at(kind: type[Struct], path: str) -> list[str]:
    """Return the names of the fields of the struct at a path like ``results[...]`` or ``access``."""
    at = inspect.type_info(kind)
    for step in _STEP.finditer(path):
        if step[1]:
            at = next((each.type for each in _fields_of(at) if each.encode_name == step[1]), inspect.AnyType())
    return [each.encode_name for each in _fields_of(at)]


def _fields_of(kind: inspect.Type) -> tuple[inspect.Field, ...]:
    """The fields of a struct, or of the structs in an array or a union."""
    if isinstance(kind, inspect.StructType):
        return kind.fields
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return _fields_of(kind.item_type)
    if isinstance(kind, inspect.Metadata):
        return _fields_of(kind.type)
    if isinstance(kind, inspect.UnionType):
        return tuple(each for one in kind.types for each in _fields_of(one))
    return ()
