"""trace/event, trace/bytes, trace/overhead (rate and CPU time): what it costs a node to write its trace.

The peer of an event is libp2p's JSON tracer, written in the node's own thread as its Python port would: the same
effects, `trace_to_json` and ``json.dumps``. The peer of the throughput is the same node without a trace.
"""

import gc
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import trio

from bench.harness.compare import FULL, QUICK, Run, alternate
from bench.harness.report import Result, Sample
from bench.pubsub.benchmark import measure, start_groups
from dep2p.gossipsub.rpc import Rpc, RpcMessage
from dep2p.gossipsub.tracing.libp2p_events import (
    TRACE_TYPES,
    DeliverMessage,
    DuplicateMessage,
    PublishMessage,
    RecvRpc,
    SendRpc,
    Trace,
    trace_to_json,
)
from dep2p.identity import Identity
from dep2p.node.tracer import Tracer, TraceSources
from dep2p.tracing.event_log import PENDING_MAX
from dep2p.tracing.settings import TraceSettings
from dep2p.types import PeerId

PEER: Final = "libp2p's JSON in the node's thread"
_FORWARDED_TO: Final = 4
_OWN_EACH: Final = 8
_STEP_MESSAGES: Final = 32
"""Messages between two turns of other tasks, as in a node that is busy."""
_SIZE_BYTES: Final = 1_024


async def trace(run: Run) -> list[Result]:
    """All of them; the throughput last, since it starts eight processes."""
    rounds = run.effort.rounds
    messages = 20_000 if run.effort is FULL else 4_000 if run.effort is QUICK else 200
    peers = [Identity.generate().peer_id for _ in range(8)]
    results = await _events(run, peers, messages, rounds)
    run.effort = replace(run.effort, rounds=7 if run.effort is FULL else min(rounds, 3))
    async with run.crew() as crew:
        groups = await start_groups(run, crew, ("dep2p-traced", "dep2p-traced-rpcs", "dep2p"), 2)
        traced, rpcs, without = await alternate(run, crew, [measure(run, group) for group in groups.values()])
    for name, samples in (("trace/overhead", traced), ("trace/overhead/rpcs", rpcs)):
        results.append(Result(name, "1/s", "the same without a trace", samples, without))
        # The rate depends on what else the machine does; the processor time of both ends much less.
        results.append(Result(f"{name}/cpu", "us", "the same without a trace", _cpu(samples), _cpu(without)))
    return results


def _cpu(samples: Sequence[Sample]) -> list[Sample]:
    """µs of both processes for one message."""
    return [Sample(each.cpu_us or 0.0) for each in samples]


async def _events(run: Run, peers: list[PeerId], messages: int, rounds: int) -> list[Result]:
    ours: list[tuple[float, float, float]] = []
    theirs: list[tuple[float, float, float]] = []
    for number in range(rounds + 1):
        for mine in (True, False) if number % 2 == 0 else (False, True):
            gc.collect()
            run.load.begin(())
            if mine:
                ours.append(await _ours(peers, messages))
            else:
                theirs.append(await _theirs(peers, messages))
            run.load.end(())
    ours, theirs = ours[1:], theirs[1:]  # the first round is thrown away

    def of(what: int, of_ours: int | None = None) -> tuple[list[Sample], list[Sample]]:
        return [Sample(one[what]) for one in ours], [Sample(one[of_ours or what]) for one in theirs]

    return [
        Result("trace/event", "us", PEER, *of(0)),
        Result("trace/event/all", "us", PEER, *of(1)),
        Result("trace/bytes", "B", PEER, *of(2)),
    ]


def _effects(peers: list[PeerId], number: int) -> Iterator[Trace]:
    """Yield the trace events of a message at a node that forwards it: 10 events. Every eighth message is the node's
    own."""
    message = RpcMessage(number.to_bytes(8, "big") + os.urandom(12), b"", b"", "bench/topic", bytes(_SIZE_BYTES))
    rpc = Rpc((message,))
    if number % _OWN_EACH == 0:
        yield PublishMessage(message)
        yield DeliverMessage(message, None)
    else:
        yield RecvRpc(peers[0], rpc)
        yield DeliverMessage(message, peers[0])
    yield SendRpc(tuple(peers[1 : 1 + _FORWARDED_TO]), rpc)
    for other in (5, 6):
        yield RecvRpc(peers[other], rpc)
        yield DuplicateMessage(message, peers[other])


_EVENTS_EACH: Final = 6 + _FORWARDED_TO


async def _ours(peers: list[PeerId], messages: int) -> tuple[float, float, float]:
    """µs in the node's thread, µs of all threads, bytes; of one event, made, handed over and written."""
    tracer = Tracer(peers[7], 1 << 20, TraceSources(list, list, list, list, list, list))
    with tempfile.TemporaryDirectory(prefix="dep2p-bench-trace-") as directory:
        async with trio.open_nursery() as nursery:
            await nursery.start(tracer.run)
            await tracer.start(Path(directory), TraceSettings(rpcs=True, snapshot_s=0, clock_s=0))
            log = tracer.log
            idle_s, _ = await _no_trace(peers, messages)
            thread_s, all_s = time.thread_time(), time.process_time()
            for number in range(messages):
                now = number / 1_000
                for effect in _effects(peers, number):
                    if type(effect) in TRACE_TYPES:  # as in the shell of pub/sub
                        log.pending += (effect, now)
                        if len(log.pending) >= PENDING_MAX:
                            log.flush()
                if number % _STEP_MESSAGES == 0:
                    await trio.lowlevel.checkpoint()
            thread_s = time.thread_time() - thread_s - idle_s
            status = await tracer.stop("measured")
            all_s = time.process_time() - all_s - idle_s
            nursery.cancel_scope.cancel()
    events = messages * _EVENTS_EACH - len(range(0, messages, _OWN_EACH))  # own ones are no deliveries
    if status.dropped or status.events != events + 2:
        raise RuntimeError(f"{status.events} events were written of {events + 2}, dropped: {status.dropped}")
    return thread_s * 1e6 / events, all_s * 1e6 / events, status.bytes / events


async def _theirs(peers: list[PeerId], messages: int) -> tuple[float, float, float]:
    idle_s, _ = await _no_trace(peers, messages)
    with tempfile.TemporaryFile("w") as file:
        thread_s = time.thread_time()
        size = 0
        for number in range(messages):
            for effect in _effects(peers, number):
                for line in trace_to_json(effect, peers[7], number):
                    size += file.write(json.dumps(line, separators=(",", ":")) + "\n")
            if number % _STEP_MESSAGES == 0:
                await trio.lowlevel.checkpoint()
        file.flush()
        thread_s = time.thread_time() - thread_s - idle_s
    events = messages * _EVENTS_EACH
    return thread_s * 1e6 / events, thread_s * 1e6 / events, size / events


async def _no_trace(peers: list[PeerId], messages: int) -> tuple[float, int]:
    """Seconds of this thread for what a node does anyhow here: the messages and the turns of other tasks."""
    began_s = time.thread_time()
    made = 0
    for number in range(messages):
        message = RpcMessage(number.to_bytes(8, "big") + os.urandom(12), b"", b"", "bench/topic", bytes(_SIZE_BYTES))
        made += len(Rpc((message,)).messages)
        if number % _STEP_MESSAGES == 0:
            await trio.lowlevel.checkpoint()
    return time.thread_time() - began_s, made
