"""Choosing tokens on the device: mask, temperature, top-k, top-p, min-p and Gumbel noise in one kernel a step.

See `branchline.engine.kernels` for shapes. The rules and the random numbers are those of `branchline.engine.sampling`,
whose argmax over filtered logits plus noise is a draw; here nothing goes to the host in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from branchline.engine.kernels import checks

OK, UNUSABLE, NOTHING_LEFT = 0, 1, 2  # status of a row


@dataclass(frozen=True, slots=True)
class Rules:
    """What each of R rows asks for, on the device of the logits; see `sample`."""

    temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None


def sample(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids int64 [R], their logprobs float32 [R] and statuses int32 [R].

    `logits` float32 [R, vocab]: what is chosen from; penalties, bias and bans (as -inf) are in it already. `raw`: the
    model's own; they give the logprobs and decide UNUSABLE: any that is not finite. Without them `logits` do, and -inf
    counts as a ban. Bit `id % 32` of word `id // 32` of `mask` int32 [R, words] allows an id; ids beyond its words are
    forbidden. top_k below 1 and top_p of 1 keep all.
    """
    checks.shaped("logits", logits, None, None)
    rows = logits.shape[0]
    strict = raw is not None
    raw = logits if raw is None else raw
    checks.shaped("raw", raw, *logits.shape)
    for name, tensor in (("logits", logits), ("raw", raw)):
        checks.dense_rows(name, tensor)
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} has dtype {tensor.dtype}; use torch.float32")
    for name, tensor in (("temperatures", temperatures), ("top_p", top_p), ("min_p", min_p)):
        checks.integers(name, tensor, torch.float32, rows)
    checks.integers("top_k", top_k, torch.int32, rows)
    checks.integers("seeds", seeds, torch.int64, rows)
    checks.integers("positions", positions, torch.int64, rows)
    if mask is not None:
        checks.integers("mask", mask, torch.int32, rows, None)
    rules = Rules(temperatures, top_k, top_p, min_p, seeds, positions, mask)
    if not checks.on_triton(logits):
        return sample_reference(logits, rules, raw, strict)
    from branchline.engine.kernels.compiled import sampling

    return sampling.sample(logits, rules, raw, strict)


def sample_reference(
    logits: torch.Tensor, rules: Rules, raw: torch.Tensor, strict: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle: rows are sorted whole. Ranks of equal values go by id."""
    work = logits if rules.mask is None else logits.masked_fill(~_allowed(rules.mask, logits.shape[1]), float("-inf"))
    best = work.amax(dim=1, keepdim=True)
    drawn = rules.temperatures > 0
    scaled = (work - best) / torch.where(drawn, rules.temperatures, 1.0)[:, None]
    kept = torch.where(_kept(scaled, rules), scaled, float("-inf"))
    noisy = kept + noise(rules.seeds, rules.positions, logits.shape[1])
    chosen = torch.where(drawn[:, None], noisy, work)
    ids = chosen.argmax(dim=1)
    left = torch.isfinite(best[:, 0])
    status = torch.where(left, OK, NOTHING_LEFT)
    finite = torch.isfinite(raw) if strict else raw < float("inf")
    status = torch.where(finite.all(dim=1), status, UNUSABLE).int()
    ids = ids.where(status == OK, 0)
    logprobs = raw.gather(1, ids[:, None])[:, 0] - raw.logsumexp(dim=1)
    return ids, logprobs, status


def _allowed(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    allowed = ((mask[:, :, None] >> bits) & 1).flatten(1).bool()
    return torch.nn.functional.pad(allowed, (0, max(0, vocab - allowed.shape[1])))[:, :vocab]


def _kept(scaled: torch.Tensor, rules: Rules) -> torch.Tensor:
    vocab = scaled.shape[1]
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(vocab, device=scaled.device)
    limit = torch.where((rules.top_k > 0) & (rules.top_k < vocab), rules.top_k, vocab)[:, None]
    inside = ordered.masked_fill(rank >= limit, float("-inf"))
    mass = inside.double().softmax(dim=1).cumsum(dim=1)
    reached = (mass < rules.top_p.double()[:, None]).sum(dim=1, keepdim=True) + 1
    keep = torch.minimum(torch.where(rules.top_p[:, None] >= 1.0, limit, reached), limit)
    kept = torch.zeros_like(scaled, dtype=torch.bool).scatter_(1, order, rank < keep)
    return kept & (scaled >= torch.where(rules.min_p > 0, rules.min_p, 0.0).log()[:, None])


def noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise float32 [R, vocab]: the very numbers of `branchline.engine.sampling.noise`."""
    mixed = _finish(_finish(seeds) + positions * _signed(0x9E3779B97F4A7C15))
    ids = torch.arange(vocab, dtype=torch.int32, device=seeds.device)
    first, second = mixed.to(torch.int32)[:, None], (mixed >> 32).to(torch.int32)[:, None]
    bits = _mix(_mix(ids ^ first) + second)
    uniform = bits.float().add_(2.0**31 + 0.5).mul_(2.0**-32).clamp_(2.0**-33, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _signed(value: int, bits: int = 64) -> int:
    """The same bits as torch's signed integers hold them."""
    return value - (1 << bits) if value >> (bits - 1) else value


def _finish(value: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64; shifts are logical."""
    value = (value ^ _shifted(value, 30, 64)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27, 64)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31, 64)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """lowbias32 on int32; shifts are logical."""
    bits = (bits ^ _shifted(bits, 16, 32)) * 0x7FEB352D
    bits = (bits ^ _shifted(bits, 15, 32)) * _signed(0x846CA68B, 32)
    return bits ^ _shifted(bits, 16, 32)


def _shifted(value: torch.Tensor, by: int, bits: int) -> torch.Tensor:
    return (value >> by) & ((1 << (bits - by)) - 1)
