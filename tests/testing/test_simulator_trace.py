"""The trace of a simulation is what a live node would write, and changes nothing."""

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dep2p.gossipsub.trace import Trace, trace_to_json
from dep2p.testing import Scenario, simulate
from dep2p.testing.simulator import TOPIC, Simulation
from dep2p.testing.simulator_trace import TRACE_EPOCH_NS, TraceFile
from dep2p.types import PeerId, peer_id_bytes

SCENARIO = Scenario(nodes=20, publishers=3, messages=8, degree=10, loss=0.05, message_bytes=1_200, validation_s=0.02)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tracing_changes_nothing(tmp_path: Path) -> None:
    plain = simulate(SCENARIO)
    traced = simulate(SCENARIO, trace_dir=tmp_path)
    assert traced.trace_hash == plain.trace_hash
    assert traced.deliveries == plain.deliveries


def test_the_trace_agrees_with_the_report(tmp_path: Path) -> None:
    report = simulate(SCENARIO, trace_dir=tmp_path / "new")
    events = lines_of(tmp_path / "new" / "trace.ndjson")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["trace.ndjson"]
    kinds = Counter(event["type"] for event in events)
    assert kinds[0] == 8
    assert kinds[3] == report.deliveries.made + 8, "own messages are delivered too"
    assert kinds[9] == 20
    sent = sum(len(event["sendRPC"]["meta"].get("messages", ())) for event in events if event["type"] == 7)
    assert sent == report.copies
    assert {len(base64.b64decode(event["peerID"])) for event in events} == {38}
    times = [event["timestamp"] for event in events]
    assert times == sorted(times) and times[0] >= TRACE_EPOCH_NS


def test_meshes_can_be_rebuilt_from_it(tmp_path: Path) -> None:
    with TraceFile(tmp_path) as trace:
        simulation = Simulation(SCENARIO, trace)
        simulation.run()
    meshes: dict[str, dict[str, None]] = {}
    for event in lines_of(tmp_path / "trace.ndjson"):
        mesh = meshes.setdefault(event["peerID"], {})
        if event["type"] == 11:
            mesh[event["graft"]["peerID"]] = None
        elif event["type"] == 12:
            del mesh[event["prune"]["peerID"]]
    world = simulation.world
    for number, router in enumerate(simulation.routers()):
        real = [base64.b64encode(peer_id_bytes(peer)).decode() for peer in router.mesh(TOPIC)]
        assert sorted(meshes[base64.b64encode(world.identities[number]).decode()]) == sorted(real)


def test_every_line_is_what_a_live_node_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[dict[str, Any]] = []
    write = TraceFile.write

    def spy(self: TraceFile, trace: Trace, own: PeerId, now: float) -> None:
        expected.extend(trace_to_json(trace, own, TRACE_EPOCH_NS + round(now * 1e9)))
        write(self, trace, own, now)

    monkeypatch.setattr(TraceFile, "write", spy)
    simulate(SCENARIO, trace_dir=tmp_path)
    assert lines_of(tmp_path / "trace.ndjson") == json.loads(json.dumps(expected))


def test_without_rpcs_and_compressed_it_is_small(tmp_path: Path) -> None:
    simulate(SCENARIO, trace_dir=tmp_path / "all")
    simulate(SCENARIO, trace_dir=tmp_path / "few", trace_rpcs=False)
    simulate(SCENARIO, trace_dir=tmp_path / "packed", trace_compress=True)
    whole = (tmp_path / "all/trace.ndjson").read_bytes()
    few = lines_of(tmp_path / "few/trace.ndjson")
    assert few == [event for event in map(json.loads, whole.splitlines()) if event["type"] not in (6, 7, 8)]
    packed = (tmp_path / "packed/trace.ndjson.zst").read_bytes()
    assert len(packed) * 5 < len(whole)
    assert zstandard.ZstdDecompressor().stream_reader(packed).read() == whole


def test_a_run_that_fails_leaves_no_trace_that_looks_complete(tmp_path: Path) -> None:
    def stop(now: float) -> None:
        if now > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(SCENARIO, trace_dir=tmp_path, on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_sybils_that_play_a_part_write_no_trace(tmp_path: Path) -> None:
    scenario = Scenario(nodes=10, publishers=2, messages=4, degree=6, attack="covert-flash", sybils_per_node=1.0)
    with TraceFile(tmp_path) as trace:
        simulation = Simulation(scenario, trace)
        simulation.run()
    honest = {base64.b64encode(identity).decode() for identity in simulation.world.identities[:10]}
    assert {event["peerID"] for event in lines_of(tmp_path / "trace.ndjson")} == honest
