"""Workers decode what a plain reader reads, whatever is done to the files; their keys are Spark's."""

import io
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F

from dep2p.spark_analytics.ingest import decode
from dep2p.spark_analytics.ingest.compact import finisher, hidden, writer
from dep2p.spark_analytics.ingest.decode import Blocks, batches_of, filled, lines, run_of
from dep2p.spark_analytics.ingest.keys import keys_of
from dep2p.spark_analytics.ingest.sample import write_sample
from dep2p.spark_analytics.ingest.silver import (
    COMMON,
    KIND_CODES,
    NESTED,
    PARTS,
    layout,
    raw_files,
    read_silver,
    write_silver,
)
from dep2p.spark_analytics.job import run
from dep2p.spark_analytics.metrics.traffic import rejected_lines
from dep2p.traces.files import read_events, trace_files
from dep2p.traces.schema import columns
from tests.spark.app_trace import write_apps

LAYOUT = layout()
_PART_OF = {kind: part for part, kinds in PARTS.items() for kind in kinds}


def test_the_run_is_in_the_name_of_the_file_else_it_is_0() -> None:
    runs = {
        "node-1577836800000000000-000001.ndjson.zst": 1577836800000000000,
        "with-dashes-5-6.ndjson.zst": 5,
        "renamed.ndjson.zst": 0,
        "copy-of-7-x.ndjson.zst": 0,
        "5.ndjson.zst": 0,
        "node--3-x-1.ndjson.zst": 0,
        "node-99999999999999999999-1.ndjson.zst": 0,
    }
    assert {name: run_of(f"s3a://bucket/date=2026-01-01/{name}") for name in runs} == runs


def test_keys_are_those_that_spark_makes(spark: Any) -> None:
    rng = Random(1)
    letters = "ab\x00é中😀"
    texts = [None, *("x" * length for length in range(130))]
    texts += ["".join(rng.choices(letters, k=rng.randrange(90))) for _ in range(2_000)]
    made = F.when(F.col("text").isNotNull(), F.xxhash64("text"))
    theirs = spark.createDataFrame([(text,) for text in texts], "text STRING").select(made.alias("key")).toArrow()
    assert keys_of(pa.array(texts)).to_pylist() == theirs["key"].to_pylist()
    assert keys_of(pa.array(texts)[77:]).to_pylist() == theirs["key"].to_pylist()[77:]
    assert keys_of(pa.array([None], pa.string())).to_pylist() == [None]
    assert keys_of(pa.array([], pa.string())).to_pylist() == []


# Against a plain reader -----------------------------------------------------------------------------------------------


def decoded(data: bytes, *, step: int = decode.BLOCK_BYTES) -> list[dict[str, Any]]:
    """The rows of a file with these bytes, in silver's columns."""
    blocks = Blocks(LAYOUT)
    rows: list[dict[str, Any]] = []
    for block in lines(io.BytesIO(data), step):
        for part, batch in blocks.of_block(block, "/traces/n-5-0.ndjson.zst", 5):
            found = filled(pa.Table.from_batches([batch]), LAYOUT.schema())
            found.validate(full=True)
            rows += [{"part": part, **row} for row in found.to_pylist()]
    return rows


def expected(text: bytes) -> list[dict[str, Any]]:
    """The same by the letter, one line at a time."""
    rows = []
    for line in text.split(b"\n"):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        rows.append(_row(event) if isinstance(event, dict) else _corrupt(line))
    return rows


def _corrupt(line: bytes) -> dict[str, Any]:
    shown = line[:1_000].decode("utf-8", "replace")
    return {**_row({}), "_corrupt": shown}


def _row(event: dict[str, Any]) -> dict[str, Any]:
    value = {name: _typed(event.get(name), sql) for name, sql in columns().items()}
    kind = value["kind"]
    k = KIND_CODES.get(kind, -1)
    part = "bad" if value["node"] is None or value["t"] is None else _PART_OF.get(kind, "bad")
    row: dict[str, Any] = {name: value.get(name) for name in COMMON}
    row |= {"k": k, "v": value["v"] or 0, "kind": kind if k < 0 else None, "run": 5}
    row |= {f"{name}_id": _key(value[name]) for name in ("node", "peer", "topic", "msg")}
    row |= {"source": "/traces/n-5-0.ndjson.zst", "source_id": _key("/traces/n-5-0.ndjson.zst")}
    if kind in ("reject", "duplicate", "deliver"):
        row["msg"] = None
    for name, fields in NESTED.items():
        row[f"of_{name}"] = {field: _nested(field, value[field]) for field in fields} if part == name else None
    return {"part": part, **row, "_corrupt": None}


def _nested(name: str, value: Any) -> Any:
    if name in ("messages", "grafts", "prunes"):
        return len(value or [])
    if name == "ihave":
        return None if value is None else sum((item or {}).get("count") or 0 for item in value)
    if name in ("iwant", "idontwant"):
        return None if value is None else [_key(item) for item in value]
    return value


def _typed(value: Any, sql: str) -> Any:
    if sql.startswith("ARRAY<"):
        return [_typed(item, sql[6:-1]) for item in value] if isinstance(value, list) else None
    if sql.startswith("STRUCT<"):
        fields = [part.partition(": ") for part in sql[7:-1].split(", ")]
        return {n: _typed(value.get(n), of) for n, _, of in fields} if isinstance(value, dict) else None
    if sql == "STRING":
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if sql == "DOUBLE":
        return float(value) if abs(value) < 1 << 1023 and math.isfinite(value) else None
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else None


def _key(text: str | None) -> int | None:
    return keys_of(pa.array([text], pa.string()))[0].as_py()  # type: ignore[no-any-return]


def _sorted(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def _agree(text: bytes, *, frame: int = 3_000) -> None:
    packed = b"".join(zstandard.compress(text[at : at + frame]) for at in range(0, len(text), frame))
    assert _sorted(decoded(packed, step=2_000)) == _sorted(expected(text))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("decode")
    write_sample(place)
    write_apps(place, 1)
    return place


def _text(path: Path) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in read_events(path))


def test_whole_files_are_decoded_by_the_letter(traces: Path) -> None:
    files = trace_files([traces])
    kinds = set()
    for path in files:
        rows = decoded(path.read_bytes())
        assert _sorted(rows) == _sorted(expected(_text(path)))
        kinds |= {row["k"] for row in rows}
    assert len(kinds) > 15


def test_a_file_that_is_cut_anywhere_keeps_its_whole_frames(traces: Path) -> None:
    path = max(trace_files([traces]), key=lambda file: file.stat().st_size)
    data = path.read_bytes()
    rng, cut = Random(2), traces / "cut-5-0.ndjson.zst"
    seen = set()
    for at in (0, 1, 5, 17, len(data) - 1, *(rng.randrange(len(data)) for _ in range(40))):
        cut.write_bytes(data[:at])
        events = [event["seq"] for event in read_events(cut)]
        assert sorted(row["seq"] for row in decoded(data[:at])) == events
        seen.add(len(events))
    cut.unlink()
    assert len(seen) > 1, "all cuts were in the first frame"


def test_a_damaged_frame_costs_no_other_frame() -> None:
    def frame(begin: int) -> bytes:
        text = b"".join(b'{"v":1,"node":"a","seq":%d,"t":5,"kind":"join"}\n' % n for n in range(begin, begin + 10))
        return zstandard.ZstdCompressor(write_checksum=True).compress(text)

    first, middle, last = frame(0), bytearray(frame(10)), frame(20)
    middle[-1] ^= 1  # the checksum
    rows = decoded(first + bytes(middle) + last)
    found = {row["seq"] for row in rows if row["part"] == "mesh"}
    assert found >= {*range(10), *range(20, 30)}
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    assert {row["seq"] for row in decoded(skippable + first + skippable + last)} == {*range(10), *range(20, 30)}
    assert decoded(b"\x00\x01garbage" * 40) == [] == decoded(b"")


_GOOD = b'{"v":1,"node":"a","seq":3,"t":5,"kind":"join","topic":"x"}'
_HOSTILE = [
    *(b"", b" ", b"\r", b"{}", b"[]", b"null", b"5", b'"text"', b"[" + _GOOD + b"]", _GOOD * 2, _GOOD + b" " + _GOOD),
    *(_GOOD[:20], _GOOD[20:], _GOOD + b"\r", b" " + _GOOD, _GOOD + b"#", b"\xef\xbb\xbf" + _GOOD, _GOOD[:-1] + b"}}"),
    b"[" * 100_000,
    b'{"node":"a","t":5,"t":6,"kind":"join"}',
    b'{"node":"a","t":5.0,"kind":"join"}',
    b'{"node":"a","t":1e3,"kind":"join"}',
    b'{"node":"a","t":"5","kind":"join"}',
    b'{"node":"a","t":99999999999999999999,"kind":"join"}',
    b'{"node":"a","t":-9223372036854775808,"kind":"join"}',
    b'{"node":5,"t":5,"kind":"join"}',
    b'{"node":"a","t":5,"kind":["join"]}',
    b'{"node":"\xff","t":5,"kind":"join"}',
    b'{"node":"\\ud800","t":5,"kind":"join"}',
    b'{"node":"\\u0000","t":5,"kind":"join","seq":true}',
    b'{"node":"a\tb","t":5,"kind":"join"}',
    b"{'node':'a','t':5,'kind':'join'}",
    b'{"node":"a","t":5,"kind":"scores","scores":[{"peer":"b","score":NaN},null,5,{"peer":"c","score":1e999}]}',
    b'{"node":"a","t":5,"kind":"scores","scores":{"peer":"b"}}',
    b'{"node":"a","t":5,"kind":"send_rpc","peer":"b","iwant":["x",null,"y"],"messages":[{"msg":"m"}],"grafts":null}',
    b'{"node":"a","t":5,"kind":"send_rpc","peer":"b","iwant":"x","ihave":[{"topic":"t","count":4},{"count":"z"}]}',
    b'{"node":"a","t":5,"kind":"send_rpc","peer":"b","ihave":[null,{"count":2}],"messages":[1,[],{}]}',
    b'{"node":"a","t":5,"kind":"queue","queue":"q","key":"\xc3\xa9","partition":-0,"count":1}',
    b'{"node":"a","t":5,"kind":"telepathy","topic":"t","attrs":{"a":[1,{}]}}',
]


@pytest.mark.parametrize("line", _HOSTILE, ids=[str(line[:30]) for line in _HOSTILE])
def test_a_strange_line_is_read_by_the_letter_alone_and_among_others(line: bytes) -> None:
    _agree(line + b"\n")
    _agree(_GOOD + b"\n" + line + b"\n" + _GOOD)


@pytest.mark.parametrize("depth", [100, 3_000, 300_000])
def test_nesting_of_any_depth_costs_no_other_line(depth: int) -> None:
    for deep in (b'{"x":' + b"[" * depth + b"]" * depth + b"}", b'{"v":' * depth + b"1" + b"}" * depth):
        rows = decoded(zstandard.compress(b"\n".join([_GOOD, deep, b"", _GOOD])))
        assert [row["topic"] for row in rows if row["part"] == "mesh"] == ["x", "x"]
        assert [row["part"] for row in rows].count("bad") == 1


def _mixed(good: list[bytes]) -> st.SearchStrategy[bytes]:
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["peer", "count", "x"]), inner),
        max_leaves=6,
    )

    def changed(line: bytes, name: str, value: Any) -> bytes:
        return json.dumps({**json.loads(line), name: value}).encode()

    line = st.sampled_from(good) | st.sampled_from(_HOSTILE)
    line |= st.builds(changed, st.sampled_from(good), st.sampled_from(sorted(columns())), values)
    line |= st.builds(lambda whole, at: whole[: at % (len(whole) + 1)], st.sampled_from(good), st.integers(0, 400))
    line |= st.binary(max_size=20)
    return st.lists(line, max_size=12).map(b"\n".join)


def test_any_mix_of_strange_lines_is_read_by_the_letter(traces: Path) -> None:
    good = [line for path in trace_files([traces]) for line in _text(path).splitlines()]
    few = [next(line for line in good if f'"kind": "{kind}"'.encode() in line) for kind in _kinds(good)]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(_mixed(few))
    def agree(text: bytes) -> None:
        _agree(text, frame=200)

    agree()


def _kinds(good: list[bytes]) -> list[str]:
    return sorted({json.loads(line)["kind"] for line in good})


def test_a_line_without_end_is_cut_and_bounded() -> None:
    data = zstandard.compress(b"x" * 20_000_000 + b"\n" + _GOOD + b"\n")
    blocks = list(lines(io.BytesIO(data), 1_000, 3_000_000))
    assert len(blocks) > 3 and max(map(len, blocks)) < 6_000_000
    found = [batch for block in blocks for part, batch in Blocks(LAYOUT).of_block(block, "p", 0) if part == "mesh"]
    assert [row["topic"] for batch in found for row in batch.to_pylist()] == ["x"]


def test_bytes_that_come_through_spark_are_read_alike(traces: Path) -> None:
    files = trace_files([traces])
    paths = [f"file:{path}" for path in files]

    def rows(**more: Any) -> list[str]:
        batch = pa.RecordBatch.from_pydict({"path": pa.array(paths), **more})
        found = [filled(pa.Table.from_batches([b]), LAYOUT.schema()) for _, b in batches_of(iter([batch]), LAYOUT)]
        return _sorted([{**row, "source": "", "source_id": 0} for table in found for row in table.to_pylist()])

    content = pa.array([path.read_bytes() for path in files], pa.binary())
    assert rows() == rows(content=content)


# Whole jobs -----------------------------------------------------------------------------------------------------------


def test_traces_and_silver_behind_urls_give_the_same_report(spark: Any, traces: Path, tmp_path: Path) -> None:
    here = run(spark, [str(traces)], tmp_path / "here")
    there = run(spark, [traces.as_uri()], tmp_path / "there", silver=(tmp_path / "silver").as_uri())
    assert (here.out / "summary.json").read_text() == (there.out / "summary.json").read_text()
    assert list((tmp_path / "silver").glob("part=messages/*.parquet"))


def test_a_file_that_workers_cannot_read_is_named(spark: Any, traces: Path, tmp_path: Path) -> None:
    files = raw_files(spark, [str(traces)])
    gone = spark.createDataFrame([(f"file:{tmp_path}/gone-1-0.ndjson.zst",)], "path STRING")
    write_silver(files.unionByName(gone), str(tmp_path / "silver"))
    found = rejected_lines(read_silver(spark, str(tmp_path / "silver")).bad).collect()
    named = [(row["source"], row["error"]) for row in found]
    assert named == [(f"{tmp_path}/gone-1-0.ndjson.zst", "cannot be read: No such file or directory")]


def test_the_place_is_made_anew_without_what_failed_attempts_left(traces: Path, tmp_path: Path) -> None:
    place = tmp_path / "silver"
    scratch = tmp_path / f"{hidden(str(place))}def"
    (place / "part=mesh").mkdir(parents=True)
    (place / "part=mesh/stale.parquet").touch()
    (tmp_path / f"{hidden(str(place))}abc").mkdir()  # of a job that was killed
    batch = pa.RecordBatch.from_pydict({"path": [f"file:{path}" for path in trace_files([traces])]})
    (_,) = writer(LAYOUT, str(scratch))(iter([batch]))  # an attempt whose result nobody took
    (done,) = writer(LAYOUT, str(scratch))(iter([batch]))
    named = set(done["file"].to_pylist())
    (there,) = finisher(str(scratch), str(place), named)(iter([batch.slice(0, 1)]))
    assert set(there["file"].to_pylist()) == named
    assert {f"{path.parent.name}/{path.name}" for path in place.glob("*/*")} == named
    assert {path.name for path in tmp_path.iterdir()} == {"silver"}


def test_of_workers_that_do_not_share_the_place_nothing_is_taken(tmp_path: Path) -> None:
    (done,) = writer(LAYOUT, str(tmp_path / "a"))(iter([pa.RecordBatch.from_pydict({"path": ["file:/none"]})]))
    named = {*done["file"].to_pylist(), "part=mesh/elsewhere.parquet"}
    (there,) = finisher(str(tmp_path / "a"), str(tmp_path / "b"), named)(iter([done]))
    assert set(there["file"].to_pylist()) < named and not (tmp_path / "b").exists()
