"""Sampling in Triton: one program a row, which reads its logits once for a greedy choice and twice for a plain draw.

Filters need no sort: the value of the last kept rank is found digit by digit of its bits, each digit by one pass that
counts (top-k) or weighs (top-p) what lies above sixteen candidates. Only rows that ask for a filter pay for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from branchline.engine.kernels.compiled.launch import block
from branchline.engine.kernels.sampling import NOTHING_LEFT, OK, UNUSABLE, Rules

BLOCK = 4096  # logits read at once
SEARCH_BLOCK = 2048  # the same in a pass over sixteen candidates
FAR = tl.constexpr(2147483647)


@triton.jit
def _finish(value):
    """splitmix64's finaliser, as in branchline.engine.sampling.noise."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _mix(bits):
    """lowbias32, as in branchline.engine.sampling.noise."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _gumbel(ids, first, second):
    """Standard Gumbel noise of these ids. log1p(-v) is log(w) v / (1 - w) with w = 1 - v rounded, to a few ulp."""
    bits = _mix(_mix(ids.to(tl.uint32) ^ first) + second)
    uniform = (bits.to(tl.int32, bitcast=True).to(tl.float32) + 2147483648.5) * 2.3283064365386963e-10
    uniform = tl.minimum(tl.maximum(uniform, 1.1641532182693481e-10), 0.9999999403953552)
    rest = 1.0 - uniform
    tiny = rest == 1.0
    safe = tl.where(tiny, 0.5, rest)
    exponential = tl.where(tiny, uniform, -tl.log(safe) * uniform / (1.0 - safe))
    return -tl.log(exponential)


@triton.jit
def _rank(value):
    """Bits that order as the floats do, uint32; -0 and 0 are one value."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _value(rank):
    """The float of a rank."""
    bits = (rank ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _read(logits, mask, ids, vocab, words, MASKED: tl.constexpr):
    """Logits of these ids, -inf where the mask forbids them or the vocabulary has ended."""
    real = ids < vocab
    if MASKED:
        word = tl.load(mask + ids // 32, mask=real & (ids // 32 < words), other=0)
        real = real & (((word >> (ids % 32)) & 1) == 1)
    return tl.load(logits + ids, mask=real, other=float("-inf"))


@triton.jit
def _scaled(logits, mask, ids, vocab, words, best, temperature, MASKED: tl.constexpr):
    """Distances to the best in units of the temperature: at most 0."""
    return tl.div_rn(
        _read(logits, mask, ids, vocab, words, MASKED) - best, temperature + tl.zeros_like(ids).to(tl.float32)
    )


@triton.jit
def _above(logits, mask, vocab, words, best, temperature, border, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """(ids above the border, their weight, ids on it); weights are exp of scaled logits."""
    count, weight, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        value = _scaled(logits, mask, ids, vocab, words, best, temperature, MASKED)
        rank = _rank(value)
        count += ((rank > border) & (ids < vocab)).to(tl.int32)
        weight += tl.where(rank > border, tl.exp(value), 0.0)
        equal += ((rank == border) & (ids < vocab)).to(tl.int32)
    return tl.sum(count, 0), tl.sum(weight, 0), tl.sum(equal, 0)


@triton.jit
def _border(
    logits, mask, vocab, words, best, temperature, wanted, least, WEIGH: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest rank at or above which lie `wanted` ids, or with WEIGH weight `wanted`; no lower than `least`."""
    border = (tl.sum(tl.zeros([16], tl.int32), 0)).to(tl.uint32)
    digit = tl.arange(0, 16).to(tl.uint32)
    for place in range(0, 8):
        shift = (28 - 4 * place + tl.zeros([16], tl.int32)).to(tl.uint32)
        candidate = border + (digit << shift)
        if WEIGH:
            found = tl.zeros([16], tl.float32)
        else:
            found = tl.zeros([16], tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            value = _scaled(logits, mask, ids, vocab, words, best, temperature, MASKED)
            higher = (_rank(value)[None, :] >= candidate[:, None]) & (ids < vocab)[None, :]
            if WEIGH:
                found += tl.sum(tl.where(higher, tl.exp(value)[None, :], 0.0), 1)
            else:
                found += tl.sum(higher.to(tl.int32), 1)
        enough = (found >= wanted) | (candidate <= least)
        border += tl.max(tl.where(enough, digit << shift, 0), 0)
    return border


@triton.jit
def _filter(
    logits, mask, vocab, words, best, temperature, limit, share, MASKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """(border, last): kept are ids above the border, and on it those up to `last`."""
    border = (tl.sum(tl.zeros([16], tl.int32), 0)).to(tl.uint32)
    nothing = border
    limited = (limit > 0) & (limit < vocab)
    if limited:
        border = _border(logits, mask, vocab, words, best, temperature, limit, nothing, False, MASKED, BLOCK)
    count, weight, equal = _above(logits, mask, vocab, words, best, temperature, border, MASKED, BLOCK)
    keep = equal
    if limited:
        keep = limit - count
    if share < 1.0:
        total = weight + keep.to(tl.float32) * tl.exp(_value(border))
        total = tl.where(border == nothing, weight, total)
        least = border
        border = _border(logits, mask, vocab, words, best, temperature, share * total, least, True, MASKED, BLOCK)
        most = keep
        count, weight, equal = _above(logits, mask, vocab, words, best, temperature, border, MASKED, BLOCK)
        each = tl.exp(_value(border))
        needed = tl.minimum(tl.ceil(tl.maximum(share * total - weight, 0.0) / tl.maximum(each, 1e-38)), 2.0e9)
        keep = tl.minimum(tl.maximum(needed.to(tl.int32), 1), equal)
        if border == least:
            keep = tl.minimum(keep, most)
    last = vocab
    if keep < equal:
        seen = 0
        last = -1
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            on = _rank(_scaled(logits, mask, ids, vocab, words, best, temperature, MASKED)) == border
            on = on & (ids < vocab)
            place = seen + tl.cumsum(on.to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(on & (place <= keep), ids, -1), 0))
            seen += tl.sum(on.to(tl.int32), 0)
    return border, last


@triton.jit
def choose_row(
    logits, raw, mask, temperatures, top_k, top_p, min_p, seeds, positions, tokens, logprobs, statuses,
    vocab, words, logits_row, raw_row, mask_row,
    BLOCK: tl.constexpr, SEARCH: tl.constexpr, MASKED: tl.constexpr, STRICT: tl.constexpr, OK: tl.constexpr,
    UNUSABLE: tl.constexpr, NOTHING_LEFT: tl.constexpr,
):  # fmt: skip
    """(row): its token, that token's logprob and its status."""
    row = tl.program_id(0).to(tl.int64)
    logits, raw, mask = logits + row * logits_row, raw + row * raw_row, mask + row * mask_row
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, BLOCK)
    best, best_ids = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], FAR, tl.int32)
    top, total = tl.full([BLOCK], -3.0e38, tl.float32), tl.zeros([BLOCK], tl.float32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + lane
        given = tl.load(raw + ids, mask=ids < vocab, other=-3.0e38)
        if STRICT:
            finite = tl.abs(given) < float("inf")
        else:
            finite = given < float("inf")
        bad = bad | (1 - finite.to(tl.int32))
        given = tl.where(finite, given, -3.0e38)
        higher = tl.maximum(top, given)
        total = total * tl.exp(top - higher) + tl.where(ids < vocab, tl.exp(given - higher), 0.0)
        top = higher
        value = _read(logits, mask, ids, vocab, words, MASKED)
        better = value > best
        best, best_ids = tl.where(better, value, best), tl.where(better, ids, best_ids)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, best_ids, FAR), 0)
    peak = tl.max(top, 0)
    normaliser = peak + tl.log(tl.sum(total * tl.exp(top - peak), 0))
    status = tl.where(highest == float("-inf"), NOTHING_LEFT, OK)
    status = tl.where(tl.max(bad, 0) > 0, UNUSABLE, status)
    if (temperature > 0.0) & (status == OK):
        limit, share, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        border = (tl.sum(tl.zeros([16], tl.int32), 0)).to(tl.uint32)
        last = vocab
        if ((limit > 0) & (limit < vocab)) | (share < 1.0):
            border, last = _filter(
                logits, mask, vocab, words, highest, temperature, limit, share, MASKED, SEARCH
            )  # fmt: skip
        floor = float("-inf")
        if least > 0.0:
            floor = tl.log(least)
        mixed = _finish(tl.load(seeds + row).to(tl.uint64))
        mixed = _finish(mixed + tl.load(positions + row).to(tl.uint64) * 0x9E3779B97F4A7C15)
        first, second = mixed.to(tl.uint32), (mixed >> 32).to(tl.uint32)
        best, best_ids = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], FAR, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + lane
            value = _scaled(logits, mask, ids, vocab, words, highest, temperature, MASKED)
            rank = _rank(value)
            kept = ((rank > border) | ((rank == border) & (ids <= last))) & (value >= floor)
            value = tl.where(kept, value + _gumbel(ids, first, second), float("-inf"))
            better = value > best
            best, best_ids = tl.where(better, value, best), tl.where(better, ids, best_ids)
        token = tl.min(tl.where(best == tl.max(best, 0), best_ids, FAR), 0)
    token = tl.where(status == OK, token, 0)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.load(raw + token) - normaliser)
    tl.store(statuses + row, status)


def sample(
    logits: torch.Tensor, rules: Rules, raw: torch.Tensor, strict: bool, *, most: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, logprobs and statuses [R]; arguments are checked. `most` bounds the block, for tests."""
    rows, vocab = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    statuses = torch.empty(rows, dtype=torch.int32, device=device)
    if not rows:
        return tokens, logprobs, statuses
    mask = rules.mask
    beside = rules.top_k if mask is None else mask
    size = min(most, block(vocab, 16))
    choose_row[(rows,)](
        logits, raw, beside, rules.temperatures, rules.top_k, rules.top_p, rules.min_p, rules.seeds, rules.positions,
        tokens, logprobs, statuses, vocab, 0 if mask is None else mask.shape[1], logits.stride(0), raw.stride(0),
        0 if mask is None else mask.stride(0),
        BLOCK=size, SEARCH=min(size, SEARCH_BLOCK), MASKED=mask is not None, STRICT=strict, OK=OK, UNUSABLE=UNUSABLE,
        NOTHING_LEFT=NOTHING_LEFT, num_warps=16 if size >= 2048 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, logprobs, statuses
