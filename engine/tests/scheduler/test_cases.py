"""The public fault reports of scheduler.jsonl, cache.jsonl, abort.jsonl and logprobs.jsonl that concern the loop.

Each test is named for its case; numbers come from the case itself.
"""

from __future__ import annotations

import math
import random
from array import array

import pytest
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.errors import InvalidArgument
from branchline.engine.scheduler import Group, SchedulerOptions, Sequence
from branchline.engine.scheduler.pages import page_demand
from branchline.engine.scheduler.waiting import WaitingQueue
from branchline.engine.types import FinishReason, LogprobParams, Request, RowPlan, SamplingParams
from harness import EOS, Clock, Engine
from tiny import expected

from tests.cases.loader import case


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


def waiting_sequence(number: int, matched: int) -> Sequence:
    """A sequence as the queue sees it."""
    from branchline.engine.scheduler.intake import text_stream
    from harness import vocabulary

    params = SamplingParams()
    group = Group(Request(f"r{number}", (1,), params), lambda step, deltas: None, 0.0, [])
    plan = RowPlan(0, params)
    text = text_stream(vocabulary(), params)
    return Sequence(number, group, 0, [1], array("I", [1]), 1, 9, True, text, plan, frozenset(), (), 0, matched=matched)


def test_sched_cold_request_is_not_starved() -> None:
    right = case("sched-cold-request-is-not-starved")
    options = SchedulerOptions()
    queue, clock = WaitingQueue(options), Clock()
    cold = waiting_sequence(0, 0)
    queue.push(cold, 0, clock())
    admitted_at = None
    for number in range(1, right["given"]["passes"] + 1):
        queue.push(waiting_sequence(number, 1000), number, clock())
        first = queue.order(number, clock())[0]
        if number == 1:
            assert first is not cold, "locality comes first at first"
        queue.remove(first)
        if first is cold:
            admitted_at = number
            break
    assert admitted_at is not None and admitted_at <= options.aging_passes <= 1000


def test_a_cold_request_is_not_starved_in_time_either() -> None:
    options = SchedulerOptions()
    queue, clock = WaitingQueue(options), Clock()
    cold = waiting_sequence(0, 0)
    queue.push(cold, 0, clock())
    clock.now += options.aging_seconds
    queue.push(waiting_sequence(1, 100_000), 1, clock())
    assert queue.order(1, clock())[0] is cold


def test_sched_decode_page_demand() -> None:
    given = case("sched-decode-page-demand")["given"]
    lengths, size = given["running_seq_lens"], given["page_size"]
    assert sum(page_demand(length, length + 1, size) for length in lengths) == 2


def test_a_decode_that_lacks_a_page_retracts_one_request_before_the_step() -> None:
    engine = Engine(pages=7, page_size=4)
    engine.submit("a", ids(8, 1), max_tokens=8, ignore_eos=True)
    engine.submit("b", ids(8, 2), max_tokens=8, ignore_eos=True)
    engine.finish()
    assert engine.loop.stats().retractions >= 1
    for name, seed in (("a", 1), ("b", 2)):
        assert engine.answers[name, 0].token_ids == expected(ids(8, seed), 8)


def test_after_a_retraction_nobody_is_admitted_until_something_ends() -> None:
    engine = Engine(pages=12, page_size=4)
    for number in range(3):
        engine.submit(f"r{number}", ids(11, number), max_tokens=24, ignore_eos=True)
    while engine.loop.stats().retractions == 0:
        engine.step()
    engine.submit("small", [1], max_tokens=1, ignore_eos=True)
    while not any(answer.finish for answer in engine.answers.values()):
        running = engine.loop.stats().running
        engine.step()
        assert engine.loop.stats().running <= running, "someone came in while pages were short"
    assert engine.answers.get(("small", 0)) is None
    engine.finish()
    assert engine.loop.stats().retractions <= 3, "retraction must not thrash"


def test_the_victim_has_generated_least_and_among_equals_came_last() -> None:
    engine = Engine(pages=14, page_size=4)
    engine.submit("old", ids(8, 1), max_tokens=30, ignore_eos=True)
    engine.step(8)
    engine.submit("young", ids(8, 2), max_tokens=30, ignore_eos=True)
    engine.submit("youngest", ids(8, 3), max_tokens=30, ignore_eos=True)
    while engine.loop.stats().retractions == 0:
        engine.step()
    sequences = {name: engine.loop._live[name].sequences[0] for name in ("old", "young", "youngest")}
    assert {name: sequence.retractions for name, sequence in sequences.items()} == {"old": 0, "young": 0, "youngest": 1}
    engine.finish()
    for number, name in enumerate(sequences, 1):
        assert engine.answers[name, 0].token_ids == expected(ids(8, number), 30)


def test_decoders_get_a_token_every_step_while_a_long_prompt_is_prefilled() -> None:
    engine = Engine(pages=400, page_size=4, max_step_tokens=64, max_running_requests=8, mixed_prefill_tokens=12)
    for number in range(3):
        engine.submit(f"d{number}", ids(5, number), max_tokens=60, ignore_eos=True)
    engine.step(2)
    engine.submit("long", ids(400, 9), max_tokens=1)
    for turn in range(3, 30):
        before = engine.executor.computed_tokens
        engine.step()
        assert [len(engine.answers[f"d{number}", 0].token_ids) for number in range(3)] == [turn] * 3
        assert engine.executor.computed_tokens - before == 3 + 12, "prompts take their bound and no more"
    engine.finish()
    assert engine.answers["long", 0].token_ids == expected(ids(400, 9), 1)


def test_a_prompt_takes_the_whole_step_when_nobody_decodes() -> None:
    engine = Engine(pages=400, page_size=4, max_step_tokens=64, max_running_requests=8, mixed_prefill_tokens=12)
    engine.submit("long", ids(130), max_tokens=1)
    engine.step()
    assert engine.executor.computed_tokens == 64
    engine.finish()


def test_a_small_newcomer_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    engine = Engine(pages=12, page_size=4)
    engine.submit("runs", ids(20, 1), max_tokens=12, ignore_eos=True)
    engine.step(2)
    engine.submit("large", ids(36, 2), max_tokens=2, ignore_eos=True)
    engine.submit("small", [1, 2], max_tokens=2, ignore_eos=True)
    while not (answer := engine.answers["runs", 0]).finish:
        assert set(engine.answers) == {("runs", 0)} and not answer.finish
        engine.step()
    engine.finish()
    assert list(engine.answers) == [("runs", 0), ("large", 0), ("small", 0)]


def test_cache_exact_page_demand() -> None:
    found = case("cache-exact-page-demand")
    given, right = found["given"], found["right"]
    demand = [page_demand(prefix, length, given["page_size"]) for prefix, length in given["rows_prefix_len_seq_len"]]
    assert demand == right["new_pages_each"]
    assert sum(demand) == right["total"] <= given["free_pages"]


def test_sched_last_request_does_not_fit() -> None:
    engine = Engine(pages=64, page_size=1)
    answer = engine.run("a", ids(32), max_tokens=100, ignore_eos=True)
    assert answer.finish is not None and answer.finish.reason is FinishReason.LENGTH
    assert answer.finish.completion_tokens == len(answer.token_ids) == 33
    assert answer.token_ids == expected(ids(32), 33)
    assert "64 tokens" in answer.finish.message
    assert len(engine.run("b", [5, 6], max_tokens=2, ignore_eos=True).token_ids) == 2
    counters = engine.counters()
    assert counters["free"] + counters["evictable"] == 64


def test_sched_prompt_longer_than_context() -> None:
    engine = Engine(pages=64, page_size=4, context_length=100)
    for length, accepted in ((101, False), (100, False), (99, True)):
        if accepted:
            assert len(engine.run(f"r{length}", ids(length), max_tokens=1).token_ids) == 1
            continue
        with pytest.raises(InvalidArgument, match=f"{length} tokens and the context length is 100") as refused:
            engine.submit(f"r{length}", ids(length), max_tokens=1)
        assert refused.value.field == "token_ids"
    assert engine.run("planted", ids(100), max_tokens=0).token_ids == []


def test_a_prompt_that_can_never_fit_the_pool_is_refused_with_both_numbers() -> None:
    engine = Engine(pages=4, page_size=4)
    with pytest.raises(InvalidArgument, match="16 tokens and the KV pool holds 16"):
        engine.submit("a", ids(16))
    assert len(engine.run("b", ids(15), max_tokens=9, ignore_eos=True).token_ids) == 2


def test_sched_reaches_the_running_limit() -> None:
    engine = Engine(pages=400, page_size=4, max_running_requests=4, max_step_tokens=16)
    for number in range(12):
        engine.submit(f"r{number}", ids(40, number), max_tokens=50, ignore_eos=True)
    seen = []
    while sum(answer.finish is not None for answer in engine.answers.values()) < 4:
        engine.step()
        seen.append(engine.loop.stats().running)
    assert max(seen) == 4 and sorted(seen)[len(seen) // 2] == 4
    engine.finish()


def test_sched_max_new_tokens_one() -> None:
    engine = Engine(pages=512)
    mix = [1, 0, 64]
    for copy in range(8):
        for tokens in mix:
            engine.submit(f"{copy}-{tokens}", ids(10, copy), max_tokens=tokens, ignore_eos=True)
    engine.finish()
    for (name, _), answer in engine.answers.items():
        assert answer.finish is not None
        assert answer.finish.completion_tokens == len(answer.token_ids) == int(name.split("-")[1])
        assert answer.finish.reason is FinishReason.LENGTH
    assert len(engine.answers) == 24


def test_sched_batch_keeps_own_params() -> None:
    engine = Engine()
    for number, tokens in enumerate((1, 3, 5)):
        engine.submit(f"r{number}", ids(4, number), max_tokens=tokens, ignore_eos=True)
    engine.finish()
    assert [len(engine.answers[f"r{number}", 0].token_ids) for number in range(3)] == [1, 3, 5]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_cache_conservation_page4(backend: str) -> None:
    found = case("cache-conservation-page4")
    right, size = found["right"], found["given"]["page_size"]
    cache = build_cache(backend, CacheContext(found["given"]["pool_slots"] // size, size))
    seen = []

    def look() -> None:
        states = ("free", "evictable", "protected", "private")
        seen.append({name: pages * size for name, pages in zip(states, cache.counters(), strict=True)})

    first = list(range(1, 13))
    pages = cache.allocate(3)
    assert pages is not None
    cache.insert(b"", first, pages)
    look()
    second = [1, 2, 3, 4, 5, 6, 7, 8, 99, 98, 97, 96, 95]
    node, shared = cache.match(b"", second, len(second) - 1)
    assert len(shared) * size == right["r2_cached_tokens"]
    cache.lock(node)
    own = cache.allocate(2)
    assert own is not None
    look()
    deepest, present = cache.insert(b"", second[:12], [*shared, own[0]])
    assert present == 2
    cache.lock(deepest)
    cache.unlock(node)
    cache.unlock(deepest)
    cache.free([own[1]])
    look()
    assert cache.evict(1) == 1
    look()
    assert seen == right["counters_after_each_op"]
    assert len(cache.match(b"", first, 12)[1]) == 2
    assert len(cache.match(b"", second, 13)[1]) == 3
    cache.audit()


def test_cache_cached_tokens_after_retraction() -> None:
    engine = Engine(pages=128, page_size=1)
    prompts = [ids(48, 1), ids(48, 2)]
    for number, prompt in enumerate(prompts):
        engine.submit(f"r{number}", prompt, max_tokens=48, ignore_eos=True)
    engine.finish()
    stats = engine.loop.stats()
    assert stats.retractions >= 1
    assert (stats.lookups, stats.prompt_tokens, stats.cached_tokens) == (2, 96, 0), "a resumption is no lookup"
    for number, prompt in enumerate(prompts):
        assert engine.prompts[f"r{number}"] == (48, 0)
        assert engine.answers[f"r{number}", 0].token_ids == expected(prompt, 48)


def test_cache_salt_and_extra_key_apart() -> None:
    from branchline._native import namespace

    engine = Engine(pages=256, page_size=1)
    keys = [("X", None), (None, "X"), (None, None)]
    cached = []
    for turn in range(6):
        salt, extra = keys[turn % 3]
        space = namespace(salt, extra, None, "w")
        engine.run(f"r{turn}", ids(40), max_tokens=1, namespace=space)
        cached.append(engine.prompts[f"r{turn}"][1])
    assert cached == case("cache-salt-and-extra-key-apart")["right"]["cached_tokens"]


@pytest.mark.parametrize(("page_size", "key"), [(1, "page_1"), (16, "page_16")])
def test_cache_same_prompt_twice(page_size: int, key: str) -> None:
    found = case("cache-same-prompt-twice")
    cached = []
    for length in found["given"]["input_ids_lengths"]:
        engine = Engine(pages=256 // page_size, page_size=page_size)
        first = engine.run("a", ids(length), max_tokens=4, ignore_eos=True)
        second = engine.run("b", ids(length), max_tokens=4, ignore_eos=True)
        assert first.token_ids == second.token_ids
        cached.append(engine.prompts["b"][1])
    assert cached == found["right"]["second_cached_tokens"][key]


def test_cache_eight_at_once() -> None:
    engine = Engine(pages=1024, page_size=1, max_step_tokens=40, max_running_requests=16)
    for number in range(8):
        engine.submit(f"r{number}", ids(64) + ids(8, 100 + number), max_tokens=6, ignore_eos=True)
    engine.finish()
    cached = [engine.prompts[f"r{number}"][1] for number in range(8)]
    assert sum(count >= 64 for count in cached) >= 7 and max(cached) <= 71
    for number in range(8):
        assert engine.answers[f"r{number}", 0].token_ids == expected(ids(64) + ids(8, 100 + number), 6)


def test_abort_rid_is_exact() -> None:
    engine = Engine(pages=512)
    for name in ("job-1", "job-12", "xjob-1"):
        engine.submit(name, ids(5, len(name)), max_tokens=60, ignore_eos=True)
    engine.step(6)
    assert engine.loop.abort("job-1") == 1
    assert engine.loop.abort("job") == 0 and engine.loop.abort("unknown") == 0
    engine.step()
    aborted = engine.answers["job-1", 0]
    assert aborted.finish is not None and aborted.finish.reason is FinishReason.ABORT
    assert engine.loop.abort("job-1") == 0
    engine.finish()
    for name in ("job-12", "xjob-1"):
        finish = engine.answers[name, 0].finish
        assert finish is not None and finish.completion_tokens == 60 and finish.reason is FinishReason.LENGTH


def test_abort_while_waiting() -> None:
    engine = Engine(max_running_requests=1)
    engine.submit("a", ids(6, 1), max_tokens=40, ignore_eos=True)
    engine.step()
    engine.submit("b", ids(6, 2), max_tokens=40)
    engine.step()
    before = engine.executor.computed_tokens
    engine.loop.abort("b")
    engine.step()
    finish = engine.answers["b", 0].finish
    assert finish is not None and finish.reason is FinishReason.ABORT
    assert (engine.answers["b", 0].token_ids, engine.answers["b", 0].text, finish.completion_tokens) == ([], "", 0)
    assert engine.executor.computed_tokens == before + 1, "only a's next token was computed"
    engine.finish()
    assert len(engine.answers["a", 0].token_ids) == 40


def scored(engine: Engine, name: str, prompt: list[int], start: int) -> list[float]:
    answer = engine.run(name, prompt, max_tokens=1, logprobs=LogprobParams(input_start=start))
    assert answer.input.start == start and answer.input.token_ids == prompt[start:]
    return answer.input.logprobs


def same(left: list[float], right: list[float]) -> bool:
    return len(left) == len(right) and all(
        (math.isnan(a) and math.isnan(b)) or abs(a - b) < 1e-3 for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_logprobs_boundary_not_null(page_size: int) -> None:
    found = case("logprobs-boundary-not-null")
    engine = Engine(page_size=page_size)
    prompt = ids(8)
    cold = scored(engine, "cold", prompt, 0)
    assert math.isnan(cold[0]) and not any(map(math.isnan, cold[1:]))
    for start, length in zip(found["given"]["logprob_start_len_each"], (8, 7, 3), strict=True):
        warm = scored(engine, f"w{start}", prompt, start)
        assert len(warm) == length and same(warm, cold[start:])
    assert engine.prompts["w5"][1] >= 4
    assert engine.prompts["w0"][1] >= 4, "stored logprobs let a scored prefix be reused"


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_logprobs_prompt_with_prefix_cache(page_size: int) -> None:
    engine = Engine(pages=256, page_size=page_size)
    for length in (31, 33, 64):
        first = scored(engine, f"{length}-1", ids(length), 0)
        assert len(first) == length
        assert same(scored(engine, f"{length}-2", ids(length), 0), first)
        assert same(scored(Engine(backend="none"), "alone", ids(length), 0), first)


@pytest.mark.parametrize("start", [0, 1, 5, 16, 33])
def test_alternatives_of_the_prompt_are_right_on_a_warm_cache(start: int) -> None:
    wanted = LogprobParams(input_start=start, top_k=2, token_ids=(3, 4), output=True)
    cold, warm = Engine(backend="none"), Engine()
    warm.run("plant", ids(33), max_tokens=0, logprobs=LogprobParams(input_start=0))
    answers = [engine.run("a", ids(33), max_tokens=3, logprobs=wanted, ignore_eos=True) for engine in (cold, warm)]
    assert same(answers[0].input.logprobs, answers[1].input.logprobs)
    assert answers[0].input.top == answers[1].input.top and answers[0].input.chosen == answers[1].input.chosen
    assert len(answers[0].input.top) == len(answers[0].input.chosen) == 33 - start
    assert answers[0].output == answers[1].output and len(answers[0].output.top) == 3
    assert warm.prompts["a"][1] == (0 if start <= 1 else min(start - 1, 32) // 4 * 4)
