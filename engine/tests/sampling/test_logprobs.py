"""Logprobs are of the raw distribution, whatever was done to choose the token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from branchline.engine.sampling.penalties import penalty_state
from branchline.engine.sampling.sampler import sample
from branchline.engine.types import RowPlan, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
LOGITS = torch.randn((4, 200), generator=torch.Generator().manual_seed(5)) * 4
SCORES = LOGITS.log_softmax(-1)


def test_logprobs_ignore_temperature_penalties_bias_and_bans() -> None:
    params = SamplingParams(
        temperature=0.3, top_k=1, repetition_penalty=1.8, frequency_penalty=1.0, logit_bias=((7, 50.0),)
    )
    state = penalty_state((3, 4), params)
    plan = RowPlan(1, params, penalties=state, banned=(9,), want_logprob=True, top_k=4, chosen_ids=(9, 0))
    result = sample(LOGITS, [plan])[0]
    assert result.token_id == 7
    assert result.logprob == pytest.approx(float(SCORES[1, 7]), abs=1e-5)
    assert result.chosen == [
        (9, pytest.approx(float(SCORES[1, 9]), abs=1e-5)),
        (0, pytest.approx(float(SCORES[1, 0]), abs=1e-5)),
    ]
    values, ids = SCORES[1].topk(4)
    assert [token for token, _ in result.top or []] == ids.tolist()
    assert [value for _, value in result.top or []] == pytest.approx(values.tolist(), abs=1e-5)


def test_scored_rows_answer_the_known_token() -> None:
    plans = [RowPlan(row, SamplingParams(), target=11 + row, want_logprob=True) for row in range(4)]
    results = sample(LOGITS, plans)
    assert [result.token_id for result in results] == [11, 12, 13, 14]
    assert [result.logprob for result in results] == pytest.approx(
        [float(SCORES[row, 11 + row]) for row in range(4)], abs=1e-5
    )


def test_plans_sharing_a_row_are_answered_each() -> None:
    plans = [
        RowPlan(2, GREEDY, want_logprob=True, top_k=1),
        RowPlan(2, GREEDY, target=5, want_logprob=True, top_k=3),
        RowPlan(2, GREEDY),
    ]
    first, second, third = sample(LOGITS, plans)
    assert len(first.top or []) == 1
    assert len(second.top or []) == 3
    assert second.logprob == pytest.approx(float(SCORES[2, 5]), abs=1e-5)
    assert (third.logprob, third.top, third.chosen) == (None, None, None)


def test_equal_alternatives_are_listed_by_lowest_id() -> None:
    logits = torch.tensor([[2.0, 5.0, 2.0, 2.0, 5.0, -1.0]])
    result = sample(logits, [RowPlan(0, GREEDY, top_k=4)])[0]
    assert [token for token, _ in result.top or []] == [1, 4, 0, 2]


def test_asking_for_more_alternatives_than_ids_gives_all() -> None:
    result = sample(torch.tensor([[0.0, 1.0]]), [RowPlan(0, GREEDY, top_k=5)])[0]
    assert [token for token, _ in result.top or []] == [1, 0]


def test_only_asked_fields_are_filled() -> None:
    plain, scored = sample(LOGITS, [RowPlan(0, GREEDY), RowPlan(1, GREEDY, chosen_ids=(3,))])
    assert dataclasses.astuple(plain)[1:] == (None, None, None, None)
    assert scored.logprob is None
    assert scored.chosen == [(3, pytest.approx(float(SCORES[1, 3]), abs=1e-5))]
