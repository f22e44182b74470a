"""The sampling kernel beside its oracle and beside the CPU sampler, whose random numbers it draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from branchline.engine.kernels import sampling
from branchline.engine.sampling.noise import gumbel, row_keys
from branchline.engine.sampling.sampler import sample
from branchline.engine.types import RowPlan, SamplingParams

VOCAB = 700
SEEDS = (0, 7, -3, 2**62, 91, 5)


def rules(rows: int, mask: torch.Tensor | None = None, **options: float | list[float]) -> sampling.Rules:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = options.get(name, default)
        return torch.tensor(value if isinstance(value, list) else [value] * rows, dtype=dtype)

    return sampling.Rules(
        column("temperatures", 0.8, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        torch.tensor([SEEDS[row % len(SEEDS)] for row in range(rows)]),
        torch.arange(rows) * 31,
        mask,
    )


def logits(rows: int, seed: int = 1, *, ties: bool = False) -> torch.Tensor:
    made = torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3
    return (made * 2).round() / 2 if ties else made


CASES = {
    "greedy": ({"temperatures": 0.0}, False),
    "plain": ({"temperatures": [0.1, 1.0, 5.0, 1e-30, 0.7, 2.0]}, False),
    "top_k": ({"top_k": [1, 2, 40, VOCAB, VOCAB + 1, 699], "temperatures": 4.0}, False),
    "top_k among equals": ({"top_k": [1, 3, 40, 100, 7, 200], "temperatures": 4.0}, True),
    "top_p": ({"top_p": [0.05, 0.5, 0.9, 0.99, 1.0, 0.7], "temperatures": 2.0}, False),
    "top_p among equals": ({"top_p": [0.05, 0.5, 0.9, 0.99, 0.3, 0.7], "temperatures": 3.0}, True),
    "min_p": ({"min_p": [0.5, 0.1, 0.0, 0.9, 0.01, 1.0], "temperatures": 3.0}, False),
    "all": ({"top_k": 50, "top_p": [0.5, 0.9, 0.99, 0.7, 0.95, 0.3], "min_p": 0.02, "temperatures": 3.0}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_choices_equal_the_oracles(interpreted: Any, name: str) -> None:
    options, ties = CASES[name]
    given, asked = logits(6, ties=ties), rules(6, **options)
    found = interpreted.sampling.sample(given, asked, given, True, most=256 if name in ("plain", "all") else 4096)
    expected = sampling.sample_reference(given, asked, given, True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_seed_gives_the_tokens_of_the_cpu_sampler(interpreted: Any) -> None:
    given, asked = logits(6, seed=4), rules(6, top_k=30, top_p=0.9)
    params = SamplingParams(temperature=0.8, top_k=30, top_p=0.9)
    plans = [
        RowPlan(row, params, seed=int(asked.seeds[row]), position=int(asked.positions[row]), want_logprob=True)
        for row in range(6)
    ]
    answers = sample(given.clone(), plans)
    tokens, logprobs, _ = interpreted.sampling.sample(given, asked, given, True)
    assert tokens.tolist() == [answer.token_id for answer in answers]
    np.testing.assert_allclose(logprobs, [answer.logprob for answer in answers], atol=1e-5)


def test_noise_is_the_cpu_samplers_bit_for_bit() -> None:
    seeds, positions = torch.tensor(SEEDS), torch.tensor([0, 1, 2, 3, 10**9, 5])
    keys = [row_keys(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert torch.equal(sampling.noise(seeds, positions, 3000), gumbel(keys, 3000, seeds.device))


@pytest.mark.parametrize("words", [22, 10])
def test_masks_forbid_and_are_not_read_beyond_their_words(interpreted: Any, words: int) -> None:
    chance = np.random.default_rng(words)
    mask = torch.from_numpy(chance.integers(-(2**31), 2**31, (6, words), dtype=np.int64).astype(np.int32))
    mask[0] = 0
    given, asked = logits(6), rules(6, mask, temperatures=[1.0, 0.0, 3.0, 3.0, 3.0, 1.0], top_p=0.9)
    found = interpreted.sampling.sample(given, asked, given, True, most=256)
    expected = sampling.sample_reference(given, asked, given, True)
    assert found[0].tolist() == expected[0].tolist()
    assert found[2].tolist() == [sampling.NOTHING_LEFT, *[sampling.OK] * 5]
    for row, token in enumerate(found[0].tolist()[1:], 1):
        assert (int(mask[row, token // 32]) >> (token % 32)) & 1


def test_rows_without_usable_logits_say_so_and_leave_the_others_alone(interpreted: Any) -> None:
    given = logits(4)
    given[0, 3], given[1, 699], given[2, 5] = float("nan"), float("-inf"), float("inf")
    for strict, expected in ((True, [1, 1, 1, 0]), (False, [1, 0, 1, 0])):
        found = interpreted.sampling.sample(given, rules(4), given, strict)
        assert found[2].tolist() == expected
        assert found[0].tolist() == sampling.sample_reference(given, rules(4), given, strict)[0].tolist()


def test_logprobs_are_those_of_the_models_own_logits(interpreted: Any) -> None:
    raw = logits(3)
    changed = raw.clone()
    changed[:, :600] = float("-inf")
    tokens, logprobs, status = interpreted.sampling.sample(changed, rules(3), raw, True)
    assert status.tolist() == [sampling.OK] * 3 and (tokens >= 600).all()
    torch.testing.assert_close(logprobs, raw.log_softmax(1).gather(1, tokens[:, None])[:, 0], rtol=0, atol=1e-5)
