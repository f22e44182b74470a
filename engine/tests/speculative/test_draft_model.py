"""The draft model's own pool: catching up, rewinding, running out of pages, giving everything back."""

from __future__ import annotations

import pytest
from branchline.engine.config import SpeculativeOptions
from branchline.engine.errors import LoadError
from branchline.engine.speculative import Ask, DraftContext, Drafter
from branchline.engine.speculative.draft_model import CATCH_UP, ModelDrafts
from branchline.engine.types import RowPlan, SamplingParams
from harness import Engine
from tiny import VOCAB, TinyExecutor, expected


class Text:
    """A greedy sequence."""

    def __init__(self, tokens: list[int], number: int = 1, **sampling: object) -> None:
        self.number = number
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.plan = RowPlan(0, SamplingParams(**{"temperature": 0.0, **sampling}), 5)  # type: ignore[arg-type]
        self.draft_state: object | None = None
        self.namespace = b""


class Free(Drafter):
    """Steps cost the same whatever they hold, and so do guesses."""

    def measured(self, tokens: int, ms: float) -> None:
        super().measured(tokens, 1.0)

    def _learn_proposing(self, proposals: object, ms: float) -> None: ...


def drafts(pages: int = 64, page_size: int = 4) -> tuple[ModelDrafts, TinyExecutor]:
    executor = TinyExecutor(pages, page_size)
    context = DraftContext(SpeculativeOptions("draft", 8, "m"), 4, 64, VOCAB, lambda *_: [], lambda: executor)
    return ModelDrafts(context), executor


def guess(made: ModelDrafts, asked: list[Ask]) -> list[list[int]]:
    """What is guessed once the prompts are read."""
    proposals = made.propose(asked)
    while any(proposal.behind for proposal in proposals):
        proposals = made.propose(asked)
    return [proposal.tokens for proposal in proposals]


def test_guesses_are_the_draft_models_own_continuation() -> None:
    made, _ = drafts()
    texts = [Text([3, 1, 4, 1, 5], 1), Text([2, 7], 2)]
    guesses = guess(made, [Ask(texts[0], 6), Ask(texts[1], 3)])
    assert guesses == [expected([3, 1, 4, 1, 5], 6), expected([2, 7], 3)]


def test_sequences_are_guessed_together_one_round_a_token() -> None:
    made, executor = drafts()
    guess(made, [Ask(Text([3, 1, 4], number), 5) for number in range(4)])
    assert executor.steps == 1 + 5


def test_wrong_guesses_are_rewound_and_only_what_is_new_is_computed() -> None:
    made, executor = drafts()
    text = Text([3, 1, 4, 1, 5])
    guessed = guess(made, [Ask(text, 6)])[0]
    text.tokens += [*guessed[:2], (guessed[2] + 1) % 90]  # two were right
    before = executor.computed_tokens
    assert guess(made, [Ask(text, 4)])[0] == expected(text.tokens, 4)
    assert executor.computed_tokens - before == 4


def test_a_sequence_that_took_all_guesses_and_one_more_goes_on() -> None:
    made, _ = drafts()
    text = Text([9, 8, 7])
    for _ in range(6):
        guessed = guess(made, [Ask(text, 3)])[0]
        assert guessed == expected(text.tokens, 3)
        text.tokens += expected(text.tokens, 4)


def test_a_long_prompt_is_read_a_bounded_piece_a_step_and_guessed_from_then() -> None:
    made, executor = drafts(pages=512)
    text, other = Text([number % 90 for number in range(CATCH_UP * 2 + 50)]), Text([1, 2, 3], 2)
    asked = [Ask(text, 2), Ask(other, 2)]
    for step in range(1, 4):
        assert all(proposal.behind and not proposal.tokens for proposal in made.propose(asked))
        assert executor.steps == step
    assert [proposal.tokens for proposal in made.propose(asked)] == [expected(text.tokens, 2), expected([1, 2, 3], 2)]
    assert executor.widest == CATCH_UP


def test_a_sequence_without_pages_gets_no_guess_and_others_do() -> None:
    made, _ = drafts(pages=4)
    proposals = guess(made, [Ask(Text(list(range(40)), 1), 4), Ask(Text([1, 2, 3], 2), 4)])
    assert proposals[0] == []
    assert proposals[1] == expected([1, 2, 3], 4)


def test_guesses_stop_where_the_pool_ends() -> None:
    made, _ = drafts(pages=2)
    assert guess(made, [Ask(Text([1, 2, 3, 4, 5]), 8)])[0] == expected([1, 2, 3, 4, 5], 4)


def test_pages_come_back_when_sequences_end_and_ending_twice_is_no_fault() -> None:
    made, executor = drafts(pages=8)
    for number in range(20):
        text = Text([number, 1, 2, 3, 4, 5, 6, 7, 8, 9], number)
        assert guess(made, [Ask(text, 4)])[0], "no page was left"
        made.end(text, finished=number % 2 == 0)
        made.end(text, finished=True)
    made.close()
    assert executor.closed


def test_a_broken_row_of_the_draft_model_ends_its_guesses_only() -> None:
    made, executor = drafts()
    truth = expected([3, 1, 4], 6)
    executor.broken_tokens = {truth[1]} - {3, 1, 4, truth[0]}
    good = next(start for start in range(90) if truth[1] not in expected([start], 6) and start != truth[1])
    proposals = guess(made, [Ask(Text([3, 1, 4], 1), 6), Ask(Text([good], 2), 6)])
    assert proposals[0] == truth[:2]
    assert proposals[1] == expected([good], 6)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 2}, {"frequency_penalty": 0.8}, {"n": 3, "temperature": 1.0}]
)
@pytest.mark.parametrize("pages", [10, 64])
def test_answers_are_equal_with_a_draft_model_whatever_its_pool(sampling: dict[str, object], pages: int) -> None:
    executors: list[TinyExecutor] = []

    def drafter(context: DraftContext) -> Drafter:
        made, executor = drafts(pages)
        executors.append(executor)
        return Free(made, context.options)

    def run(engine: Engine) -> list[tuple[list[int], str]]:
        for number in range(4):
            engine.submit(f"r{number}", [number, 5, 6, 7, 8], max_tokens=24, **sampling)
        engine.finish()
        return [(answer.token_ids, answer.text) for _, answer in sorted(engine.answers.items())]

    assert run(Engine(pages=48, drafter=drafter)) == run(Engine(pages=48))
    assert executors[0].steps > 0


def test_sampled_text_is_guessed_with_the_requests_own_seed() -> None:
    def drafter(context: DraftContext) -> Drafter:
        return Free(drafts()[0], context.options)

    answer = Engine(drafter=drafter).run("r", [1, 2, 3], max_tokens=30, temperature=1.0, seed=8, ignore_eos=True)
    assert answer.finish is not None and answer.finish.accepted == answer.finish.drafted > 15


def test_without_a_second_model_there_is_nothing_to_build() -> None:
    with pytest.raises(LoadError, match="needs speculative-draft-model"):
        ModelDrafts(DraftContext(SpeculativeOptions("draft"), 4, 64, VOCAB, lambda *_: []))
