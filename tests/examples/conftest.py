"""The three daemons that the examples share; each test restarts some of them."""

from collections.abc import Iterator

import pytest

from tests.examples.programs import Team, team_of_three


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    """Ann, Bob and Eve."""
    with team_of_three() as started:
        yield started
