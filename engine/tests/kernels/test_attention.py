"""Paged attention in Triton's interpreter beside its oracle, and beside itself where bits are promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from branchline.engine.kernels import attention

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@dataclass
class Case:
    """Random sequences whose pages lie scattered. Slots that belong to nobody are NaN."""

    heads: int
    kv_heads: int
    width: int
    page: int
    contexts: list[int]
    dtype: torch.dtype = torch.float32
    window: int | None = None
    e4m3: bool = False

    def __post_init__(self) -> None:
        chance = torch.Generator().manual_seed(self.width + sum(self.contexts))
        pages = -(-max(self.contexts) // self.page)
        count = len(self.contexts)
        table = torch.randperm(count * pages + 3, generator=chance)[: count * pages].view(count, pages)
        pool = torch.full((2, (count * pages + 3) * self.page, self.kv_heads, self.width), float("nan"))
        for line, context in zip(table, self.contexts, strict=True):
            at = torch.arange(context)
            slots = line[at // self.page] * self.page + at % self.page
            pool[:, slots] = torch.randn((2, context, self.kv_heads, self.width), generator=chance)
            line[-(-context // self.page) :] = -(1 << 30)  # unused entries may hold anything
        self.table = table.int()
        self.keys, self.values = pool.to(torch.float8_e4m3fn if self.e4m3 else self.dtype)
        self.lengths = torch.tensor(self.contexts, dtype=torch.int32)
        self.chance = chance

    def queries(self, tokens: int) -> torch.Tensor:
        return torch.randn((tokens, self.heads, self.width), generator=self.chance).to(self.dtype)

    def pages(self, queries: torch.Tensor) -> attention.Pages:
        scales = (0.5, 0.25) if self.e4m3 else (1.0, 1.0)
        return attention.checked(queries, self.keys, self.values, self.table, self.page, None, self.window, *scales)

    def longest(self) -> int:
        return self.table.shape[1] * self.page


def decode(compiled: Any, case: Case, queries: torch.Tensor, split: int, *, invariant: bool = False) -> torch.Tensor:
    out = torch.full_like(queries, float("nan"))
    pages = case.pages(queries)
    return compiled.attention.decode_attention(
        queries, pages, case.lengths, case.longest(), split, invariant, None, out
    )


def prefill(
    compiled: Any, case: Case, queries: torch.Tensor, counts: list[int], split: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives, and the oracle."""
    new = np.array(counts, np.int32)
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(new))).astype(np.int32))
    tiles = torch.from_numpy(attention.prefill_tiles(new, case.heads, case.kv_heads, invariant=split > 0))
    out = torch.full_like(queries, float("nan"))
    pages = case.pages(queries)
    found = compiled.attention.prefill_attention(queries, pages, starts, case.lengths, tiles, split, out)
    return found, attention.prefill_attention_reference(queries, pages, starts, case.lengths)


RAGGED = [
    Case(4, 4, 16, 16, [1, 64, 97]),
    Case(8, 2, 32, 16, [0, 130, 7, 64]),
    Case(6, 2, 24, 1, [65, 3], torch.float16),
    Case(7, 1, 16, 64, [63, 64, 65]),
    Case(8, 2, 16, 32, [200, 20, 1], window=37),
    Case(4, 1, 16, 8, [70, 1], torch.float16, e4m3=True),
]


@pytest.mark.parametrize("case", RAGGED, ids=lambda case: f"{case.heads}x{case.kv_heads} page {case.page}")
def test_decode_equals_its_oracle_over_ragged_contexts(interpreted: Any, case: Case) -> None:
    queries = case.queries(len(case.contexts))
    found = decode(interpreted, case, queries, split=64)
    expected = attention.decode_attention_reference(queries, case.pages(queries), case.lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        (Case(4, 4, 16, 16, [5, 64, 97]), [5, 1, 40]),
        (Case(8, 2, 32, 1, [130, 33]), [130, 2]),
        (Case(6, 2, 24, 4, [65, 3], torch.float16), [64, 0]),
        (Case(8, 1, 16, 32, [150, 40], window=37), [90, 40]),
        (Case(2, 1, 16, 128, [70, 1], torch.float16, e4m3=True), [33, 1]),
    ],
    ids=["equal heads", "page of one", "group of three", "window", "float8"],
)  # fmt: skip
def test_prefill_equals_its_oracle_over_ragged_tokens(interpreted: Any, case: Case, counts: list[int]) -> None:
    found, expected = prefill(interpreted, case, case.queries(sum(counts)), counts)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[case.dtype])


def test_a_rows_bits_do_not_depend_on_its_company_or_on_who_shares_the_work(
    interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(8, 2, 16, 16, [150, 9, 131])
    queries = case.queries(3)
    together = decode(interpreted, case, queries, split=64)
    monkeypatch.setattr(interpreted.attention, "lanes", lambda *_: 1)
    alone = Case(8, 2, 16, 16, [150, 9, 131])
    alone.table, alone.lengths = case.table[2:], case.lengths[2:]
    alone.keys, alone.values = case.keys, case.values
    assert torch.equal(decode(interpreted, alone, queries[2:], split=64)[0], together[2])


@pytest.mark.parametrize("window", [None, 90])
def test_invariant_prefill_and_decode_give_a_token_the_same_bits(interpreted: Any, window: int | None) -> None:
    case = Case(8, 2, 16, 16, [200], window=window)
    queries = case.queries(80)
    whole, _ = prefill(interpreted, case, queries, [80], split=64)
    late, _ = prefill(interpreted, case, queries[57:], [23], split=64)
    assert torch.equal(whole[57:], late), "where the chunk begins"
    last = decode(interpreted, case, queries[79:], split=64, invariant=True)
    assert torch.equal(whole[79:], last), "which kernel"


def test_splits_follow_from_the_longest_context_alone() -> None:
    assert [attention.split_size(longest) for longest in (1, 4096, 16384, 16385, 131072)] == [256, 256, 256, 512, 2048]
    held = attention.decode_workspace(4, 8, 16, 1000, device=torch.device("cpu"))
    assert held.numel() == 4 * 8 * 4 * 18


def test_tiles_cover_every_new_token_once() -> None:
    tiles = attention.prefill_tiles(np.array([70, 0, 1, 32], np.int32), 8, 2)
    assert tiles.tolist() == [[0, 0], [0, 32], [0, 64], [2, 0], [3, 0]]


def test_a_workspace_that_is_too_small_is_refused_before_it_is_written(interpreted: Any) -> None:
    case = Case(4, 4, 16, 16, [130])
    queries = case.queries(1)
    with pytest.raises(ValueError, match=r"workspace has 8 torch.float32; use 216 float32 or more"):
        interpreted.attention.decode_attention(
            queries, case.pages(queries), case.lengths, 144, 64, False, torch.empty(8), torch.empty_like(queries)
        )
