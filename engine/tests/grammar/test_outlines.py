"""The backend outlines beyond the common suite: ends, bytes 0, limits, and the same texts as llguidance."""

from __future__ import annotations

import base64
import json
import random

import pytest
from branchline.engine.grammar.base import BaseGrammarObject, GrammarContext
from branchline.engine.grammar.outlines import OutlinesBackend
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import GrammarKind
from grammars import BYTE_END, accepts, constraint, tokenizer_json

BYTES = [bytes([code]) for code in range(256)]
BACKEND = OutlinesBackend(GrammarContext(tokenizer_json(BYTES), 257, (BYTE_END,)))


def made(kind: GrammarKind, text: str) -> BaseGrammarObject:
    """A constraint over bytes in its first state."""
    return BACKEND.load(kind, BACKEND.compile(kind, text)).start([BYTE_END])


@pytest.mark.parametrize(
    "text",
    [
        "a|ab",
        "a*?b?",
        "(a|ab)(c|bcd)",
        "[^x]{1,3}",
        "\\d+(\\.\\d{2})?",
        ".",
        "a\\x00?",
        "[\\x00a]{2}",
        "",
        "(|a)b|c",
        "é|è?x",
    ],
)
def test_texts_are_those_of_llguidance(text: str) -> None:
    ours, theirs = made(GrammarKind.REGEX, text), constraint(GrammarKind.REGEX, text)
    draw = random.Random(text)
    for _ in range(150):
        tried = "".join(draw.choice("abcdx\0.07éè\n") for _ in range(draw.randrange(5)))
        assert accepts(ours, tried) == accepts(theirs, tried), repr(tried)


def test_a_byte_0_is_text_only_where_the_constraint_has_it() -> None:
    plain = made(GrammarKind.CHOICE, json.dumps(["ab", "a"]))
    assert plain.accept_token(ord("a")) and plain.is_complete() and not plain.accept_token(0)
    zero = made(GrammarKind.CHOICE, json.dumps(["a\0", "ab"]))
    assert zero.accept_token(ord("a")) and not zero.is_complete()
    assert zero.accept_token(0) and zero.is_complete() and zero.is_exhausted()


def test_what_it_does_not_do_is_refused_by_name() -> None:
    for kind in (GrammarKind.JSON, GrammarKind.EBNF, GrammarKind.STRUCTURAL_TAG):
        with pytest.raises(GrammarUnsupported, match="'outlines' can't enforce"):
            BACKEND.compile(kind, "true")
    with pytest.raises(GrammarUnsupported, match="'size'"):
        BACKEND.compile(GrammarKind.CHOICE, json.dumps([f"{number:04}" for number in range(1000)]))
    with pytest.raises(GrammarInvalid):
        BACKEND.compile(GrammarKind.CHOICE, "[]")
    with pytest.raises(GrammarInvalid):
        BACKEND.compile(GrammarKind.REGEX, "(")


def test_what_is_no_automaton_is_not_loaded() -> None:
    for wrong in ("§", base64.b64encode(b"no").decode()):
        with pytest.raises(GrammarInvalid):
            BACKEND.load(GrammarKind.REGEX, wrong)


def test_forced_text_has_one_spelling() -> None:
    words = [b"a", b"b", b"ab", b"abc", b"c"]
    backend = OutlinesBackend(GrammarContext(tokenizer_json(words), 6, (5,)))
    forced = backend.load(GrammarKind.REGEX, backend.compile(GrammarKind.REGEX, "abc(a|b)")).start([5])
    assert forced.forced_tokens() == [3]
    free = backend.load(GrammarKind.REGEX, backend.compile(GrammarKind.REGEX, "ab(c|a)")).start([5])
    assert free.forced_tokens() == []
