"""Through the whole stack, in float32: the tokens and input logprobs that transformers gives."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import Starter

pytestmark = pytest.mark.model
FIXTURE = Path(__file__).resolve().parents[2] / "engine" / "tests" / "fixtures" / "greedy.json"
NEAR_TIE = 1e-3


def test_twenty_prompts_at_once_continue_as_with_transformers(stacks: Starter) -> None:
    stack = stacks("--dtype", "float32")
    entries: list[dict[str, Any]] = json.loads(FIXTURE.read_text())["entries"]
    params = {"max_new_tokens": 64, "ignore_eos": True}

    def ask(entry: dict[str, Any]) -> dict[str, Any]:
        return stack.generate(entry["prompt"], sampling_params=params, return_logprob=True, logprob_start_len=0)

    with ThreadPoolExecutor(len(entries)) as pool:
        answers = list(pool.map(ask, entries))
    whole = 0
    for entry, answer in zip(entries, answers, strict=True):
        clear = next((step for step, gap in enumerate(entry["gaps"]) if gap < NEAR_TIE), len(entry["ids"]))
        assert answer["output_ids"][:clear] == entry["ids"][:clear]
        whole += clear == 64
        found = [item[0] for item in answer["meta_info"]["input_token_logprobs"]]
        assert found[0] is None
        assert found[1:] == pytest.approx(entry["input_logprobs"], abs=1e-3)
    assert len(entries) == 20 and whole >= 18
