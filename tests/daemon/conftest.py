"""Fixtures of the daemon's tests: a control API over a fake node, and real daemon processes."""

from collections.abc import Iterator

import pytest

from tests.daemon.harness import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    """A control API over a fake node."""
    with serving() as started:
        yield started
