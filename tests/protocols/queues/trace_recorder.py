"""A trace that records and counts the events of a queue's core."""

from collections import Counter
from collections.abc import Sequence

from dep2p.protocols.queues.channel import Channel
from dep2p.protocols.queues.consumer import HeldMessage
from dep2p.protocols.queues.message import QueuedMessage
from dep2p.protocols.queues.records import Run
from dep2p.protocols.queues.registry.registry import QueueRegistry
from dep2p.protocols.queues.trace_hooks import TracedChannel, TracedQueue

_COUNTED = {
    "handed_out": ("delivered",),
    "finished": ("finished",),
    "requeued": ("requeued", "requeued_consumer_gone"),
    "timed_out": ("timed_out",),
    "rejected": ("rejected",),
    "dead": ("dead",),
    "dropped": ("dropped_attempts_used_up",),
    "expired": ("expired",),
}


class TraceRecorder:
    """A `QueueTrace`. Of one registry: a crash begins another one."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int, int, str]] = []
        """State, channel, partition, number, reason."""
        self.attempts: dict[tuple[str, int, int], int] = {}
        self.out: dict[tuple[str, int, int], None] = {}
        """In a consumer's hands, as far as was told."""
        self.there: dict[tuple[int, int], None] = {}
        """Published."""
        self.counts: Counter[tuple[str, str]] = Counter()

    def published(self, queue: TracedQueue, runs: Sequence[Run]) -> None:
        for run in runs:
            for seq in range(run.first_seq, run.first_seq + run.items):
                assert (run.partition, seq) not in self.there, "it was told before"
                self.there[run.partition, seq] = None
                self._record("published", "", run.partition, seq)

    def delivered(self, channel: TracedChannel, partition: int, message: QueuedMessage, to: str, attempts: int) -> None:
        assert isinstance(channel, Channel) and to in channel.consumers
        self._record("handed_out", channel.name, partition, message.seq)
        key = (channel.name, partition, message.seq)
        assert key not in self.out, "it is in somebody's hands already"
        self.out[key] = None
        self.attempts[key] = attempts

    def settled(self, channel: TracedChannel, state: str, partition: int, held: HeldMessage, reason: str = "") -> None:
        self._record(state, channel.name, partition, held.message.seq, reason)
        key = (channel.name, partition, held.message.seq)
        assert self.attempts[key] == held.attempts
        del self.out[key]

    def ended(
        self, channel: TracedChannel, state: str, partition: int, message: QueuedMessage, reason: str = ""
    ) -> None:
        self._record(state, channel.name, partition, message.seq, reason)

    def _record(self, state: str, channel: str, partition: int, seq: int, reason: str = "") -> None:
        self.events.append((state, channel, partition, seq, reason))
        self.counts[channel, state] += 1

    def states(self, channel: str = "") -> list[str]:
        """Return the states of one channel, or of all."""
        return [event[0] for event in self.events if not channel or event[1] == channel]

    def check(self, registry: QueueRegistry) -> None:
        """It is what the core itself counts, and what consumers hold."""
        held: dict[tuple[str, int, int], None] = {}
        for queue in registry.queues.values():
            for channel in queue.channels.values():
                for state, names in _COUNTED.items():
                    counted = sum(channel.counts[name] for name in names)
                    assert self.counts[channel.name, state] == counted, (channel.name, state)
                for consumer in channel.consumers.values():
                    held.update(dict.fromkeys((channel.name, *key) for key in consumer.held))
        assert self.out.keys() == held.keys()
