"""One Spark session for all tests here; they run when asked for, with the extra (`make spark` installs it)."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_NEEDS_SPARK = [
    *(
        "test_against_duckdb.py",
        "test_bad_input.py",
        "test_cluster.py",
        "test_decode.py",
        "test_live.py",
        "test_metrics.py",
        "test_places.py",
    ),
    *("test_live_daemons.py", "test_passes.py", "test_session.py", "test_follow.py", "test_errors.py"),
]
collect_ignore = _NEEDS_SPARK if find_spec("pyspark") is None else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each worker would start a JVM of its own: these run when asked for, by ``-m spark`` or by their path."""
    here = Path(__file__).parent
    mine = [item for item in items if item.path.parent == here and item.path.name in _NEEDS_SPARK]
    for item in mine:
        item.add_marker(pytest.mark.spark)
        item.add_marker(pytest.mark.xdist_group("spark"))
        item.add_marker(pytest.mark.timeout(400))
    expression = re.sub(r"not spark", "", str(config.getoption("markexpr")))
    if "spark" not in expression and not any("spark" in argument for argument in config.args):
        items[:] = [item for item in items if item not in mine]
        config.hook.pytest_deselected(items=mine)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from dep2p.spark_analytics.runtime.session import SparkOptions, close_session, open_session

    session = open_session(SparkOptions(master="local[2]", memory="1500m", shuffle_partitions=2))
    yield session
    close_session(session)
