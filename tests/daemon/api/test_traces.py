"""The trace over the control API: begun, looked at, ended; what is refused."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from dep2p.client import Client
from dep2p.errors import TraceError, TraceRunningError
from dep2p.traces.files import read_events, trace_files
from tests.daemon.api.harness import Served


@pytest.fixture
def tracing(served: Served) -> Iterator[Served]:
    """A node whose tracer runs."""

    async def begin() -> None:
        await served.control.nursery.start(served.node.tracer.run)

    async def end() -> None:
        await served.node.tracer.stop("the test is over")

    served.call(begin)
    yield served
    served.call(end)


@asynccontextmanager
async def client_of(served: Served) -> AsyncGenerator[Client]:
    async with Client.open(socket=served.socket) as client:
        yield client


def test_nothing_is_traced_before_someone_says_so(tracing: Served) -> None:
    found = tracing.http.get("/v1/trace").json()
    assert not found["is_on"] and found["directory"] is None and found["events"] == 0
    stopped = tracing.http.post("/v1/trace/stop", json={})
    assert stopped.status_code == 200 and not stopped.json()["is_on"]


def test_started_looked_at_and_stopped(tracing: Served, tmp_path: Path) -> None:
    body = {"dir": str(tmp_path), "rpcs": False, "sample": 0.5, "roll_s": 30}
    began = tracing.http.post("/v1/trace/start", json=body)
    assert began.status_code == 201
    assert began.json()["is_on"] and began.json()["directory"] == str(tmp_path)
    settings = began.json()["settings"]
    assert {name: settings[name] for name in ("rpcs", "roll_s", "sample", "snapshot_s")} == {
        **{"rpcs": False, "roll_s": 30, "sample": 0.5, "snapshot_s": 5},
    }
    again = tracing.http.post("/v1/trace/start", json={})
    assert again.status_code == 409 and again.json()["code"] == "D7006" and str(tmp_path) in again.json()["detail"]
    ended = tracing.http.post("/v1/trace/stop", json={}).json()
    assert not ended["is_on"] and ended["files"] == 1 and ended["events"] == 2 and ended["growing"] is None
    (path,) = trace_files([tmp_path])
    assert [event["kind"] for event in read_events(path)] == ["node_start", "node_stop"]


def test_without_a_directory_it_goes_where_the_configuration_says(tracing: Served) -> None:
    began = tracing.http.post("/v1/trace/start", json={}).json()
    assert began["directory"] == str(tracing.config.data_dir / "trace")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"dir": "here"}, "relative"),
        ({"dir": 5}, "dir"),
        ({"roll_bytes": 5}, "roll_bytes"),
        ({"roll_bytes": 1 << 30, "disk_bytes_max": 1 << 30}, "disk_bytes_max"),
        ({"snapshot_s": -1}, "snapshot_s"),
        ({"rpcs": "yes"}, "rpcs"),
        ({"sample": 0}, "sample"),
        ({"sample": 1.5}, "sample"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_begins(tracing: Served, body: dict[str, object], word: str) -> None:
    refused = tracing.http.post("/v1/trace/start", json=body)
    assert refused.status_code == 400 and word in refused.json()["detail"]
    assert not tracing.http.get("/v1/trace").json()["is_on"]


def test_a_place_that_cannot_be_written_is_named(tracing: Served, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = tracing.http.post("/v1/trace/start", json={"dir": str(tmp_path / "file")})
    assert refused.json()["code"] == "D7005" and str(tmp_path / "file") in refused.json()["detail"]


def test_the_client_raises_what_the_library_does(tracing: Served, tmp_path: Path) -> None:
    async def calls() -> None:
        async with client_of(tracing) as client:
            assert not (await client.tracer.status()).is_on
            (tmp_path / "file").touch()
            with pytest.raises(TraceError):
                await client.tracer.start(tmp_path / "file")
            await client.tracer.start(tmp_path / "traces", snapshot_s=1.5)
            with pytest.raises(TraceRunningError):
                await client.tracer.start()
            assert (await client.tracer.stop()).settings.snapshot_s == 1.5

    trio.run(calls)
