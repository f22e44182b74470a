"""Tokens chosen by the sampler: greedy, penalties, bias, bans, filters, noise."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
import torch
from branchline.engine.sampling.filters import restrict
from branchline.engine.sampling.noise import gumbel, row_keys
from branchline.engine.sampling.penalties import penalise, penalty_state
from branchline.engine.sampling.sampler import NOTHING_LEFT, UNUSABLE, sample
from branchline.engine.types import RowPlan, SamplingParams
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.loader import case

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


def tokens(logits: torch.Tensor, plans: list[RowPlan]) -> list[int]:
    results = sample(logits, plans)
    assert [result.error for result in results] == [None] * len(plans)
    return [result.token_id for result in results]


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def test_sampling_zero_and_one_temperature_rows() -> None:
    of_case = case("sampling-zero-and-one-temperature-rows")
    plans = [
        RowPlan(row, SamplingParams(temperature=temperature), seed=5, want_logprob=True, top_k=3)
        for row, temperature in enumerate(of_case["given"]["temperatures"])
    ]
    results = sample(torch.tensor(of_case["given"]["logits"]), plans)
    assert [result.token_id for result in results] == of_case["right"]["sampled_ids"]
    values = [value for result in results for _, value in result.top or []]
    assert torch.isfinite(torch.tensor(values)).all()


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert tokens(torch.tensor([[1.0, 7.0, 7.0, 7.0]]), [RowPlan(0, GREEDY)]) == [1]


def test_sampling_penalties_output_only() -> None:
    of_case = case("sampling-penalties-output-only")
    values, right = of_case["given"], of_case["right"]
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    state = penalty_state(tuple(values["prompt_ids"]), SamplingParams(**{name: values[name] for name in names}))
    assert state is not None
    for token in values["output_ids"]:
        state.observe(token)
    logits = torch.tensor([values["logits"]], dtype=torch.float32)
    penalise(logits, [(0, state)])
    assert torch.allclose(logits, torch.tensor([right["logits"]]), atol=right["abs_tol"])


def test_repetition_penalty_shrinks_seen_ids_of_prompt_and_output() -> None:
    state = penalty_state((1, 2), SamplingParams(repetition_penalty=2.0))
    assert state is not None
    state.observe(3)
    logits = torch.tensor([[4.0, 4.0, -4.0, 1.0, -1.0]])
    penalise(logits, [(0, state)])
    assert logits.tolist() == [[4.0, 2.0, -8.0, 0.5, -1.0]]


def test_no_state_is_made_without_penalties() -> None:
    assert penalty_state((1, 2, 3), SamplingParams()) is None


def test_penalty_state_grows_past_its_first_capacity() -> None:
    state = penalty_state((), SamplingParams(presence_penalty=1.0))
    assert state is not None
    for token in range(300):
        state.observe(token)
    logits = torch.zeros((2, 400))
    penalise(logits, [(1, state)])
    assert logits[0].abs().sum() == 0
    assert logits[1, :300].eq(-1).all() and logits[1, 300:].eq(0).all()


def test_penalties_of_one_row_leave_the_others() -> None:
    state = penalty_state((0,), SamplingParams(temperature=0.0, repetition_penalty=10.0))
    logits = torch.tensor([[5.0, 1.0], [5.0, 1.0]])
    plans = [RowPlan(0, dataclasses.replace(GREEDY, repetition_penalty=10.0), penalties=state), RowPlan(1, GREEDY)]
    assert tokens(logits, plans) == [1, 0]
    assert logits[0, 0] == 5.0, "the model's logits are not changed"


def test_logit_bias_adds_and_banned_ids_are_never_chosen() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    biased = dataclasses.replace(GREEDY, logit_bias=((0, 100.0),))
    assert tokens(logits, [RowPlan(0, biased), RowPlan(0, biased, banned=(0,)), RowPlan(0, GREEDY, banned=(2, 1))]) == [
        0,
        2,
        0,
    ]


def test_banning_everything_fails_that_row_only() -> None:
    results = sample(torch.zeros((2, 2)), [RowPlan(0, GREEDY, banned=(0, 1)), RowPlan(1, GREEDY)])
    assert results[0].error == NOTHING_LEFT
    assert results[1].error is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2, top_p=0.5)])
def test_unusable_logits_fail_their_own_row_only(bad: float, params: SamplingParams) -> None:
    logits = random_logits(3, 50)
    clean = tokens(logits, [RowPlan(row, params, seed=9, position=row) for row in range(3)])
    logits[1, 17] = bad
    results = sample(logits, [RowPlan(row, params, seed=9, position=row, want_logprob=True) for row in range(3)])
    assert results[1].error == UNUSABLE
    assert (results[0].token_id, results[2].token_id) == (clean[0], clean[2])


def test_a_draw_depends_on_seed_and_position_and_not_on_company() -> None:
    logits = random_logits(6, 3000)
    params = SamplingParams(temperature=1.3)
    plans = [RowPlan(row, params, seed=row, position=10 + row) for row in range(6)]
    together = tokens(logits, plans)
    alone = [tokens(logits[row : row + 1], [dataclasses.replace(plan, row=0)])[0] for row, plan in enumerate(plans)]
    shuffled = list(range(6))
    random.Random(1).shuffle(shuffled)
    mixed = tokens(logits, [plans[row] for row in shuffled] + [RowPlan(0, SamplingParams(top_k=5, top_p=0.4), seed=8)])
    assert together == alone
    assert [together[row] for row in shuffled] == mixed[:6]
    assert len({tokens(logits[:1], [RowPlan(0, params, seed=seed)])[0] for seed in range(40)}) > 5
    assert len({tokens(logits[:1], [RowPlan(0, params, position=at)])[0] for at in range(40)}) > 5


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    draws = 20_000
    plans = [RowPlan(0, SamplingParams(), seed=3, position=position) for position in range(draws)]
    counts = Counter(tokens(probabilities.log()[None], plans))
    for token, probability in enumerate(probabilities.tolist()):
        deviation = (draws * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - draws * probability) < 5 * deviation


def test_a_tiny_temperature_chooses_the_best() -> None:
    logits = random_logits(1, 100)
    assert tokens(logits, [RowPlan(0, SamplingParams(temperature=1e-30), seed=4)]) == [int(logits.argmax())]


def test_noise_is_finite_even_where_its_uniform_is_extreme() -> None:
    noise = gumbel([row_keys(seed, seed * 7) for seed in range(40)], 49152, CPU)
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - 1.6449) < 0.02


def test_noise_of_neighbouring_seeds_positions_and_ids_is_uncorrelated() -> None:
    noise = gumbel([row_keys(0, 0), row_keys(1, 0), row_keys(0, 1), row_keys(-1, 0)], 50_000, CPU)
    rows = torch.cat((noise, noise[:1].roll(1, dims=1)))
    correlation = torch.corrcoef(rows) - torch.eye(5)
    assert correlation.abs().max() < 0.03


def kept(logits: list[float], **options: float) -> set[int]:
    scaled = torch.tensor([logits])
    restrict(scaled, [SamplingParams(**options)])  # type: ignore[arg-type]
    return set(torch.isfinite(scaled[0]).nonzero().flatten().tolist())


def oracle(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters as a plain list program."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k > 0:
        order = order[:top_k]
    weights = torch.tensor([logits[token] for token in order], dtype=torch.float64).softmax(0).tolist()
    mass, chosen = 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if mass >= top_p and chosen:
            break
        chosen.append(token)
        mass += weight
    top = max(weights)
    return {token for token, weight in zip(order, weights, strict=True) if token in chosen and weight >= min_p * top}


@given(
    logits=st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=40),
    top_k=st.integers(-1, 45),
    top_p=st.sampled_from([0.05, 0.31, 0.77, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4, 1.0]),
)
@settings(deadline=None, max_examples=300)
def test_filters_equal_a_plain_list_program(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    assert kept(logits, top_k=top_k, top_p=top_p, min_p=min_p) == oracle(logits, top_k, top_p, min_p)


def test_nucleus_larger_than_the_candidates_is_exact() -> None:
    logits = (torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 0.01).tolist()
    assert kept(logits, top_p=0.9) == oracle(logits, -1, 0.9, 0.0)
    assert kept(logits, top_p=0.9, top_k=3000) == oracle(logits, 3000, 0.9, 0.0)


def test_filters_of_one_row_leave_the_others() -> None:
    scaled = random_logits(3, 30)
    before = scaled.clone()
    restrict(scaled, [SamplingParams(), SamplingParams(top_k=2), SamplingParams(min_p=1.0)])
    assert torch.equal(scaled[0], before[0])
    assert int(torch.isfinite(scaled[1]).sum()) == 2
    assert int(torch.isfinite(scaled[2]).sum()) == 1


def test_filtered_draws_stay_inside_the_filter() -> None:
    logits = random_logits(1, 500)
    best = set(logits[0].topk(3).indices.tolist())
    plans = [RowPlan(0, SamplingParams(top_k=3, temperature=5.0), seed=seed) for seed in range(200)]
    assert set(tokens(logits, plans)) == best


def test_no_plans_give_no_results() -> None:
    assert sample(torch.zeros((0, 8)), []) == []
