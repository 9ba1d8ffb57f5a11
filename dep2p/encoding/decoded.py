"""Type guards for decoded CBOR and JSON values."""

from collections.abc import Callable
from typing import TypeGuard


def is_array(value: object) -> TypeGuard[list[object]]:
    """A list of anything."""
    return isinstance(value, list)


def is_array_of(value: object, size: int) -> TypeGuard[list[object]]:
    """A list of that many items."""
    return is_array(value) and len(value) == size


def is_map(value: object) -> TypeGuard[dict[object, object]]:
    """A map of anything."""
    return isinstance(value, dict)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def are_texts(
    items: list[object], items_max: int, is_valid: Callable[[object], bool] = _is_text
) -> TypeGuard[list[str]]:
    """At most that many texts; ``is_valid`` takes nothing but texts."""
    return len(items) <= items_max and all(is_valid(item) for item in items)
