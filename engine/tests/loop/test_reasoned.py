"""Constrained requests that reason first, in the loop: every row has its own block, budget and borders."""

from __future__ import annotations

import re

import pytest
from branchline.engine.types import FinishReason, GrammarAsk, GrammarKind, ReasoningAsk, Request, Resume, SamplingParams
from constrained import PROMPT, Constrained, drive
from harness import EOS, text_of

BEGIN, END = "<t>", "</t>"
INSIDE = [*PROMPT, *(ord(one) - 32 for one in BEGIN)]
REGEX = "[0-9]{3}(ab|cd)"


def reasoned(budget: int | None = 8, implicit: bool = False) -> GrammarAsk:
    """A constraint behind at most `budget` tokens of reasoning."""
    return GrammarAsk(GrammarKind.REGEX, REGEX, reasoning=ReasoningAsk(BEGIN, END, implicit, budget))


def parts(text: str) -> tuple[str, str]:
    """(reasoning, answer)."""
    reasoning, _, answer = text.partition(END)
    return reasoning, answer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("forced", [True, False])
def test_the_answer_behind_the_block_is_what_the_constraint_says(temperature: float, forced: bool) -> None:
    engine = Constrained(pages=300, forced_tokens=forced)
    for seed in range(6):
        options = {"temperature": temperature, "seed": seed, "max_tokens": 60}
        engine.submit(f"in{seed}", INSIDE, grammar=reasoned(5 + 3 * seed), **options)
        engine.submit(f"im{seed}", PROMPT, grammar=reasoned(12, implicit=True), **options)
        engine.submit(f"off{seed}", [*INSIDE, *(ord(one) - 32 for one in END)], grammar=reasoned(), **options)
    drive(engine)
    assert engine.errors == {}
    for seed in range(6):
        for name, budget in ((f"in{seed}", 5 + 3 * seed), (f"im{seed}", 12)):
            reasoning, answer = parts(engine.answers[name, 0].text)
            assert re.fullmatch(REGEX, answer), engine.answers[name, 0].text
            assert len(reasoning) + len(END) <= budget
        assert re.fullmatch(REGEX, engine.answers[f"off{seed}", 0].text)
        finish = engine.answers[f"in{seed}", 0].finish
        assert finish is not None and finish.reason is FinishReason.STOP


def test_forced_tokens_make_no_difference_to_ids_behind_a_block() -> None:
    runs = []
    for forced in (True, False):
        engine = Constrained(pages=300, forced_tokens=forced)
        for seed in range(4):
            engine.submit(f"r{seed}", INSIDE, grammar=reasoned(9), temperature=1.0, seed=seed, max_tokens=60)
        drive(engine)
        runs.append(({key: one.token_ids for key, one in engine.answers.items()}, engine.loop.stats().steps))
    assert runs[0][0] == runs[1][0] and runs[0][1] < runs[1][1]


def test_a_block_goes_on_where_another_worker_left_it() -> None:
    whole = Constrained(pages=200)
    whole.submit("w", INSIDE, grammar=reasoned(14), temperature=1.0, seed=8, max_tokens=60)
    drive(whole)
    tokens = whole.answers["w", 0].token_ids
    for cut in (3, 13, len(tokens) - 2):
        rest = Constrained(pages=200)
        request = Request(
            "r",
            tuple(INSIDE),
            SamplingParams(temperature=1.0, seed=8, max_tokens=60),
            grammar=reasoned(14),
            resume=Resume(tuple(tokens[:cut]), cut, 0),
        )
        rest.loop.submit(request, rest.take)
        drive(rest)
        assert rest.errors == {} and tokens[:cut] + rest.answers["r", 0].token_ids == tokens


def test_no_end_is_taken_inside_the_block() -> None:
    engine = Constrained()
    engine.submit("r", INSIDE, grammar=reasoned(20), logit_bias=((EOS, 100.0),), max_tokens=60)
    drive(engine)
    tokens = engine.answers["r", 0].token_ids
    assert EOS not in tokens[:16] and re.fullmatch(REGEX, parts(text_of(tokens))[1])


def test_marks_that_can_not_be_spelled_end_their_request_only() -> None:
    engine = Constrained()
    wrong = GrammarAsk(GrammarKind.REGEX, REGEX, reasoning=ReasoningAsk("<t>", "é"))
    engine.submit("wrong", INSIDE, grammar=wrong, max_tokens=20)
    engine.submit("right", INSIDE, grammar=reasoned(), max_tokens=40)
    drive(engine)
    assert "can't spell" in engine.errors["wrong"].message
    assert re.fullmatch(REGEX, parts(engine.answers["right", 0].text)[1])


def test_guesses_do_not_change_what_is_reasoned() -> None:
    from branchline.engine.speculative import build_drafter

    texts = []
    for make in (None, lambda context: build_drafter("ngram", context)):
        engine = Constrained(pages=300, drafter=make)
        for seed in range(3):
            engine.submit(f"r{seed}", INSIDE, grammar=reasoned(30), seed=seed, max_tokens=80)
        drive(engine)
        texts.append([engine.answers[f"r{seed}", 0].text for seed in range(3)])
    assert texts[0] == texts[1]
