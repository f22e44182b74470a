"""A constraint behind a block of reasoning, with every backend: marks, borders, budgets, rollback, isolation."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
from branchline._native import Vocabulary
from branchline.engine.errors import InvalidArgument
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject, GrammarContext
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.grammar.reasoning import Marks, Phase, ReasoningObject, wrap
from branchline.engine.grammar.testing import build_backend
from branchline.engine.types import GrammarKind, ReasoningAsk
from branchline.registry import grammar_backends
from grammars import tokenizer_json

from tests.cases.loader import case

WORDS = (
    "<think>", "</think>", "<th", "ink>", "</", "think>", "think", ">{", "</think>{", "</think>\n", "two", " and",
    "x</think>", "{\"", "ab", "\n\n", "<<", "></",
)  # fmt: skip
PIECES = [bytes([code]) for code in range(128)] + [word.encode() for word in WORDS]
END = len(PIECES)
ASK = ReasoningAsk("<think>", "</think>")
CHOICE = (GrammarKind.CHOICE, '["ab", "abc", "<x"]')
BACKENDS = [name for name in grammar_backends.names() if name != "none"]


@cache
def context() -> GrammarContext:
    """Bytes below 128, WORDS and an end; the head is wider."""
    return GrammarContext(tokenizer_json(PIECES), END + 7, (END,))


@cache
def pieces() -> Pieces:
    """Of the same vocabulary."""
    return Pieces(Vocabulary.from_tokenizer_json(context().tokenizer_json), context().vocab_size)


@cache
def backend(name: str) -> BaseGrammarBackend:
    """As the engine builds it."""
    return build_backend(name, context())


def spelled(*words: str) -> list[int]:
    """Each word as one token, or as single characters if it is none."""
    ids: list[int] = []
    for word in words:
        one = pieces().id_of(word.encode())
        ids += [one] if one is not None else list(word.encode())
    return ids


def behind(
    name: str, prompt: str = "<think>\n", ask: ReasoningAsk = ASK, what: tuple[GrammarKind, str] = CHOICE
) -> ReasoningObject:
    """A wrapped constraint in its first state."""
    made = backend(name)
    inner = made.load(what[0], made.compile(*what))
    return wrap(inner, ask, Marks(pieces(), ask.begin, ask.end), list(prompt.encode())).start([END])


def allowed(grammar: BaseGrammarObject) -> set[int]:
    """Ids of its mask."""
    mask = grammar.allocate_vocab_mask(1, grammar.vocab_size)
    grammar.fill_vocab_mask(mask, 0)
    return set(masks.allowed_ids(mask[0], mask.shape[1] * 32).tolist())


def takes(grammar: BaseGrammarObject, *words: str) -> bool:
    """Whether all of it is taken."""
    ids = spelled(*words)
    return grammar.accept_tokens(ids) == len(ids)


@pytest.mark.parametrize("name", BACKENDS)
def test_grammar_starts_after_thinking(name: str) -> None:
    given = case("grammar-starts-after-thinking")["given"]
    if GrammarKind.JSON in backend(name).kinds:
        import json

        schema = json.dumps(given["response_format"]["json_schema"]["schema"])
        grammar = behind(name, "user\n" + given["prompt_ends_with"], what=(GrammarKind.JSON, schema))
        text = given["engine_text"]
        end = text.index("</think>") + len("</think>")
        for at, byte in enumerate(text[:end].encode()):
            assert END not in allowed(grammar) and byte in allowed(grammar), text[:at]
            assert grammar.accept_token(byte)
        assert allowed(grammar) <= {*spelled('{"'), ord("{")}
        assert takes(grammar, *text[end:]) and grammar.is_complete()
        off = behind(name, given["thinking_off_variant"]["prompt_ends_with"], what=(GrammarKind.JSON, schema))
        assert ord("t") not in allowed(off) and takes(off, *given["thinking_off_variant"]["engine_text"])


@pytest.mark.parametrize("name", BACKENDS)
def test_where_an_output_begins_is_read_from_its_own_prompt(name: str) -> None:
    for prompt, inside, plain in (
        ("a<think>", True, False),
        ("a<think>\n", True, False),
        ("a<think>\n\n</think>\n\n", False, True),
        ("what does <think> mean?", False, True),
        ("", False, True),
    ):
        grammar = behind(name, prompt)
        assert (ord("z") in allowed(grammar), ord("a") in allowed(grammar)) == (inside, inside or plain), prompt
        assert (pieces().id_of(b"<think>") in allowed(grammar)) == (inside or not prompt.rstrip().endswith("</think>"))
    implicit = ReasoningAsk("<think>", "</think>", implicit=True)
    assert ord("z") in allowed(behind(name, "", implicit))
    assert ord("z") not in allowed(behind(name, "</think>\n", implicit))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "mark",
    [("</think>",), ("</", "think>"), ("</", "think", ">"), ("<", "/", "think>"), ("x</think>",), tuple("</think>")],
    ids="|".join,
)
def test_a_mark_counts_however_it_is_cut_into_tokens(name: str, mark: tuple[str, ...]) -> None:
    grammar = behind(name)
    assert takes(grammar, "two", " and", "<", *mark)
    assert not grammar.is_inside and not grammar.is_complete()
    assert allowed(grammar) == set(spelled("ab", "a", "<"))
    assert takes(grammar, "ab") and grammar.is_complete() and grammar.accept_token(END)


@pytest.mark.parametrize("name", BACKENDS)
def test_no_token_runs_past_the_end_mark(name: str) -> None:
    grammar = behind(name)
    for word in ("</think>{", "</think>\n"):
        assert spelled(word)[0] not in allowed(grammar) and not takes(grammar, word)
    assert takes(grammar, "</", "think")
    assert not set(spelled(">{", "></")) & allowed(grammar)
    assert not takes(grammar, ">{") and takes(grammar, ">", "ab")


@pytest.mark.parametrize("name", BACKENDS)
def test_an_output_may_begin_with_the_block_or_with_the_text(name: str) -> None:
    for words, complete in (
        (("ab",), True),
        (("<x",), True),
        (("<think>", "two", "</think>", "ab"), True),
        (("<th", "ink>", "z", "</think>", "<x"), True),
        (("<", "t", "h", "ink>", "</think>"), False),
        (("<", "x"), True),
    ):
        grammar = behind(name, "hello")
        assert takes(grammar, *words), words
        assert grammar.is_complete() is complete, words
    grammar = behind(name, "hello")
    assert takes(grammar, "<") and allowed(grammar) == set(spelled("x", "t", "think>", "think"))
    assert not takes(grammar, "z")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_block_that_never_ends_is_never_complete(name: str) -> None:
    grammar = behind(name)
    for _ in range(50):
        assert takes(grammar, "two") and not grammar.is_complete() and not grammar.accept_token(END)
    assert not grammar.is_exhausted() and grammar.forced_tokens() == []


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_the_end_mark_is_forced_when_the_budget_is_spent(name: str, budget: int) -> None:
    grammar = behind(name, ask=ReasoningAsk("<think>", "</think>", max_tokens=budget))
    spent = 0
    while grammar.is_inside:
        forced = grammar.forced_tokens()
        assert (len(forced) > 0) == (spent + 1 >= budget)
        if forced:
            assert allowed(grammar) == {forced[0]} and not takes(grammar, "two")
        assert grammar.accept_token(forced[0] if forced else spelled("two")[0])
        spent += 1
    assert spent == max(budget, 1) and takes(grammar, "ab")
    lead = behind(name, "hello", ReasoningAsk("<think>", "</think>", max_tokens=budget))
    assert (pieces().id_of(b"<think>") in allowed(lead)) == (budget >= 2)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_budget_ends_within_a_mark_that_has_begun(name: str) -> None:
    grammar = behind(name, ask=ReasoningAsk("<think>", "</think>", max_tokens=4))
    assert takes(grammar, "two", " and", "</")
    assert grammar.forced_tokens() == spelled("think>") and takes(grammar, "think>", "ab")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("prompt", ["<think>\n", "hello"])
def test_rollback_and_copies_across_the_borders_equal_replay(name: str, prompt: str) -> None:
    draw = random.Random(f"{name} {prompt}")
    for _ in range(4):
        grammar, run = behind(name, prompt), list[int]()
        while not grammar.is_terminated() and len(run) < 10:
            ids = sorted(allowed(grammar))
            marks = [one for one in ids if pieces().bytes[one : one + 1] and b"think" in pieces().bytes[one]]
            token = draw.choice(marks if marks and draw.random() < 0.4 else ids)
            for other in draw.sample(range(END + 7), 3):
                assert grammar.validate_tokens([other]) == (other in ids) or grammar.forced_tokens(), other
            assert grammar.accept_token(token)
            run.append(token)
        for back in range(len(run) + 1):
            undone, kept = grammar.copy(), run[: len(run) - back]
            undone.rollback(back)
            fresh = behind(name, prompt)
            assert fresh.accept_tokens(kept) == len(kept)
            assert allowed(undone) == allowed(fresh) and undone.is_complete() == fresh.is_complete()
            assert undone.accept_tokens(run[len(kept) :]) == back
        assert grammar.accepted == len(run)


@pytest.mark.parametrize("name", BACKENDS)
def test_requests_of_one_constraint_reason_apart(name: str) -> None:
    made = backend(name)
    shared = made.load(CHOICE[0], made.compile(*CHOICE))
    marks = Marks(pieces(), ASK.begin, ASK.end)
    first, second = (wrap(shared, ASK, marks, list(b"<think>")).start([END]) for _ in range(2))
    assert takes(first, "</think>", "ab")
    assert takes(second, "two") and second.is_inside and first.is_complete() and not second.is_complete()
    third = wrap(shared, ASK, marks, list(b"x")).start([END])
    assert takes(third, "ab") and third.is_complete()


def test_marks_that_can_not_be_spelled_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="can't spell"):
        Marks(pieces(), "<think>", "é")
    with pytest.raises(InvalidArgument, match="both begin and end"):
        Marks(pieces(), "", "</think>")


def test_the_search_for_a_mark_equals_looking_at_the_whole_text() -> None:
    for mark in ("aab", "abab", "aaa"):
        marks = Marks(pieces(), "x", mark)
        for text in map("".join, itertools.product("ab", repeat=7)):
            for cut in range(8):
                seen, behind_it = marks.feed(0, text[:cut].encode())
                if behind_it < 0:
                    _, behind_it = marks.feed(seen, text[cut:].encode())
                elif behind_it >= 0:
                    behind_it += 7 - cut
                found = text.find(mark)
                assert behind_it == (-1 if found < 0 else 7 - found - len(mark)), (mark, text, cut)


def test_the_phase_is_part_of_the_marks() -> None:
    marks = Marks(pieces(), "<think>", "</think>")
    assert marks.phase(list(b"<think>" + b" " * 70), False) is Phase.LEAD  # beyond the looked-at end
    assert marks.phase(list(b"</think>\n\n"), True) is Phase.AFTER
