"""Every Triton kernel on the device beside its oracle in float32 on the same tensors, and the bits that are promised.

The Triton forms are called directly, so that in Triton's interpreter (`--dry`) the very same comparisons run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ALLOWED = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Place:
    """Where kernels run and how large their inputs are."""

    device: str
    dry: bool

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of activations; the interpreter has no arithmetic on bfloat16."""
        return ("float32", "float16") if self.dry else ("float32", "float16", "bfloat16")

    def noise(self, *shape: int, dtype: str = "float32", seed: int = 0) -> Any:
        """Standard normal values."""
        import torch

        chance = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=chance, device=self.device).to(getattr(torch, dtype))


def worst(found: Any, expected: Any) -> float:
    """The largest difference; NaN where either has one."""
    return float((found.float() - expected.float()).abs().max())


class Paged:
    """Random keys and values on scattered pages."""

    def __init__(
        self, place: Place, contexts: list[int], heads: int, kv_heads: int, width: int, page: int, dtype: str,
        *, e4m3: bool = False, window: int | None = None,
    ) -> None:  # fmt: skip
        import torch

        self.place, self.heads, self.kv_heads, self.width, self.dtype = place, heads, kv_heads, width, dtype
        pages = -(-max(contexts) // page)
        count = len(contexts) * pages
        chance = torch.Generator(place.device).manual_seed(count)
        order = torch.randperm(count, generator=chance, device=place.device)
        self.table = order.view(len(contexts), pages).int()
        pool = place.noise(2, count * page, kv_heads, width, dtype=dtype, seed=1)
        self.keys, self.values = pool.to(torch.float8_e4m3fn) if e4m3 else pool
        self.lengths = torch.tensor(contexts, dtype=torch.int32, device=place.device)
        self.page, self.window, self.longest = page, window, pages * page

    def queries(self, tokens: int) -> Any:
        """Random queries of this many tokens."""
        return self.place.noise(tokens, self.heads, self.width, dtype=self.dtype, seed=2)

    def pages(self, queries: Any, rows: slice = slice(None)) -> Any:
        """The checked arguments."""
        from branchline.engine.kernels.attention import checked

        table = self.table[rows].contiguous()
        return checked(queries, self.keys, self.values, table, self.page, None, self.window, 1.0, 1.0)

    def decode(self, queries: Any, split: int, *, invariant: bool = False, rows: slice = slice(None)) -> Any:
        """The kernel's answer."""
        import torch
        from branchline.engine.kernels.compiled import attention

        pages, lengths = self.pages(queries, rows), self.lengths[rows].contiguous()
        out = torch.empty_like(queries)
        return attention.decode_attention(queries, pages, lengths, self.longest, split, invariant, None, out)

    def prefill(self, queries: Any, counts: list[int], split: int = 0) -> tuple[Any, Any]:
        """The kernel's answer, and a call of the oracle."""
        import torch
        from branchline.engine.kernels import attention as plain
        from branchline.engine.kernels.compiled import attention

        new = np.array(counts, np.int32)
        starts = torch.tensor([0, *np.cumsum(new).tolist()], dtype=torch.int32, device=self.place.device)
        tiles = torch.from_numpy(plain.prefill_tiles(new, self.heads, self.kv_heads, invariant=split > 0))
        pages, out = self.pages(queries), torch.empty_like(queries)
        found = attention.prefill_attention(
            queries, pages, starts, self.lengths, tiles.to(self.place.device), split, out
        )
        return found, lambda: plain.prefill_attention_reference(queries, pages, starts, self.lengths)


def attention_checks(report: Any, place: Place) -> None:
    """Decode and prefill over head ratios, page sizes, windows and ragged ends."""
    from branchline.engine.kernels.attention import decode_attention_reference

    width = 16 if place.dry else 64
    contexts = [70, 1, 33] if place.dry else [700, 1, 333, 64]
    new = [40, 1, 33] if place.dry else [400, 1, 333, 2]
    forms = [(8, 2, 16, False, None), (6, 2, 1, False, None), (4, 4, 64, True, None), (8, 1, 32, False, 37)]
    for dtype in place.dtypes:
        # float32 tiles take the compiler long, and no model is served in it.
        for heads, kv_heads, page, e4m3, window in forms if place.dry or dtype != "float32" else forms[:1]:
            paged = Paged(place, contexts, heads, kv_heads, width, page, dtype, e4m3=e4m3, window=window)
            queries = paged.queries(len(contexts))
            expected = decode_attention_reference(queries, paged.pages(queries), paged.lengths)
            told = f"{dtype} heads {heads}/{kv_heads} page {page}{' e4m3' if e4m3 else ''}{' window' if window else ''}"
            report.check(f"decode {told}", worst(paged.decode(queries, 64), expected), ALLOWED[dtype])
            found, oracle = paged.prefill(paged.queries(sum(new)), new)
            report.check(f"prefill {told}", worst(found, oracle()), ALLOWED[dtype])


def row_checks(report: Any, place: Place) -> None:
    """Norms, rotary writes and page copies."""
    import torch
    from branchline.engine.kernels import norm as plain_norm
    from branchline.engine.kernels import rope as plain_rope
    from branchline.engine.kernels.compiled import norm, pages, rope

    heads, kv_heads, width, tokens = (4, 2, 16, 3) if place.dry else (32, 8, 128, 77)
    for dtype in place.dtypes:
        x = place.noise(tokens, heads * width, dtype=dtype)
        residual, weight = place.noise(*x.shape, dtype=dtype, seed=1), place.noise(x.shape[1], dtype=dtype, seed=2)
        theirs = residual.clone()
        found = norm.rms_norm(x, residual, weight, 1e-5, torch.empty_like(x))
        expected = plain_norm.add_rms_norm_reference(x, theirs, weight, 1e-5)
        # Rounded twice: a last place of the normed value is one of the result, which may be as large as ten.
        report.check(f"add_rms_norm {dtype}", worst(found, expected), 4 * ALLOWED[dtype])
        report.check(f"add_rms_norm's residual {dtype}", worst(residual, theirs), 0.0)
        projected = place.noise(tokens, (heads + 2 * kv_heads) * width, dtype=dtype)
        cos, sin = place.noise(99, width, dtype=dtype, seed=3), place.noise(99, width, dtype=dtype, seed=4)
        positions = torch.arange(tokens, device=place.device) % 99
        slots = (positions * 7) % 128
        pools = torch.zeros(2, 2, 128, kv_heads, width, dtype=x.dtype, device=place.device)
        targets = [plain_rope.Target(pool[0], pool[1], slots, 1.0, 1.0) for pool in pools]
        out = torch.empty(tokens, heads, width, dtype=x.dtype, device=place.device)
        rope.rope_write(projected, cos, sin, positions, targets[0], None, out)
        expected = plain_rope.rope_write_reference(projected, cos, sin, positions, targets[1], heads, None)
        report.check(f"rope_write queries {dtype}", worst(out, expected), 2 * ALLOWED[dtype])
        report.check(f"rope_write pool {dtype}", worst(pools[0], pools[1]), 2 * ALLOWED[dtype])
    pool = place.noise(2, 2, 8 * 16, kv_heads, width, dtype="float16")
    host = torch.zeros(4, 2, 2, 16, kv_heads, width, dtype=pool.dtype, pin_memory=not place.dry)
    moved, slots = torch.tensor([5, 0, 7], device=place.device), torch.tensor([2, 0, 3], device=place.device)
    back = torch.zeros_like(pool)
    pages.copy_pages(pool, host, moved, slots, 16, True)
    pages.copy_pages(back, host, moved, slots, 16, False)
    picked = [slice(page * 16, page * 16 + 16) for page in (5, 0, 7)]
    report.check("copy_pages there and back", max(worst(back[:, :, at], pool[:, :, at]) for at in picked), 0.0)


def product_checks(report: Any, place: Place) -> None:
    """Invariant and float8 products."""
    import torch
    from branchline.engine.kernels import linear as plain
    from branchline.engine.kernels.compiled.linear import multiply

    rows, inner, columns = (5, 600, 70) if place.dry else (77, 4096, 1000)
    for dtype in place.dtypes:
        x, weight = place.noise(rows, inner, dtype=dtype), place.noise(columns, inner, dtype=dtype, seed=1)
        weight = weight * inner**-0.5
        out = torch.empty(rows, columns, dtype=x.dtype, device=place.device)
        expected = plain.linear_invariant_reference(x, weight, None)
        found = multiply(x, weight, None, None, out, invariant=True)
        report.check(f"linear_invariant {dtype}", worst(found, expected), ALLOWED[dtype])
        held, scales = plain.quantize_e4m3(weight)
        expected = plain.linear_e4m3_reference(x, held, scales, None)
        for count in (3, rows):
            found = multiply(x[:count], held, scales, None, out[:count], invariant=False)
            report.check(f"linear_e4m3 {dtype} {count} rows", worst(found, expected[:count]), ALLOWED[dtype])


def sampling_checks(report: Any, place: Place) -> None:
    """Tokens beside the oracle's on the device, and beside those of the CPU sampler for the same seeds."""
    import torch
    from branchline.engine.kernels import sampling as plain
    from branchline.engine.kernels.compiled.sampling import sample
    from branchline.engine.sampling.sampler import sample as on_cpu
    from branchline.engine.types import RowPlan, SamplingParams

    rows, vocab = (4, 500) if place.dry else (64, 128256)
    logits = place.noise(rows, vocab) * 3
    index = torch.arange(rows, device=place.device)
    for name, top_k, top_p, min_p in (("plain", 0, 1.0, 0.0), ("top-k, top-p", 50, 0.9, 0.0), ("min-p", 0, 1.0, 0.05)):
        column = torch.full((rows,), 0.8, device=place.device)
        rules = plain.Rules(
            column, torch.full_like(index, top_k).int(), torch.full_like(column, top_p),
            torch.full_like(column, min_p), index, index + 3, None,
        )  # fmt: skip
        tokens, logprobs, status = sample(logits, rules, logits, True)
        params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
        plans = [RowPlan(row, params, seed=row, position=row + 3, want_logprob=True) for row in range(rows)]
        answers = on_cpu(logits.cpu(), plans)
        other = sum(one != answer.token_id for one, answer in zip(tokens.tolist(), answers, strict=True))
        report.check(f"sample {name}: rows unlike the CPU sampler's", other + int(status.sum()), rows // 50)
        theirs = torch.tensor([answer.logprob for answer in answers])
        equal = tokens.cpu() == torch.tensor([answer.token_id for answer in answers])
        report.check(f"sample {name}: logprobs", worst(logprobs.cpu()[equal], theirs[equal]), 1e-4)


def bit_checks(report: Any, place: Place) -> None:
    """A row's bits alone, in company, in either kernel, wherever its chunk begins: the number of values that differ."""
    import torch
    from branchline.engine.kernels.compiled.linear import multiply

    dtype, width = place.dtypes[-1], 16 if place.dry else 128
    contexts = [130, 50] if place.dry else [1500, 77, 600, 900]
    paged = Paged(place, contexts, 8, 2, width, 16, dtype)
    split = 64 if place.dry else 256
    queries = paged.queries(len(contexts))
    together = paged.decode(queries, split)
    alone = paged.decode(queries[:1].contiguous(), split, rows=slice(0, 1))
    report.check("decode: alone and in company", float((together[:1] != alone).sum()), 0)
    one = Paged(place, contexts[:1], 8, 2, width, 16, dtype)
    tokens = 20 if place.dry else 300
    queries = one.queries(tokens)
    whole, _ = one.prefill(queries, [tokens], split)
    late, _ = one.prefill(queries[7:].contiguous(), [tokens - 7], split)
    last = one.decode(queries[-1:].contiguous(), split, invariant=True)
    report.check("invariant prefill: another chunk border", float((whole[7:] != late).sum()), 0)
    report.check("invariant prefill and decode", float((whole[-1:] != last).sum()), 0)
    rows, inner, columns = (70, 600, 70) if place.dry else (500, 4096, 4096)
    x, weight = place.noise(rows, inner, dtype=dtype), place.noise(columns, inner, dtype=dtype, seed=1)

    def product(given: Any, *, spread: bool) -> Any:
        out = torch.empty(given.shape[0], columns, dtype=x.dtype, device=place.device)
        return multiply(given, weight, None, None, out, invariant=True, spread=spread)

    many, single = product(x, spread=False), product(x[-1:].contiguous(), spread=True)
    report.check("linear_invariant: alone and in company", float((many[-1:] != single).sum()), 0)


CHECKS: tuple[Callable[[Any, Place], None], ...] = (
    row_checks,
    sampling_checks,
    product_checks,
    attention_checks,
    bit_checks,
)
