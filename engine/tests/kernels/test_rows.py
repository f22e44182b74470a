"""Norms, rotary writes, page copies and products in Triton's interpreter beside their oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branchline.engine.kernels import linear, norm, pages, rope

HALVES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROUNDED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3.2e-2}  # the interpreter cuts bfloat16 off


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [96, 256])
def test_norms_equal_their_oracles_and_the_sum_stays_behind(interpreted: Any, dtype: torch.dtype, width: int) -> None:
    x, residual = noise(3, width, dtype=dtype), noise(3, width, dtype=dtype, seed=1)
    weight = noise(width, dtype=dtype, seed=2)
    alone = interpreted.norm.rms_norm(x[:, :], None, weight, 1e-5, torch.empty_like(x))
    torch.testing.assert_close(alone, norm.rms_norm_reference(x, weight, 1e-5), rtol=ROUNDED[dtype], atol=CLOSE[dtype])
    theirs = residual.clone()
    found = interpreted.norm.rms_norm(x, residual, weight, 1e-5, torch.empty_like(x))
    expected = norm.add_rms_norm_reference(x, theirs, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=ROUNDED[dtype], atol=CLOSE[dtype])
    torch.testing.assert_close(residual, theirs, rtol=ROUNDED[dtype], atol=0)
    assert dtype == torch.bfloat16 or torch.equal(residual, theirs)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("pool_dtype", [None, torch.float8_e4m3fn])
def test_heads_turn_and_keys_and_values_go_to_their_slots(
    interpreted: Any, dtype: torch.dtype, normed: bool, pool_dtype: torch.dtype | None
) -> None:
    heads, kv_heads, width, tokens = 6, 2, 24, 3
    projected = noise(tokens, (heads + 2 * kv_heads) * width, dtype=dtype)
    projected[0, -1] = 400.0  # saturates once it is divided by its scale
    cos, sin = noise(50, width, dtype=dtype, seed=1), noise(50, width, dtype=dtype, seed=2)
    positions, slots = torch.tensor([0, 49, 7]), torch.tensor([5, -1, 30])
    norms = rope.HeadNorms(noise(width, dtype=dtype), noise(width, dtype=dtype, seed=9), 1e-6) if normed else None

    def run(form: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pool = torch.zeros(2, 40, kv_heads, width).to(pool_dtype or dtype)
        target = rope.Target(pool[0], pool[1], slots, 0.5, 0.25)
        return form(target), *pool.float()

    found = run(lambda target: interpreted.rope.rope_write(
        projected, cos, sin, positions, target, norms, torch.empty(tokens, heads, width, dtype=dtype)
    ))  # fmt: skip
    expected = run(lambda target: rope.rope_write_reference(projected, cos, sin, positions, target, heads, norms))
    assert float(expected[2].max()) == (448.0 if pool_dtype else 400.0), "saturated, not NaN"
    torch.testing.assert_close(found[0], expected[0], rtol=ROUNDED[dtype], atol=CLOSE[dtype])
    for one, other in zip(found[1:], expected[1:], strict=True):
        if pool_dtype:  # the interpreter loses the carry of what rounds up to a power of two
            one = torch.where(other.abs().log2() % 1 == 0, other, one)
        # A value that lies between two e4m3 neighbours may go to either.
        torch.testing.assert_close(one, other, rtol=0.13 if pool_dtype else ROUNDED[dtype], atol=CLOSE[dtype])
        assert not one[[0, 6, 39]].any(), "no other slot is written"


@pytest.mark.parametrize(("dtype", "page"), [(torch.float16, 4), (torch.float8_e4m3fn, 1), (torch.float32, 16)])
def test_pages_go_to_the_host_tier_and_come_back(interpreted: Any, dtype: torch.dtype, page: int) -> None:
    pool = noise(2, 2, 6 * page, 3, 5).to(dtype)
    host, theirs = torch.zeros(4, 2, 2, page, 3, 5).to(dtype), torch.zeros(4, 2, 2, page, 3, 5).to(dtype)
    moved, slots = torch.tensor([5, 0, 2]), torch.tensor([1, 3, 0])
    interpreted.pages.copy_pages(pool, host, moved, slots, page, True)
    pages.copy_pages_reference(pool, theirs, moved, slots, page, True)
    assert torch.equal(host.view(torch.uint8), theirs.view(torch.uint8)) and bool(host.float().any())
    wanted, other = pool.clone(), torch.zeros_like(pool)
    interpreted.pages.copy_pages(other, host, moved, slots, page, False)
    for number in range(6):
        span = slice(number * page, (number + 1) * page)
        expected = wanted[:, :, span] if number in (5, 0, 2) else torch.zeros_like(wanted[:, :, span])
        assert torch.equal(other[:, :, span].view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_equal_their_oracle_however_their_parts_are_spread(interpreted: Any, dtype: torch.dtype) -> None:
    x, weight, bias = noise(5, 1100, dtype=dtype), noise(70, 1100, dtype=dtype, seed=1), noise(70, dtype=dtype, seed=2)
    expected = linear.linear_invariant_reference(x, weight, bias)
    multiply = interpreted.linear.multiply
    one, many = (
        multiply(x, weight, None, bias, torch.empty(5, 70, dtype=dtype), invariant=True, spread=spread)
        for spread in (False, True)
    )
    torch.testing.assert_close(one, expected, rtol=1e-3 if dtype == torch.float16 else 1e-5, atol=1e-4)
    assert torch.equal(one, many)
    alone = multiply(x[3:4], weight, None, bias, torch.empty(1, 70, dtype=dtype), invariant=True, spread=True)
    assert torch.equal(alone[0], one[3]), "company"


@pytest.mark.parametrize(("rows", "invariant"), [(3, False), (3, True), (70, False)])
def test_float8_products_equal_their_oracle(interpreted: Any, rows: int, invariant: bool) -> None:
    x, weight = noise(rows, 200, dtype=torch.float16), noise(33, 200, seed=1)
    weight[4] = 0.0
    held, scales = linear.quantize_e4m3(weight)
    torch.testing.assert_close(held.float() * scales[:, None], weight, rtol=0.0625, atol=float(scales.max()) / 512)
    expected = linear.linear_e4m3_reference(x, held, scales, None)
    out = torch.empty(rows, 33, dtype=torch.float16)
    found = interpreted.linear.multiply(x, held, scales, None, out, invariant=invariant)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)
    assert not found[:, 4].any()


def test_parts_follow_from_the_weights_shape_alone(interpreted: Any) -> None:
    part_of = interpreted.linear.part_of
    assert [part_of(4096, 4096), part_of(28672, 4096), part_of(4096, 14336), part_of(64, 100)] == [
        1024,
        4096,
        3584,
        128,
    ]
