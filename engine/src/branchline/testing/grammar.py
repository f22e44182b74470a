"""What every grammar backend must do: the brute-force suite of the engine, as checks of a factory.

A check is named by the constraint that it tries; one of a kind that the backend doesn't claim says that it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from branchline.engine.grammar import conformance
from branchline.engine.grammar.base import BaseGrammarBackend, GrammarContext
from branchline.engine.grammar.conformance import Sample
from branchline.engine.grammar.small import byte_context, small_context
from branchline.engine.grammar.testing import self_test
from branchline.engine.types import GrammarKind

Make = Callable[[GrammarContext], BaseGrammarBackend]
Each = Callable[[BaseGrammarBackend, Sample], None]


def its_self_test_passes(make: Make) -> None:
    """What an engine asks of it at its start."""
    fault = self_test(make(byte_context()))  # also if it claims no kind
    assert not fault, fault


def a_wider_head_allows_no_padding(make: Make) -> None:
    """The head of a model is often wider than its tokenizer."""
    conformance.padding_is_never_allowed(_built(make), _built(make, conformance.WIDE))


def rows_of_a_batch_are_told_apart(make: Make) -> None:
    """Also beside another backend's."""
    backend = _built(make)
    assert backend.kinds, "it claims no kind of constraint"
    conformance.rows_are_told_apart(backend)


def _built(make: Make, width: int = small_context().vocab_size) -> BaseGrammarBackend:
    backend = make(small_context(width))
    assert isinstance(backend, BaseGrammarBackend), f"{type(backend).__name__} doesn't derive from BaseGrammarBackend"
    return backend


def _of_sample(each: Each, sample: Sample, make: Make) -> None:
    backend = _built(make)
    if sample.kind in backend.kinds:
        each(backend, sample)
    else:
        conformance.unsupported_is_refused(backend, sample.kind)


def _of_kind(kind: GrammarKind, make: Make) -> None:
    backend = _built(make)
    claimed = kind in backend.kinds
    (conformance.wrong_is_refused if claimed else conformance.unsupported_is_refused)(backend, kind)


def _named(check: partial[None], name: str) -> Callable[[Make], None]:
    check.__name__ = name  # type: ignore[attr-defined]  # what a test is called by
    return check


CHECKS = (
    its_self_test_passes,
    a_wider_head_allows_no_padding,
    rows_of_a_batch_are_told_apart,
    *(_named(partial(_of_kind, kind), f"wrong_is_refused[{kind.value}]") for kind in GrammarKind),
    *(
        _named(partial(_of_sample, each, sample), f"{each.__name__}[{sample.kind.value} {sample.text}]")
        for sample in conformance.SAMPLES
        for each in conformance.EACH
    ),
)
