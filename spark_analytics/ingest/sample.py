"""A small trace with something of every kind: for the training run of the class-data archive, and for trying things."""

from pathlib import Path
from typing import Final

import zstandard

from dep2p.traces import schema
from dep2p.traces.files import FileName, GrowingFile
from dep2p.traces.schema import SCHEMA_VERSION as V

_NODES: Final = ("alpha", "beta", "gamma", "delta")
_START_US: Final = 1_577_836_800_000_000


def write_sample(directory: Path) -> list[Path]:
    """Four nodes, a chain from alpha to delta, a queue, a few reliable messages. Returns the files."""
    paths: list[Path] = []
    for place, node in enumerate(_NODES):
        events = _events(place, node)
        events.sort(key=lambda event: event.t)
        for seq, event in enumerate(events):
            event.seq = seq
        growing = GrowingFile(directory, FileName(node, _START_US * 1000, 0), _START_US)
        growing.append(events, zstandard.ZstdCompressor())
        paths.append(growing.finish())
    return paths


def _events(place: int, node: str) -> list[schema.TraceEvent]:
    t = _START_US
    around = [_NODES[n] for n in (place - 1, place + 1) if 0 <= n < len(_NODES)]
    events: list[schema.TraceEvent] = [
        schema.NodeStartEvent(V, node, 0, t, "sample"),
        schema.JoinEvent(V, node, 0, t + 10, "news"),
        *(schema.AddPeerEvent(V, node, 0, t + 5, peer) for peer in around),
        *(schema.GraftEvent(V, node, 0, t + 20, peer, "news") for peer in around),
        schema.ScoresEvent(V, node, 0, t + 5_000_000, [schema.PeerScore(peer, 1.5) for peer in around]),
        schema.DepthsEvent(V, node, 0, t + 5_000_000, [schema.Depth("queue:jobs/mail", 3, 300)]),
        schema.RttsEvent(V, node, 0, t + 5_000_000, [schema.PeerRtt(peer, 1_000) for peer in around]),
        *(schema.ClockEvent(V, node, 0, t + 30, peer, 10, 500) for peer in around),
        schema.NodeStopEvent(V, node, 0, t + 20_000_000, "sample ends"),
    ]
    for number in range(20):
        msg, at = b"message-%d" % number, t + 1_000_000 + number * 500_000
        if place == 0:
            events.append(schema.PublishEvent(V, node, 0, at, msg, "news", 100))
            events.append(schema.DeliveryEvent(V, node, 0, at, msg, "beta", "created", size=100))
            events.append(schema.DeliveryEvent(V, node, 0, at + 10, msg, "beta", "sending", attempt=1))
            events.append(schema.DeliveryEvent(V, node, 0, at + 4_000 + number, msg, "beta", "acknowledged"))
            events.append(schema.RequestEvent(V, node, 0, at, "beta", "time", "out", "ok", 2_000 + number, 10, 10))
            events.append(schema.QueueEvent(V, node, 0, at, "", "jobs", "published", msg, position=number))
            for delay, state in ((500, "handed_out"), (1_500, "finished")):
                events.append(
                    schema.QueueEvent(
                        *(V, node, 0, at + delay, "", "jobs", state, msg, "mail"),
                        consumer="one",
                        partition=0,
                        position=number,
                        attempt=1,
                        key=f"k{number % 3}",
                    )
                )
            events.append(
                schema.SendRpcEvent(V, node, 0, at, "beta", 100, 0, messages=[schema.MessageRef(msg, "news", 100)])
            )
        else:
            events.append(schema.DeliverEvent(V, node, 0, at + place * 10_000, msg, "news", _NODES[place - 1], 100))
            if place + 1 < len(_NODES):
                events.append(
                    schema.DuplicateEvent(V, node, 0, at + place * 10_000 + 9_000, msg, "news", _NODES[place + 1])
                )
            sent = schema.IHaveRef("news", 1)
            events.append(schema.RecvRpcEvent(V, node, 0, at + place * 10_000, around[0], 100, 24, ihave=[sent]))
            events.append(schema.SendRpcEvent(V, node, 0, at + place * 10_000, around[0], 0, 20, idontwant=[msg]))
    if place == 1:
        events.append(schema.RejectEvent(V, node, 0, t + 9_000_000, b"odd", "news", "alpha", "validation failed"))
        events.append(schema.DropRpcEvent(V, node, 0, t + 9_000_000, "gamma", 100, 0, reason="queue full"))
        events.append(schema.SendRpcEvent(V, node, 0, t + 900_000, "alpha", 0, 9, iwant=[b"message-0"]))
        events.append(schema.SessionTraceEvent(V, node, 0, t + 100, "s1", "alpha", "out", "opened"))
    return events
