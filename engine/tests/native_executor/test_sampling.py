"""The native sampler against the torch sampler: same tokens, logprobs and errors from the same logits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from branchline import _native
from branchline.engine.executor.native import NativeExecutor
from branchline.engine.sampling import sampler
from branchline.engine.sampling.penalties import penalty_state
from branchline.engine.types import RowPlan, RowResult, SamplingParams
from hypothesis import given, settings
from hypothesis import strategies as st

from .driver import F32, Line, batch_of, build, tiny_model

VOCABS = (1, 7, 33, 320, 5000)


def native(logits: F32, plans: list[RowPlan]) -> list[RowResult]:
    fields = _native.sample_rows(np.ascontiguousarray(logits), logits.shape[1], plans)
    return [RowResult(*one) for one in fields]


def rows(vocab: int, count: int, seed: int, spread: float = 3.0) -> F32:
    return (np.random.default_rng(seed).standard_normal((count, vocab)) * spread).astype(np.float32)


def close(found: list[tuple[int, float]] | None, expected: list[tuple[int, float]] | None) -> bool:
    if found is None or expected is None:
        return found is expected
    ids = [token for token, _ in found] == [token for token, _ in expected]
    return ids and all(math.isclose(a[1], b[1], abs_tol=1e-4) for a, b in zip(found, expected, strict=True))


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([-1, 1, 2, 5, 40, 2000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_options_give_the_same_answer_as_the_torch_sampler(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from(VOCABS))
    logits = rows(vocab, 3, data.draw(st.integers(0, 50)), data.draw(st.sampled_from([0.1, 3.0, 12.0])))
    ids = st.integers(0, vocab - 1)
    theirs, ours = [], []
    for row in range(3):
        options = data.draw(params)
        options = dataclasses.replace(
            options, logit_bias=tuple(data.draw(st.lists(st.tuples(ids, st.sampled_from([-5.0, 2.5])), max_size=2)))
        )
        prompt = tuple(data.draw(st.lists(ids, max_size=4)))
        state = penalty_state(prompt, options)
        native_state = NativeExecutor.penalty_state(None, prompt, options)  # type: ignore[arg-type]
        assert (state is None) == (native_state is None)
        for token in data.draw(st.lists(ids, max_size=4)):
            if state is not None:
                state.observe(token)
                native_state.observe(token)  # type: ignore[union-attr]
        plan = RowPlan(
            row, options, seed=data.draw(st.integers(-5, 2**70)), position=data.draw(st.integers(0, 9000)),
            penalties=state, banned=tuple(data.draw(st.lists(ids, max_size=1))), want_logprob=data.draw(st.booleans()),
            top_k=data.draw(st.sampled_from([0, 1, 5])), chosen_ids=tuple(data.draw(st.lists(ids, max_size=2))),
        )  # fmt: skip
        theirs.append(plan)
        ours.append(dataclasses.replace(plan, penalties=native_state))
    expected = sampler.sample(torch.from_numpy(logits), theirs)
    for found, wanted in zip(native(logits, ours), expected, strict=True):
        assert (found.error is None) == (wanted.error is None)
        if wanted.error is not None:
            assert found.error == wanted.error
            continue
        assert found.token_id == wanted.token_id
        assert (found.logprob is None) == (wanted.logprob is None)
        assert found.logprob is None or math.isclose(found.logprob, wanted.logprob or 0.0, abs_tol=1e-4)
        assert close(found.top, wanted.top)
        assert close(found.chosen, wanted.chosen)


def test_unfiltered_draws_over_a_whole_vocabulary_equal_the_torch_sampler() -> None:
    logits = rows(49152, 4, 3, 1.5)
    plans = [RowPlan(row, SamplingParams(), seed=row, position=position) for row in range(4) for position in range(25)]
    expected = [result.token_id for result in sampler.sample(torch.from_numpy(logits), plans)]
    assert [result.token_id for result in native(logits, plans)] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_row_with_a_value_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = rows(40, 2, 1)
    logits[0, 39] = bad
    first, second = native(logits, [RowPlan(0, SamplingParams()), RowPlan(1, SamplingParams(temperature=0.0))])
    assert first.error == sampler.UNUSABLE
    assert second.error is None and second.token_id == int(logits[1].argmax())


def test_bans_of_everything_are_an_error_of_the_row() -> None:
    (result,) = native(rows(3, 1, 1), [RowPlan(0, SamplingParams(), banned=(0, 1, 2))])
    assert result.error == sampler.NOTHING_LEFT


@pytest.mark.parametrize(
    "change",
    [{"target": 40}, {"banned": (40,)}, {"chosen_ids": (-1,)}, {"params": SamplingParams(logit_bias=((99, 1.0),))}],
)
def test_ids_outside_the_vocabulary_fail_their_row(change: dict[str, object]) -> None:
    plan = dataclasses.replace(RowPlan(0, SamplingParams(temperature=0.0)), **change)  # type: ignore[arg-type]
    bad, good = native(rows(40, 1, 1), [plan, RowPlan(0, SamplingParams(temperature=0.0))])
    assert bad.error is not None and "vocabulary" in bad.error
    assert good.error is None


def test_scored_row_answers_for_its_target_and_equal_tops_go_by_id() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 0.0]], np.float32)
    (result,) = native(logits, [RowPlan(0, SamplingParams(), target=3, want_logprob=True, top_k=3)])
    assert result.token_id == 3
    assert [token for token, _ in result.top or []] == [1, 2, 0]


def test_same_plan_draws_the_same_token_alone_and_in_a_batch() -> None:
    executor = build(tiny_model("F32"), threads=2)
    lines = [Line([number]) for number in range(8)]
    step = batch_of(16, [(line, [number + 1, number + 2]) for number, line in enumerate(lines)])
    plans = [RowPlan(row, SamplingParams(temperature=1.5), seed=9, position=row) for row in range(8)]
    executor.run(step)
    together = [result.token_id for result in executor.sample(None, plans)]
    assert together == [executor.sample(None, [plan])[0].token_id for plan in plans]
    assert len(set(together)) > 1


def test_penalty_state_of_another_executor_is_refused() -> None:
    state = penalty_state((1,), SamplingParams(repetition_penalty=2.0))
    with pytest.raises(TypeError, match="penalties must be a state made by penalty_state"):
        native(rows(4, 1, 1), [RowPlan(0, SamplingParams(), penalties=state)])
