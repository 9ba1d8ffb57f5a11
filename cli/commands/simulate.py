"""``dep2p simulate``: a whole pubsub network in this process, under virtual time. Needs no daemon."""

import sys
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dep2p.cli.framework.command import Invocation, command
from dep2p.cli.framework.errors import CliError
from dep2p.cli.framework.render import duration, table
from dep2p.error_codes import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from dep2p.testing.simulator.simulator import Report, Scenario

_REDRAW_S: Final = 0.2
_BAR_CELLS: Final = 24


class Profile(StrEnum):
    """Named sets of router parameters."""

    SEED = "seed"
    GO = "go"


class ScoreProfile(StrEnum):
    """Profiles of peer scoring."""

    STANDARD = "standard"
    HARDENING = "hardening"
    OFF = "off"


class WireName(StrEnum):
    """Codecs between simulated nodes."""

    NONE = "none"
    REALM = "realm"
    LIBP2P = "libp2p"


class AttackName(StrEnum):
    """Scripted attackers; the same names as in the simulator, which is not loaded for ``--help``."""

    COLD_BOOT_ECLIPSE = "cold-boot-eclipse"
    COVERT_FLASH = "covert-flash"
    GRAFT_FLOOD = "graft-flood"
    MESSAGE_SPAM = "message-spam"
    EARLY_FORGERY = "early-forgery"
    TARGET_ECLIPSE = "target-eclipse"
    PUBLISHER_CENSORSHIP = "publisher-censorship"


_ATTACKS: Final = ", ".join(attack.value for attack in AttackName)


def _mesh_option(flag: str, text: str) -> Any:
    return typer.Option(flag, help=f"{text} (else the profile's).", min=0, metavar="N", show_default=False)


def simulate(
    run: Invocation,
    nodes: Annotated[int, typer.Option("--nodes", "-n", help="Honest nodes.", min=2, max=1_000_000)] = 1_000,
    publishers: Annotated[int, typer.Option("--publishers", help="Nodes that publish, in turn.", min=1)] = 10,
    messages: Annotated[int, typer.Option("--messages", "-m", help="Messages published, together.", min=0)] = 60,
    rate: Annotated[float, typer.Option("--rate", help="Messages a second, together.")] = 4.0,
    size: Annotated[int, typer.Option("--size", "-s", help="Bytes of a message.", min=16)] = 512,
    seed: Annotated[int, typer.Option("--seed", help="One seed is one run, always the same.")] = 1,
    degree: Annotated[int, typer.Option("--degree", help="Links of a node; it dials half of them.", min=2)] = 20,
    latency: Annotated[
        str,
        typer.Option("--latency", help="One-way delay of links in ms: fixed:50, uniform:10:150, lognormal:60:0.5."),
    ] = "uniform:10:150",
    loss: Annotated[float, typer.Option("--loss", help="Share of message and gossip RPCs that get lost.")] = 0.0,
    validation_ms: Annotated[float, typer.Option("--validation-ms", help="Time to check a message.", min=0)] = 0.0,
    profile: Annotated[Profile, typer.Option("--profile", help="Router parameters: seed (ours) or go.")] = Profile.SEED,
    d: Annotated[int | None, _mesh_option("--d", "Mesh peers wanted")] = None,
    d_lo: Annotated[int | None, _mesh_option("--d-lo", "Below it a mesh grafts")] = None,
    d_hi: Annotated[int | None, _mesh_option("--d-hi", "From it on a mesh prunes")] = None,
    d_score: Annotated[int | None, _mesh_option("--d-score", "Best scored peers that survive a prune")] = None,
    d_out: Annotated[int | None, _mesh_option("--d-out", "Dialed peers kept in a mesh")] = None,
    d_lazy: Annotated[int | None, _mesh_option("--d-lazy", "Peers that hear gossip")] = None,
    gossip_factor: Annotated[
        float | None,
        typer.Option("--gossip-factor", help="The same as a share.", min=0, max=1, metavar="SHARE", show_default=False),
    ] = None,
    flood_publish: Annotated[bool, typer.Option("--flood-publish", help="Publish to all peers of the topic.")] = False,
    scores: Annotated[
        ScoreProfile, typer.Option("--scores", help="Peer scoring: standard, hardening or off.")
    ] = ScoreProfile.STANDARD,
    attack: Annotated[AttackName | None, typer.Option("--attack", help=f"Add sybils that attack: {_ATTACKS}.")] = None,
    sybils: Annotated[float, typer.Option("--sybils", help="Sybils for each honest node.", min=0)] = 4.0,
    sybil_degree: Annotated[int, typer.Option("--sybil-degree", help="Honest nodes a sybil dials.", min=1)] = 10,
    partition: Annotated[
        str | None,
        typer.Option(
            "--partition", metavar="FROM:TO[:SHARE]", help="Split the network, seconds after the first publish."
        ),
    ] = None,
    leaves: Annotated[float, typer.Option("--leaves", help="Nodes that leave, a second.", min=0)] = 0.0,
    crashes: Annotated[float, typer.Option("--crashes", help="Nodes that crash, a second.", min=0)] = 0.0,
    down: Annotated[float, typer.Option("--down", help="Seconds until such a node is back.", min=1)] = 5.0,
    wire: Annotated[
        WireName, typer.Option("--wire", help="Encode and decode every RPC: none, realm or libp2p.")
    ] = WireName.NONE,
    settle: Annotated[float, typer.Option("--settle", help="Seconds to deliver after the last publish.", min=0)] = 5.0,
    require: Annotated[
        float, typer.Option("--require", help="Fail (exit 1) below this delivery ratio.", min=0, max=1)
    ] = 0.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="Write the trace of all nodes into DIR.")
    ] = None,
    trace_rpcs: Annotated[
        bool, typer.Option("--trace-rpcs/--no-trace-rpcs", help="With the events of each RPC, nine tenths of the file.")
    ] = True,
) -> int:
    """Simulate a pubsub network with the node's own router: delivery, latency, copies, meshes."""
    from dep2p.gossipsub.params import GossipParams, go_defaults
    from dep2p.gossipsub.scoring.params import hardening_scores, standard_scores
    from dep2p.testing.simulator import simulator
    from dep2p.testing.simulator.faults import Churn, Partition
    from dep2p.testing.simulator.topology import Latency

    given: dict[str, int | float | None] = {
        "d": d,
        "d_lo": d_lo,
        "d_hi": d_hi,
        "d_score": d_score,
        "d_out": d_out,
        "d_lazy": d_lazy,
    }
    given["gossip_factor"] = gossip_factor
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    made_scores = {
        ScoreProfile.STANDARD: standard_scores(),
        ScoreProfile.HARDENING: hardening_scores(),
        ScoreProfile.OFF: None,
    }
    try:
        params = go_defaults() if profile is Profile.GO else GossipParams()
        scenario = simulator.Scenario(
            nodes=nodes,
            publishers=min(publishers, nodes),
            messages=messages,
            rate_per_s=rate,
            message_bytes=size,
            seed=seed,
            degree=degree,
            latency=Latency.parse(latency),
            loss=loss,
            validation_s=validation_ms / 1_000,
            params=replace(params, flood_publish=flood_publish, **changes),
            scores=made_scores[scores],
            partition=Partition.parse(partition) if partition is not None else None,
            churn=Churn(leaves, crashes, down),
            attack=attack.value if attack is not None else None,
            sybils_per_node=sybils,
            sybil_degree=sybil_degree,
            wire=wire.value,
            settle_s=settle,
        )
    except ValueError as error:
        raise CliError(str(error), "D1001", tries=("dep2p simulate --help",)) from None
    bar = _Bar(scenario, shown=not (run.quiet or run.json))
    try:
        report = simulator.simulate(scenario, trace_dir=trace, trace_rpcs=trace_rpcs, on_progress=bar.on_progress)
    finally:
        bar.clear()
    if run.json:
        run.emit(report.as_object())
    else:
        run.print(_text(report))
    if trace is not None:
        run.say(f"trace: {trace}   (dep2p trace analyze {trace} --out report)")
    if report.deliveries.ratio < require:
        run.warn(f"delivery ratio {report.deliveries.ratio:.4f} is below {require:g}")
        return EXIT_FAILED
    return EXIT_OK


class _Bar:
    """The virtual time, on one line of a terminal; nothing where there is none."""

    def __init__(self, scenario: "Scenario", *, shown: bool) -> None:
        self._end_s = scenario.end_s
        self._shown = shown and sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._next_s = 0.0

    def on_progress(self, virtual_s: float) -> None:
        """Redraw, a few times a second at most."""
        if not self._shown:
            return
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _REDRAW_S
        sys.stderr.write("\r\x1b[K" + self.line(virtual_s, now - self._started_s))
        sys.stderr.flush()

    def line(self, virtual_s: float, passed_s: float) -> str:
        """The line after ``passed_s`` real seconds."""
        share = min(1.0, virtual_s / self._end_s)
        left = duration(passed_s / share - passed_s) if share > 0 else "?"
        cells = "#" * int(share * _BAR_CELLS)
        return f"simulating  [{cells:<{_BAR_CELLS}}] {share:4.0%}  {virtual_s:.1f} of {self._end_s:.1f} s  {left} left"

    def clear(self) -> None:
        """Wipe the line."""
        if self._shown and self._next_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _text(report: "Report") -> str:
    deliveries = report.deliveries
    latency, hops, degree = deliveries.latency_ms, deliveries.hops, report.mesh_degree
    rows = [
        ("delivered", f"{deliveries.ratio:.4%}", f"{deliveries.made:,} of {deliveries.expected:,}"),
        ("worst message", f"{deliveries.worst_message:.4%}", ""),
        (
            "latency",
            f"p50 {latency.p50:.0f} ms",
            f"p90 {latency.p90:.0f}  p99 {latency.p99:.0f}  max {latency.max:.0f} ms",
        ),
        ("hops", f"mean {hops.mean:.2f}", f"p50 {hops.p50:.0f}  p99 {hops.p99:.0f}  max {hops.max:.0f}"),
        ("copies per delivery", f"{report.copies_per_delivery:.2f}", f"{report.copies:,} copies"),
        ("mesh degree", f"mean {degree.mean:.2f}", f"min {report.mesh_degree_min}  max {degree.max:.0f}"),
    ]
    if report.scenario.attack is not None:
        thrown = report.disconnects.get("sybils", 0)
        rows.append(
            (
                "sybils",
                f"{report.scenario.sybils:,}",
                f"{report.mesh_sybil_share:.1%} of meshes, thrown out {thrown:,} times",
            )
        )
        if report.target is not None:
            target = report.target
            rows.append(
                (
                    "the target's",
                    f"{target.ratio:.4%}",
                    f"{target.made:,} of {target.expected:,}, p50 {target.latency_ms.p50:.0f} max "
                    f"{target.latency_ms.max:.0f} ms",
                )
            )
        rows.append(("forged, delivered", f"{report.forged_delivered}", ""))
    rows += [
        (f"rpcs: {kind}", f"{count:,}", "") for kind, count in sorted(report.rpcs.items(), key=lambda item: -item[1])
    ]
    rows += [(f"not arrived: {reason}", f"{count:,}", "") for reason, count in sorted(report.drops.items())]
    rows += [
        (
            "events",
            f"{report.events:,}",
            f"{report.events_per_s:,.0f}/s, {report.scenario.end_s:g} s of virtual time in {report.wall_s:.2f} s",
        ),
        ("trace hash", report.trace_hash, ""),
    ]
    if report.delivered_twice:
        rows.append(("DELIVERED TWICE", f"{report.delivered_twice}", "a bug in dep2p: report it with this command"))
    return table((f"{report.scenario.nodes:,} nodes", f"{report.scenario.messages:,} messages", ""), rows)


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "simulate",
        examples=[
            ("dep2p simulate --nodes 1000 --publishers 10 --messages 60 --loss 0.01 --seed 7", "a lossy network"),
            ("dep2p simulate --profile go --nodes 1000 --json", "with go-libp2p's mesh, for comparison"),
            ("dep2p simulate --nodes 200 --attack cold-boot-eclipse --require 0.99", "four sybils for each node"),
            ("dep2p simulate --nodes 100 --partition 2:8 --crashes 1 --settle 15 --trace out", "faults, and a trace"),
        ],
        notes="""
        Nodes start within a second and dial each other at random. From second 5 on the publishers take turns; then the
        network has --settle seconds. A node counts for a message when it was up from its publication to --settle
        seconds after it. The same options and seed give the same trace hash, under any PYTHONHASHSEED.

        --trace writes what live nodes would have written, a file for each node and run: `dep2p trace analyze` reads
        it. Second 0 is 2020-01-01T00:00:00Z. --no-trace-rpcs leaves out the events of each RPC, most of the bytes.
        """,
    )(simulate)
