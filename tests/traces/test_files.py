"""Trace files: names, frames, and what a reader makes of damaged ones."""

import io
import math
from pathlib import Path
from typing import cast

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dep2p.traces.files import (
    FileName,
    GrowingFile,
    ReadProblems,
    encode_frame,
    parse_file_name,
    partition_of,
    read_events,
    scan_frames,
    trace_files,
)
from dep2p.traces.schema import KINDS, SCHEMA_VERSION, AnyEvent, DeliverEvent, TraceEvent, columns

T_US = 1_577_836_800_000_000


def delivers(start: int, count: int) -> list[TraceEvent]:
    return [
        DeliverEvent(SCHEMA_VERSION, "node", n, T_US + n, b"id%d" % n, "topic", "peer", 100)
        for n in range(start, start + count)
    ]


@given(st.text(min_size=1).filter(lambda text: "\n" not in text), st.integers(0, 2**63), st.integers(0, 10**6))
def test_a_name_says_what_went_into_it(node: str, start_ns: int, number: int) -> None:
    name = FileName(node, start_ns, number)
    assert parse_file_name(str(name)) == name


@pytest.mark.parametrize("name", ["x.ndjson.zst", "a-b-1.ndjson.zst", "a-1-2.ndjson.zst.part", ".ndjson.zst"])
def test_other_names_are_no_trace_files(name: str) -> None:
    assert parse_file_name(name) is None


def test_a_file_is_hidden_until_it_is_complete(tmp_path: Path) -> None:
    growing = GrowingFile(tmp_path, FileName("node", T_US * 1000, 0), T_US)
    growing.append(delivers(0, 5), zstandard.ZstdCompressor())
    assert trace_files([tmp_path]) == []
    path = growing.finish()
    assert trace_files([tmp_path]) == [path]
    assert path.relative_to(tmp_path).parent.as_posix() == "date=2020-01-01/hour=00" == partition_of(T_US)
    assert [event["seq"] for event in read_events(path)] == [0, 1, 2, 3, 4]


def test_cut_at_any_byte_it_keeps_its_whole_frames(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor()
    frames = [encode_frame(delivers(n * 4, 4), compressor) for n in range(3)]
    whole = b"".join(frames)
    ends = [0, len(frames[0]), len(frames[0]) + len(frames[1]), len(whole)]
    path = tmp_path / "cut.ndjson.zst"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        problems = ReadProblems()
        events = list(read_events(path, problems))
        complete = sum(end <= size for end in ends[1:])
        assert len(events) == 4 * complete
        assert problems.cut_bytes == size - ends[complete]
        assert not problems.bad_frames and not problems.bad_lines


@pytest.mark.parametrize("write_checksum", [True, False])
@pytest.mark.parametrize("write_content_size", [True, False])
@pytest.mark.parametrize("size", [0, 10, 300, 70_000, 400_000])
def test_frames_are_found_whatever_their_header(write_checksum: bool, write_content_size: bool, size: int) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=write_checksum, write_content_size=write_content_size)
    data = compressor.compress(bytes(n * 7919 % 251 for n in range(size)))
    skippable = b"\x51\x2a\x4d\x18\x03\x00\x00\x00abc"
    frames = scan_frames(io.BytesIO(data + skippable + data))
    first, second = len(data), len(data) + len(skippable)
    assert frames.whole == [(0, first), (first, second), (second, second + first)]
    assert frames.cut_bytes == 0


def test_damage_in_the_middle_costs_what_it_hits_and_is_named(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor(write_checksum=True)
    good = encode_frame(delivers(0, 4), compressor)
    spoilt = bytearray(encode_frame(delivers(4, 4), compressor))
    spoilt[-1] ^= 0xFF
    odd = compressor.compress(b'{"kind": "later"}\nno json\n[1]\n\n')
    path = tmp_path / "damaged.ndjson.zst"
    path.write_bytes(good + spoilt + odd)
    problems = ReadProblems()
    assert [event.get("seq") for event in read_events(path, problems)] == [0, 1, 2, 3, None]
    assert (problems.bad_frames, problems.bad_lines, problems.first_bad_line) == (1, 2, "no json")


def test_a_missing_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such trace"):
        trace_files([tmp_path / "none"])


def test_a_field_has_one_type_in_all_kinds() -> None:
    assert {"msg", "peer", "queue", "offset_us"} <= set(columns())
    assert columns()["scores"] == "ARRAY<STRUCT<peer: STRING, score: DOUBLE>>"


def _is_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, cast(dict[str, object], value).values()))
    if isinstance(value, list):
        return all(map(_is_finite, cast(list[object], value)))
    return not isinstance(value, float) or math.isfinite(value)


@given(st.data())
def test_every_kind_survives_json(data: st.DataObject) -> None:
    event = data.draw(st.sampled_from(list(KINDS.values())).flatmap(st.from_type))
    event.v = SCHEMA_VERSION
    if any(not -(2**63) <= value < 2**64 for value in msgspec.structs.astuple(event) if isinstance(value, int)):
        return
    if not _is_finite(msgspec.to_builtins(event)):
        return  # JSON has no infinity: it is written as null
    again = msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent)
    assert msgspec.to_builtins(again) == msgspec.to_builtins(event)
