"""Bounds as expressions against arithmetic, over every short decimal."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import pytest
from branchline.engine.grammar.schema import numbers
from hypothesis import given
from hypothesis import strategies as st

TEXTS = [
    sign + whole + rest
    for sign in ("", "-")
    for whole in ("0", "1", "2", "9", "10", "13", "19", "20", "99", "100", "103", "130", "131")
    for rest in ("", ".0", ".5", ".05", ".50", ".12", ".19", ".99", ".125")
]
BOUNDS = [
    Fraction(text) for text in ("0", "1", "-1", "10", "13", "130", "-57", "0.5", "-0.5", "0.12", "19.125", "99.9")
]


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_bound_matches_exactly_the_decimals_that_arithmetic_allows(bound: Fraction, is_open: bool) -> None:
    low, high = re.compile(numbers.at_least(bound, is_open)), re.compile(numbers.at_most(bound, is_open))
    for text in TEXTS:
        value = Fraction(text)
        if text.startswith("-") and value == 0:
            continue  # minus zero may be left out
        above = value > bound if is_open else value >= bound
        below = value < bound if is_open else value <= bound
        assert bool(low.fullmatch(text)) is above, text
        assert bool(high.fullmatch(text)) is below, text


@given(st.decimals(min_value=-500, max_value=500, places=2), st.decimals(min_value=-500, max_value=500, places=2))
def test_a_bound_of_any_decimal_matches_like_arithmetic(bound: object, value: object) -> None:
    edge, one = Fraction(str(bound)), Fraction(str(value))
    text = f"{value:.2f}"
    if one == 0:
        text = "0.00"
    assert bool(re.fullmatch(numbers.at_least(edge, False), text)) is (one >= edge)
    assert bool(re.fullmatch(numbers.at_most(edge, True), text)) is (one < edge)


def test_a_value_has_its_spellings_and_no_other() -> None:
    pattern = numbers.equal(Fraction(5), every=True)
    assert [bool(re.fullmatch(pattern, text)) for text in ("5", "5.0", "5.000", "5.01", "50", "-5")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_bounds_and_steps_that_leave_nothing_are_known_to() -> None:
    clauses = [
        (("min", Fraction(5), False), ("max", Fraction(1), False)),
        (("min", Fraction(1), True), ("max", Fraction(1), False)),
        (("int", True), ("min", Fraction(1), True), ("max", Fraction(2), True)),
        (("mult", Fraction(1), True), ("int", False)),
        (("mult", Fraction(1), False), ("int", True)),
        (("int", False), ("int", True)),
        (("int", True), ("mult", Fraction(2), True), ("int", False)),
        (("in", (Fraction(3),)), ("max", Fraction(2), False)),
    ]
    assert [numbers.gather(clause).is_empty for clause in clauses] == [True] * len(clauses)


def test_a_short_range_of_multiples_is_listed() -> None:
    demand = numbers.gather((("mult", Fraction(7), True), ("min", Fraction(0), False), ("max", Fraction(30), False)))
    assert demand.values == [0, 7, 14, 21, 28]
    assert list(itertools.chain([demand.is_empty])) == [False]
