"""The writer's files: rolled, bounded, torn by kills and full disks."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dep2p.traces.files import SUFFIX, ReadProblems, read_events, scan_frames, trace_files
from dep2p.traces.salvage import salvage
from dep2p.traces.schema import SCHEMA_VERSION, PublishEvent, TraceEvent
from dep2p.tracing.file_writer import TraceFiles
from dep2p.tracing.settings import TraceSettings

T_US = 1_577_836_800_000_000
NODE = "12D3KooWnode"


def publishes(start: int, count: int) -> list[TraceEvent]:
    return [
        PublishEvent(SCHEMA_VERSION, NODE, 0, T_US + n, os.urandom(16), "topic", 100)
        for n in range(start, start + count)
    ]


def made(directory: Path, *, start_ns: int = 1, now_s: Sequence[float] = (), **settings: Any) -> TraceFiles:
    """An open writer; ``now_s`` is a list whose last entry is the time."""
    files = TraceFiles(directory, NODE, start_ns, TraceSettings(**settings), clock=lambda: now_s[-1] if now_s else 0.0)
    files.open(T_US)
    return files


def hidden(directory: Path) -> list[Path]:
    return sorted(directory.rglob(f".*{SUFFIX}"))


def seqs(directory: Path) -> list[int]:
    paths = sorted(trace_files([directory]), key=lambda path: path.name)
    return [event["seq"] for path in paths for event in read_events(path)]


def test_files_are_rolled_by_size_and_by_time_and_nothing_is_lost_between_them(tmp_path: Path) -> None:
    now_s = [0.0]
    files = made(tmp_path, now_s=now_s, roll_bytes=20_000, roll_s=60)
    for number in range(20):
        files.write(publishes(number * 100, 100), {}, T_US)
    files.write(publishes(2_000, 1), {}, T_US)
    by_size = len(trace_files([tmp_path]))
    assert 1 <= by_size <= 4 and all(path.stat().st_size < 25_000 for path in trace_files([tmp_path]))
    now_s.append(61.0)
    files.write(publishes(2_001, 99), {}, T_US)
    assert len(trace_files([tmp_path])) == by_size + 1
    assert len(hidden(tmp_path)) == 1
    files.finish()
    assert seqs(tmp_path) == list(range(2_100)) and not hidden(tmp_path)
    assert files.counters["files"] == len(trace_files([tmp_path])) and files.events == 2_100


def test_an_empty_file_is_not_left(tmp_path: Path) -> None:
    files = made(tmp_path)
    files.finish()
    assert not trace_files([tmp_path]) and not hidden(tmp_path)


def test_what_was_lost_is_in_the_trace_and_takes_one_number(tmp_path: Path) -> None:
    files = made(tmp_path)
    files.write(publishes(0, 3), {"buffer full": 7}, T_US)
    files.write(publishes(3, 1), {}, T_US)
    files.finish()
    (path,) = trace_files([tmp_path])
    events = list(read_events(path))
    assert [event["seq"] for event in events] == [0, 1, 2, 3, 4]
    assert (events[3]["kind"], events[3]["count"], events[3]["reason"]) == ("dropped", 7, "buffer full")


def test_the_oldest_files_make_space_whichever_run_they_are_of(tmp_path: Path) -> None:
    removed = 0
    for run in range(1, 5):
        files = made(tmp_path, start_ns=run, roll_bytes=4_096, disk_bytes_max=20_000)
        for number in range(8):
            files.write(publishes(number * 100, 100), {}, T_US + run * 3_600_000_000)
            total = sum(path.stat().st_size for path in [*trace_files([tmp_path]), *hidden(tmp_path)])
            assert total <= 20_000 + 4_096
        files.finish()
        removed += files.counters["files_removed"]
        assert files.counters["bytes_removed"] >= files.counters["files_removed"]
    assert sum(path.stat().st_size for path in trace_files([tmp_path])) <= 20_000
    assert removed >= 4
    assert {path.name.split("-")[1] for path in trace_files([tmp_path])} <= {"3", "4"}


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    other = tmp_path / "date=2020-01-01" / "hour=00" / f"other-1-000000{SUFFIX}"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"x" * 100_000)
    growing = other.with_name(f".other-1-000001{SUFFIX}")
    growing.write_bytes(b"x")
    files = made(tmp_path, roll_bytes=4_096, disk_bytes_max=8_192)
    for number in range(10):
        files.write(publishes(number * 100, 100), {}, T_US)
    files.finish()
    assert other.exists() and growing.exists()


def test_files_too_old_are_removed(tmp_path: Path) -> None:
    files = made(tmp_path, age_max_s=3_600)
    files.write(publishes(0, 10), {}, T_US)
    files.finish()
    (path,) = trace_files([tmp_path])
    os.utime(path, (1.0, 1.0))
    made(tmp_path, start_ns=2, age_max_s=3_600).finish()
    assert not trace_files([tmp_path])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("cut", [0, 1, 40, -1, -30])
def test_the_next_start_completes_what_a_kill_left(tmp_path: Path, cut: int) -> None:
    killed = made(tmp_path)
    for number in range(5):
        killed.write(publishes(number * 100, 100), {}, T_US)
    (left,) = hidden(tmp_path)
    whole = left.read_bytes()
    with left.open("rb") as file:
        ends = [end for _, end in scan_frames(file).whole]
    # As the kernel leaves it: the lock is free, the end torn anywhere.
    torn = tmp_path / "again" / "date=2020-01-01" / "hour=00" / left.name
    torn.parent.mkdir(parents=True)
    torn.write_bytes(whole[:cut] if cut else whole)
    frames = sum(end <= torn.stat().st_size for end in ends)
    files = made(tmp_path / "again", start_ns=2)
    files.finish()
    problems = ReadProblems()
    read = [event["seq"] for path in trace_files([tmp_path / "again"]) for event in read_events(path, problems)]
    assert read == list(range(frames * 100)) and not problems and not hidden(tmp_path / "again")
    assert files.counters["files_salvaged"] == bool(frames)


def test_a_file_that_a_live_writer_holds_is_left_alone(tmp_path: Path) -> None:
    files = made(tmp_path)
    files.write(publishes(0, 10), {}, T_US)
    found = salvage(tmp_path)
    assert found.busy == 1 and not found.finished and len(hidden(tmp_path)) == 1
    files.write(publishes(10, 10), {}, T_US)
    files.finish()
    assert seqs(tmp_path) == list(range(20))


def test_a_full_disk_is_counted_reported_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = made(tmp_path)
    files.write(publishes(0, 10), {}, T_US)
    real = os.write
    with monkeypatch.context() as full:

        def write_a_part(descriptor: int, data: memoryview) -> int:
            if len(data) > 20:
                return real(descriptor, data[:20])
            raise OSError(28, "No space left on device")

        full.setattr(os, "write", write_a_part)
        for number in range(1, 4):
            files.write(publishes(number * 10, 10), {}, T_US)
        assert files.error == "No space left on device"
    files.write(publishes(40, 10), {}, T_US)
    assert not files.error
    files.finish()
    problems = ReadProblems()
    events = [event for path in trace_files([tmp_path]) for event in read_events(path, problems)]
    assert not problems, "what was written of a frame is taken back"
    assert [event["seq"] for event in events] == list(range(21)), "lost events take no number"
    (dropped,) = [event for event in events if event["kind"] == "dropped"]
    assert dropped["count"] == 30 and "No space" in dropped["reason"]
    assert files.counters["events_dropped_write_failed"] == 30
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len([record for record in warnings if "cannot write" in record.getMessage()]) == 1


def test_a_torn_frame_that_cannot_be_taken_back_ends_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = made(tmp_path)
    files.write(publishes(0, 10), {}, T_US)
    with monkeypatch.context() as broken:

        def fail(*_: object) -> int:
            raise OSError(5, "Input/output error")

        broken.setattr(os, "write", fail)
        broken.setattr(os, "ftruncate", fail)
        files.write(publishes(10, 10), {}, T_US)
    files.write(publishes(20, 10), {}, T_US)
    files.finish()
    assert len(trace_files([tmp_path])) == 2
    assert seqs(tmp_path) == list(range(21))


def test_the_lock_of_a_growing_file_ends_with_its_writer(tmp_path: Path) -> None:
    files = made(tmp_path)
    files.write(publishes(0, 1), {}, T_US)
    (left,) = hidden(tmp_path)
    with left.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("name", "value"),
    [("roll_bytes", 100), ("disk_bytes_max", 5), ("roll_s", 0.0), ("snapshot_s", -1.0), ("clock_s", float("nan"))],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        TraceSettings(**{name: value})  # type: ignore[arg-type]
