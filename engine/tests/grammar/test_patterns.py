"""Reading and writing regular expressions: the same language as Python's `re` has where both speak, else refused."""

from __future__ import annotations

import json
import re

import pytest
from branchline.engine.grammar.pattern import Quoting, parse, write
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.schema.probe import byte_tokenizer
from llguidance import LLMatcher

from tests.cases.loader import case

ALPHABET = ["", "a", "b", "ab", "ba", "aab", "abc", "c", "a\nb", 'a"b', "a\\b", "foo", "fooa", "é", "a1", "-", "]"]
SAME = [
    "a", "^a", "a$", "^a$", "^a+$", "a|b", "^(a|b)$", "^a|b$", "^(?:ab)?c?$", "[ab]+", "^[^a]*$", "a{2}", "^a{1,2}b",
    r"\d", r"^\w+$", r"\s", "^.$", r"[\]\-]", r"\x61", "^(?!foo)", "^(?!foo$)", "^(?=a).b", "", "^$",
    "(^a|c)$", "[.?!,-]", '"', r"\\",
]  # fmt: skip


def accepts(pattern: str, text: str, *, whole: bool, quoted: bool) -> bool:
    """What the written expressions say of the text."""
    quoting = Quoting.JSON if quoted else Quoting.PLAIN
    mark = r"\x22" if quoted else ""
    lines, names = [], []
    for number, term in enumerate(write(parse(pattern).root, quoting, whole=whole)):
        parts = [f"/{mark}(?:{one}){mark}/" for one in term.all_of] + [
            f"~/{mark}(?:{one}){mark}/" for one in term.none_of
        ]
        names.append(f"T{number}")
        lines.append(f"T{number}: " + " & ".join(part.replace("~/", "~ /") for part in parts))
    matcher = LLMatcher(byte_tokenizer(), f"start: {' | '.join(names)}\n" + "\n".join(lines) + "\n", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list((json.dumps(text, ensure_ascii=False) if quoted else text).encode())
    if matcher.validate_tokens(data) < len(data):
        return False
    return (not data or matcher.consume_tokens(data)) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", SAME)
def test_a_pattern_finds_in_json_strings_what_re_finds_in_texts(pattern: str) -> None:
    for text in ALPHABET:
        expected = re.search(pattern, text, re.ASCII) is not None
        assert accepts(pattern, text, whole=False, quoted=True) is expected, text


@pytest.mark.parametrize("pattern", SAME)
def test_a_whole_pattern_matches_what_re_matches_in_full(pattern: str) -> None:
    for text in ALPHABET:
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        assert accepts(pattern, text, whole=True, quoted=False) is expected, text


@pytest.mark.parametrize(
    "pattern", ["(", ")", "[", "a{2,1}", "*a", "a**", "\\", "[b-a]", r"\u12", "a{", "a{1000000}", "(?<1>a)", r"\q"]
)
def test_a_pattern_that_does_not_parse_is_invalid(pattern: str) -> None:
    with pytest.raises(GrammarInvalid):
        parse(pattern)


@pytest.mark.parametrize("pattern", [r"(a)\1", r"\ba", "(?<=a)b", "(?i)a", "a++", r"\p{Script=Greek}", "(?>a)"])
def test_a_pattern_that_is_not_regular_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(GrammarUnsupported, match="pattern"):
        write(parse(pattern).root, Quoting.JSON, whole=False)


@pytest.mark.parametrize("pattern", ["a(^b)+", "a^b", "a(?=b)c", "(?=a)b"])
def test_an_anchor_where_it_has_no_meaning_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarUnsupported):
        write(parse(pattern).root, Quoting.JSON, whole=False)


def test_character_class_literals() -> None:
    """grammar-character-class-literals"""
    one = case("grammar-character-class-literals")
    pattern = one["given"]["regex"]
    assert [accepts(pattern, text, whole=True, quoted=False) for text in one["right"]["must_accept"]] == [True] * 6
    refused = [accepts(pattern, text, whole=True, quoted=False) for text in one["right"]["must_reject"]]
    assert refused == [False] * len(refused)
