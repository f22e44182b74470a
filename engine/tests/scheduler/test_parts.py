"""The scheduler's parts by themselves: page demand, page tables, the score store, in-flight blocks, the queue."""

from __future__ import annotations

import math

import pytest
from branchline.engine.scheduler import SchedulerOptions, scores
from branchline.engine.scheduler.load import OwnTime, Pace
from branchline.engine.scheduler.pages import page_demand
from branchline.engine.scheduler.sharing import Inflight
from branchline.engine.scheduler.waiting import WaitingQueue
from branchline.engine.types import LogprobParams
from harness import Engine
from hypothesis import given
from hypothesis import strategies as st
from parts import Parts


@given(computed=st.integers(0, 300), more=st.integers(0, 300), size=st.integers(1, 64))
def test_page_demand_is_what_a_slot_by_slot_count_gives(computed: int, more: int, size: int) -> None:
    before = {at // size for at in range(computed)}
    after = {at // size for at in range(computed + more)}
    assert page_demand(computed, computed + more, size) == len(after - before)


@given(steps=st.lists(st.integers(1, 12), max_size=12), size=st.integers(1, 5))
def test_extending_takes_exactly_the_pages_needed_and_never_moves_one(steps: list[int], size: int) -> None:
    parts = Parts(pages=10, page_size=size)
    sequence = parts.sequence(list(range(60))[: 10 * size - 1] or [1])
    for count in steps:
        before = list(sequence.pages)
        room = parts.tables.extend(sequence, count)
        assert sequence.pages[: len(before)] == before, "tables are append-only"
        assert room == min(count, 10 * size - sequence.computed)
        sequence.computed += room
        assert len(sequence.pages) == -(-sequence.computed // size)
    parts.tables.release(sequence, keep=False)
    parts.tables.release(sequence, keep=False)
    assert parts.cache.counters() == (10, 0, 0, 0)


def test_two_sequences_that_computed_the_same_page_share_it_and_free_the_duplicate() -> None:
    parts = Parts()
    twins = [parts.sequence([1, 2, 3, 4, 5, 6]) for _ in range(2)]
    for twin in twins:
        assert parts.tables.extend(twin, 6) == 6
        twin.computed = 6
    for twin in twins:
        parts.tables.publish(twin)
    assert twins[1].duplicates == twins[1].pages[:1] and twins[0].duplicates == []
    assert parts.cache.counters() == (4, 0, 1, 3)
    for twin in twins:
        parts.tables.release(twin, keep=True)
    assert parts.cache.counters() == (7, 1, 0, 0)
    parts.cache.audit()


@pytest.mark.parametrize(
    ("start", "known", "limit"),
    [
        (None, 0, 9),
        (0, 0, 0),
        (1, 0, 0),
        (5, 0, 4),
        (9, 0, 8),
        (10, 0, 9),
        (50, 0, 9),
        (0, 4, 3),
        (0, 10, 9),
        (4, 4, 7),
    ],
)
def test_the_cache_is_used_up_to_the_row_that_scores_the_first_unknown_position(
    start: int | None, known: int, limit: int
) -> None:
    sequence = Parts().sequence(list(range(10)), start)
    assert scores.match_limit(sequence, known) == limit


def test_the_score_store_knows_whole_blocks_without_gaps_and_checks_their_tokens() -> None:
    parts = Parts(pages=32)
    store = scores.ScoreStore(8, 4)
    scored = parts.sequence(list(range(11)), 0)
    scored.scores = [math.nan, *[-float(number) for number in range(1, 11)]]
    store.keep(scored)
    assert len(store) == 2
    assert store.known(parts.sequence(list(range(11)), 3)) == [-3.0, -4.0, -5.0, -6.0, -7.0]
    assert math.isnan(store.known(parts.sequence(list(range(11)), 0))[0])
    assert store.known(parts.sequence([*range(6), 60, 7, 8], 3)) == [-3.0]
    forged = parts.sequence([9] * 11, 3)
    forged.group.hashes = scored.group.hashes
    assert store.known(forged) == [], "a hash that collides gives nothing away"
    store.clear()
    assert store.known(parts.sequence(list(range(11)), 3)) == []


def test_the_score_store_is_bounded() -> None:
    parts = Parts(pages=32)
    store = scores.ScoreStore(3, 4)
    for number in range(6):
        sequence = parts.sequence([number] * 8, 0)
        sequence.scores = [math.nan, *[-1.0] * 7]
        store.keep(sequence)
    assert len(store) == 3
    assert len(store.known(parts.sequence([5] * 8, 0))) == 8
    assert store.known(parts.sequence([0] * 8, 0)) == []


def test_a_fully_scored_prompt_is_not_computed_again() -> None:
    engine = Engine(page_size=4)
    wanted = LogprobParams(input_start=0)
    first = engine.run("a", list(range(32)), max_tokens=0, logprobs=wanted)
    before = engine.executor.computed_tokens
    second = engine.run("b", list(range(32)), max_tokens=0, logprobs=wanted)
    assert engine.executor.computed_tokens - before == 4, "the last page only: one token is always computed"
    assert second.input.token_ids == first.input.token_ids and second.input.logprobs[1:] == first.input.logprobs[1:]


def test_input_logprobs_come_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MAX_POSITIONS", 5)
    engine = Engine(page_size=4)
    for name in ("cold", "stored"):
        engine.run(name, list(range(32)), max_tokens=1, logprobs=LogprobParams(input_start=0))
        assert engine.answers[name, 0].input.token_ids == list(range(32))
    assert all(
        len(delta.input_logprobs.token_ids) <= 5
        for _, deltas in engine.frames
        for delta in deltas
        if delta.input_logprobs is not None
    )


def test_only_sequence_0_scores_the_prompt() -> None:
    engine = Engine()
    engine.submit("r", [1, 2, 3, 4, 5], n=3, max_tokens=2, logprobs=LogprobParams(input_start=0), ignore_eos=True)
    engine.finish()
    assert [len(engine.answers["r", index].input.token_ids) for index in range(3)] == [5, 0, 0]


def test_a_block_is_in_flight_until_it_is_settled_by_its_own_sequence() -> None:
    parts, inflight = Parts(pages=32), Inflight()
    leader, follower = parts.sequence(list(range(12))), parts.sequence([*range(8), 70, 71, 72, 73])
    inflight.claim(leader)
    inflight.claim(follower)
    assert len(inflight) == 4
    assert inflight.awaits(follower, 11, 4)
    inflight.settle(follower, 0, 2)
    assert len(inflight) == 4, "the first two blocks are the leader's to settle"
    inflight.settle(leader, 0, 2)
    follower.matched = 8
    assert not inflight.awaits(parts.sequence([50] * 12), 11, 4)
    inflight.drop(leader)
    inflight.drop(follower)
    assert len(inflight) == 0


def test_the_queue_puts_the_retracted_first_and_counts_tokens() -> None:
    parts, queue = Parts(), WaitingQueue(SchedulerOptions())
    first, second, third = (parts.sequence([1] * length) for length in (3, 4, 5))
    queue.push(first, 0, 0.0)
    queue.push(second, 0, 0.0)
    queue.push_front(third)
    assert queue.order(1, 0.0) == [third, first, second] and list(queue) == [third, first, second]
    assert (len(queue), queue.tokens) == (3, 12)
    assert queue.remove(first) and not queue.remove(first)
    assert (len(queue), queue.tokens, queue.oldest_s()) == (2, 9, 0.0)


def test_a_long_cached_prefix_goes_first_among_equals_in_waiting() -> None:
    parts, queue = Parts(), WaitingQueue(SchedulerOptions())
    cold, warm, hot = (parts.sequence([1, 2]) for _ in range(3))
    warm.matched, hot.matched = 64, 640
    for sequence in (cold, warm, hot):
        queue.push(sequence, 0, 0.0)
    assert queue.order(1, 0.0) == [hot, warm, cold]


def test_own_time_is_a_mean_over_the_latest_steps_only() -> None:
    own = OwnTime()
    assert own.mean() == 0.0
    for value in [100.0] * 10 + [1.0] * 1024:
        own.add(value)
    assert own.mean() == pytest.approx(1.0)


def test_the_pace_is_bounded_and_has_a_default() -> None:
    pace = Pace()
    assert pace.retry_after_ms() == 1000
    for now in (0.0, 0.5, 1.0):
        pace.end(now)
    assert pace.retry_after_ms() == 500
    pace.end(1e6)
    assert pace.retry_after_ms() == 30_000
