"""A whole pubsub network in one process, under virtual time: the router of a live node, a thousand times.

One scenario with one seed is one run, on any machine with the same Python and under any hash seed; its trace hash says
whether two runs were the same. How to use it: docs/howto/simulate.md.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from dep2p.gossipsub.events import Join, Publish
from dep2p.gossipsub.options import RouterOptions
from dep2p.gossipsub.params import GossipParams
from dep2p.gossipsub.router import Router
from dep2p.gossipsub.scoring.params import ScoreParams, standard_scores
from dep2p.gossipsub.signing.policy import MessageSigning
from dep2p.testing.simulator.attacks import ATTACKS, Attack, Stage
from dep2p.testing.simulator.calendar import Agenda
from dep2p.testing.simulator.faults import Churn, Faults, Partition
from dep2p.testing.simulator.messages import WireName, authenticate, forge, make_compose, make_wire
from dep2p.testing.simulator.metrics import Deliveries, Metrics, Spread
from dep2p.testing.simulator.topology import Latency, random_graph
from dep2p.testing.simulator.trace import TraceDir
from dep2p.testing.simulator.world import Conditions, World

TOPIC: Final = "simulation"

_BOOT_S: Final = 1.0
_SEQNO_START: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A simulation to run. Raises ``ValueError`` that says what is wrong.

    Nodes start within the first second and dial each other; at ``warmup_s`` the publishers begin to take turns,
    together ``rate_per_s`` messages a second; after the last one the network has ``settle_s`` to deliver.
    """

    nodes: int = 1_000
    publishers: int = 10
    messages: int = 60
    rate_per_s: float = 4.0
    message_bytes: int = 512
    seed: int = 1
    degree: int = 20
    """Links of a node, half of them dialed by it."""
    latency: Latency = field(default_factory=Latency)
    loss: float = 0.0
    """Share of message and gossip RPCs that never arrive. Control is not lost: in a live node a stream carries it."""
    validation_s: float = 0.0
    """Seconds that a node takes to check a message; 0 checks inside the router."""
    params: GossipParams = field(default_factory=GossipParams)
    scores: ScoreParams | None = field(default_factory=standard_scores)
    partition: Partition | None = None
    churn: Churn = field(default_factory=Churn)
    attack: str | Attack | None = None
    """The attack: a name in `ATTACKS`, or an `Attack` of your own."""
    sybils_per_node: float = 4.0
    sybil_degree: int = 10
    """Honest nodes that each sybil dials; all when there are fewer."""
    wire: WireName = "none"
    """The codec that encodes and decodes each RPC; ``none`` hands the objects over, several times as fast."""
    warmup_s: float = 5.0
    settle_s: float = 5.0

    def __post_init__(self) -> None:
        for name, low in (("nodes", 2), ("publishers", 1), ("messages", 0), ("message_bytes", 16), ("degree", 2)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}")
        if self.publishers > self.nodes:
            raise ValueError(f"{self.publishers} publishers among {self.nodes} nodes: there cannot be more")
        if not 0 <= self.loss < 1:
            raise ValueError("loss is a share: from 0 to below 1")
        if self.rate_per_s <= 0:
            raise ValueError("rate_per_s must be above 0")
        for name in ("validation_s", "settle_s", "sybils_per_node"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative")
        if self.warmup_s < _BOOT_S:
            raise ValueError("warmup_s must be at least 1: until then nodes are starting")
        if isinstance(self.attack, str) and self.attack not in ATTACKS:
            raise ValueError(f"no attack {self.attack!r}: there are {', '.join(ATTACKS)}")
        if self.payload_bytes > self.params.message_bytes_max:
            raise ValueError(f"messages of {self.payload_bytes} bytes: params allow {self.params.message_bytes_max}")
        if self.sybil_degree < 1:
            raise ValueError("sybil_degree must be at least 1")

    @property
    def attacked_by(self) -> Attack | None:
        """Return the attack, if there is one."""
        return ATTACKS[self.attack] if isinstance(self.attack, str) else self.attack

    @property
    def attack_name(self) -> str | None:
        """Return the name of the attack; its summary when it is not one of `ATTACKS`."""
        return self.attack.summary if isinstance(self.attack, Attack) else self.attack

    @property
    def payload_bytes(self) -> int:
        """Bytes of a published message: an attack may need larger ones."""
        attack = self.attacked_by
        return self.message_bytes if attack is None else max(self.message_bytes, attack.message_bytes_min)

    @property
    def check_s(self) -> float:
        """Seconds in which a node checks a message: an attack may need some."""
        attack = self.attacked_by
        return self.validation_s if attack is None else max(self.validation_s, attack.validation_s_min)

    @property
    def sybils(self) -> int:
        """Count of attackers."""
        return round(self.nodes * self.sybils_per_node) if self.attack is not None else 0

    @property
    def last_publish_s(self) -> float:
        """Virtual time of the last publish."""
        return self.warmup_s + max(0, self.messages - 1) / self.rate_per_s

    @property
    def end_s(self) -> float:
        """Virtual time at which the simulation ends."""
        return self.last_publish_s + self.settle_s


@dataclass(slots=True)
class Report:
    """The results of a simulation. Times are virtual, but for ``wall_s``, ``cpu_s`` and ``build_s``."""

    scenario: Scenario
    deliveries: Deliveries
    copies: int
    copies_per_delivery: float
    """Messages sent to neighbours, for each message and node that has it, the publisher included."""
    target: Deliveries | None
    """Deliveries to the node, or of the publisher, that the attack is aimed at; None when it is aimed at neither."""
    mesh_degree: Spread
    mesh_degree_min: int
    mesh_sybil_share: float
    """Share of places in honest meshes that the sybils hold when the last message is published."""
    delivered_twice: int
    forged_delivered: int
    rpcs: dict[str, int]
    drops: dict[str, int]
    disconnects: dict[str, int]
    publishes_refused: int
    sizes_max: dict[str, int]
    """The fullest that each bounded part of any honest router was at the end."""
    counters: dict[str, int]
    """The routers' counters, summed."""
    events: int
    wall_s: float
    cpu_s: float
    """Processor seconds of the run; less than ``wall_s`` where other processes have the core too."""
    build_s: float
    trace_hash: str

    @property
    def events_per_s(self) -> float:
        """Simulated events for each second of real time."""
        return self.events / self.wall_s if self.wall_s else 0.0

    def as_object(self) -> dict[str, object]:
        """Return the report for JSON. Everything but ``performance`` depends on nothing but the scenario."""
        scenario = self.scenario
        deliveries = self.deliveries
        return {
            "nodes": scenario.nodes,
            "publishers": scenario.publishers,
            "messages": scenario.messages,
            "seed": scenario.seed,
            "loss": scenario.loss,
            "attack": scenario.attack_name,
            "sybils": scenario.sybils,
            "virtual_s": round(scenario.end_s, 3),
            "expected_deliveries": deliveries.expected,
            "deliveries": deliveries.made,
            "delivery_ratio": round(deliveries.ratio, 6),
            "worst_message_ratio": round(deliveries.worst_message, 6),
            "latency_ms": deliveries.latency_ms.as_object(),
            "hops": deliveries.hops.as_object(),
            "target": None
            if self.target is None
            else {
                "expected": self.target.expected,
                "made": self.target.made,
                "ratio": round(self.target.ratio, 6),
                "latency_ms": self.target.latency_ms.as_object(),
            },
            "copies": self.copies,
            "copies_per_delivery": round(self.copies_per_delivery, 4),
            "mesh_degree": {**self.mesh_degree.as_object(), "min": self.mesh_degree_min},
            "mesh_sybil_share": round(self.mesh_sybil_share, 4),
            "delivered_twice": self.delivered_twice,
            "forged_delivered": self.forged_delivered,
            "rpcs": dict(sorted(self.rpcs.items())),
            "drops": dict(sorted(self.drops.items())),
            "disconnects": dict(sorted(self.disconnects.items())),
            "publishes_refused": self.publishes_refused,
            "sizes_max": self.sizes_max,
            "counters": dict(sorted(self.counters.items())),
            "events": self.events,
            "trace_hash": self.trace_hash,
            "performance": {
                "wall_s": round(self.wall_s, 3),
                "cpu_s": round(self.cpu_s, 3),
                "build_s": round(self.build_s, 3),
                "events_per_s": round(self.events_per_s, 1),
            },
        }


class Simulation:
    """One run of a scenario, step by step; `simulate` does all of the steps."""

    def __init__(self, scenario: Scenario, trace: TraceDir | None = None) -> None:
        self.scenario = scenario
        self.agenda: Agenda = Agenda()
        self.metrics: Metrics = Metrics(scenario.nodes, self.agenda.mix)
        # Streams of random numbers of their own, so that one more fault does not change the graph.
        self._rng = Random(f"{scenario.seed} routers")
        self._rng_graph = Random(f"{scenario.seed} graph")
        self._rng_faults = Random(f"{scenario.seed} faults")
        self._rng_attack = Random(f"{scenario.seed} attack")
        self._tracing = trace is not None
        self._starts: dict[int, int] = {}
        self.world: World = World(
            Conditions(
                latency=scenario.latency,
                loss=scenario.loss,
                validation_s=scenario.check_s,
                wire=make_wire(scenario.wire, scenario.params),
            ),
            metrics=self.metrics,
            agenda=self.agenda,
            rng=Random(f"{scenario.seed} links"),
            trace=trace,
        )
        self.mesh_degree: Spread = Spread()
        self.mesh_degree_min: int = 0
        self.mesh_sybil_share: float = 0.0
        self._publishers: tuple[int, ...] = ()
        self.target: int | None = None
        """The node that the attack is aimed at."""
        self._build()

    # Setting up ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        scenario = self.scenario
        world = self.world
        rng = self._rng_graph
        for _ in range(scenario.nodes + scenario.sybils):
            world.add()
        starts = [rng.random() * 0.5 * _BOOT_S for _ in range(len(world.nodes))]
        for number in range(scenario.nodes):
            world.call(starts[number], partial(self._start, number))
        for dialer, other in random_graph(scenario.nodes, scenario.degree, rng):
            at = max(starts[dialer], starts[other]) + rng.random() * 0.5 * _BOOT_S
            world.call(at, partial(self._dial, dialer, other))
        self._publishers = tuple(rng.sample(range(scenario.nodes), scenario.publishers))
        attack = scenario.attacked_by
        if attack is not None:
            self._choose_target(attack)
            for number in range(scenario.nodes, len(world.nodes)):
                self._place_sybil(attack, number, starts)
        self._schedule_publishes()
        faults = Faults(world, scenario.nodes, self._rng_faults, self._restart)
        if scenario.partition is not None:
            faults.schedule_partition(scenario.partition, scenario.warmup_s)
        faults.schedule_churn(scenario.churn, scenario.warmup_s, scenario.last_publish_s)

    def _choose_target(self, attack: Attack) -> None:
        if attack.target == "publisher":
            self.target = self._publishers[0]
        elif attack.target == "node":
            others = [number for number in range(self.scenario.nodes) if number not in self._publishers]
            self.target = others[0] if others else 0

    def _stage(self, number: int) -> Stage:
        scenario = self.scenario
        return Stage(
            world=self.world,
            number=number,
            topic=TOPIC,
            start=scenario.warmup_s,
            end=scenario.last_publish_s,
            rng=self._rng_attack,
            victims=scenario.nodes,
            sybils=range(scenario.nodes, len(self.world.nodes)),
            publishers=self._publishers,
            target=self.target,
            forge=partial(forge, scenario.wire, scenario.params),
        )

    def _place_sybil(self, attack: Attack, number: int, starts: list[float]) -> None:
        """Put a sybil on the agenda. It dials as soon as both ends are there, before honest nodes have dialed each
        other."""
        stage = self._stage(number)
        self.world.call(starts[number], partial(self._start_sybil, attack, stage))
        for other in attack.links(stage, self.scenario.sybil_degree):
            self.world.call(max(starts[number], starts[other]) + 0.001, partial(self._dial, number, other))

    def _schedule_publishes(self) -> None:
        scenario = self.scenario
        for index in range(scenario.messages):
            number = self._publishers[index % len(self._publishers)]
            at = scenario.warmup_s + index / scenario.rate_per_s
            self.world.call(at, partial(self._publish, number, index))

    def make_router(self, number: int, now: float) -> Router:
        """Make a router for a node, as a live node has one but for keys and codec."""
        scenario = self.scenario
        starts = self._starts[number] = self._starts.get(number, 0) + 1
        return Router(
            self.world.peers[number],
            self.world.identities[number],
            params=scenario.params,
            signing=MessageSigning(
                compose=make_compose(scenario.wire, scenario.params, self.world.identities[number]),
                seqno_start=_SEQNO_START * starts,
                authenticate=authenticate,
                is_external=scenario.check_s > 0,
            ),
            rng=self._rng,
            now=now,
            options=RouterOptions(scores=scenario.scores, tracing=self._tracing and number < scenario.nodes),
        )

    # What happens to the world ---------------------------------------------------------------------------------------

    def _start(self, number: int, now: float) -> None:
        # Heartbeats of different nodes fall on different times, as they do in a real network.
        router = self.make_router(number, now)
        self.world.start(number, router, router.receive)
        self.world.post(now, number, Join(TOPIC))

    def _restart(self, number: int) -> None:
        self._start(number, self.agenda.now)

    def _start_sybil(self, attack: Attack, stage: Stage, now: float) -> None:
        sybil = attack.make(stage, partial(self.make_router, stage.number, now))
        self.world.start(stage.number, sybil, sybil.receive)
        if attack.joins:
            self.world.post(now, stage.number, Join(TOPIC))

    def _dial(self, dialer: int, other: int, now: float) -> None:
        self.world.dial(dialer, other)

    def _publish(self, number: int, index: int, now: float) -> None:
        """Publish a message; the next node that is up does it when the publisher is down."""
        nodes = self.scenario.nodes
        for step in range(nodes):
            candidate = (number + step) % nodes
            if self.world.is_up(candidate):
                data = (b"message %d " % index).ljust(self.scenario.payload_bytes, b".")
                self.world.post(now, candidate, Publish(TOPIC, data, index, if_no_peers="ignore"))
                return

    # Running ---------------------------------------------------------------------------------------------------------

    def run(self, on_progress: Callable[[float], None] | None = None) -> None:
        """Run the simulation to its end. ``on_progress`` is called with the virtual time, very often."""
        self.world.run(self.scenario.last_publish_s + 0.001, on_progress)
        self._measure_meshes()
        self.world.run(self.scenario.end_s, on_progress)

    def routers(self) -> list[Router]:
        """Return the honest routers that are up."""
        nodes = self.world.nodes[: self.scenario.nodes]
        return [node for node in nodes if isinstance(node, Router)]

    def _measure_meshes(self) -> None:
        sizes: list[float] = []
        sybils = places = 0
        for router in self.routers():
            mesh = router.mesh(TOPIC)
            sizes.append(len(mesh))
            places += len(mesh)
            sybils += sum(1 for peer in mesh if self.world.numbers[peer] >= self.scenario.nodes)
        self.mesh_degree = Spread.of(sizes)
        self.mesh_degree_min = int(min(sizes, default=0))
        self.mesh_sybil_share = sybils / places if places else 0.0

    def _target_deliveries(self) -> Deliveries | None:
        attack = self.scenario.attacked_by
        if attack is None or self.target is None:
            return None
        if attack.target == "publisher":
            return self.metrics.summary(self.scenario.settle_s, publisher=self.target)
        return self.metrics.summary(self.scenario.settle_s, node=self.target)

    def report(self, *, wall_s: float = 0.0, cpu_s: float = 0.0, build_s: float = 0.0) -> Report:
        """Return the results so far."""
        metrics = self.metrics
        sizes: dict[str, int] = {}
        counters: dict[str, int] = {}
        for router in self.routers():
            for name, size in router.sizes().items():
                sizes[name] = max(sizes.get(name, 0), size)
            for name, count in router.counters().items():
                counters[name] = counters.get(name, 0) + count
        held = metrics.deliveries + len(metrics.records)
        return Report(
            scenario=self.scenario,
            deliveries=metrics.summary(self.scenario.settle_s),
            copies=metrics.copies,
            copies_per_delivery=metrics.copies / held if held else 0.0,
            target=self._target_deliveries(),
            mesh_degree=self.mesh_degree,
            mesh_degree_min=self.mesh_degree_min,
            mesh_sybil_share=self.mesh_sybil_share,
            delivered_twice=metrics.delivered_twice,
            forged_delivered=metrics.forged_delivered,
            rpcs=metrics.rpcs,
            drops=metrics.drops,
            disconnects=metrics.disconnects,
            publishes_refused=metrics.publishes_refused,
            sizes_max=sizes,
            counters=counters,
            events=self.agenda.events,
            wall_s=wall_s,
            cpu_s=cpu_s,
            build_s=build_s,
            trace_hash=self.agenda.trace_hash(),
        )


def simulate(
    scenario: Scenario,
    *,
    trace_dir: Path | None = None,
    trace_rpcs: bool = True,
    on_progress: Callable[[float], None] | None = None,
) -> Report:
    """Run a scenario to its end.

    - ``trace_dir``: where the trace is written, see :class:`~dep2p.testing.simulator.trace.TraceDir`.
    - ``on_progress``: called with the virtual time in seconds, very often.

    Raises ``OSError`` when the trace cannot be written.
    """
    if trace_dir is None:
        return _simulate(scenario, None, on_progress)
    with TraceDir(trace_dir, rpcs=trace_rpcs) as trace:
        return _simulate(scenario, trace, on_progress)


def _simulate(scenario: Scenario, trace: TraceDir | None, on_progress: Callable[[float], None] | None) -> Report:
    started = time.perf_counter()
    collects = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and a collection would walk over all nodes again and again
    try:
        simulation = Simulation(scenario, trace)
        built, cpu_s = time.perf_counter(), time.process_time()
        simulation.run(on_progress)
        wall_s, cpu_s = time.perf_counter() - built, time.process_time() - cpu_s
        return simulation.report(wall_s=wall_s, cpu_s=cpu_s, build_s=built - started)
    finally:
        if collects:
            gc.enable()
