"""Constrained requests in the loop: what they say, how they end, and that they cost nobody else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

import pytest
from branchline.engine.config import SpeculativeOptions
from branchline.engine.errors import ErrorCode, InternalError, InvalidArgument
from branchline.engine.grammar.guidance import GuidanceObject
from branchline.engine.speculative import Drafted, Drafter
from branchline.engine.types import (
    FinishReason,
    GrammarAsk,
    GrammarKind,
    LogprobParams,
    Request,
    Resume,
    SamplingParams,
)
from constrained import PROMPT, Constrained, ask, drive
from harness import Engine
from tiny import expected

SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer"}}, "required": ["a"]}'


@pytest.fixture
def engine() -> Constrained:
    return Constrained()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_what_the_constraint_says(engine: Constrained, temperature: float) -> None:
    texts = {"r": "(yes|no), [a-f]{3}!", "i": "-?[0-9]{1,6}"}
    for name, text in texts.items():
        for seed in range(5):
            engine.submit(f"{name}{seed}", PROMPT, grammar=ask(text), temperature=temperature, seed=seed, max_tokens=40)
    engine.submit("json", PROMPT, grammar=ask(SCHEMA, GrammarKind.JSON), temperature=temperature, max_tokens=200)
    drive(engine)
    assert engine.errors == {}
    for name, text in texts.items():
        for seed in range(5):
            answer = engine.answers[f"{name}{seed}", 0]
            assert re.fullmatch(text, answer.text), answer.text
            assert answer.finish is not None and answer.finish.reason is FinishReason.STOP
    value = json.loads(engine.answers["json", 0].text)
    assert value["a"] in ("x", "yy")


def test_neighbours_without_a_constraint_are_untouched(engine: Constrained) -> None:
    engine.submit("free", PROMPT, max_tokens=12, ignore_eos=True)
    engine.submit("bound", PROMPT, grammar=ask("[0-9]{12}"), max_tokens=12)
    drive(engine)
    assert engine.answers["free", 0].token_ids == expected(PROMPT, 12)
    assert re.fullmatch("[0-9]{12}", engine.answers["bound", 0].text)


def test_the_end_is_forced_where_nothing_else_may_follow(engine: Constrained) -> None:
    for name, text, ignore in (("a", "abc", False), ("b", "abc", True), ("c", "", False), ("d", "x{0}", False)):
        engine.submit(name, PROMPT, grammar=ask(text), max_tokens=30, ignore_eos=ignore)
    drive(engine)
    assert engine.errors == {}
    for name, text in (("a", "abc"), ("b", "abc"), ("c", ""), ("d", "")):
        answer = engine.answers[name, 0]
        assert answer.finish is not None
        assert (answer.text, answer.finish.reason) == (text, FinishReason.STOP)


def test_each_of_several_sequences_has_its_own_state(engine: Constrained) -> None:
    engine.submit("n", PROMPT, grammar=ask("[ab]{6}"), temperature=1.0, n=6, max_tokens=20)
    drive(engine)
    texts = {engine.answers["n", index].text for index in range(6)}
    assert all(re.fullmatch("[ab]{6}", text) for text in texts) and len(texts) > 1


def test_stop_ids_of_the_request_are_legal_only_where_the_text_is_complete(engine: Constrained) -> None:
    stop = ord("b") - 32
    bias = ((stop, 100.0),)
    engine.submit("s", PROMPT, grammar=ask("a[b-d]a{3}"), stop_token_ids=(stop,), logit_bias=bias, max_tokens=20)
    drive(engine)
    answer = engine.answers["s", 0]
    assert answer.finish is not None and answer.finish.reason is FinishReason.STOP
    assert re.fullmatch("a[cd]aaa", answer.text), "the stop id is masked inside"


def test_stop_strings_still_end_the_text(engine: Constrained) -> None:
    engine.submit("s", PROMPT, grammar=ask("one\\. two\\. three\\."), stop=(".",), max_tokens=64)
    drive(engine)
    answer = engine.answers["s", 0]
    assert answer.text == "one"
    assert answer.finish is not None and answer.finish.matched_stop == "."


def test_length_still_ends_what_is_unfinished(engine: Constrained) -> None:
    engine.submit("l", PROMPT, grammar=ask("[a-z]{50}"), max_tokens=7)
    drive(engine)
    answer = engine.answers["l", 0]
    assert len(answer.text) == 7
    assert answer.finish is not None and answer.finish.reason is FinishReason.LENGTH


def test_output_is_the_same_after_retraction() -> None:
    wanted = {}
    for pages in (400, 12):
        engine = Constrained(pages=pages, page_size=4)
        for number in range(4):
            grammar = ask("([a-f]{3} ){8}")
            engine.submit(str(number), [*PROMPT, number], grammar=grammar, max_tokens=40, temperature=1.0, seed=number)
        drive(engine)
        assert engine.errors == {}
        wanted[pages] = [engine.answers[str(number), 0].text for number in range(4)]
        if pages == 12:
            assert engine.loop.stats().retractions > 0
    assert wanted[400] == wanted[12]


def test_a_wrong_constraint_fails_its_own_request_before_any_output(engine: Constrained) -> None:
    engine.submit("bad", PROMPT, grammar=ask("("))
    engine.submit("good", PROMPT, max_tokens=4, ignore_eos=True)
    drive(engine)
    assert engine.errors["bad"].code is ErrorCode.INVALID_ARGUMENT
    assert ("bad", 0) not in engine.answers
    assert engine.answers["good", 0].token_ids == expected(PROMPT, 4)


def test_steps_go_on_while_a_constraint_is_compiled(engine: Constrained) -> None:
    engine.compiler.held = []
    engine.submit("slow", PROMPT, grammar=ask("abc"), max_tokens=10)
    engine.submit("quick", PROMPT, max_tokens=6, ignore_eos=True)
    engine.step(20)
    quick = engine.answers["quick", 0]
    assert quick.finish is not None and quick.token_ids == expected(PROMPT, 6)
    assert engine.loop.busy and ("slow", 0) not in engine.answers
    assert engine.loop.stats().running == 0
    engine.settle()
    engine.compiler.held.pop()()
    engine.settle()
    drive(engine)
    assert engine.answers["slow", 0].text == "abc"


def test_a_request_that_waits_can_be_aborted_and_its_compilation_stops(engine: Constrained) -> None:
    engine.compiler.held = []
    engine.submit("slow", PROMPT, grammar=ask("abc"), max_tokens=10)
    engine.step(3)
    engine.settle()
    assert engine.loop.abort("slow") == 1
    engine.finish()
    finish = engine.answers["slow", 0].finish
    assert finish is not None and finish.reason is FinishReason.ABORT
    engine.settle()
    assert engine.compiler.cancelled == [1]
    engine.compiler.held.pop()()
    engine.settle()
    engine.finish()


def test_the_deadline_of_a_request_that_waits_counts(engine: Constrained) -> None:
    engine.compiler.held = []
    engine.submit("slow", PROMPT, grammar=ask("abc"), deadline_s=engine.clock.now + 5)
    engine.step(3)
    engine.clock.now += 6
    engine.finish()
    finish = engine.answers["slow", 0].finish
    assert finish is not None and finish.reason is FinishReason.ABORT and "deadline" in finish.message


def test_without_a_backend_every_constraint_is_refused_and_free_requests_run() -> None:
    engine = Engine()
    for kind in GrammarKind:
        engine.submit(kind.value, PROMPT, grammar=GrammarAsk(kind, "x"))
    engine.submit("free", PROMPT, max_tokens=3, ignore_eos=True)
    engine.finish()
    assert {error.code for error in engine.errors.values()} == {ErrorCode.INVALID_ARGUMENT}
    assert set(engine.errors) == {kind.value for kind in GrammarKind}
    assert engine.answers["free", 0].token_ids == expected(PROMPT, 3)


FAULTS = [InvalidArgument("a limit is hit"), RuntimeError("it broke")]


def raises(error: Exception) -> Callable[..., object]:
    def broken(*given: object) -> object:
        raise error

    return broken


def ended_alone(engine: Constrained, error: Exception) -> None:
    """`bad` has its error, `good` all it asked for."""
    drive(engine)
    found = engine.errors.pop("bad")
    assert found.code is (ErrorCode.INVALID_ARGUMENT if isinstance(error, InvalidArgument) else ErrorCode.INTERNAL)
    assert engine.errors == {}
    assert re.fullmatch("[cd]{60}", engine.answers["good", 0].text)


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("method", ["_fill", "_accept", "_rollback", "_forced"])
def test_a_constraint_that_fails_in_a_step_ends_its_own_request_only(
    monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    drafter = (lambda context: Guesses()) if method in ("_accept", "_rollback") else None
    engine = Constrained(pages=200, forced_tokens=drafter is None, drafter=drafter)
    engine.submit("bad", PROMPT, grammar=ask("(ab|ba|c){200}"), max_tokens=200)
    engine.submit("good", PROMPT, grammar=ask("[cd]{60}"), max_tokens=60)
    while len(engine.answers) < 2:
        engine.step()
        engine.settle()
    (bad,) = (one for one in engine.loop._scheduler._decoding.values() if one.group.request.request_id == "bad")
    monkeypatch.setattr(bad.grammar, method, raises(error))
    ended_alone(engine, error)


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("method", ["_copy", "_accept"])
def test_a_constraint_that_fails_at_its_start_ends_its_own_request_only(
    engine: Constrained, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    engine.submit("good", PROMPT, grammar=ask("[cd]{60}"), max_tokens=60)
    engine.submit("first", PROMPT, grammar=ask("[ab]{6}"), max_tokens=1)
    while len(engine.answers) < 2:
        engine.step()
        engine.settle()
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    resume = Resume((ord("a") - 32,), 1, 0)
    engine.loop.submit(Request("bad", tuple(PROMPT), sampling, grammar=ask("[ab]{6}"), resume=resume), engine.take)
    with (
        monkeypatch.context() as patch
    ):  # until `bad` is set up, from what `first` left; `good` makes no step meanwhile
        patch.setattr(GuidanceObject, method, raises(error))
        engine.loop._receive()
    ended_alone(engine, error)


def test_a_token_outside_the_constraint_is_a_fault_and_never_text(
    engine: Constrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.submit("r", PROMPT, grammar=ask("a{20}"), max_tokens=20)
    monkeypatch.setattr(engine.executor, "_choose", lambda scores, plan: 5)
    drive(engine)
    assert isinstance(engine.errors["r"], InternalError)
    assert ("r", 0) not in engine.answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_change_the_steps_and_nothing_else(temperature: float) -> None:
    texts = ["The answer is (red|green|blue)\\. END", "(Mr|Mrs|Ms)\\. [A-Z][a-z]{2,6}", "[a-c]{4}: fixed words"]
    found, steps = [], []
    for on in (True, False):
        engine = Constrained(forced_tokens=on, pages=200)
        for number, text in enumerate(texts):
            engine.submit(
                str(number), [*PROMPT, number], grammar=ask(text), temperature=temperature, max_tokens=40,
                logprobs=LogprobParams(output=True, top_k=2), seed=number, frequency_penalty=0.5,
            )  # fmt: skip
        drive(engine)
        answers = [engine.answers[str(number), 0] for number in range(3)]
        found.append(
            [(one.token_ids, one.text, one.output.logprobs, one.finish and one.finish.reason) for one in answers]
        )
        steps.append(engine.executor.steps)
        assert all(len(one.output.logprobs) == len(one.token_ids) for one in answers)
    assert found[0] == found[1]
    assert steps[0] < steps[1]


def test_limits_and_stops_hold_inside_a_forced_run() -> None:
    engine = Constrained(pages=200)
    engine.submit("limit", PROMPT, grammar=ask("abcdefghijklm"), max_tokens=5)
    engine.submit("stop", PROMPT, grammar=ask("abcdefghijklm"), max_tokens=20, stop=("def",))
    drive(engine)
    limit, stop = engine.answers["limit", 0], engine.answers["stop", 0]
    assert limit.text == "abcde" and len(limit.token_ids) == 5
    assert stop.text == "abc" and len(stop.token_ids) == 6


class Guesses(Drafter):
    """Guesses letters in every step, some of which the constraint forbids."""

    def __init__(self) -> None:
        super().__init__(None, SpeculativeOptions("guesses", 8))  # type: ignore[arg-type]

    @property
    def wants_hidden(self) -> bool:
        return False

    def plan(self, sequences: Iterable[tuple[Drafted, int]], decodes: int, room: int) -> dict[int, list[int]]:
        guess = [ord(letter) - 32 for letter in "abcz"]
        return {
            sequence.number: [guess[(len(sequence.tokens) + at) % 4] for at in range(min(limit, 6))]
            for sequence, limit in sequences
        }

    def settle(self, *news: object) -> None: ...

    def measured(self, tokens: int, ms: float) -> None: ...

    def end(self, sequence: Drafted, finished: bool) -> None: ...


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_are_filtered_by_the_constraint_and_change_no_token(temperature: float) -> None:
    found, drafted = [], 0
    for drafter in (None, lambda context: Guesses()):
        engine = Constrained(pages=200, forced_tokens=False, drafter=drafter)
        engine.submit("r", [*PROMPT, *PROMPT, *PROMPT], grammar=ask("(ab|ba|c){20}"), temperature=temperature, seed=3)
        engine.submit("free", [*PROMPT, *PROMPT], max_tokens=20, ignore_eos=True)
        drive(engine)
        assert engine.errors == {}
        finish = engine.answers["r", 0].finish
        drafted = finish.drafted if finish else 0
        found.append([engine.answers[name, 0].token_ids for name in ("r", "free")])
    assert found[0] == found[1]
    assert drafted > 0


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_constrained_answer_goes_on_where_another_worker_left_it(cut: int) -> None:
    whole = Constrained(pages=200)
    whole.submit("w", PROMPT, grammar=ask("[a-d]{6}-[0-9]{6}"), temperature=1.0, seed=8, max_tokens=30)
    drive(whole)
    tokens = whole.answers["w", 0].token_ids
    rest = Constrained(pages=200)
    sampling = SamplingParams(temperature=1.0, seed=8, max_tokens=30)
    request = Request(
        "r",
        tuple(PROMPT),
        sampling,
        grammar=ask("[a-d]{6}-[0-9]{6}"),
        resume=Resume(tuple(tokens[:cut]), cut, 0),
    )
    rest.loop.submit(request, rest.take)
    drive(rest)
    assert rest.errors == {}
    assert tokens[:cut] + rest.answers["r", 0].token_ids == tokens


def test_what_breaks_the_constraint_can_not_be_gone_on_with(engine: Constrained) -> None:
    request = Request(
        "r",
        tuple(PROMPT),
        SamplingParams(temperature=0.0, max_tokens=30),
        grammar=ask("[a-d]{6}"),
        resume=Resume((ord("z") - 32,), 1, 0),
    )
    engine.loop.submit(request, engine.take)
    drive(engine)
    assert "break the constraint" in engine.errors["r"].message


def test_an_answer_is_the_same_whoever_is_in_the_step(engine: Constrained) -> None:
    engine.submit("alone", PROMPT, grammar=ask("[a-f]{12}"), temperature=1.0, seed=4, max_tokens=20)
    drive(engine)
    alone = engine.answers["alone", 0].token_ids
    crowd = Constrained(pages=400)
    for number in range(6):
        crowd.submit(f"f{number}", [*PROMPT, number], max_tokens=15, ignore_eos=True)
        crowd.submit(f"g{number}", [number, *PROMPT], grammar=ask("[0-9]{9}|x+y"), max_tokens=12)
    crowd.submit("among", PROMPT, grammar=ask("[a-f]{12}"), temperature=1.0, seed=4, max_tokens=20)
    drive(crowd)
    assert crowd.answers["among", 0].token_ids == alone
    for number in range(6):
        assert crowd.answers[f"f{number}", 0].token_ids == expected([*PROMPT, number], 15)
