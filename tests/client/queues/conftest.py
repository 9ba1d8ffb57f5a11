"""A client of a daemon with queues, real or scripted, in an event loop of each kind."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from dep2p.client import Client
from tests.client.queues.running import Body, Run, ScriptedBody, ScriptedRun
from tests.client.scripted_daemon import scripted_daemon
from tests.daemon.api.harness import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as started:
        started.call(started.control.nursery.start, started.node.queues.engine.run)
        yield started


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest, served: Served) -> Run:
    def runner(body: Body) -> None:
        async def main() -> None:
            with anyio.fail_after(30):
                async with Client.open(served.socket) as client:
                    await body(client)

        anyio.run(main, backend=request.param)

    return runner


@pytest.fixture(params=["asyncio", "trio"])
def scripted(request: pytest.FixtureRequest, tmp_path: Path) -> ScriptedRun:
    def runner(body: ScriptedBody, reconnect_s: float = 1e6) -> None:
        async def main() -> None:
            opening = Client.open(tmp_path / "s", reconnect_s=reconnect_s)
            with anyio.fail_after(30):
                async with scripted_daemon(tmp_path / "s") as daemon, opening as client:
                    await body(daemon, client)

        anyio.run(main, backend=request.param)

    return runner
