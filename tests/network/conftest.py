"""The laboratory for tests; skipped where none can be made."""

from collections.abc import Iterator
from functools import cache

import pytest

from tests.network.lab import Lab, why_not

_reason = cache(why_not)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """An empty laboratory."""
    reason = _reason()
    if reason is not None:
        pytest.skip(f"no network laboratory: {reason}")
    with Lab() as made:
        yield made
