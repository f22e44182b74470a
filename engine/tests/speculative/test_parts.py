"""Rates, costs, the choice of lengths, look-ups in a text, options."""

from __future__ import annotations

import pytest
from branchline import registry
from branchline.engine.config import SpeculativeOptions
from branchline.engine.speculative.base import BEHIND, Ask, DraftContext, Proposal
from branchline.engine.speculative.controller import Drafter
from branchline.engine.speculative.estimate import Rates, StepCosts
from branchline.engine.speculative.ngram import Followers, NgramDrafts
from branchline.engine.types import RowPlan, SamplingParams


class Text:
    """A decoding sequence."""

    def __init__(self, tokens: list[int], number: int = 1) -> None:
        self.number = number
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.plan = RowPlan(0, SamplingParams())
        self.draft_state: object | None = None
        self.namespace = b""


def hashes(namespace: bytes, tokens: object) -> list[int]:
    return [hash((namespace, tuple(tokens[: 4 * page]))) for page in range(1, len(tokens) // 4 + 1)]  # type: ignore[arg-type,index]


def algorithm() -> NgramDrafts:
    return NgramDrafts(DraftContext(SpeculativeOptions("ngram", 8), 4, 64, 100, hashes))


def test_a_guess_continues_the_latest_occurrence_of_the_last_three_tokens() -> None:
    made = algorithm()
    [guess] = made.propose([Ask(Text([1, 2, 3, 7, 8, 1, 2, 3, 9, 6, 4, 1, 2, 3]), 3)])
    assert guess.tokens == [9, 6, 4]


def test_a_repeated_pattern_is_continued_past_the_end() -> None:
    [guess] = algorithm().propose([Ask(Text([1, 2, 3, 1, 2, 3]), 7)])
    assert guess.tokens == [1, 2, 3, 1, 2, 3, 1]


def test_a_text_without_a_repetition_gives_no_guess() -> None:
    assert algorithm().propose([Ask(Text(list(range(50))), 8)])[0].tokens == []


def test_a_long_copy_is_told_from_a_chance_repetition() -> None:
    [copy] = algorithm().propose([Ask(Text([*range(20), *range(12)]), 4)])
    [chance] = algorithm().propose([Ask(Text([*range(20), 3, 4, 5]), 4)])
    assert (copy.kind, chance.kind) == ("copy", "ngram")


def test_what_followed_a_page_is_known_until_others_push_it_out() -> None:
    followers = Followers(hashes, 4, 3)
    followers.learn(b"", list(range(16)), 0)
    assert followers.after(b"", [0, 1]) == []  # four links, room for three: the first went
    assert followers.after(b"", list(range(9))) == [9, 10, 11, 12, 13, 14, 15]
    assert followers.after(b"", [*range(8), 77]) == []
    assert len(followers) == 3


def test_costs_between_and_beyond_what_was_measured_follow_from_it() -> None:
    costs = StepCosts()
    assert costs.at(1) == 0.0
    for _ in range(5):
        costs.observe(1, 10.0)
        costs.observe(9, 18.0)
    assert costs.at(1) == pytest.approx(10.0)
    assert costs.at(5) == pytest.approx(14.0)
    assert costs.at(20) > 18.0


def test_one_stalled_step_hardly_moves_a_cost() -> None:
    costs = StepCosts()
    for _ in range(20):
        costs.observe(1, 10.0)
    costs.observe(1, 5000.0)
    assert costs.at(1) < 12.5


def test_a_sequence_starts_at_the_common_rate_and_comes_to_its_own() -> None:
    rates = Rates({})
    for _ in range(30):
        rates.add("copy", 8, False)
    other = Rates(rates.common)
    assert other.of("copy") > 0.9
    for _ in range(10):
        other.add("copy", 0, True)
    assert other.of("copy") < 0.4 < rates.of("copy")


class Fixed:
    """Always the same guess."""

    api_version = 1
    free = True
    wants_hidden = False

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        return []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        return [Proposal([7] * ask.limit, "fixed") for ask in asked]

    def accepted(self, sequence: object, hidden: object) -> None: ...

    def end(self, sequence: object, finished: bool) -> None: ...

    def close(self) -> None: ...


def drafter(per_token_ms: float) -> Drafter:
    made = Drafter(Fixed(), SpeculativeOptions("fixed", 8))  # type: ignore[arg-type]
    for tokens in range(1, 10):
        for _ in range(4):
            made.measured(tokens, 10.0 + per_token_ms * (tokens - 1))
    return made


def test_cheap_right_guesses_are_checked_and_dear_ones_are_not() -> None:
    cheap, dear = drafter(0.1), drafter(9.9)
    text = Text([1, 2, 3])
    assert len(cheap.plan([(text, 8)], 1, 64)[1]) > 1
    assert dear.plan([(text, 8)], 1, 64) == {}


def test_guesses_that_prove_wrong_stop_and_come_back_once_right_unseen() -> None:
    made, text = drafter(2.0), Text([1, 2, 3])

    def turns(count: int, token: int) -> int:
        checked = 0
        for _ in range(count):
            draft = made.plan([(text, 8)], 1, 64).get(1, [])
            checked += len(draft)
            right = len(draft) if token == 7 else 0
            made.settle(text, len(draft), min(len(draft), right + 1), right)
            text.tokens.extend([token] * (right + 1))
        return checked

    turns(60, 5)
    assert turns(20, 5) == 0
    turns(60, 7)
    assert turns(10, 7) > 20


class Slow(Fixed):
    """Guesses cost something, and every fifth time it has to read first."""

    free = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        self.asked.append(asked[0].limit)
        return [BEHIND] * len(asked) if len(self.asked) % 5 == 0 else super().propose(asked)


def test_an_algorithm_that_is_behind_is_asked_for_the_same_in_the_next_step() -> None:
    algorithm, text = Slow(), Text([1, 2, 3])
    made = Drafter(algorithm, SpeculativeOptions("slow", 8), lambda: 0.0)  # type: ignore[arg-type]
    behind = False
    for _ in range(2000):  # all guesses are wrong, so it is asked ever less often
        before = len(algorithm.asked)
        made.measured(1, 10.0)
        draft = made.plan([(text, 8)], 1, 64).get(1, [])
        made.settle(text, len(draft), min(len(draft), 1), 0)
        made.measured(1 + len(draft), 10.0 + 5.0 * len(draft))
        text.tokens.append(5)
        if behind:
            assert len(algorithm.asked) == before + 1, "it was not asked again at once"
            assert algorithm.asked[-1] == algorithm.asked[-2]
        behind = len(algorithm.asked) > before and len(algorithm.asked) % 5 == 0
    assert 5 < len(algorithm.asked) < 200


def test_no_more_tokens_are_chosen_than_the_step_has_room_for() -> None:
    made = drafter(0.0)
    texts = [Text([1], number) for number in range(4)]
    drafts = made.plan([(text, 8) for text in texts], 4, 5)
    assert sum(map(len, drafts.values())) == 5


def test_options_are_checked_by_the_algorithm_before_anything_loads() -> None:
    import branchline.engine.speculative  # noqa: F401

    assert SpeculativeOptions().faults() == []
    assert "name the second model" in SpeculativeOptions("draft").faults()[0]
    assert "leave it out" in SpeculativeOptions("ngram", 8, "some/model").faults()[0]
    assert "registered: 'draft', 'ngram'" in SpeculativeOptions("nope").faults()[0]


def test_built_in_names_are_reserved_and_a_misshapen_algorithm_is_refused() -> None:
    with pytest.raises(registry.RegistryError, match="reserved"):
        registry.speculative_algorithms.register("ngram")(Fixed)
    with pytest.raises(registry.RegistryError, match="missing method 'propose'"):
        registry.speculative_algorithms.register("half")(type("Half", (), {"close": lambda self: None}))
