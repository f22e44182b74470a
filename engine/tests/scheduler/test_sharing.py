"""Prefixes that arrive together are computed once; n sequences of one prompt likewise."""

from __future__ import annotations

import random

import pytest
from branchline.engine.scheduler.sequence import child_seed
from branchline.engine.types import FinishReason
from harness import EOS, Engine
from tiny import expected


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_groups_of_simultaneous_prompts_hit_nearly_all_they_could(shuffled: bool) -> None:
    engine = Engine(pages=1000, page_size=16, max_running_requests=64)
    jobs = [(group, member) for group in range(8) for member in range(8)]
    if shuffled:
        random.Random(3).shuffle(jobs)
    prompts = {f"{group}-{member}": ids(256, group) + ids(32, 100 + group * 8 + member) for group, member in jobs}
    waiting, running = list(prompts), set[str]()
    while waiting or running:
        while waiting and len(running) < 16:
            name = waiting.pop(0)
            engine.submit(name, prompts[name], max_tokens=32, ignore_eos=True)
            running.add(name)
        engine.step()
        running = {name for name in running if (name, 0) not in engine.answers or not engine.answers[name, 0].finish}
    engine.finish()
    cached = sum(count for _, count in engine.prompts.values())
    assert cached >= 0.95 * 8 * 7 * 256
    for name, prompt in prompts.items():
        assert engine.answers[name, 0].token_ids == expected(prompt, 32)


def test_a_follower_waits_through_all_chunks_of_its_leader() -> None:
    engine = Engine(pages=256, page_size=4, max_step_tokens=20, max_running_requests=8)
    engine.submit("leader", ids(200), max_tokens=1)
    engine.submit("follower", [*ids(199), 1], max_tokens=1)
    engine.finish()
    assert engine.prompts["follower"] == (200, 196)
    assert engine.executor.computed_tokens == 200 + 4


def test_waiting_for_a_leader_is_bounded() -> None:
    engine = Engine(
        pages=256, page_size=4, max_step_tokens=8, max_running_requests=8, prefill_chunk=4, share_wait_steps=5
    )
    engine.submit("leader", ids(200), max_tokens=1)
    engine.submit("follower", ids(200), max_tokens=1)
    engine.step(7)
    assert engine.loop.stats().running == 2
    engine.finish()
    assert engine.answers["leader", 0].token_ids == engine.answers["follower", 0].token_ids == expected(ids(200), 1)


def test_a_follower_computes_itself_when_its_leader_is_aborted() -> None:
    engine = Engine(pages=256, page_size=4, max_step_tokens=20, max_running_requests=8)
    engine.submit("leader", ids(200), max_tokens=1)
    engine.submit("follower", ids(200), max_tokens=4, ignore_eos=True)
    engine.step(3)
    engine.loop.abort("leader")
    engine.finish()
    assert engine.prompts["follower"][1] == 60, "what the leader had computed is used"
    assert engine.answers["follower", 0].token_ids == expected(ids(200), 4)


def test_strangers_are_not_held_up_by_a_leader() -> None:
    engine = Engine(pages=256, page_size=4, max_step_tokens=40, max_running_requests=8, prefill_chunk=20)
    engine.submit("leader", ids(200), max_tokens=1)
    engine.submit("follower", ids(200), max_tokens=1)
    engine.submit("stranger", ids(10, 9), max_tokens=1)
    engine.step()
    assert engine.answers["stranger", 0].finish is not None
    engine.finish()


def test_without_a_tree_nobody_waits() -> None:
    engine = Engine(pages=256, page_size=4, backend="none")
    for number in range(4):
        engine.submit(f"r{number}", ids(40), max_tokens=1)
    engine.step()
    assert all(engine.answers[f"r{number}", 0].finish for number in range(4))


def test_n_sequences_prefill_their_prompt_once() -> None:
    engine = Engine(pages=256, page_size=4)
    engine.submit("r", ids(41), n=5, temperature=0.8, seed=3, max_tokens=10, ignore_eos=True)
    engine.finish()
    assert engine.prompts["r"] == (41, 0)
    prefill = engine.executor.computed_tokens - 5 * 9
    assert prefill == 41 + 4 * 1, "the children compute the tail page only"
    stats = engine.loop.stats()
    assert (stats.lookups, stats.prompt_tokens, stats.cached_tokens) == (1, 41, 0), "a request is counted once"
    tokens = [tuple(engine.answers["r", index].token_ids) for index in range(5)]
    assert len(set(tokens)) > 1
    for index in range(5):
        finish = engine.answers["r", index].finish
        assert finish is not None and finish.reason is FinishReason.LENGTH and finish.completion_tokens == 10
    again = Engine(backend="none")
    again.submit("r", ids(41), n=5, temperature=0.8, seed=3, max_tokens=10, ignore_eos=True)
    again.finish()
    assert [tuple(again.answers["r", index].token_ids) for index in range(5)] == tokens


def test_sequence_i_is_the_request_with_the_child_seed_of_i() -> None:
    engine = Engine()
    engine.submit("all", ids(9), n=3, temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
    engine.finish()
    for index in range(3):
        alone = engine.run(
            f"one-{index}", ids(9), temperature=0.8, seed=child_seed(3, index), max_tokens=6, ignore_eos=True
        )
        assert alone.token_ids == engine.answers["all", index].token_ids


def test_child_seeds_differ_and_keep_the_seed_of_sequence_0() -> None:
    seeds = [child_seed(7, index) for index in range(128)]
    assert seeds[0] == 7 and len(set(seeds)) == 128
    assert len({child_seed(seed, index) for seed in range(20) for index in range(20)}) == 400


def test_the_fork_experiment_counts_exactly() -> None:
    engine = Engine(pages=256, page_size=4)
    shared = ids(50)
    engine.run("plant", shared, max_tokens=0)
    for number in range(2):
        engine.run(f"branch-{number}", shared + ids(10, 5 + number), max_tokens=3, ignore_eos=True)
        assert engine.prompts[f"branch-{number}"] == (60, 48)
    stats = engine.loop.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.lookups, stats.hits) == (170, 96, 3, 2)
    assert engine.loop.flush() > 0
    engine.run("cold", shared + ids(10, 5), max_tokens=3, ignore_eos=True)
    assert engine.prompts["cold"] == (60, 0)
