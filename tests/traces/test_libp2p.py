"""Tracer files of libp2p, JSON and protobuf, become our events."""

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dep2p.gossipsub.rpc import IHave, PeerInfo, Prune, Rpc, RpcMessage, SubscriptionChange
from dep2p.gossipsub.tracing.libp2p_events import (
    AddPeer,
    DeliverMessage,
    DropRpc,
    DuplicateMessage,
    GraftPeer,
    JoinTopic,
    LeaveTopic,
    PrunePeer,
    PublishMessage,
    RecvRpc,
    RejectedMessage,
    RemovePeer,
    SendRpc,
    Trace,
    trace_to_json,
)
from dep2p.gossipsub.tracing.schema_events import trace_events
from dep2p.identity import Identity
from dep2p.traces.files import read_events, trace_files
from dep2p.traces.libp2p import ImportReport, TraceFormatError, import_files
from dep2p.types import PeerId, peer_id_bytes

OWN, OTHER = (Identity.generate().peer_id for _ in range(2))
START_NS = 1_700_000_000_000_000_000
MESSAGE = RpcMessage(b"\x00\xff id of 20 bytes ..", peer_id_bytes(OTHER), b"\0" * 8, "news", b"data")
RPC = Rpc(
    messages=(MESSAGE,),
    subscriptions=(SubscriptionChange("news", True),),
    ihave=(IHave("news", (b"a" * 20, b"b" * 20)),),
    iwant=(b"c" * 20,),
    graft=("news",),
    prune=(Prune("news", 60, (PeerInfo(peer_id_bytes(OWN)),)),),
    idontwant=(b"d" * 20,),
)
TRACES: tuple[Trace, ...] = (
    JoinTopic("news"),
    AddPeer(OTHER, "/meshsub/1.2.0"),
    GraftPeer(OTHER, "news"),
    PublishMessage(MESSAGE),
    DeliverMessage(MESSAGE, OWN),
    DeliverMessage(MESSAGE, OTHER),
    DuplicateMessage(MESSAGE, OTHER),
    RejectedMessage(MESSAGE, OTHER, "validation failed"),
    SendRpc((OTHER,), RPC),
    RecvRpc(OTHER, RPC),
    DropRpc(OTHER, RPC),
    PrunePeer(OTHER, "news"),
    RemovePeer(OTHER),
    LeaveTopic("news"),
)


def json_lines(traces: tuple[Trace, ...] = TRACES, own: PeerId = OWN) -> list[str]:
    found: list[str] = []
    for number, trace in enumerate(traces):
        found += [json.dumps(item) for item in trace_to_json(trace, own, START_NS + number * 1000)]
    return found


def imported(path: Path, out: Path) -> tuple[list[dict[str, Any]], ImportReport]:
    report = import_files([path], out)
    return [event for file in trace_files([out]) for event in read_events(file)], report


def expected() -> list[dict[str, Any]]:
    """Return our own writer's events for the same trace, without the fields that libp2p's files do not have: sizes and
    payload bytes."""
    found: list[dict[str, Any]] = []
    for number, trace in enumerate(TRACES):
        for event in trace_events(trace, OWN, number + 1, START_NS // 1000 + number):
            item: dict[str, Any] = json.loads(msgspec.json.encode(event))
            item.pop("size", None)
            item.pop("message_bytes", None)
            for part in item.get("messages", ()):
                part.pop("size")
            found.append(item)
    return found


def test_json_becomes_what_our_own_writer_would_have_written(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("\n".join(json_lines()) + "\n")
    events, report = imported(tmp_path / "trace.json", tmp_path / "out")
    assert events[0]["kind"] == "node_start" and events[-1]["kind"] == "node_stop"
    assert events[1:-1] == expected()
    assert (report.events, report.skipped, report.nodes, report.cut) == (14, 0, 1, [])


# A second encoder of pb/trace.proto, for the test only ---------------------------------------------------------------


def varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def proto(trace: Trace, own: PeerId, stamp: int) -> bytes:
    me, peer, msg = peer_id_bytes(own), peer_id_bytes(OTHER), MESSAGE.id
    control = field(1, field(1, "news") + field(2, b"a" * 20) + field(2, b"b" * 20)) + field(2, field(1, b"c" * 20))
    control += field(3, field(1, "news")) + field(4, field(1, "news") + field(2, me)) + field(5, field(1, b"d" * 20))
    meta = field(1, field(1, msg) + field(2, "news")) + field(2, field(1, 1) + field(2, "news")) + field(3, control)
    payloads: dict[type, Callable[[], tuple[int, bytes]]] = {
        PublishMessage: lambda: (0, field(1, msg) + field(2, "news")),
        RejectedMessage: lambda: (1, field(1, msg) + field(2, peer) + field(3, "validation failed") + field(4, "news")),
        DuplicateMessage: lambda: (2, field(1, msg) + field(2, peer) + field(3, "news")),
        AddPeer: lambda: (4, field(1, peer) + field(2, "/meshsub/1.2.0")),
        RemovePeer: lambda: (5, field(1, peer)),
        RecvRpc: lambda: (6, field(1, peer) + field(2, meta)),
        SendRpc: lambda: (7, field(1, peer) + field(2, meta)),
        DropRpc: lambda: (8, field(1, peer) + field(2, meta)),
        JoinTopic: lambda: (9, field(1, "news")),
        LeaveTopic: lambda: (10, field(2, "news")),
        GraftPeer: lambda: (11, field(1, peer) + field(2, "news")),
        PrunePeer: lambda: (12, field(1, peer) + field(2, "news")),
    }
    if isinstance(trace, DeliverMessage):
        number, body = 3, field(1, msg) + field(2, "news") + field(3, peer_id_bytes(trace.received_from or own))
    else:
        number, body = payloads[type(trace)]()
    unknown = field(99, b"from the future")
    event = field(1, number) + field(2, me) + field(3, stamp) + field(number + 4, body + unknown) + unknown
    return varint(len(event)) + event


def proto_file() -> bytes:
    return b"".join(proto(trace, OWN, START_NS + number * 1000) for number, trace in enumerate(TRACES))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_protobuf_becomes_the_same(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "trace.pb").write_bytes(pack(proto_file()))
    events, report = imported(tmp_path / "trace.pb", tmp_path / "out")
    assert events[1:-1] == expected()
    assert report.cut == []


def test_several_nodes_in_a_file_get_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "all.json").write_text("\n".join([*json_lines(), *json_lines(own=OTHER)]))
    _, report = imported(tmp_path / "all.json", tmp_path / "out")
    assert report.nodes == 2 and len(report.paths) == 2


@pytest.mark.parametrize("size", [40, 41, 200, 500])
def test_cut_files_are_taken_up_to_the_cut(tmp_path: Path, size: int) -> None:
    whole = proto_file()
    (tmp_path / "cut.pb").write_bytes(whole[: len(whole) - size])
    events, report = imported(tmp_path / "cut.pb", tmp_path / "out")
    assert 0 < report.events < 14 and len(events) == report.events + 2
    assert report.cut == [str(tmp_path / "cut.pb")]
    text = "\n".join(json_lines())
    (tmp_path / "cut.json").write_text(text[: len(text) - size // 10])
    _, report = imported(tmp_path / "cut.json", tmp_path / "out2")
    assert report.events == 13 and report.cut == [str(tmp_path / "cut.json")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b'{"colour": 1}\n', "line 1: no trace event of libp2p"),
        (b"{nonsense}\n", "line 1: no JSON"),
        (b"\xff\xff\xff\xff\xff\x0f", "a length of"),
        (b"\x03\x0f\x0f\x0f", "event 0: no protobuf"),
    ],
)
def test_other_files_are_an_error_that_names_them(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "odd").write_bytes(data)
    with pytest.raises(TraceFormatError, match=f"odd.*{why}"):
        import_files([tmp_path / "odd"], tmp_path / "out")


def test_events_that_lack_something_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = json_lines()
    peer = json.loads(lines[0])["peerID"]
    lines[3:3] = [
        json.dumps({"type": 77, "peerID": peer, "timestamp": START_NS}),
        json.dumps({"type": 3, "peerID": peer, "timestamp": START_NS, "deliverMessage": {"topic": "news"}}),
        json.dumps({"type": 3, "peerID": peer, "timestamp": "soon"}),
        "[1, 2]",
        "no json in the middle",
    ]
    (tmp_path / "odd.json").write_text("\n".join(lines) + "\n")
    _, report = imported(tmp_path / "odd.json", tmp_path / "out")
    assert (report.events, report.skipped) == (14, 5)


def test_a_node_with_a_path_for_an_id_is_written_inside_the_directory(tmp_path: Path) -> None:
    evil = base64.b64encode(b"../../../../../../tmp/EVIL").decode()
    source, out = tmp_path / "evil.json", tmp_path / "a" / "b" / "out"
    join = {"type": 9, "peerID": evil, "timestamp": 1577836800000000000, "join": {"topic": "t"}}
    source.write_text(json.dumps(join) + "\n")
    (path,) = import_files([source], out).paths
    assert path.resolve().is_relative_to(out.resolve())
    assert [event["node"] for event in read_events(path)] == ["../../../../../../tmp/EVIL"] * 3
