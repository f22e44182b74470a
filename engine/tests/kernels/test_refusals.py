"""Arguments that do not fit are refused by name before anything is written; without a GPU the oracles answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from branchline.engine import kernels

QUERIES, POOL = torch.zeros(2, 4, 16), torch.zeros(64, 2, 16)
TABLE, LENGTHS = torch.zeros(2, 4, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
STARTS, TILES = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)


def decode(**other: Any) -> torch.Tensor:
    given = {"queries": QUERIES, "keys": POOL, "values": POOL, "page_table": TABLE, "context_lens": LENGTHS}
    return kernels.decode_attention(**{**given, "page_size": 16, **other})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page_size": 12}, "page_size is 12; use a power of two"),
        ({"split_tokens": 100}, "split_tokens is 100; use a power of two"),
        ({"window": 0}, "window is 0; use 1 or more, or None"),
        ({"queries": torch.zeros(2, 3, 16)}, "queries have 3 heads; use a multiple of keys' 2"),
        ({"queries": QUERIES.half()}, "keys have dtype torch.float32; use torch.float16 or torch.float8_e4m3fn"),
        ({"keys": torch.zeros(64, 2, 8)}, "keys has shape [64, 2, 8]; use [any, any, 16]"),
        ({"values": torch.zeros(32, 2, 16)}, "values are [32, 2, 16] torch.float32; use keys' [64, 2, 16]"),
        ({"page_table": TABLE.long()}, "page_table has dtype torch.int64; use torch.int32"),
        ({"page_table": TABLE[:1]}, "page_table has shape [1, 4]; use [2, any]"),
        ({"context_lens": LENGTHS[:1]}, "context_lens has shape [1]; use [2]"),
        ({"out": torch.zeros(2, 4, 8)}, "out has shape [2, 4, 8]; use [2, 4, 16]"),
    ],
)
def test_attention_names_what_does_not_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        decode(**changed)


def test_other_kernels_name_what_does_not_fit() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    column, index = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    tier = torch.zeros(2, 1, 2, 4, 1, 8)
    refused = {
        "weight has shape [3, 8]; use [8]": lambda: kernels.rms_norm(x, weight, 1e-5),
        "residual has dtype torch.float16; use that of x, torch.float32": lambda: kernels.add_rms_norm(
            x, x.half(), x[0], 1e-5
        ),
        "weight has dtype torch.float16; use that of x, torch.float32": lambda: kernels.linear_invariant(
            x, weight.half()
        ),
        "scales torch.float32; use torch.float8_e4m3fn and torch.float32": lambda: kernels.linear_e4m3(
            x, weight, torch.ones(3)
        ),
        "query_norm and key_norm go together": lambda: kernels.rope_write(
            torch.zeros(2, 32), x, x, index, index, torch.zeros(4, 1, 8), torch.zeros(4, 1, 8),
            heads=2, kv_heads=1, query_norm=x[0],
        ),
        "logits has dtype torch.float16; use torch.float32": lambda: kernels.sample(
            x.half(), temperatures=column, top_k=LENGTHS, top_p=column, min_p=column, seeds=index, positions=index
        ),
        "host has dtype torch.float32; use that of the pool, torch.float16": lambda: kernels.copy_pages(
            torch.zeros(1, 2, 8, 1, 8).half(), tier, index, index, page_size=4, store=True
        ),
    }  # fmt: skip
    for message, call in refused.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_without_a_gpu_every_choice_is_the_oracle() -> None:
    pool = torch.randn(64, 2, 16)
    queries = torch.randn(2, 4, 16)
    row = decode(queries=queries, keys=pool, values=pool)
    ragged = kernels.prefill_attention(queries, pool, pool, TABLE, STARTS, LENGTHS, TILES, page_size=16)
    assert torch.equal(row, ragged)
    torch.testing.assert_close(row, pool[0].repeat_interleave(2, 0).expand_as(row)), "one token sees itself"
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    torch.testing.assert_close(kernels.linear_invariant(x, weight), x @ weight.T)
    held, scales = kernels.quantize_e4m3(weight)
    torch.testing.assert_close(kernels.linear_e4m3(x, held, scales), x @ (held.float() * scales[:, None]).T)
    residual = x.clone()
    normed = kernels.add_rms_norm(x, residual, torch.ones(8), 0.0)
    torch.testing.assert_close(normed, kernels.rms_norm(2 * x, torch.ones(8), 0.0))
    assert torch.equal(residual, 2 * x)
    column, index = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    tokens, _, _ = kernels.sample(
        x, temperatures=column, top_k=LENGTHS, top_p=column, min_p=column, seeds=index, positions=index
    )
    assert torch.equal(tokens, x.argmax(1))
