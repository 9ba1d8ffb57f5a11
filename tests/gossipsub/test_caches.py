"""Seen cache, message cache, backoffs, promises, sequence numbers: bounded, and right about time."""

from hypothesis import given
from hypothesis import strategies as st

from dep2p.gossipsub.events import Verdict
from dep2p.gossipsub.messages.message_cache import MessageCache
from dep2p.gossipsub.messages.seen_cache import SeenCache
from dep2p.gossipsub.signing.policy import Seqnos
from dep2p.gossipsub.state.backoff import Backoffs
from dep2p.gossipsub.state.promises import Promises
from dep2p.pubsub.seqno_validator import SeqnoValidator
from tests.gossipsub.network import message_from, peer, public_message


def test_an_id_is_seen_for_the_time_to_live_from_its_first_copy() -> None:
    seen = SeenCache(10, 100, refresh=False)
    seen.add(b"a", 0)
    seen.add(b"b", 5)
    seen.sweep(9.9)
    assert b"a" in seen
    seen.sweep(10)
    assert b"a" not in seen
    assert b"b" in seen


def test_with_refresh_the_time_starts_anew_with_each_copy() -> None:
    seen = SeenCache(10, 100, refresh=True)
    seen.add(b"a", 0)
    seen.add(b"b", 1)
    seen.touch(b"a", 8)
    seen.sweep(12)
    assert b"a" in seen
    assert b"b" not in seen


@given(st.integers(1, 50), st.lists(st.binary(min_size=1, max_size=2), max_size=300, unique=True))
def test_the_seen_cache_never_holds_more_than_its_items(items_max: int, ids: list[bytes]) -> None:
    seen = SeenCache(1000, items_max, refresh=False)
    for number, message_id in enumerate(ids):
        seen.add(message_id, float(number), rejected=number % 3 == 0)
        assert message_id in seen
        assert len(seen) <= items_max
        assert len(seen.rejected) <= len(seen)
    assert len(seen) + seen.evicted == len(ids)


def test_messages_leave_the_cache_after_their_windows() -> None:
    cache = MessageCache(5, 3, items_max=100, bytes_max=10_000)
    message = message_from(1, 1)
    cache.put(message)
    cache.put(message)
    for _ in range(3):
        assert cache.gossip_ids("t") == [message.id]
        cache.shift()
    assert cache.gossip_ids("t") == []
    assert cache.get(message.id) is message
    cache.shift()
    assert message.id in cache
    cache.shift()
    assert cache.get(message.id) is None
    assert (len(cache), cache.payload_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.booleans()), max_size=80))
def test_the_message_cache_is_bounded_in_items_and_bytes(steps: list[tuple[int, int, bool]]) -> None:
    cache = MessageCache(3, 2, items_max=10, bytes_max=60)
    for number, (size, topic, shift) in enumerate(steps):
        cache.put(message_from(1, number, f"t{topic}", b"x" * size))
        assert len(cache) <= 10
        assert cache.payload_bytes <= 60
        if shift:
            cache.shift()
    for _ in range(3):
        cache.shift()
    assert (len(cache), cache.payload_bytes) == (0, 0)


def test_transmissions_are_counted_per_peer_and_forgotten_with_the_message() -> None:
    cache = MessageCache(1, 1, items_max=10, bytes_max=100)
    message = message_from(1, 1)
    cache.put(message)
    assert [cache.count_transmission(message.id, peer(1)) for _ in range(3)] == [1, 2, 3]
    assert cache.count_transmission(message.id, peer(2)) == 1
    cache.shift()
    cache.put(message)
    assert cache.count_transmission(message.id, peer(1)) == 1


def test_slack_holds_our_grafts_back_but_never_judges_a_peer_s() -> None:
    backoffs = Backoffs(10, slack_s=2)
    backoffs.set("t", peer(1), 60)
    assert backoffs.end("t", peer(1)) == 60
    ends = backoffs.of_topic("t")
    assert backoffs.blocked(ends, peer(1), 61)
    assert not backoffs.blocked(ends, peer(1), 62)
    backoffs.sweep(61)
    assert len(backoffs) == 1
    backoffs.sweep(62)
    assert len(backoffs) == 0


def test_a_backoff_is_never_shortened() -> None:
    backoffs = Backoffs(10, slack_s=0)
    backoffs.set("t", peer(1), 60)
    backoffs.set("t", peer(1), 10)
    assert backoffs.end("t", peer(1)) == 60


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(0, 50)), max_size=100))
def test_backoffs_are_bounded_over_all_topics(steps: list[tuple[int, int, int]]) -> None:
    backoffs = Backoffs(7, slack_s=1)
    for now, (topic, number, end) in enumerate(steps):
        backoffs.set(f"t{topic}", peer(number), float(end))
        assert backoffs.end(f"t{topic}", peer(number)) >= end
        assert len(backoffs) <= 7
        if now % 10 == 0:
            backoffs.sweep(float(now))
    backoffs.sweep(100)
    assert len(backoffs) == 0


def test_a_promise_is_broken_only_after_the_followup_time() -> None:
    promises = Promises(3)
    promises.add(peer(1), b"a", 0)
    promises.add(peer(1), b"b", 1)
    assert promises.broken(2.9) == {}
    assert promises.broken(3) == {peer(1): 1}
    assert promises.broken(4) == {peer(1): 1}
    assert len(promises) == 0


def test_a_promise_made_again_after_it_was_kept_counts_anew() -> None:
    promises = Promises(3)
    promises.add(peer(1), b"a", 0)
    promises.fulfilled(b"a")
    promises.add(peer(1), b"a", 2)
    assert promises.broken(4) == {}
    assert promises.broken(5) == {peer(1): 1}


def test_an_excused_peer_broke_nothing() -> None:
    promises = Promises(3)
    promises.add(peer(1), b"a", 0)
    promises.add(peer(2), b"a", 0)
    promises.excuse(peer(1))
    assert promises.broken(10) == {peer(2): 1}


def test_seqnos_grow_and_start_above_what_earlier_runs_used() -> None:
    seqnos = Seqnos(7)
    assert [seqnos.next(), seqnos.next()] == [(8).to_bytes(8, "big"), (9).to_bytes(8, "big")]
    assert Seqnos(seqnos.last).next() == (10).to_bytes(8, "big")


def test_the_seqno_validator_takes_each_author_s_growing_numbers_only() -> None:
    validator = SeqnoValidator(authors_max=10)
    verdicts = [
        validator(public_message(message_from(author, seqno)))
        for author, seqno in [(1, 5), (1, 5), (1, 4), (1, 6), (2, 1)]
    ]
    assert verdicts == [Verdict.ACCEPT, Verdict.IGNORE, Verdict.IGNORE, Verdict.ACCEPT, Verdict.ACCEPT]
    for author in range(100):
        validator(public_message(message_from(author, 1)))
    assert len(validator) <= 10
