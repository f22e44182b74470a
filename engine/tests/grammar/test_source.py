"""Expressions, choices and grammars of notations: what they accept, and what is refused with which words."""

from __future__ import annotations

import json
import re

import pytest
from branchline.engine.grammar import source
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import GrammarKind
from grammars import accepts, constraint
from hypothesis import given, settings
from hypothesis import strategies as st

REGEX, CHOICE, EBNF = GrammarKind.REGEX, GrammarKind.CHOICE, GrammarKind.EBNF

EXPRESSIONS = [
    ("", [""], ["a", " "]),
    ("()", [""], ["a"]),
    ("a{0}", [""], ["a"]),
    ("x?", ["", "x"], ["xx"]),
    ("abc", ["abc"], ["ab", "abcd", "xabc"]),
    ("a|bc", ["a", "bc"], ["ab", "ac", ""]),
    ("^a$", ["a"], ["aa", ""]),
    ("^(a|b)+$", ["abab"], ["", "abc"]),
    ("[0-9]{2,3}", ["12", "123"], ["1", "1234", "ab"]),
    ("(ab){2}", ["abab"], ["ab", "ababab"]),
    (".", ["a", "é", "日"], ["\n", "", "ab"]),
    ("[^a]", ["b", "\n", "日"], ["a", ""]),
    ("\\d+\\.\\d", ["12.5"], ["12", "x.5"]),
    ("\\w\\s\\W", ["a !", "_\t-"], ["a b"]),
    ("[\\t\\n]{2}ok", ["\t\nok", "\n\nok"], ["ok", "\tok"]),
    ("\\u00e9", ["é"], ["e"]),
    ("a/b", ["a/b"], ["ab"]),
    ('"\\\\"', ['"\\"'], ["\\"]),
    ("(?:a|b)c", ["ac", "bc"], ["c"]),
    ("^(?!ab)[a-c]{2}", ["ba", "ac", "cc"], ["ab"]),
    ("^(?=.*c)[a-c]{2}", ["ac", "cb"], ["ab"]),
    ("\\p{Lu}\\p{Ll}+", ["Ab", "Éa"], ["ab", "A"]),
    ("日本(語)?", ["日本", "日本語"], ["日"]),
    ("(Mr|Mrs|Ms)\\. [A-Z][a-z]{2,6}", ["Mr. Abc", "Ms. Abcdefg"], ["Mr Abc", "Mrs. abc"]),
]


@pytest.mark.parametrize(("text", "good", "bad"), EXPRESSIONS, ids=lambda value: str(value)[:20])
def test_expressions_match_the_whole_text(text: str, good: list[str], bad: list[str]) -> None:
    grammar = constraint(REGEX, text)
    assert [one for one in good if not accepts(grammar, one)] == []
    assert [one for one in bad if accepts(grammar, one)] == []


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.sampled_from(["a", "b", "[ab]", "c", "."]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(inner, st.sampled_from("?*+")).map(lambda two: f"(?:{two[0]}){two[1]}"),
            st.tuples(inner, st.integers(0, 2)).map(lambda two: f"(?:{two[0]}){{{two[1]},{two[1] + 1}}}"),
        ),
        max_leaves=6,
    ),
    st.lists(st.text("abc", max_size=6), min_size=8, max_size=8),
)
def test_expressions_mean_what_python_takes_them_for(text: str, samples: list[str]) -> None:
    grammar = constraint(REGEX, text)
    for sample in ("", *samples):
        assert accepts(grammar, sample) is (re.fullmatch(text, sample) is not None), (text, sample)


@pytest.mark.parametrize("text", ["(", "[", "a{2,1}", "*a", "a)", "\\", "(?<name", "[b-a]"])
def test_broken_expressions_are_invalid(text: str) -> None:
    with pytest.raises(GrammarInvalid):
        constraint(REGEX, text)


@pytest.mark.parametrize("text", ["(a)\\1", "(?<=a)b", "(?<!a)b", "\\bword", "a(?=b)", "(?i)a"])
def test_what_is_not_regular_is_refused_by_name(text: str) -> None:
    with pytest.raises((GrammarUnsupported, GrammarInvalid)) as caught:
        constraint(REGEX, text)
    assert caught.value.message[0].islower()


def test_an_expression_that_nothing_matches_is_invalid() -> None:
    with pytest.raises(GrammarInvalid, match="no text fits"):
        constraint(REGEX, "^(?=a)b$")


@pytest.mark.parametrize("text", ["\x00", "\x00ab", "[\x00-\x02]c"])
def test_nul_is_a_character(text: str) -> None:
    assert accepts(constraint(REGEX, text), {"\x00": "\x00", "\x00ab": "\x00ab"}.get(text, "\x01c"))


@pytest.mark.parametrize(
    "choices",
    [["yes", "no"], ["a", "ab", "abc"], ["", "x"], ['"', "\\", "/", "\n", "é", "日本"], ["a.c", "[x]", "a|b"]],
)
def test_a_choice_is_one_of_its_strings(choices: list[str]) -> None:
    grammar = constraint(CHOICE, json.dumps(choices))
    assert all(accepts(grammar, one) for one in choices)
    for one in choices:
        for other in (one + "~", one[:-1], "axc", "x]"):
            assert accepts(grammar, other) is (other in choices), other


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "no JSON"),
        ("{}", "no JSON array of strings"),
        ("[1]", "no JSON array of strings"),
        ("[]", "has no string"),
        (json.dumps(["\ud800"]), "lone surrogate"),
        (json.dumps(["x" * 9 for _ in range(20_001)]), "at most 20000"),
    ],
)
def test_wrong_choices_are_invalid(text: str, words: str) -> None:
    with pytest.raises(GrammarInvalid, match=words):
        source.of_choice(text)


def test_equal_choices_count_once() -> None:
    assert source.choices_of('["a", "b", "a"]') == ["a", "b"]


GRAMMARS = [
    ('root ::= "a" | "b"', ["a", "b"], ["ab", ""]),
    ('root ::= "a" root "b" | "c"', ["c", "acb", "aacbb"], ["ac", "cb", "aacb"]),
    ('root ::= pair ("," pair)*\npair ::= [a-z] "=" [0-9]', ["a=1", "a=1,b=2"], ["a=", "a=1,", "a=1b=2"]),
    ('root ::= "x"{2,3}', ["xx", "xxx"], ["x", "xxxx"]),
    ('root ::= "\\"" [^"]* "\\""', ['""', '"ab"'], ['"', 'ab"']),
    ("root ::= [0-9]+ # digits\n", ["12"], ["", "a"]),
    ('root ::= "\\U0001F600" [\\u3040-\\u309F]', ["😀あ"], ["😀", "\\U0001F600あ"]),
    (r'root ::= "\u0042ce" [\u0041-\u0043]', ["BceA", "BceC"], ["䋎A", "BceD"]),
    (
        r'root ::= "\u00e9\u0022\u005c\u000A" [^\u005D-\u007a\u0000-\u001f]',
        ['é"\\\nA', 'é"\\\n~'],
        ['é"\\\n]', 'é"\\\n\t'],
    ),
    (r'root ::= "\\u0041"', ["\\u0041"], ["A"]),
    ('root ::= "a" | # root ::= "b"\n  "c"', ["a", "c"], ["b"]),
]


@pytest.mark.parametrize(("text", "good", "bad"), GRAMMARS, ids=range(len(GRAMMARS)))
def test_grammars_accept_their_language(text: str, good: list[str], bad: list[str]) -> None:
    grammar = constraint(EBNF, text)
    assert [one for one in good if not accepts(grammar, one)] == []
    assert [one for one in bad if accepts(grammar, one)] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "root ::= nosuchrule",
        'root ::= "\x00"',
        "root ::= (",
        "hello",
        'a ::= "x"',
        'root ::= "\\U00110000"',
        r'root ::= "\ud83d"',
    ],
)
def test_broken_grammars_are_invalid(text: str) -> None:
    with pytest.raises(GrammarInvalid):
        constraint(EBNF, text)


@pytest.mark.parametrize(
    "text", ['root ::= "a"\nroot ::= "b"', 'root ::= x\n  x::= "a"\n\nx  ::= "b"', 's: "a"\ns: "b"']
)
def test_no_rule_of_a_grammar_is_dropped_for_another_of_its_name(text: str) -> None:
    with pytest.raises(GrammarInvalid):
        constraint(EBNF, text)


def test_sources_have_a_bound() -> None:
    with pytest.raises(GrammarInvalid, match="at most 1048576"):
        source.of_json('"' + "x" * (1 << 20) + '"')
