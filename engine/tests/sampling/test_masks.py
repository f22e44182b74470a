"""Masks in the samplers: torch and native choose the same, allowed, tokens, whatever else changes the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from branchline import _native
from branchline.engine.grammar import mask as masks
from branchline.engine.sampling.sampler import NOTHING_LEFT, sample
from branchline.engine.types import I32, RowPlan, RowResult, SamplingParams

from tests.cases.loader import case

SEEDS = 60


def mask_of(vocab: int, allowed: list[int]) -> I32:
    words: I32 = masks.allocate(1, vocab)[0]
    words[:] = 0
    masks.set_bits(words, allowed, True)
    return words


def both(logits: np.ndarray, plans: list[RowPlan]) -> list[RowResult]:
    """The answers, which must be the same from both."""
    fields = _native.sample_rows(np.ascontiguousarray(logits), logits.shape[1], plans)
    natively = [RowResult(*one) for one in fields]
    by_torch = sample(torch.from_numpy(logits), plans)
    for one, other in zip(natively, by_torch, strict=True):
        assert (one.error is None) is (other.error is None)
        assert one.error is not None or one.token_id == other.token_id
    return natively


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 70, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_only_allowed_tokens_are_chosen(vocab: int, temperature: float) -> None:
    random = np.random.default_rng(vocab)
    logits = (random.standard_normal((SEEDS, vocab)) * 3).astype(np.float32)
    plans, wanted = [], []
    for row in range(SEEDS):
        allowed = sorted({int(one) for one in random.integers(0, vocab, 1 + row % 9)})
        wanted.append(allowed)
        top_k = (-1, 1, 5)[row % 3]
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=(1.0, 0.9)[row % 2])
        plans.append(RowPlan(row, params, seed=row, position=row, mask=mask_of(vocab, allowed), want_logprob=True))
    for row, result in enumerate(both(logits, plans)):
        assert result.error is None and result.token_id in wanted[row]
        if temperature == 0.0:
            assert result.token_id == max(wanted[row], key=lambda token: (logits[row, token], -token))


def test_a_full_mask_changes_nothing() -> None:
    logits = np.random.default_rng(1).standard_normal((20, 77)).astype(np.float32)
    full = masks.allocate(1, 77)[0]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, top_p=0.8)
        masked = both(logits, [RowPlan(row, params, seed=row, mask=full) for row in range(20)])
        free = both(logits, [RowPlan(row, params, seed=row) for row in range(20)])
        assert [one.token_id for one in masked] == [one.token_id for one in free]


def test_logprobs_are_of_the_raw_row() -> None:
    logits = np.array([[3.0, 2.0, 1.0]], dtype=np.float32)
    plan = RowPlan(0, SamplingParams(temperature=0.0), mask=mask_of(3, [1]), want_logprob=True, top_k=2)
    (result,) = both(logits, [plan])
    assert result.token_id == 1
    assert result.logprob == pytest.approx(2.0 - np.log(np.exp([3.0, 2.0, 1.0]).sum()), abs=1e-5)
    assert result.top is not None and [token for token, _ in result.top] == [0, 1]


def test_a_mask_narrower_than_the_head_forbids_what_lies_beyond() -> None:
    given = case("grammar-mask-narrower-than-head")["given"]
    logits = np.zeros((1, given["lm_head_rows"]), dtype=np.float32)
    logits[0, [60, 69, 48]] = 9.0, 8.0, 1.0
    narrow = mask_of(given["tokenizer_ids"], given["grammar_allows"])
    assert len(narrow) == 2, "two words of 32 for 70 ids"
    (greedy,) = both(logits, [RowPlan(0, SamplingParams(temperature=0.0), mask=narrow)])
    assert greedy.token_id == 48
    plans = [RowPlan(0, SamplingParams(temperature=1.0), seed=seed, mask=narrow) for seed in range(1000)]
    assert {one.token_id for one in both(logits, plans)} == {5, 48}


def test_bans_bias_and_penalties_hold_beside_a_mask() -> None:
    logits = np.array([[5.0, 4.0, 3.0, 2.0]], dtype=np.float32)
    params = SamplingParams(temperature=0.0, logit_bias=((3, 50.0), (2, 1.5)))
    (biased,) = both(logits, [RowPlan(0, params, mask=mask_of(4, [0, 1, 2]))])
    assert biased.token_id == 0
    (banned,) = both(logits, [RowPlan(0, params, mask=mask_of(4, [0, 1, 2]), banned=(0,))])
    assert banned.token_id == 2
    state = _native.PenaltyState((), 1.0, 2.0, 0.0)
    state.observe(0)
    plan = RowPlan(0, SamplingParams(temperature=0.0), mask=mask_of(4, [0, 2]), penalties=state)
    assert _native.sample_rows(logits, 4, [plan])[0][0] == 0  # 5 - 2 = 3: a tie, and the lower id wins
    state.observe(0)
    assert _native.sample_rows(logits, 4, [plan])[0][0] == 2


def test_a_mask_that_leaves_nothing_is_the_rows_own_error() -> None:
    logits = np.zeros((2, 40), dtype=np.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature)
        empty, free = both(logits, [RowPlan(0, params, mask=mask_of(40, [])), RowPlan(1, params)])
        assert empty.error == NOTHING_LEFT and free.error is None
