"""A fault costs one request, or one step's requests; the loop, the neighbours and the ledger go on."""

from __future__ import annotations

import logging
import random

import pytest
from branchline.engine.errors import ErrorCode, InternalError, InvalidArgument, ResourceExhausted, Unavailable
from branchline.engine.loop import EngineLoop
from branchline.engine.types import Delta, FinishReason, Request, SamplingParams
from harness import EOS, Engine, vocabulary
from tiny import expected


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


def test_unusable_logits_end_their_request_only() -> None:
    engine = Engine()
    bad = ids(9, 1)
    engine.executor.broken_tokens = {bad[-1]}
    good = next(prompt for seed in range(2, 50) if bad[-1] not in (prompt := ids(9, seed)) + expected(prompt, 8))
    engine.submit("bad", bad, max_tokens=8)
    engine.submit("good", good, max_tokens=8, ignore_eos=True)
    engine.finish()
    assert isinstance(engine.errors["bad"], InternalError) and "NaN" in engine.errors["bad"].message
    assert engine.answers["good", 0].token_ids == expected(good, 8)


def test_one_sequence_with_unusable_logits_ends_all_n_with_one_error() -> None:
    engine = Engine(pages=128)
    token = 40
    engine.executor.broken_tokens = {token}
    prompt = next(p for s in range(50) if token not in (p := ids(9, s)))
    engine.submit("r", prompt, n=8, temperature=3.0, seed=1, max_tokens=200, ignore_eos=True)
    engine.finish()
    assert "r" in engine.errors


@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_step_that_fails_once_costs_nobody_anything(when: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(max_running_requests=2)
    engine.executor.faults[when] = RuntimeError("a hiccup")
    for number in range(3):
        engine.submit(f"r{number}", ids(10, number), max_tokens=6, ignore_eos=True)
    with caplog.at_level(logging.ERROR):
        engine.finish()
    assert not engine.errors and "a hiccup" in caplog.text
    for number in range(3):
        assert engine.answers[f"r{number}", 0].token_ids == expected(ids(10, number), 6)


def test_a_request_that_breaks_every_step_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(pages=256, max_running_requests=8)
    poison = 41
    good = [p for seed in range(400) if poison not in (p := ids(9, seed)) + expected(p, 12)][:6]
    engine.executor.poison = {poison}
    for number, prompt in enumerate(good):
        engine.submit(f"good-{number}", prompt, max_tokens=12, ignore_eos=True)
    engine.step(3)
    engine.submit("bad", [*good[0][:5], poison, 3], n=2, max_tokens=12, ignore_eos=True)
    with caplog.at_level(logging.ERROR):
        engine.finish()
    assert set(engine.errors) == {"bad"}
    assert engine.errors["bad"].code is ErrorCode.INTERNAL and "poisoned kernel" in engine.errors["bad"].message
    for number, prompt in enumerate(good):
        assert engine.answers[f"good-{number}", 0].token_ids == expected(prompt, 12)


def test_a_lost_executor_is_not_asked_for_every_row_again(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(pages=512, max_running_requests=64)
    for number in range(40):
        engine.submit(f"r{number}", ids(4, number), max_tokens=6, ignore_eos=True)
    engine.executor.lost = True
    with caplog.at_level(logging.ERROR):
        engine.step()
    assert len(engine.errors) == 40 and engine.executor.steps == 1 + 4


@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_failing_step_ends_its_requests_and_the_loop_goes_on(when: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(max_running_requests=2)
    for number in range(3):
        engine.submit(f"r{number}", ids(10, number), max_tokens=6, ignore_eos=True)
    engine.step(when - 1)
    engine.executor.lost = True
    with caplog.at_level(logging.ERROR):
        engine.step()
        engine.executor.lost = False
        engine.finish()
    assert set(engine.errors) == {"r0", "r1"}
    assert engine.errors["r0"].code is ErrorCode.INTERNAL and "device lost" in engine.errors["r0"].message
    assert engine.answers["r2", 0].token_ids == expected(ids(10, 2), 6)
    again = engine.run("again", ids(10, 0), max_tokens=6, ignore_eos=True)
    assert again.token_ids == expected(ids(10, 0), 6), "nothing of the failed step is served from the cache"


def test_an_exception_in_one_requests_bookkeeping_ends_that_request() -> None:
    engine = Engine()
    engine.submit("bad", ids(6, 1), frequency_penalty=1.0, max_tokens=5)
    engine.submit("good", ids(6, 2), frequency_penalty=1.0, max_tokens=5, ignore_eos=True)
    engine.step()
    sequence = engine.loop._live["bad"].sequences[0]
    sequence.plan.penalties = object()  # the executor will not know it
    engine.finish()
    assert "AssertionError" in engine.errors["bad"].message
    assert engine.answers["good", 0].finish is not None


def test_a_sink_that_raises_loses_its_requests_and_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def broken(step: int, deltas: list[Delta]) -> None:
        raise ConnectionError("gone")

    engine.loop.submit(Request("gone", tuple(ids(5)), SamplingParams(max_tokens=500)), broken)
    engine.submit("here", ids(5, 1), max_tokens=9, ignore_eos=True)
    engine.finish()
    assert engine.answers["here", 0].token_ids == expected(ids(5, 1), 9)
    assert engine.executor.computed_tokens < 40, "the abandoned request stopped"


@pytest.mark.parametrize(("prompt", "words"), [([], "empty"), ([-1], "holds -1"), ([EOS + 1], rf"\[0, {EOS + 1}\)")])
def test_a_prompt_that_is_wrong_is_refused_at_the_door(prompt: list[int], words: str) -> None:
    engine = Engine()
    with pytest.raises(InvalidArgument, match=words) as refused:
        engine.submit("a", prompt)
    assert refused.value.field == "token_ids" and not engine.loop.busy


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    engine = Engine()
    engine.submit("a", ids(5), max_tokens=3)
    with pytest.raises(InvalidArgument, match="'a' is in use"):
        engine.submit("a", ids(5), max_tokens=3)
    engine.finish()
    engine.answers.clear()
    engine.prompts.clear()
    engine.submit("a", ids(5), max_tokens=3)
    engine.finish()


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    engine = Engine(max_running_requests=2, max_queued_requests=3)
    for number in range(5):
        engine.submit(f"r{number}", ids(5, number), max_tokens=4, ignore_eos=True)
    with pytest.raises(ResourceExhausted, match="max_queued_requests is 3") as refused:
        engine.submit("late", ids(5))
    assert refused.value.retry_after_ms == 1000
    for _ in range(20):
        engine.clock.now += 0.5
        engine.step()
    engine.finish()
    assert len(engine.answers) == 5
    engine.submit("late", ids(5), max_tokens=1)
    engine.finish()


def test_a_refused_queue_place_comes_back_at_the_measured_pace() -> None:
    engine = Engine(max_running_requests=1, max_queued_requests=9)
    for number in range(10):
        engine.submit(f"r{number}", ids(5, number), max_tokens=1)
    for _ in range(4):
        engine.clock.now += 0.3
        engine.step()
    for number in range(4):
        engine.submit(f"s{number}", ids(5, number), max_tokens=1)
    with pytest.raises(ResourceExhausted) as refused:
        engine.submit("late", ids(5))
    assert refused.value.retry_after_ms == pytest.approx(300, abs=2)
    engine.finish()


def test_a_closed_loop_refuses_and_has_ended_everything() -> None:
    engine = Engine()
    engine.submit("a", ids(5), max_tokens=300, ignore_eos=True)
    engine.step(3)
    engine.loop.close()
    finish = engine.answers["a", 0].finish
    assert finish is not None and finish.reason is FinishReason.ABORT and "shutting down" in finish.message
    with pytest.raises(Unavailable, match="shutting down"):
        engine.submit("b", ids(5))
    engine.loop.close()


def test_a_request_that_can_not_be_set_up_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def refuse(prompt: tuple[int, ...], params: SamplingParams) -> object | None:
        if params.presence_penalty:
            raise MemoryError("no room for counts")
        return None

    monkeypatch.setattr(engine.executor, "penalty_state", refuse)
    engine.submit("bad", ids(5), presence_penalty=1.0)
    engine.submit("good", ids(5), max_tokens=2, ignore_eos=True)
    engine.finish()
    assert "no room for counts" in engine.errors["bad"].message
    assert len(engine.answers["good", 0].token_ids) == 2


def test_the_loop_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import branchline.engine.loop, sys; assert 'torch' not in sys.modules; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_options_that_contradict_each_other_are_refused() -> None:
    for limits, words in (
        ({"max_running_requests": 9, "max_step_tokens": 8}, "raise max_step_tokens"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"aging_passes": 1001}, "aging_passes is 1001"),
    ):
        with pytest.raises(ValueError, match=words):
            Engine(**limits)  # type: ignore[arg-type]


def test_starting_twice_is_refused() -> None:
    engine = Engine()
    loop = EngineLoop(engine.executor, engine.cache, vocabulary())
    loop.start()
    with pytest.raises(RuntimeError, match="already started"):
        loop.start()
    loop.close()


def test_a_fault_of_the_loop_itself_ends_all_requests_but_not_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    for number in range(3):
        engine.submit(f"r{number}", ids(9, number), max_tokens=9)
    engine.step(2)
    scheduler = engine.loop._scheduler
    monkeypatch.setattr(scheduler, "schedule", lambda now: 1 // 0)
    with caplog.at_level(logging.ERROR):
        engine.loop._guarded_step()
    monkeypatch.undo()
    assert set(engine.errors) == {"r0", "r1", "r2"} and not engine.loop.busy
    assert "ZeroDivisionError" in engine.errors["r0"].message
    engine.finish()
    assert engine.run("again", ids(9), max_tokens=5, ignore_eos=True).token_ids == expected(ids(9), 5)


def test_what_a_failed_request_computed_since_its_prompt_is_not_kept() -> None:
    prompt, output = next(
        (prompt, output)
        for seed in range(200)
        if len(set(output := expected(prompt := ids(8, seed), 6))) == 6 and output[5] not in prompt
    )
    engine = Engine(page_size=4)
    engine.executor.broken_tokens = {output[5]}
    engine.submit("bad", prompt, max_tokens=20, ignore_eos=True)
    engine.finish()
    assert engine.answers["bad", 0].token_ids == output and "bad" in engine.errors
    engine.executor.broken_tokens = set()
    engine.run("next", [*prompt, *output], max_tokens=1)
    assert engine.prompts["next"] == (14, 8), "pages of unusable output are not offered to others"
