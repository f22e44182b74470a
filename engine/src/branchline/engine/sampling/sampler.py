"""Answers RowPlans from a step's logits: next tokens, scores of known tokens, logprobs.

Greedy and plainly sampled rows are handled together; Python touches a row only to build its result. A row
with NaN or infinite logits yields an error for that row and nothing else. Logprobs come from the logits as
the model gave them, before penalties, bias, bans and temperature.
"""

from __future__ import annotations

import numpy as np
import torch

from branchline.engine.sampling.filters import restrict
from branchline.engine.sampling.noise import gumbel, row_keys
from branchline.engine.sampling.penalties import PenaltyState, penalise
from branchline.engine.types import RowPlan, RowResult

UNUSABLE = "model produced NaN or infinite logits for this sequence"
NOTHING_LEFT = "bans, logit_bias and the constraint leave no token to choose"
NOISE_ROWS = 64  # rows of noise made at once: bounds memory at vocab × 64 floats


def sample(logits: torch.Tensor, plans: list[RowPlan]) -> list[RowResult]:
    """One result a plan, in order. `logits` float32 [R, vocab]; several plans may share a row."""
    if not plans:
        return []
    best, best_ids = logits.max(dim=1)
    usable = (torch.isfinite(best) & torch.isfinite(logits.amin(dim=1))).tolist()
    greedy = best_ids.tolist()
    results = [_first_result(plan, usable, greedy) for plan in plans]
    changed = [number for number, plan in enumerate(plans) if results[number].error is None and _is_changed(plan)]
    if changed:
        _choose(logits, plans, changed, results)
    wanted = [
        number
        for number, plan in enumerate(plans)
        if results[number].error is None and (plan.want_logprob or plan.top_k > 0 or plan.chosen_ids)
    ]
    if wanted:
        _score(logits, plans, wanted, results)
    return results


def _first_result(plan: RowPlan, usable: list[bool], greedy: list[int]) -> RowResult:
    if not usable[plan.row]:
        return RowResult(-1 if plan.target is None else plan.target, error=UNUSABLE)
    return RowResult(greedy[plan.row] if plan.target is None else plan.target)


def _is_changed(plan: RowPlan) -> bool:
    """Whether the row's token is other than the argmax of its raw logits."""
    if plan.target is not None:
        return False
    if plan.mask is not None or plan.penalties is not None:
        return True
    return bool(plan.params.temperature > 0 or plan.params.logit_bias or plan.banned)


def _choose(logits: torch.Tensor, plans: list[RowPlan], numbers: list[int], results: list[RowResult]) -> None:
    """Set the token of plans whose logits are changed or sampled."""
    rows = torch.tensor([plans[number].row for number in numbers], device=logits.device)
    work = logits.index_select(0, rows)
    states = [
        (line, _counted(plans[number]))
        for line, number in enumerate(numbers)
        if isinstance(plans[number].penalties, PenaltyState)
    ]
    penalise(work, states)
    _bias(work, [plans[number] for number in numbers])
    _mask(work, [plans[number] for number in numbers])
    drawn = [line for line, number in enumerate(numbers) if plans[number].params.temperature > 0]
    for start in range(0, len(drawn), NOISE_ROWS):
        _draw(work, drawn[start : start + NOISE_ROWS], [plans[number] for number in numbers])
    best, ids = work.max(dim=1)
    for number, token, alive in zip(numbers, ids.tolist(), torch.isfinite(best).tolist(), strict=True):
        results[number].token_id = token
        if not alive:
            results[number].error = NOTHING_LEFT


def _counted(plan: RowPlan) -> PenaltyState:
    """The row's penalty state, guessed tokens before it included."""
    state = plan.penalties
    assert isinstance(state, PenaltyState), "states come from penalty_state"
    return state.with_ahead(plan.ahead) if plan.ahead else state


def _bias(work: torch.Tensor, plans: list[RowPlan]) -> None:
    biased = [(line, token, value) for line, plan in enumerate(plans) for token, value in plan.params.logit_bias]
    if biased:
        lines, tokens, values = zip(*biased, strict=True)
        where = (torch.tensor(lines, device=work.device), torch.tensor(tokens, device=work.device))
        work.index_put_(where, torch.tensor(values, dtype=work.dtype, device=work.device), accumulate=True)
    banned = [(line, token) for line, plan in enumerate(plans) for token in plan.banned]
    if banned:
        lines, tokens = zip(*banned, strict=True)
        where = (torch.tensor(lines, device=work.device), torch.tensor(tokens, device=work.device))
        work.index_put_(where, torch.tensor(float("-inf"), dtype=work.dtype, device=work.device))


def _mask(work: torch.Tensor, plans: list[RowPlan]) -> None:
    """Send what constraints forbid to −inf. Masks may be narrower than the head: ids beyond them are forbidden."""
    masked = [(line, plan.mask) for line, plan in enumerate(plans) if plan.mask is not None]
    if not masked:
        return
    vocab = work.shape[1]
    words = torch.from_numpy(np.stack([mask for _, mask in masked])).to(work.device, non_blocking=True)
    bits = torch.arange(32, dtype=torch.int32, device=work.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).flatten(1).bool()
    if allowed.shape[1] < vocab:
        allowed = torch.nn.functional.pad(allowed, (0, vocab - allowed.shape[1]))
    lines = torch.tensor([line for line, _ in masked], device=work.device)
    work.index_copy_(0, lines, work.index_select(0, lines).masked_fill_(~allowed[:, :vocab], float("-inf")))


def _draw(work: torch.Tensor, lines: list[int], plans: list[RowPlan]) -> None:
    """Replace sampled rows by scaled, filtered logits plus Gumbel noise: their argmax is the draw."""
    index = torch.tensor(lines, device=work.device)
    temperatures = torch.tensor([[plans[line].params.temperature] for line in lines], device=work.device)
    scaled = work.index_select(0, index)
    # Shifted first: a tiny temperature then sends all but the best to −inf instead of overflowing to +inf.
    scaled.sub_(scaled.amax(dim=1, keepdim=True)).div_(temperatures)
    restrict(scaled, [plans[line].params for line in lines])
    keys = [row_keys(plans[line].seed, plans[line].position) for line in lines]
    scaled.add_(gumbel(keys, work.shape[1], work.device))
    work.index_copy_(0, index, scaled)


def _score(logits: torch.Tensor, plans: list[RowPlan], numbers: list[int], results: list[RowResult]) -> None:
    """Fill logprob, top and chosen of the given plans."""
    rows = sorted({plans[number].row for number in numbers})
    line_of = {row: line for line, row in enumerate(rows)}
    index = torch.tensor(rows, device=logits.device)
    raw = logits if len(rows) == logits.shape[0] else logits.index_select(0, index)
    totals = raw.logsumexp(dim=1)
    asked = [
        (line_of[plans[number].row], token)
        for number in numbers
        for token in (results[number].token_id, *plans[number].chosen_ids)
    ]
    lines, tokens = (torch.tensor(column, device=logits.device) for column in zip(*asked, strict=True))
    scores = iter((raw[lines, tokens] - totals[lines]).tolist())
    tops = _tops(raw, totals, {line_of[plans[n].row]: 0 for n in numbers}, [
        (line_of[plans[n].row], plans[n].top_k) for n in numbers
    ])  # fmt: skip
    for number in numbers:
        plan, result = plans[number], results[number]
        own = next(scores)
        result.logprob = own if plan.want_logprob else None
        if plan.chosen_ids:
            result.chosen = [(token, next(scores)) for token in plan.chosen_ids]
        if plan.top_k > 0:
            result.top = tops[line_of[plan.row]][: plan.top_k]


def _tops(
    raw: torch.Tensor, totals: torch.Tensor, widths: dict[int, int], asked: list[tuple[int, int]]
) -> dict[int, list[tuple[int, float]]]:
    """The best (id, logprob) of each line that wants any, best first, equal values by lowest id."""
    for line, count in asked:
        widths[line] = max(widths[line], count)
    lines = [line for line, count in widths.items() if count > 0]
    if not lines:
        return {}
    width = min(max(widths.values()), raw.shape[1])
    chosen = raw[torch.tensor(lines, device=raw.device)]
    floor = chosen.topk(width, dim=1).values[:, -1:]
    at, ids = (chosen >= floor).nonzero(as_tuple=True)  # by line, then by id
    values = (chosen[at, ids] - totals[torch.tensor(lines, device=raw.device)][at]).tolist()
    found: dict[int, list[tuple[int, float]]] = {line: [] for line in lines}
    for line, token, value in zip(at.tolist(), ids.tolist(), values, strict=True):
        found[lines[line]].append((token, value))
    for entries in found.values():
        entries.sort(key=lambda entry: -entry[1])  # stable: ids stay ascending among equals
        del entries[width:]
    return found
