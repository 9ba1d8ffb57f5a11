"""The trace of a simulation is what live nodes would write, and changes nothing."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dep2p.testing import Scenario, simulate
from dep2p.testing.simulator.faults import Churn
from dep2p.testing.simulator.simulator import TOPIC, Simulation
from dep2p.testing.simulator.trace import TRACE_EPOCH_NS, TraceDir
from dep2p.traces.files import ReadProblems, parse_file_name, read_events, trace_files
from dep2p.traces.schema import AnyEvent

SCENARIO = Scenario(nodes=20, publishers=3, messages=8, degree=10, loss=0.05, message_bytes=1_200, validation_s=0.02)


def events_of(directory: Path) -> list[dict[str, Any]]:
    problems = ReadProblems()
    events = [event for path in trace_files([directory]) for event in read_events(path, problems)]
    assert not problems
    return events


def test_tracing_changes_nothing(tmp_path: Path) -> None:
    plain = simulate(SCENARIO)
    traced = simulate(SCENARIO, trace_dir=tmp_path)
    assert traced.trace_hash == plain.trace_hash
    assert traced.deliveries == plain.deliveries


def test_the_trace_agrees_with_the_report(tmp_path: Path) -> None:
    report = simulate(SCENARIO, trace_dir=tmp_path / "new")
    events = events_of(tmp_path / "new")
    kinds = Counter(event["kind"] for event in events)
    assert kinds["publish"] == 8
    assert kinds["deliver"] == report.deliveries.made + 8, "own messages are delivered too"
    assert sum(event["kind"] == "deliver" and "peer" not in event for event in events) == 8
    assert kinds["join"] == kinds["node_start"] == kinds["node_stop"] == 20
    sent = [event for event in events if event["kind"] == "send_rpc"]
    assert sum(len(event.get("messages", ())) for event in sent) == report.copies
    assert sum(event.get("message_bytes", 0) for event in sent) == report.copies * 1_200
    assert all(event["t"] * 1000 >= TRACE_EPOCH_NS for event in events)


def test_every_event_fits_the_schema_and_none_is_missing_in_a_run(tmp_path: Path) -> None:
    simulate(SCENARIO, trace_dir=tmp_path)
    for path in trace_files([tmp_path]):
        name = parse_file_name(path.name)
        events = list(read_events(path))
        assert name is not None and path.parent.parent.name == "date=2020-01-01"
        assert [event["seq"] for event in events] == list(range(len(events)))
        assert events[0]["kind"] == "node_start" and events[-1]["kind"] == "node_stop"
        assert {event["node"] for event in events} == {name.node}
        times = [event["t"] for event in events]
        assert times == sorted(times) and times[0] * 1000 == name.start_ns
        msgspec.convert(events, list[AnyEvent])


def test_meshes_can_be_rebuilt_from_it(tmp_path: Path) -> None:
    with TraceDir(tmp_path) as trace:
        simulation = Simulation(SCENARIO, trace)
        simulation.run()
    meshes: dict[str, dict[str, None]] = {}
    for event in events_of(tmp_path):
        mesh = meshes.setdefault(event["node"], {})
        if event["kind"] == "graft":
            mesh[event["peer"]] = None
        elif event["kind"] == "prune":
            del mesh[event["peer"]]
    for peer, router in zip(simulation.world.peers, simulation.routers(), strict=True):
        assert sorted(meshes[peer]) == sorted(router.mesh(TOPIC))


def test_a_node_that_crashes_ends_without_a_word_and_comes_back_as_a_new_run(tmp_path: Path) -> None:
    scenario = Scenario(nodes=12, publishers=2, messages=20, degree=8, churn=Churn(0.5, 0.5, 2.0), settle_s=6.0)
    simulate(scenario, trace_dir=tmp_path)
    ends: Counter[str] = Counter()
    for path in trace_files([tmp_path]):
        last = list(read_events(path))[-1]
        ends[last.get("reason", "left") if last["kind"] == "node_stop" else "killed"] += 1
    assert ends["killed"] > 0 and ends["left"] > 0 and ends["end of the simulation"] > 0
    assert ends.total() > 12, "a second run is a file of its own"


def test_without_rpcs_it_is_small(tmp_path: Path) -> None:
    simulate(SCENARIO, trace_dir=tmp_path / "all")
    simulate(SCENARIO, trace_dir=tmp_path / "few", trace_rpcs=False)
    without = Counter(event["kind"] for event in events_of(tmp_path / "few"))
    whole = Counter(event["kind"] for event in events_of(tmp_path / "all"))
    assert without == {kind: count for kind, count in whole.items() if not kind.endswith("_rpc")}


def test_a_run_that_fails_leaves_no_trace_that_looks_complete(tmp_path: Path) -> None:
    def stop(now: float) -> None:
        if now > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(SCENARIO, trace_dir=tmp_path, on_progress=stop)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_sybils_that_play_a_part_write_no_trace(tmp_path: Path) -> None:
    scenario = Scenario(nodes=10, publishers=2, messages=4, degree=6, attack="covert-flash", sybils_per_node=1.0)
    with TraceDir(tmp_path) as trace:
        simulation = Simulation(scenario, trace)
        simulation.run()
    assert {event["node"] for event in events_of(tmp_path)} == {*simulation.world.peers[:10]}
