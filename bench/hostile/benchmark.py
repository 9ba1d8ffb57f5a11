"""hostile/<attack>: a bystander's request while one node is attacked, beside the same while it is quiet."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import trio

from bench.harness.compare import FULL, TINY, Run
from bench.harness.processes import Crew, Worker, WorkerError
from bench.harness.report import Result, Sample

MEMBERS = 4
"""Honest members that are connected before the attack."""
NEWCOMERS = 2
"""Honest members that want to join while it goes on."""
UNKNOWN_MEMBERS = 8
"""Members that the node under ``high-numbers`` has yet to learn."""
RSS_GROWTH_MAX_MB = 1_024
"""The attack is stopped there, and the result says so: it would go on until the machine has no memory left."""
_PER_S = 100.0
"""Requests a second of the bystander: an idle node answers that many with a small part of a core."""
_MESSAGES_PER_S = 10.0
_GIVE_UP_S = 5.0
"""A request that is not answered by then has failed, and counts as having taken so long."""
_IN_FLIGHT = 16
_QUIET_ROUNDS = 4
_ATTACK_ROUNDS = 8
"""Times ``Effort.seconds`` of each measurement."""
_FIRST_ATTACKED = 1_000_000
"""The number of the first message that is published under attack."""
_SETTLE_S = 0.5
_GATHER_S = 8.0
"""For the connections of an attack that is its number: measuring begins when all are there or refused."""
_GATHERED = ("connections", "reserved", "reservations_refused", "refused")
_RSS_PERIOD_S = 0.05
_CALL_TIMEOUT_S = 60.0
_VICTIM_TIMEOUT_S = 20.0
_SIDE = "dep2p"

Who = Literal["stranger", "member", "caller"]
Layout = Literal["direct", "relay", "newcomer", "topic"]
"""direct: members ask a node that listens. relay: they reach it through a relay, which is the one under attack.
newcomer: the node has yet to learn the members. topic: the bystander publishes, and the node's deliveries are timed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One attack: who attacks, which nodes there are, and how much of it."""

    by: Who
    connections: int = 8
    """In the whole run; an eighth of it with ``--quick``, at least 8. Records, for ``invented-members``."""
    layout: Layout = "direct"
    relay_is_member: bool = False
    """The relay is in the realm of the members, as one that they run themselves."""
    needs_all: bool = False
    """The attack is its number: the quick run has all of it, too."""
    is_crowd_apart: bool = False
    """The other members have work with the attack, too: they run in a process of their own, so that the one that asks
    is a node as others are."""


SCENARIOS: Mapping[str, Scenario] = {
    "rsa-keys": Scenario("stranger"),
    "wrong-calls": Scenario("caller"),
    "half-open": Scenario("stranger", 448, needs_all=True),
    "idle-connections": Scenario("stranger", 448, needs_all=True),
    "yamux-resets": Scenario("stranger"),
    "yamux-empty": Scenario("stranger"),
    "yamux-dribble": Scenario("stranger"),
    "failed-proofs": Scenario("stranger"),
    "request-flood": Scenario("member"),
    "request-unread": Scenario("member"),
    "request-hold": Scenario("member"),
    "queue-flood": Scenario("member"),
    "identify": Scenario("stranger"),
    "invented-members": Scenario("member", 4_000, is_crowd_apart=True),
    "forged-copy": Scenario("stranger", layout="topic"),
    "ihave-parallel": Scenario("stranger"),
    "graft-unsubscribed": Scenario("stranger"),
    "quic-initials": Scenario("stranger"),
    "relay-circuits": Scenario("stranger", layout="relay"),
    "relay-reservations": Scenario("stranger", 280, layout="relay", relay_is_member=True, needs_all=True),
    "open-relay-reservations": Scenario("stranger", 280, layout="relay", needs_all=True),
    "relay-proofs": Scenario("stranger", layout="relay"),
    "high-numbers": Scenario("member", layout="newcomer"),
    "subscribe-flood": Scenario("stranger"),
    "graft-flood": Scenario("stranger"),
}
"""By the name in the result, in the order of the run."""


_LEAST = ("members_up", "members_learned", "newcomers_joined", "others_rate_percent")
"""Counts of which the least of several rounds is shown; the most of all others."""


@dataclass(slots=True)
class _Play:
    """One round of one scenario: its processes and what was measured."""

    scenario: Scenario
    run: Run
    crew: Crew
    victim: Worker
    bystander: Worker
    attacker: Worker
    """The victim itself where its own program is to blame."""
    watched: Worker
    """The process whose memory is measured: the victim, or the relay."""
    address: str = ""
    """Where members dial the victim."""
    target: str = ""
    """Where the attacker dials."""
    others: list[str] = field(default_factory=list[str])
    members: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    is_stopped: bool = False
    """The attack was ended before its time."""

    def rss_mb(self) -> float:
        """Resident memory of the watched process; 0 when it has ended."""
        try:
            return self.watched.rss_kb() / 1_000
        except (OSError, ValueError):
            self.counts["node_ended"] = 1
            return 0.0


async def hostile(run: Run) -> list[Result]:
    """A result for each attack; processes of their own for each round of it."""
    results: list[Result] = []
    for name in [run.attack] if run.attack else list(SCENARIOS):
        rounds = [await _play(run, name) for _ in range(max(1, run.effort.rounds // 3))]
        keys = dict.fromkeys(key for _, _, counted in rounds for key in counted)
        results.append(
            Result(
                f"hostile/{name}",
                "ms",
                "the same while it is quiet",
                [attacked for _, attacked, _ in rounds],
                [quiet for quiet, _, _ in rounds],
                {key: (min if key in _LEAST else max)(counted[key] for _, _, counted in rounds) for key in keys},
            )
        )
    return results


async def _play(run: Run, name: str) -> tuple[Sample, Sample, Counter[str]]:
    """A round: the bystander's latencies while the node is quiet and while it is attacked, and what was counted."""
    scenario = SCENARIOS[name]
    async with run.crew() as crew:
        started: dict[str, Worker] = {}

        async def start(role: str) -> None:
            started[role] = await crew.start(_SIDE, role, f"bench.hostile.{role}")

        async with trio.open_nursery() as nursery:
            for role in ("victim", "bystander", *(() if scenario.by == "caller" else ("attacker",))):
                nursery.start_soon(start, role)
        victim = started["victim"]
        play = _Play(scenario, run, crew, victim, started["bystander"], started.get("attacker", victim), watched=victim)
        await _set_up(play)
        run.load.begin(crew.pids)
        quiet = await _quiet(play)
        quiet_rate = await _rate(play) if scenario.by == "member" else 0.0
        run.load.end(crew.pids)
        attacked = await _attacked(play, name, quiet_rate)
        return _sample(quiet), _sample(attacked), play.counts


def _sample(measured: Mapping[str, float]) -> Sample:
    return Sample(measured["p99_ms"], measured["p50_ms"], measured["p99_ms"])


async def _set_up(play: _Play) -> None:
    """Open the nodes, and connect the members."""
    secret, layout, relay = play.run.secret, play.scenario.layout, ""
    if layout == "relay":
        play.watched = await play.crew.start(_SIDE, "relay", "bench.hostile.victim")
        relay_secret = secret if play.scenario.relay_is_member else ""
        relay = _texts(await play.watched.call_text("relay", secret=relay_secret))[0]
    addresses = _texts(await play.victim.call_text("serve", secret=secret, relay=relay))
    play.address = next(one for one in addresses if "/p2p-circuit" in one or "/tcp/" in one)
    play.target = relay or play.address
    if layout == "topic":
        play.others = [await play.bystander.call_text("author", address=play.address)]
    elif layout == "newcomer":
        play.others = play.members = _texts(
            await play.bystander.call_text("meet", secret=secret, count=UNKNOWN_MEMBERS)
        )
    else:
        play.others = [one for one in addresses if "/quic" in one or "/p2p-circuit" in one]
        groups = [(play.bystander, MEMBERS)]
        if play.scenario.is_crowd_apart:
            crowd = await play.crew.start(_SIDE, "crowd", "bench.hostile.bystander")
            groups = [(play.bystander, 1), (crowd, MEMBERS - 1)]
        for worker, count in groups:
            is_relayed = layout == "relay"
            joined = await worker.call_text(
                "join", secret=secret, address=play.address, count=count, is_relayed=is_relayed
            )
            play.members += _texts(joined)


def _texts(text: str) -> list[str]:
    found: Sequence[str] = json.loads(text)
    return list(found)


async def _quiet(play: _Play) -> Mapping[str, float]:
    seconds = play.run.effort.seconds * _QUIET_ROUNDS
    if play.scenario.layout == "newcomer":
        # The node under attack has to be new: another one is the quiet one.
        other = await play.crew.start(_SIDE, "quiet", "bench.hostile.victim")
        addresses = _texts(await other.call_text("serve", secret=play.run.secret))
        await play.bystander.call("introduce", address=addresses[0])
        measured = await _probe(play, seconds, 0)
        learned = await other.call("status", members=play.members)
        play.counts["members_learned_quiet"] = int(learned["known"])
        return measured
    return await _probe(play, seconds, 0)


async def _probe(play: _Play, seconds: float, first: int) -> Mapping[str, float]:
    """The bystander's latencies for so long: of its requests, or of its messages' deliveries at the node."""
    if play.scenario.layout != "topic":
        return await play.bystander.call(
            "ask", timeout_s=seconds + _CALL_TIMEOUT_S, seconds=seconds, per_s=_PER_S, give_up_s=_GIVE_UP_S
        )
    count = max(1, int(seconds * _MESSAGES_PER_S))
    await play.bystander.call("publish", first=first, count=count, per_s=_MESSAGES_PER_S)
    found = await _ask_victim(play, "take", first=first, count=count, give_up_s=_GIVE_UP_S)
    return found or {"count": count, "failed": count, "p50_ms": _GIVE_UP_S * 1_000, "p99_ms": _GIVE_UP_S * 1_000}


async def _rate(play: _Play) -> float:
    seconds = max(0.1, play.run.effort.seconds * 2)
    found = await play.bystander.call("rate", seconds=seconds, in_flight=_IN_FLIGHT)
    return found["per_s"]


async def _ask_victim(play: _Play, command: str, **arguments: object) -> Mapping[str, float]:
    """The victim's answer; nothing when it has ended or does not answer."""
    try:
        return await play.victim.call(command, timeout_s=_VICTIM_TIMEOUT_S, **arguments)
    except WorkerError:
        play.counts["node_ended"] = 1
        return {}


async def _attacked(play: _Play, name: str, quiet_rate: float) -> Mapping[str, float]:
    """The same latencies under attack; puts all that is counted into ``play.counts``."""
    counts, effort = play.counts, play.run.effort
    counts["rss_before_mb"] = counts["rss_most_mb"] = round(play.rss_mb())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_memory, play)
        await _ask_victim(play, "watch")
        await _begin(play, name)
        await trio.sleep(_SETTLE_S)
        if play.scenario.layout == "newcomer":
            await play.bystander.call("introduce", address=play.address)
        measured = await _probe(play, effort.seconds * _ATTACK_ROUNDS, _FIRST_ATTACKED)
        counts["asked"], counts["failed"] = int(measured["count"]), int(measured["failed"])
        if quiet_rate:
            counts["others_rate_percent"] = round(await _rate(play) * 100 / quiet_rate)
        found = await _ask_victim(play, "status", members=play.members)
        counts["members"], counts["members_up"] = len(play.members), int(found.get("up", 0))
        if play.scenario.layout == "newcomer":
            counts["members_learned"] = int(found.get("known", 0))
        if name == "graft-unsubscribed":
            counts["mesh"] = int(found.get("mesh", 0))
        counts["loop_pass_most_ms"] = round((await _ask_victim(play, "watch")).get("loop_pass_ms", 0))
        await _let_newcomers_in(play, name)
        nursery.cancel_scope.cancel()
    if not play.is_stopped:
        await _end(play)
    await trio.sleep(min(_SETTLE_S, effort.seconds))
    counts["rss_after_mb"] = round(play.rss_mb())
    return measured


async def _begin(play: _Play, name: str) -> None:
    if play.scenario.by == "caller":
        await play.victim.call("begin")
        return
    connections = play.scenario.connections
    if play.run.effort is not FULL and not play.scenario.needs_all:
        connections = max(8, connections // 8)
    if play.run.effort is TINY:
        connections = 2
    await play.attacker.call(
        "begin",
        attack=name,
        address=play.target,
        secret=play.run.secret,
        connections=connections,
        others=play.others,
    )
    if play.scenario.needs_all:
        for _ in range(int(_GATHER_S / _SETTLE_S)):
            gathered = await play.attacker.call("progress")
            if play.is_stopped or sum(gathered.get(key, 0) for key in _GATHERED) >= connections:
                break
            await trio.sleep(_SETTLE_S)


async def _end(play: _Play) -> None:
    """Stop the attack and take its counts."""
    play.is_stopped = True
    try:
        found = await play.attacker.call("end", timeout_s=_VICTIM_TIMEOUT_S)
    except WorkerError:
        if play.attacker is not play.victim:
            raise
        play.counts["node_ended"] = 1
        return
    play.counts.update({key: int(value) for key, value in found.items()})


async def _watch_memory(play: _Play) -> None:
    counts = play.counts
    while True:
        counts["rss_most_mb"] = max(counts["rss_most_mb"], round(play.rss_mb()))
        if counts["rss_most_mb"] - counts["rss_before_mb"] > RSS_GROWTH_MAX_MB:
            counts["stopped_for_memory"] = 1
            with trio.CancelScope(shield=True):
                await _end(play)
            return
        await trio.sleep(_RSS_PERIOD_S)


async def _let_newcomers_in(play: _Play, name: str) -> None:
    """Honest members come while the attack goes on."""
    if play.scenario.layout in ("topic", "newcomer"):
        return
    if play.scenario.relay_is_member:
        found = await play.bystander.call(
            "reserve", secret=play.run.secret, address=play.target, count=NEWCOMERS, give_up_s=_GIVE_UP_S
        )
    else:
        found = await play.bystander.call(
            "newcomers",
            secret=play.run.secret,
            address=play.address,
            count=NEWCOMERS,
            give_up_s=_GIVE_UP_S,
            is_relayed=play.scenario.layout == "relay",
        )
    play.counts["newcomers"], play.counts["newcomers_joined"] = NEWCOMERS, int(found["joined"])
    play.counts["newcomer_ms"] = round(found["longest_ms"])
