"""top_k, top_p and min_p on rows of scaled logits, in this order, each on what the one before left.

All three come down to "keep the n best of a row, equal values by lowest id" or to a threshold, so the
vocabulary is never fully sorted unless a nucleus is larger than CANDIDATES.
"""

from __future__ import annotations

import math

import torch

from branchline.engine.types import SamplingParams

CANDIDATES = 1024


def restrict(scaled: torch.Tensor, params: list[SamplingParams]) -> None:
    """Set to −inf, in place, what the filters of each row remove. `scaled` float32 [rows, vocab] is logits / T."""
    vocab = scaled.shape[1]
    ranked = [row for row, one in enumerate(params) if 0 < one.top_k < vocab or one.top_p < 1.0]
    if ranked:
        _keep_best(scaled, ranked, params)
    floors = [row for row, one in enumerate(params) if one.min_p > 0.0]
    if floors:
        index = torch.tensor(floors, device=scaled.device)
        chosen = scaled[index]
        shares = [math.log(params[row].min_p) for row in floors]
        floor = chosen.amax(dim=1, keepdim=True) + torch.tensor(shares, device=scaled.device)[:, None]
        scaled[index] = chosen.masked_fill_(chosen < floor, float("-inf"))


def _keep_best(scaled: torch.Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    vocab = scaled.shape[1]
    index = torch.tensor(rows, device=scaled.device)
    chosen = scaled[index]
    limits = [params[row].top_k if 0 < params[row].top_k < vocab else vocab for row in rows]
    shares = [params[row].top_p for row in rows]
    width = min(vocab, max([CANDIDATES, *(limit for limit in limits if limit < vocab)]))
    best = chosen.topk(width, dim=1).values
    limit = torch.tensor(limits, device=scaled.device)
    share = torch.tensor(shares, device=scaled.device)
    keep, enough = _counts(chosen, best, limit, share)
    if not bool(enough.all()):
        open_rows = (~enough).nonzero().squeeze(1)
        full = chosen[open_rows].sort(dim=1, descending=True).values
        keep[open_rows], _ = _counts(chosen[open_rows], full, limit[open_rows], share[open_rows])
        threshold = best.gather(1, (keep.clamp(max=width) - 1)[:, None])
        threshold[open_rows] = full.gather(1, (keep[open_rows] - 1)[:, None])
    else:
        threshold = best.gather(1, (keep - 1)[:, None])
    scaled[index] = _cut(chosen, threshold, keep)


def _counts(
    chosen: torch.Tensor, best: torch.Tensor, limit: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the best each row keeps, and whether `best` [rows, width] is wide enough to tell."""
    width = best.shape[1]
    rank = torch.arange(width, device=best.device)
    inside = best.masked_fill(rank >= limit[:, None], float("-inf"))
    total = torch.where(
        (limit <= width)[:, None], inside.logsumexp(dim=1, keepdim=True), chosen.logsumexp(dim=1, keepdim=True)
    )
    mass = (inside - total).exp().cumsum(dim=1)
    nucleus = (mass < share[:, None]).sum(dim=1) + 1  # the one that reaches the share is kept
    nucleus = torch.where(share >= 1.0, limit, nucleus)
    keep = torch.minimum(nucleus, limit)
    return keep.clamp(min=1, max=chosen.shape[1]), keep <= width


def _cut(chosen: torch.Tensor, threshold: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    above = chosen > threshold
    equal = chosen == threshold
    wanted = keep - above.sum(dim=1)
    if bool((equal.sum(dim=1) > wanted).any()):
        equal &= equal.cumsum(dim=1) <= wanted[:, None]
    return chosen.masked_fill(~(above | equal), float("-inf"))
