"""PostgreSQL and Redis for tests: skipped with the reason where they are not installed; where CI=true that fails."""

import os
from collections.abc import Callable
from typing import NoReturn

import pytest

from bench.harness import servers
from bench.harness.servers import NotInstalledError, Server, free_port

__all__ = ["Server", "free_port", "missing", "postgres", "redis"]


def missing(reason: str) -> NoReturn:
    """Skips, with the reason; where CI=true it fails."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def postgres() -> Server:
    """A new server, not started."""
    return _made(servers.postgres)


def redis() -> Server:
    """A new server, not started."""
    return _made(servers.redis)


def _made(make: Callable[[], Server]) -> Server:
    try:
        return make()
    except NotInstalledError as error:
        missing(str(error))
