"""The benchmark's shapes: both forms ask the same, and the least to compute is counted right."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from branchline import lang as bl
from branchline.lang.backends.base import GenCall, SelectCall

from benchmarks.lang.run import least
from benchmarks.lang.shapes import SHAPES


def said(prompt: str, tokens: int, seed: int | None) -> str:
    """An answer that depends on all that was asked."""
    return f" <{zlib.crc32(f'{prompt}|{tokens}|{seed}'.encode()):x}>"


class Plain:
    """The forms by hand, answered as the mock answers the programs."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def gen(self, prompt: str, tokens: int, **options: Any) -> str:
        self.asked.append(prompt)
        return said(prompt, tokens, options.get("seed"))

    async def pick(self, prompt: str, choices: Sequence[str]) -> str:
        self.asked.append(prompt)
        return choices[0]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_both_forms_of_a_shape_send_the_same_prompts_and_come_to_the_same(name: str) -> None:
    def answer(call: GenCall) -> str:
        return said(call.prompt.text, call.sampling.max_tokens or 0, call.sampling.seed)

    mock, plain = bl.Mock(answers=answer), Plain()
    state = SHAPES[name].program.run(number=3, hold=True, backend=mock)
    assert asyncio.run(SHAPES[name].by_hand(plain, 3)) == state.ret_value  # type: ignore[arg-type]
    calls: list[GenCall | SelectCall] = [*mock.calls, *mock.selects]
    assert sorted(call.prompt.text for call in calls) == sorted(plain.asked)
    assert (mock.meter.planted > 0) == SHAPES[name].forks


def test_the_least_is_each_page_once_and_at_least_a_token_of_each_prompt() -> None:
    first, other = list(range(32)), [*range(16), *range(100, 116)]
    assert least([(first, [*first, 7])], 16) == (32, 32)
    assert least([(first, first), (other, other)], 16) == (32 + 16, 48)
    assert least([(first, first), (first, first)], 16) == (32 + 16, 32)  # the last page has the last token
    assert least([(first[:8], first), (first, first)], 16) == (8 + 16, 32)  # the answer's pages count as known
