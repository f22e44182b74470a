"""Every backend through the one suite, and the suite against backends that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from branchline.engine.grammar import conformance
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject, GrammarContext
from branchline.engine.grammar.guidance import GuidanceBackend, GuidanceObject
from branchline.engine.grammar.outlines import OutlinesBackend
from branchline.engine.types import I32, GrammarKind
from grammars import tokenizer_json

CONTEXT = GrammarContext(
    tokenizer_json([piece.encode() for piece in conformance.PIECES]), conformance.END + 1, (conformance.END,)
)
BACKENDS = {"llguidance": GuidanceBackend(CONTEXT), "outlines": OutlinesBackend(CONTEXT)}


def all_checks() -> list[Any]:
    made = []
    for name, backend in BACKENDS.items():
        for number, check in enumerate(conformance.checks(backend)):
            made.append(pytest.param(check, id=f"{name}-{number}-{check.func.__name__}"))  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("check", all_checks())
def test_backends_conform(check: Callable[[], None]) -> None:
    check()


class Loose(GuidanceObject):
    """Allows one token too many."""

    def _fill(self, words: I32) -> None:
        super()._fill(words)
        masks.set_bits(words, [conformance.PIECES.index("}")], True)


class Tight(GuidanceObject):
    """Never allows `b`."""

    def _fill(self, words: I32) -> None:
        super()._fill(words)
        masks.set_bits(words, [conformance.PIECES.index("b")], False)


class Eager(GuidanceObject):
    """Thinks every text complete."""

    def _complete(self) -> bool:
        return True


class Forgetful(GuidanceObject):
    """Does not roll back."""

    def _rollback(self, count: int) -> None:
        del count


class Shared(GuidanceObject):
    """Its copies are itself."""

    def _copy(self) -> Any:
        return type(self)(self._matcher, self.vocab_size, self._own_ends)


class Forcing(GuidanceObject):
    """Forces what need not follow."""

    def _forced(self) -> list[int]:
        return [0]


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        (Loose, "masks_are_exact"),
        (Tight, "masks_are_exact"),
        (Eager, "ends_are_exact"),
        (Forgetful, "rollback_is_replay"),
        (Shared, "copies_are_apart"),
        (Forcing, "forced_is_in_the_mask"),
    ],
)
def test_the_suite_catches_a_backend_that_is_wrong(kind: type[GuidanceObject], caught: str) -> None:
    class Wrong(GuidanceBackend):
        def load(self, form: GrammarKind, compiled: str) -> BaseGrammarObject:
            made = super().load(form, compiled)
            assert isinstance(made, GuidanceObject)
            return kind(made._matcher, made.vocab_size, made._own_ends)

    backend = Wrong(CONTEXT)
    failed = set()
    for check in conformance.checks(backend):
        try:
            check()
        except Exception:
            failed.add(check.func.__name__)  # type: ignore[attr-defined]
    assert caught in failed


class Few(BaseGrammarBackend):
    """Claims nothing."""

    name = "few"


def test_kinds_that_are_not_claimed_are_refused_by_name() -> None:
    found = conformance.checks(Few(CONTEXT))
    assert len(found) == len(GrammarKind)
    for check in found:
        check()


def test_a_claim_that_is_not_kept_is_caught() -> None:
    class Silent(Few):
        def dispatch_fallback(self, kind: GrammarKind, text: str) -> BaseGrammarObject:
            return BACKENDS["llguidance"].dispatch_regex("a")

    with pytest.raises(AssertionError, match="not claimed and not refused"):
        conformance.checks(Silent(CONTEXT))[0]()
