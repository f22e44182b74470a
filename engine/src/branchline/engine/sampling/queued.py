"""Answers RowPlans without waiting for the device: a step's sampling is queued behind its logits, and read later.

The same answers as sampler.py's, from the same random numbers. What the host knows goes up in one upload, what it asks
for comes back in one copy. Called by executors that run ahead of their results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.attention.base import Upload
from branchline.engine.kernels import sampling as choosing
from branchline.engine.sampling import penalties
from branchline.engine.sampling.penalties import PenaltyState
from branchline.engine.sampling.sampler import NOTHING_LEFT, UNUSABLE
from branchline.engine.types import RowPlan, RowResult

Fetch = Callable[[torch.Tensor], Callable[[], npt.NDArray[np.uint8]]]
"""Queues the copy of uint8 device memory to the host; what it gives waits for it."""

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class Queued:
    """A step's sampling on its way. `tokens` int64 [plans] on the device are for the next step's rows."""

    plans: list[RowPlan]
    tokens: torch.Tensor
    wanted: list[int]  # plans that want logprobs
    widths: tuple[int, int]  # most chosen ids and most top entries of one of these
    read: Callable[[], npt.NDArray[np.uint8]]


def queue(logits: torch.Tensor, plans: list[RowPlan], upload: Upload, fetch: Fetch) -> Queued:
    """Queue the answers to `plans`, of which there is at least one. `logits` float32 [R, vocab] is not changed."""
    wanted = [number for number, plan in enumerate(plans) if plan.want_logprob or plan.top_k > 0 or plan.chosen_ids]
    widths = (
        max((len(plans[number].chosen_ids) for number in wanted), default=0),
        min(max((plans[number].top_k for number in wanted), default=0), logits.shape[1]),
    )
    given = upload(_arrays(plans, wanted, widths[0], logits.shape[1]))
    raw = logits.index_select(0, given["rows"])
    changed = _changed(raw, given)
    tokens, _, status = choosing.sample(
        changed,
        temperatures=given["temperatures"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        min_p=given["min_p"],
        seeds=given["seeds"],
        positions=given["positions"],
        mask=given.get("mask"),
        raw=raw,
    )
    targets = given["targets"]
    tokens = torch.where(targets < 0, tokens, targets)
    parts = [tokens, status.to(torch.int64)]
    if wanted:
        parts += _score(raw.index_select(0, given["wanted"]), tokens, given, widths[1])
    read = fetch(torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts]))
    return Queued(plans, tokens, wanted, widths, read)


def results(queued: Queued) -> list[RowResult]:
    """Wait for the answers: one result a plan, in order."""
    data, count, lines = queued.read(), len(queued.plans), len(queued.wanted)
    at = 0

    def take(dtype: Any, *shape: int) -> npt.NDArray[Any]:
        nonlocal at
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found: npt.NDArray[Any] = data[at : at + size].view(dtype).reshape(shape)
        at += size
        return found

    tokens, status = take(np.int64, count).tolist(), take(np.int64, count).tolist()
    answers = [_result(plan, token, state) for plan, token, state in zip(queued.plans, tokens, status, strict=True)]
    if not lines:
        return answers
    chosen, top = queued.widths
    own = take(np.float32, lines).tolist()
    asked = take(np.float32, lines, chosen).tolist()
    values, ids = take(np.float32, lines, top).tolist(), take(np.int64, lines, top).tolist()
    for line, number in enumerate(queued.wanted):
        plan, answer = queued.plans[number], answers[number]
        if answer.error is not None:
            continue
        answer.logprob = own[line] if plan.want_logprob else None
        if plan.chosen_ids:
            answer.chosen = list(zip(plan.chosen_ids, asked[line], strict=False))
        if plan.top_k > 0:
            answer.top = list(zip(ids[line], values[line], strict=True))[: plan.top_k]
    return answers


def _result(plan: RowPlan, token: int, status: int) -> RowResult:
    if status == choosing.UNUSABLE:
        return RowResult(-1 if plan.target is None else plan.target, error=UNUSABLE)
    return RowResult(token, error=NOTHING_LEFT if status == choosing.NOTHING_LEFT else None)


def _arrays(plans: list[RowPlan], wanted: list[int], chosen: int, vocab: int) -> Arrays:
    """All that the device is told, by name."""
    params = [plan.params for plan in plans]
    made: Arrays = {
        "rows": np.array([plan.row for plan in plans], dtype=np.int64),
        "targets": np.array([-1 if plan.target is None else plan.target for plan in plans], dtype=np.int64),
        "temperatures": np.array([one.temperature for one in params], dtype=np.float32),
        "top_k": np.array([one.top_k for one in params], dtype=np.int32),
        "top_p": np.array([one.top_p for one in params], dtype=np.float32),
        "min_p": np.array([one.min_p for one in params], dtype=np.float32),
        "seeds": np.array([plan.seed & (1 << 64) - 1 for plan in plans], dtype=np.uint64).view(np.int64),
        "positions": np.array([plan.position for plan in plans], dtype=np.int64),
    }
    sampled = [(line, plan) for line, plan in enumerate(plans) if plan.target is None]
    states = [(line, _counted(plan)) for line, plan in sampled if isinstance(plan.penalties, PenaltyState)]
    made |= penalties.columns(states)
    biased = [(line, token, value) for line, plan in sampled for token, value in plan.params.logit_bias]
    if biased:
        lines, tokens, values = zip(*biased, strict=True)
        made["bias_rows"], made["bias_ids"] = np.array(lines, dtype=np.int64), np.array(tokens, dtype=np.int64)
        made["bias"] = np.array(values, dtype=np.float32)
    if any(plan.mask is not None or plan.banned for _, plan in sampled):
        made["mask"] = _masks(sampled, len(plans), vocab)
    if wanted:
        made["wanted"] = np.array(wanted, dtype=np.int64)
        ids = np.zeros((len(wanted), chosen), dtype=np.int64)
        for line, number in enumerate(wanted):
            own = plans[number].chosen_ids
            ids[line, : len(own)] = own
        made["chosen"] = ids
    return made


def _masks(sampled: list[tuple[int, RowPlan]], lines: int, vocab: int) -> npt.NDArray[np.int32]:
    """int32 [plans, words]: what constraints and bans leave. A mask narrower than the head forbids what lies beyond."""
    words = -(-vocab // 32)
    made = np.full((lines, words), -1, dtype=np.int32)
    for line, plan in sampled:
        if plan.mask is not None:
            have = min(words, len(plan.mask))
            made[line, :have], made[line, have:] = plan.mask[:have], 0
        for token in plan.banned:
            made[line].view(np.uint32)[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFF_FFFF)
    return made


def _counted(plan: RowPlan) -> PenaltyState:
    """The row's penalty state, guessed tokens before it included."""
    state = plan.penalties
    assert isinstance(state, PenaltyState), "states come from penalty_state"
    return state.with_ahead(plan.ahead) if plan.ahead else state


def _changed(raw: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """With penalties and bias; `raw` itself if there are none. Bans are in the masks."""
    if "counts" not in given and "bias" not in given:
        return raw
    work = raw.clone()
    if "counts" in given:
        penalties.apply(work, given)
    if "bias" in given:
        work.index_put_((given["bias_rows"], given["bias_ids"]), given["bias"], accumulate=True)
    return work


def _score(raw: torch.Tensor, tokens: torch.Tensor, given: dict[str, torch.Tensor], top: int) -> list[torch.Tensor]:
    """Logprobs of the plans that want some: each one's own token, its chosen ids, its best ids."""
    totals = raw.logsumexp(dim=1, keepdim=True)
    own = tokens.index_select(0, given["wanted"])[:, None]
    parts = [raw.gather(1, own.clamp(min=0)) - totals, raw.gather(1, given["chosen"]) - totals]
    # Stable, so that the lowest id comes first among equals.
    best = raw.sort(dim=1, descending=True, stable=True) if top else None
    values = raw[:, :0] if best is None else best.values[:, :top] - totals
    ids = tokens.new_empty((len(raw), 0)) if best is None else best.indices[:, :top]
    return [*parts, values, ids]
