"""Guessing changes how many steps a request takes and nothing of its answer, whatever the guesses are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from branchline.engine.config import SpeculativeOptions
from branchline.engine.speculative import Ask, DraftContext, Drafted, Drafter, Proposal
from branchline.engine.speculative.ngram import NgramDrafts
from branchline.engine.types import LogprobParams
from harness import Answer, Engine, text_of
from tiny import VOCAB, expected


class Oracle:
    """Guesses the greedy truth, wrong with a given chance."""

    api_version = 1
    free = True
    wants_hidden = False

    def __init__(self, wrong: float, seed: int = 0) -> None:
        self.wrong = wrong
        self.chance = random.Random(seed)
        self.ended: list[tuple[int, bool]] = []
        self.proposals = 0

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        return []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        self.proposals += 1
        return [Proposal([self._spoil(token) for token in expected(ask.sequence.tokens, ask.limit)]) for ask in asked]

    def _spoil(self, token: int) -> int:
        return (token + 1) % (VOCAB - 1) if self.chance.random() < self.wrong else token

    def accepted(self, sequence: Drafted, hidden: object) -> None:
        raise AssertionError("hidden states were not asked for")

    def end(self, sequence: Drafted, finished: bool) -> None:
        self.ended.append((sequence.number, finished))

    def close(self) -> None: ...


class Eager(Drafter):
    """A drafter whose steps cost the same whatever they hold: it checks all it is given."""

    def measured(self, tokens: int, ms: float) -> None:
        super().measured(tokens, 1.0)


def eager(algorithm: object) -> Callable[[DraftContext], Drafter]:
    return lambda context: Eager(algorithm, context.options)  # type: ignore[arg-type]


def ngram(context: DraftContext) -> Drafter:
    return Eager(NgramDrafts(context), context.options)


PROMPT = [5, 9, 2, 40, 41, 42, 5, 9, 2]
OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 11},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    "seeded penalties": {"temperature": 1.0, "seed": 3, "frequency_penalty": 1.5},
    "bias": {"logit_bias": ((7, 3.0), (9, -4.0))},
    "minimum": {"min_tokens": 20, "stop_token_ids": tuple(range(0, 90, 3))},
    "stop ids": {"stop_token_ids": tuple(range(0, 90, 7))},
    "several": {"n": 3, "temperature": 0.9, "seed": 5},
    "logprobs": {"logprobs": LogprobParams(output=True, top_k=3, token_ids=(1, 2))},
    "input logprobs": {"logprobs": LogprobParams(output=True, input_start=0)},
}


def answers(engine: Engine, options: dict[str, object], count: int = 40) -> dict[tuple[str, int], Answer]:
    engine.run("r", PROMPT, **{"max_tokens": count, **options})
    return engine.answers


def same(found: Answer, wanted: Answer) -> None:
    assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
    assert (found.output, found.input) == (wanted.output, wanted.input)
    assert found.finish is not None and wanted.finish is not None
    for name in ("reason", "completion_tokens", "matched_token_id", "matched_stop"):
        assert getattr(found.finish, name) == getattr(wanted.finish, name)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_are_equal_with_right_and_wrong_guesses(options: dict[str, object], wrong: float) -> None:
    wanted = answers(Engine(), options)
    found = answers(Engine(drafter=eager(Oracle(wrong))), options)
    assert found.keys() == wanted.keys()
    for key, answer in found.items():
        same(answer, wanted[key])


@pytest.mark.parametrize("stop_at", range(2, 12))
def test_a_stop_string_within_accepted_guesses_cuts_text_and_tokens_where_it_would(stop_at: int) -> None:
    text = text_of(expected(PROMPT, 40))
    options: dict[str, object] = {"stop": (text[stop_at : stop_at + 3],)}
    wanted = answers(Engine(), options)["r", 0]
    engine = Engine(drafter=eager(Oracle(0.0)))
    same(answers(engine, options)["r", 0], wanted)


def test_right_guesses_save_steps() -> None:
    plain, guessed = Engine(), Engine(drafter=eager(Oracle(0.0)))
    answers(plain, {})
    found = answers(guessed, {})["r", 0]
    assert guessed.executor.steps < plain.executor.steps / 2
    assert found.finish is not None and found.finish.accepted == found.finish.drafted > 20
    assert guessed.loop.stats().accepted_tokens == found.finish.accepted


def test_no_guess_reaches_beyond_the_last_token() -> None:
    engine = Engine(drafter=eager(Oracle(0.0)))
    answer = answers(engine, {}, count=7)["r", 0]
    assert answer.token_ids == expected(PROMPT, 7)
    assert engine.executor.computed_tokens == len(PROMPT) + 6


@pytest.mark.parametrize("pages", [12, 16, 24])
def test_guesses_never_cost_another_request_its_pages(pages: int) -> None:
    def run(engine: Engine) -> dict[tuple[str, int], Answer]:
        for number in range(4):
            engine.submit(f"r{number}", [number, *PROMPT], max_tokens=25)
        engine.finish()
        return engine.answers

    wanted = run(Engine(pages=pages))
    oracle = Oracle(0.2)
    found = run(Engine(pages=pages, drafter=eager(oracle)))
    for key, answer in found.items():
        same(answer, wanted[key])
    assert sum(finished for _, finished in oracle.ended) >= 4


def test_an_aborted_request_among_guesses_leaves_the_others_alone() -> None:
    engine = Engine(drafter=eager(Oracle(0.1)))
    for number in range(3):
        engine.submit(f"r{number}", [number, *PROMPT], max_tokens=30)
    engine.step(3)
    engine.loop.abort("r1")
    engine.finish()
    for number in (0, 2):
        same(engine.answers[f"r{number}", 0], Engine().run("alone", [number, *PROMPT], max_tokens=30))


def test_a_broken_row_behind_a_wrong_guess_costs_nothing() -> None:
    engine = Engine(drafter=eager(Oracle(1.0)))
    truth = expected(PROMPT, 30)
    engine.executor.broken_tokens = set(range(VOCAB - 1)) - set(truth) - set(PROMPT)
    assert answers(engine, {}, count=30)["r", 0].token_ids == truth


def test_an_algorithm_that_raises_is_turned_off_and_the_answer_stays(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Oracle):
        def propose(self, asked: list[Ask]) -> list[Proposal]:
            raise ZeroDivisionError

    assert answers(Engine(drafter=eager(Faulty(0.0))), {})["r", 0].token_ids == expected(PROMPT, 40)
    assert "decoding goes on without it" in caplog.text


def test_a_prompt_sent_again_is_guessed_from_the_radix_tree() -> None:
    engine = Engine(drafter=ngram)
    engine.run("first", PROMPT, max_tokens=40)
    before = engine.executor.steps
    again = engine.run("second", PROMPT, max_tokens=40)
    assert again.token_ids == expected(PROMPT, 40)
    assert engine.executor.steps - before < 20
    assert again.finish is not None and again.finish.accepted > 20


def test_what_one_namespace_wrote_is_not_guessed_in_another() -> None:
    engine = Engine(drafter=ngram)
    engine.run("first", PROMPT, max_tokens=40, namespace=b"a")
    other = engine.run("second", PROMPT, max_tokens=40, namespace=b"b")
    assert other.finish is not None and other.finish.drafted < 10
