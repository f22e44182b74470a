"""What makes a step cheap changes nothing: plain rows, packing by columns, the queue's running sums, the cost's fit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.scheduler.batch import Row, pack
from branchline.engine.scheduler.cost import RIDGE, StepCost, Work
from branchline.engine.scheduler.plain import Plain
from branchline.engine.scheduler.waiting import WINDOW, WaitingQueue
from branchline.engine.types import LogprobParams
from harness import EOS, Engine
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import Parts

PARTS = Parts(pages=64)  # makes sequences; holds nothing
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 12},
    "sampled": {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True},
    "stopped": {"stop": ("e", "ab", "7"), "temperature": 1.0, "seed": 5, "max_tokens": 40},
    "stopped and told": {"stop": ("e", "x"), "include_stop": True, "temperature": 1.0, "seed": 8, "max_tokens": 40},
    "by id": {"stop_token_ids": tuple(range(0, 95, 7)), "temperature": 1.0, "seed": 9, "max_tokens": 40},
    "at least": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 95, 3)), "temperature": 1.0, "max_tokens": 20},
    "three": {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 9},
    "penalised": {"frequency_penalty": 0.9, "max_tokens": 9},
}


def said(pages: int) -> list[Any]:
    """Every piece of news of a run over all kinds, but for the times in it."""
    engine = Engine(pages=pages)
    for number, (name, sampling) in enumerate(KINDS.items()):
        engine.submit(name, [number, 2, 3, 4, 5], **sampling)
    engine.submit("told", [1, 2, 3], logprobs=LogprobParams(output=True, top_k=2), max_tokens=6)
    engine.finish()
    assert engine.errors == {}
    news = []
    for step, deltas in engine.frames:
        for one in deltas:
            end = one.finish
            told = None if end is None else (end.reason, end.matched_token_id, end.matched_stop, end.completion_tokens)
            columns = None if one.logprobs is None else (one.logprobs.token_ids, one.logprobs.logprobs)
            news.append((step, one.request_id, one.index, one.token_ids, one.text, one.prompt, columns, told))
    return news


@pytest.mark.parametrize("pages", [128, 16])
def test_plain_rows_say_what_the_long_way_says(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    pushed: list[int] = []
    push = Plain.push

    def counted(self: Plain, step: Any, results: Any) -> None:
        push(self, step, results)
        pushed.append(sum(row.news is not None for row in step.rows))

    monkeypatch.setattr(Plain, "push", counted)
    short = said(pages)
    assert sum(pushed) > 50, "the short way was not taken"
    monkeypatch.setattr(Plain, "is_plain", lambda *given: False)
    assert said(pages) == short


def test_a_text_put_in_anothers_place_is_pushed_the_long_way() -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.submit(name, [1, 2, 3], max_tokens=8, ignore_eos=True)
    engine.step(3)
    sequence = next(iter(engine.loop._scheduler.sequences()))

    class Loud:
        def push(self, token_ids: list[int]) -> tuple[str, int, None]:
            return "!", 1, None

        def finish(self) -> str:
            return "."

    sequence.text = Loud()
    engine.finish()
    assert engine.answers["a", 0].text.endswith("!!!!!.") and engine.answers["b", 0].text.isprintable()
    assert engine.answers["a", 0].token_ids == engine.answers["b", 0].token_ids


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_a_packed_step_is_what_a_token_by_token_account_gives(seed: int) -> None:
    chance, size = random.Random(seed), 4
    rows: list[Row] = []
    decodes = chance.randrange(4)
    for number in range(decodes + chance.randrange(0 if decodes else 1, 4)):
        length = chance.randrange(2, 40)
        sequence = PARTS.sequence([chance.randrange(EOS) for _ in range(length)])
        sequence.pages = [chance.randrange(999) for _ in range(length)]
        if number < decodes:
            draft = [chance.randrange(EOS) for _ in range(chance.choice([0, 0, 0, 3]))]
            rows.append(Row(sequence, length - 1, 1 + len(draft), draft=draft))
        else:
            start = chance.randrange(length)
            rows.append(Row(sequence, start, chance.randrange(1, length - start + 1)))
    step = pack(rows, size, decodes)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    for row in rows:
        own = [*row.sequence.tokens, *row.draft]
        for position in range(row.start, row.start + row.count):
            if row.draft or position == len(own) - 1:
                wanted.append(len(tokens))
            tokens.append(own[position])
            positions.append(position)
            slots.append(row.sequence.pages[position // size] * size + position % size)
    batch = step.batch
    found = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
    assert [column.tolist() for column in found] == [tokens, positions, slots, wanted]
    assert [column.dtype for column in found] == [np.int32, np.int32, np.int64, np.int64]
    assert batch.query_lens.tolist() == [row.count for row in rows]
    assert batch.context_lens.tolist() == [row.start + row.count for row in rows]
    assert [plan.row for plan in step.plans] == list(range(len(wanted)))
    assert [plan.position for plan in step.plans] == [positions[at] + 1 for at in wanted]
    assert [row.first_plan for row in rows if row.plans] == [row.first_row for row in rows if row.plans]


def test_an_estimate_moves_a_waiting_sequence_and_the_queues_sum() -> None:
    parts, queue = Parts(), WaitingQueue(SchedulerOptions())
    first, second = parts.sequence([1, 2, 3]), parts.sequence([4, 5, 6])
    for sequence in (first, second):
        queue.push(sequence, 0, 0.0)
    assert queue.order(1, 0.0) == [first, second] and queue.matched == 0
    queue.estimate(second, 640, 7)
    assert queue.order(1, 0.0) == [second, first]
    assert (queue.matched, second.matched, second.matched_version) == (640, 640, 7)
    queue.remove(second)
    queue.estimate(second, 64, 8)  # no longer there: told, not counted
    assert (queue.matched, second.matched, queue.order(1, 0.0)) == (0, 64, [first])
    queue.push(second, 1, 0.0)
    assert queue.matched == 64 and queue.window() == [first, second]


def test_a_long_queues_window_is_chosen_again_when_somebody_goes() -> None:
    parts, queue = Parts(), WaitingQueue(SchedulerOptions())
    line = [parts.sequence([1, 2]) for _ in range(WINDOW + 2)]
    for sequence in line:
        queue.push(sequence, 0, 0.0)
    assert queue.window() == line[:WINDOW]
    queue.remove(line[3])
    assert queue.window() == [*line[:3], *line[4 : WINDOW + 1]]


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_the_costs_fit_is_that_of_the_normal_equations(seed: int) -> None:
    chance, cost = random.Random(seed), StepCost()
    for _ in range(30):  # no step without prompts: all terms are fitted together
        work = Work(chance.randrange(9), chance.randrange(9000), chance.randrange(1, 99), chance.random() * 1e5)
        seconds = 0.01 + 0.002 * work.decodes + 1e-3 * work.prompts + 1e-6 * work.prompt_context
        cost.learn(work, seconds * chance.choice([0.9, 1.0, 1.1]))
    rates = cost.rates()
    assert min(rates) >= 0
    if min(rates) > 0:  # no term was taken out: the gradient is that of the ridge alone
        lower = np.tril(np.array(cost._gram[1]))
        gram = lower + np.tril(lower, -1).T
        ridged = gram + np.diag(np.diag(gram) * RIDGE)
        assert ridged @ np.array(rates) == pytest.approx(cost._right[1], rel=1e-6)
