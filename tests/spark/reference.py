"""Every metric again, in plain Python and as simply as it can be said: loops over lists of events, no shared code."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from dep2p.traces.files import parse_file_name, read_events, trace_files

Events = list[dict[str, Any]]


def load(directory: Path) -> Events:
    """All events, each with its run, in the order of time."""
    found: Events = []
    for path in trace_files([directory]):
        name = parse_file_name(path.name)
        assert name is not None
        found += [{**event, "run": name.start_ns} for event in read_events(path)]
    return sorted(found, key=lambda event: (event["t"], event["node"], event["seq"]))


def rounded(value: int) -> int:
    """Down to 8 significant bits."""
    value = max(0, value)
    spare = max(0, value.bit_length() - 8)
    return value >> spare << spare


class Reference:
    """All figures of a trace; ``settle_us`` and ``bucket_us`` as in the analysis."""

    def __init__(self, events: Events, *, settle_us: int, bucket_us: int) -> None:
        self.events = events
        self.settle_us = settle_us
        self.bucket_us = bucket_us
        self.of: dict[str, Events] = defaultdict(list)
        for event in events:
            self.of[event["kind"]].append(event)
        self.run_ends: dict[tuple[str, int], int] = {}
        for event in events:
            self.run_ends[event["node"], event["run"]] = event["t"]
        self.subscriptions = self._subscriptions()
        self.publishes: dict[str, dict[str, Any]] = {}
        for event in self.of["publish"]:
            self.publishes.setdefault(event["msg"], event)
        self.firsts: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        for event in self.of["deliver"]:
            own = "peer" not in event or event["node"] == self.publishes.get(event["msg"], {}).get("node")
            if not own:
                self.firsts[event["msg"]].setdefault(event["node"], event)

    def _subscriptions(self) -> list[tuple[str, str, int, int]]:
        found: list[tuple[str, str, int, int]] = []
        open_since: dict[tuple[str, int, str], int] = {}
        for event in self.events:
            if event["kind"] in ("join", "leave"):
                key = (event["node"], event["run"], event["topic"])
                if key in open_since:
                    found.append((event["topic"], event["node"], open_since.pop(key), event["t"]))
                if event["kind"] == "join":
                    open_since[key] = event["t"]
        for (node, run, topic), begin in open_since.items():
            found.append((topic, node, begin, self.run_ends[node, run]))
        return found

    # Propagation

    def eligible(self, msg: str) -> set[str]:
        publish = self.publishes[msg]
        return {
            node
            for topic, node, begin, end in self.subscriptions
            if topic == publish["topic"]
            and begin <= publish["t"]
            and end >= publish["t"] + self.settle_us
            and node != publish["node"]
        }

    def hops(self, msg: str) -> dict[str, int]:
        """Return for each node that got it the hops from the publisher, -1 when a node on the way is not in the
        trace."""
        publisher = self.publishes[msg]["node"]
        parent = {node: event["peer"] for node, event in self.firsts[msg].items()}

        def depth(node: str) -> int:
            count, at, seen = 0, node, set[str]()
            while at != publisher:
                if at not in parent or at in seen:
                    return -1
                seen.add(at)
                at = parent[at]
                count += 1
            return count

        return {node: depth(node) for node in parent}

    def spread(self) -> dict[str, tuple[int, ...]]:
        """Message → eligible, reached, delivered, t50 to t100, last, sum of latencies, its hops, parents, lost."""
        found: dict[str, tuple[int, ...]] = {}
        for msg, publish in self.publishes.items():
            due = self.eligible(msg)
            late = sorted((e["t"] - publish["t"], node) for node, e in self.firsts[msg].items())
            good = sorted(t for t, node in late if node in due)
            hops = self.hops(msg)
            times = []
            for share in (50, 90, 99, 100):
                need = -(-len(due) * share // 100)
                times.append(good[need - 1] if 0 < need <= len(good) else -1)
            last = max((t for t, _ in late), default=-1)
            latest = {hops[node] for t, node in late if t == last} or {-1}
            known = {publish["node"], *self.firsts[msg]}
            parents = {e["peer"] for e in self.firsts[msg].values() if e["peer"] in known}
            found[msg] = (
                *(len(due), len(good), len(late), *times, last, sum(t for t, _ in late)),
                *(min(latest), max(latest), len(parents), sum(value < 0 for value in hops.values())),
            )
        return found

    def links(self) -> dict[tuple[str, str], tuple[int, int, int, int]]:
        delays: dict[tuple[str, str], list[int]] = defaultdict(list)
        for msg, publish in self.publishes.items():
            for node, event in self.firsts[msg].items():
                if event["peer"] == publish["node"]:
                    delays[event["peer"], node].append(event["t"] - publish["t"])
                elif event["peer"] in self.firsts[msg]:
                    delays[event["peer"], node].append(event["t"] - self.firsts[msg][event["peer"]]["t"])
        return {link: (len(d), sum(d), min(d), max(d)) for link, d in delays.items()}

    def hop_counts(self) -> Counter[tuple[str, int]]:
        return Counter((p["topic"], n) for msg, p in self.publishes.items() for n in self.hops(msg).values())

    def latencies(self) -> Counter[tuple[str, str, int]]:
        return Counter(
            (publish["topic"], publish["node"], rounded(event["t"] - publish["t"]))
            for msg, publish in self.publishes.items()
            for event in self.firsts[msg].values()
        )

    def node_coverage(self) -> dict[tuple[str, int], tuple[int, int, int]]:
        """(node, bucket of the publish) → eligible, reached, delivered."""
        found: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        for msg, publish in self.publishes.items():
            bucket = publish["t"] // self.bucket_us
            due = self.eligible(msg)
            for node in due:
                found[node, bucket][0] += 1
                found[node, bucket][1] += node in self.firsts[msg]
            for node in self.firsts[msg]:
                found[node, bucket][2] += 1
        return {key: (a, b, c) for key, (a, b, c) in found.items()}

    def copies(self) -> Counter[tuple[str, str | None, str, str]]:
        return Counter(
            (e["node"], e.get("peer"), e["topic"], kind)
            for kind in ("publish", "deliver", "duplicate", "reject")
            for e in self.of[kind]
        )

    def _asked(self, field: str) -> dict[tuple[str, str, str], int]:
        asked: dict[tuple[str, str, str], int] = {}
        for event in self.of["send_rpc"]:
            for msg in event.get(field, ()):
                asked.setdefault((event["node"], event["peer"], msg), event["t"])
        return asked

    def recovered(self) -> Counter[str]:
        asked = self._asked("iwant")
        return Counter(
            e["topic"]
            for e in self.of["deliver"]
            if "peer" in e and asked.get((e["node"], e["peer"], e["msg"]), 2**62) <= e["t"]
        )

    def idontwant(self) -> tuple[int, int, int]:
        sent = self._asked("idontwant")
        late = Counter(
            (e["node"], e["peer"], e["msg"])
            for e in self.of["duplicate"]
            if sent.get((e["node"], e["peer"], e["msg"]), 2**62) <= e["t"]
        )
        return len(sent), len(late), late.total()

    def rpcs(self) -> dict[tuple[str, str, str], tuple[int, ...]]:
        found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0] * 7)
        for kind in ("recv_rpc", "send_rpc", "drop_rpc"):
            for e in self.of[kind]:
                sums = found[kind, e["node"], e["peer"]]
                sums[0] += 1
                sums[1] += len(e.get("messages", ()))
                sums[2] += e.get("message_bytes", 0)
                sums[3] += e.get("control_bytes", 0)
                sums[4] += sum(have["count"] for have in e.get("ihave", ()))
                sums[5] += len(e.get("iwant", ()))
                sums[6] += len(e.get("idontwant", ()))
        return {key: tuple(sums) for key, sums in found.items()}

    # Mesh

    def mesh_sessions(self) -> list[tuple[str, str, str, int, int]]:
        up: dict[tuple[str, int, str, str], int] = {}
        found: list[tuple[str, str, str, int, int]] = []

        def close(key: tuple[str, int, str, str], t: int) -> None:
            if key in up:
                found.append((key[0], key[2], key[3], up.pop(key), t))

        for event in self.events:
            node, run = event["node"], event["run"]
            if event["kind"] == "graft":
                up.setdefault((node, run, event["topic"], event["peer"]), event["t"])
            elif event["kind"] == "prune":
                close((node, run, event["topic"], event["peer"]), event["t"])
            elif event["kind"] == "remove_peer":
                for key in [k for k in up if k[:2] == (node, run) and k[3] == event["peer"]]:
                    close(key, event["t"])
        for key in list(up):
            close(key, self.run_ends[key[0], key[1]])
        return sorted(found)

    def meshes_at(self, bucket: int) -> dict[str, set[tuple[str, str]]]:
        """Topic → links (node, peer) at the end of a bucket."""
        at = (bucket + 1) * self.bucket_us
        links: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for node, topic, peer, begin, end in self._sessions:
            if begin <= at < end:
                links[topic].add((node, peer))
        return links

    def mesh_samples(self) -> dict[tuple[str, int], dict[str, Any]]:
        self._sessions = self.mesh_sessions()
        first, last = self.events[0]["t"], self.events[-1]["t"]
        traced = {event["node"] for event in self.events}
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for bucket in range(first // self.bucket_us - 1, last // self.bucket_us + 1):
            at = (bucket + 1) * self.bucket_us
            meshes = self.meshes_at(bucket)
            topics = {topic for topic, _, begin, end in self.subscriptions if begin <= at < end}
            for topic in topics | set(meshes):
                due = {node for name, node, begin, end in self.subscriptions if name == topic and begin <= at < end}
                degree = Counter(node for node, _ in meshes[topic])
                values = [degree[node] for node in due]
                inner = {link for link in meshes[topic] if set(link) <= traced}
                found[topic, bucket] = {
                    "degree": (len(values), min(values), sum(values) / len(values), max(values)) if values else None,
                    "without": values.count(0),
                    "links": len(inner),
                    "one_way": sum((b, a) not in inner for a, b in inner),
                    "islands": islands(meshes[topic]),
                }
        return found

    # Apps

    def sent(self) -> dict[tuple[str, str], Counter[str]]:
        states: dict[tuple[str, str, str], Events] = defaultdict(list)
        for e in self.of["delivery"]:
            if e["state"] not in ("received", "repeated"):
                states[e["node"], e["peer"], e["msg"]].append(e)
        found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.ack_latency: Counter[int] = Counter()
        for (node, peer, _), changes in states.items():
            sums = found[node, peer]
            names = {e["state"] for e in changes}
            attempts = max((e.get("attempt") or 0 for e in changes), default=0)
            sums["messages"] += 1
            if "acknowledged" in names:
                sums["acknowledged"] += 1
                acked = min(e["t"] for e in changes if e["state"] == "acknowledged")
                self.ack_latency[rounded(acked - min(e["t"] for e in changes if e["state"] == "created"))] += 1
            elif names & {"failed", "expired", "dropped"}:
                sums["lost"] += 1
            else:
                sums["under_way"] += 1
            sums["retries"] += max(0, attempts - 1)
            sums["retried"] += attempts > 1
        return found

    def arrived(self) -> dict[tuple[str, str], Counter[str]]:
        found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        highest: dict[tuple[str, str], int] = {}
        for e in self.of["delivery"]:
            link = (e["node"], e["peer"])
            if e["state"] == "received":
                found[link]["received"] += 1
                found[link]["reordered"] += e["position"] < highest.get(link, -1)
                highest[link] = max(highest.get(link, -1), e["position"])
            elif e["state"] == "repeated":
                found[link]["repeated"] += 1
        return found

    def queues(self) -> dict[tuple[str, str], Counter[str]]:
        published = {(e["queue"], e["msg"]): e["t"] for e in self.of["queue"] if e["state"] == "published"}
        messages: dict[tuple[str, str, str], Events] = defaultdict(list)
        for e in self.of["queue"]:
            if "channel" in e:
                messages[e["queue"], e["channel"], e["msg"]].append(e)
        found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.queue_times: Counter[tuple[str, str, str, int]] = Counter()
        for (queue, channel, msg), changes in messages.items():
            sums = found[queue, channel]
            out = [e for e in changes if e["state"] == "handed_out"]
            done = [e for e in changes if e["state"] == "finished"]
            sums["messages"] += 1
            sums["finished"] += bool(done)
            tried = len(out) - sum(e["state"] == "released" for e in changes)
            sums["redelivered"] += tried > 1
            sums["hand_outs"] += tried
            for name, state in (("timeouts", "timed_out"), ("requeues", "requeued"), ("dead", "dead")):
                sums[name] += sum(e["state"] == state for e in changes)
            there = published.get((queue, msg))
            waited = out[0]["duration_us"] if there is None else out[0]["t"] - there
            self.queue_times[queue, channel, "wait", rounded(waited)] += 1
            if done:
                self.queue_times[queue, channel, "service", rounded(done[-1]["t"] - out[-1]["t"])] += 1
        seen: set[tuple[str, str, str]] = set()
        highest: dict[tuple[str, str, str], int] = {}
        for e in self.of["queue"]:
            if e["state"] != "handed_out" or "key" not in e:
                continue
            if (e["queue"], e["channel"], e["msg"]) in seen:
                continue
            seen.add((e["queue"], e["channel"], e["msg"]))
            lane = (e["queue"], e["channel"], e["key"])
            found[e["queue"], e["channel"]]["violations"] += e["position"] < highest.get(lane, -1)
            highest[lane] = max(highest.get(lane, -1), e["position"])
        return found

    def requests(self) -> Counter[tuple[str, str, str, int]]:
        return Counter((e["name"], e["side"], e["outcome"], rounded(e["duration_us"])) for e in self.of["request"])

    def streams(self) -> dict[tuple[str, str, str], tuple[int, int, int]]:
        found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for e in self.of["stream"]:
            sums = found[e["name"], e["side"], e["state"]]
            sums[0] += 1
            sums[1] += e.get("bytes_in", 0)
            sums[2] += e.get("bytes_out", 0)
        return {key: (count, into, out) for key, (count, into, out) in found.items()}

    def sessions(self) -> dict[str, tuple[int, int]]:
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for e in self.of["session"]:
            found[e["state"]][0] += 1
            found[e["state"]][1] += e.get("count", 0)
        return {state: (times, items) for state, (times, items) in found.items()}

    def push_latency(self) -> Counter[tuple[str, str, int]]:
        """(server, client, µs) → pushes, one by one."""
        epochs: dict[tuple[str, str], int] = {}
        sent: dict[tuple[Any, ...], int] = {}
        got: dict[tuple[Any, ...], int] = {}
        for e in sorted(self.of["session"], key=lambda e: (e["t"], e["seq"])):
            end = (e["session"], e["node"])
            if "epoch" in e:
                epochs[end] = e["epoch"]
            if e["state"] not in ("sent", "received"):
                continue
            link = (e["node"], e["peer"]) if e["side"] == "in" else (e["peer"], e["node"])
            of = sent if e["side"] == "in" else got
            for number in range(e["position"] - e["count"] + 1, e["position"] + 1):
                of.setdefault((*link, e["session"], epochs[end], number), e["t"])
        return Counter((key[0], key[1], rounded(max(0, t - sent[key]))) for key, t in got.items() if key in sent)

    def scores(self) -> dict[str, tuple[int, float, float]]:
        """Peer → raters, mean, lowest."""
        given: dict[str, list[tuple[str, float]]] = defaultdict(list)
        for e in self.of["scores"]:
            for reading in e["scores"]:
                given[reading["peer"]].append((e["node"], reading["score"]))
        return {
            peer: (len({n for n, _ in rows}), sum(s for _, s in rows) / len(rows), min(s for _, s in rows))
            for peer, rows in given.items()
        }


def islands(links: set[tuple[str, str]]) -> tuple[int, int, int]:
    """Nodes, connected parts, nodes in the largest part."""
    around: dict[str, set[str]] = defaultdict(set)
    for a, b in links:
        around[a].add(b)
        around[b].add(a)
    left, sizes = set(around), []
    while left:
        reached, edge = set[str](), {next(iter(left))}
        while edge:
            reached |= edge
            edge = {peer for node in edge for peer in around[node]} - reached
        sizes.append(len(reached))
        left -= reached
    return len(around), len(sizes), max(sizes, default=0)
