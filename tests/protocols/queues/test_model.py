"""The queue core against a naive model, under any order of operations, failed commits and crashes."""

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dep2p.errors import NotInFlightError, StoreError
from tests.protocols.queues.world import Taker, World

_CHANNELS = ("a", "b")
_ATTEMPTS_MAX = 4


class QueueMachine(RuleBasedStateMachine):
    """The invariants: a message is with one consumer of a channel at a time, with none once it is finished, and no
    acknowledged message is ever lost: not finished, not dead, and not delivered either."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(cache_bytes=2_000)
        queue = self.world.create(max_attempts=_ATTEMPTS_MAX, partitions=2)
        for name in _CHANNELS:
            self.world.channel(queue, name)
        self.published: dict[bytes, None] = {}
        self.finished: dict[str, dict[bytes, None]] = {name: {} for name in _CHANNELS}
        self.attempts: dict[tuple[str, bytes], int] = {}
        self.takers: list[tuple[str, Taker]] = []
        self.number = 0

    # What may happen

    @rule(count=st.integers(1, 5), delay_s=st.sampled_from([0.0, 0.0, 7.0]), priority=st.sampled_from([0, 0, 3]))
    def publish(self, count: int, delay_s: float, priority: int) -> None:
        bodies = [b"%d" % (self.number + n) + b"." * 20 for n in range(count)]
        self.number += count
        made = self.world.publish(self.world.queue(), *bodies, delay_s=delay_s, priority=priority)
        assert made.is_done
        assert made.error is None
        self.published.update(dict.fromkeys(bodies))

    @rule()
    def publish_without_room(self) -> None:
        self.world.fail_next = StoreError("the disk is ill")
        made = self.world.publish(self.world.queue(), b"never")
        assert made.error is not None

    @rule(is_written=st.booleans(), is_followed=st.booleans(), is_crash=st.booleans())
    def publish_in_doubt(self, is_written: bool, is_followed: bool, is_crash: bool) -> None:
        """The store goes away while it writes; the same batch is written again, or found to be there."""
        body = b"%d" % self.number + b"?" * 20
        self.number += 1
        self.world.doubt_next = is_written
        made = self.world.publish(self.world.queue(), body, settle=False)
        self.world.commit()
        assert made.error is not None
        assert not made.is_done
        if is_written or not is_crash:
            self.published[body] = None
        if is_crash:
            self.crash()
            return
        if is_followed:
            self.publish(1, 0.0, 0)
        self.world.settle()
        assert made.is_done
        assert made.error is None

    @precondition(lambda self: len(self.takers) < 4)
    @rule(name=st.sampled_from(_CHANNELS), max_in_flight=st.integers(0, 4))
    def attach(self, name: str, max_in_flight: int) -> None:
        taker = self.world.consumer(self.world.queue().channel(name), max_in_flight, msg_timeout_s=30.0)
        self.takers.append((name, taker))

    @precondition(lambda self: self.takers)
    @rule(data=st.data())
    def set_ready(self, data: Any) -> None:
        _name, taker = data.draw(st.sampled_from(self.takers))
        taker.channel.set_ready(taker.core, data.draw(st.integers(0, 5)))
        self.world.settle()

    @precondition(lambda self: self.takers)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "requeue", "later", "release", "reject", "touch"]))
    def settle_one(self, data: Any, how: str) -> None:
        name, taker = data.draw(st.sampled_from(self.takers))
        if not taker.got:
            return
        delivery = data.draw(st.sampled_from(taker.got))
        held = (delivery.partition, delivery.message.seq) in taker.core.held
        body = delivery.message.body
        try:
            if how == "finish":
                assert (taker.finish(delivery) == []) is held
                if held:
                    self.finished[name][body] = None
            elif how == "touch":
                taker.do(taker.channel.touch, delivery, self.world.now)
            elif how == "release":
                taker.do(taker.channel.release, delivery)
            elif how == "reject":
                taker.do(taker.channel.reject, delivery, "no")
            else:
                taker.requeue(delivery, 0.0 if how == "requeue" else 5.0, "again")
            assert held or how == "finish"
        except NotInFlightError:
            assert not held
        if how != "touch" and delivery in taker.got:
            taker.got.remove(delivery)

    @precondition(lambda self: self.takers)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        pair = data.draw(st.sampled_from(self.takers))
        self.takers.remove(pair)
        pair[1].leave()

    @rule(seconds=st.sampled_from([0.5, 6.0, 31.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.world.sleep(seconds)

    @rule()
    def crash(self) -> None:
        self.takers.clear()
        self.world.crash()

    # What must be true

    @invariant()
    def a_trace_is_told_what_is_counted_and_what_is_held(self) -> None:
        self.world.trace.check(self.world.registry)

    @invariant()
    def nobody_holds_what_another_has_or_what_is_finished(self) -> None:
        for name in _CHANNELS:
            held: list[bytes] = []
            for of, taker in self.takers:
                if of == name:
                    held += [each.message.body for each in taker.core.held.values()]
            assert len(held) == len(set(held))
            assert not set(held) & set(self.finished[name])
            assert set(held) <= set(self.published)

    @invariant()
    def attempts_stay_within_their_bound(self) -> None:
        for _name, taker in self.takers:
            assert len(taker.core.held) <= 5
            for each in taker.core.held.values():
                assert 1 <= each.attempts <= _ATTEMPTS_MAX

    def teardown(self) -> None:
        self.takers.clear()
        self.world.crash()
        queue = self.world.queue()
        for name in _CHANNELS:
            channel = queue.channel(name)
            taker = self.world.consumer(channel, 10_000, msg_timeout_s=1e6)
            self.world.sleep(60.0)
            came = {each.message.body for each in taker.got}
            dead = {each.body for each in self.world.store.scan_dead_letters(channel.id, 0, items_max=10_000)}
            finished = set(self.finished[name])
            assert came | dead | finished == set(self.published), "a message is lost"
            assert not came & finished, "a finished message came back"
            assert not came & dead
            taker.finish(*taker.got)
        assert queue.items == 0


QueueMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("DEP2P_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestQueueMachine = QueueMachine.TestCase
