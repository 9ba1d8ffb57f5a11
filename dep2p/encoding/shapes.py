"""Type checks of decoded values: a value from JSON, CBOR or TOML is an ``object`` until one of these has checked it."""

from collections.abc import Mapping
from typing import TypeGuard


def is_list(value: object) -> TypeGuard[list[object]]:
    """Whether it is a list, of any items."""
    return isinstance(value, list)


def is_sequence(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    """Whether it is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_map(value: object) -> TypeGuard[dict[object, object]]:
    """Whether it is a dict, with any keys and values."""
    return isinstance(value, dict)


def is_text_map(value: object) -> TypeGuard[dict[str, object]]:
    """Whether it is a dict whose keys are all text. Takes time in proportion to its size."""
    return is_map(value) and all(type(key) is str for key in value)


def is_mapping(value: object) -> bool:
    """Whether it is a mapping, also of another kind than a dict: for values of programs that no checker has seen."""
    return isinstance(value, Mapping)


def list_of(value: object) -> list[object]:
    """Return the value. Raises ``TypeError`` for anything but a list.

    >>> list_of([1, "a"])
    [1, 'a']
    """
    if not is_list(value):
        raise TypeError(f"{type(value).__name__} is not a list")
    return value


def row_of(value: object, columns: int) -> list[object]:
    """Return the value. Raises ``TypeError`` for anything but a list, ``ValueError`` for one of another length."""
    row = list_of(value)
    if len(row) != columns:
        raise ValueError(f"{len(row)} fields in the place of {columns}")
    return row


def text_map_of(value: object) -> dict[str, object]:
    """Return the value. Raises ``TypeError`` for anything but a dict with text keys."""
    if not is_text_map(value):
        raise TypeError(f"{type(value).__name__} is not a map of names")
    return value
