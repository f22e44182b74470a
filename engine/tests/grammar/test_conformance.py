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
from branchline.engine.grammar.small import small_context
from branchline.engine.types import I32, GrammarKind
from branchline.registry import RegistryError
from branchline.testing import checks

CONTEXT = small_context()
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


class Padded(GuidanceObject):
    """Allows ids that no tokenizer knows."""

    def _fill(self, words: I32) -> None:
        super()._fill(words)
        masks.set_bits(words, range(conformance.END + 1, self.vocab_size), True)


class Spilling(GuidanceObject):
    """Its array of scores is its own."""

    @staticmethod
    def apply_vocab_mask(logits: Any, mask: I32) -> None:
        GuidanceObject.apply_vocab_mask(logits[:1], mask[:1])


class Tireless(GuidanceObject):
    """Thinks that something may always follow."""

    def _exhausted(self) -> bool:
        return False


class Spelling(GuidanceObject):
    """Lets forced text be spelled in any way, and says that nothing is forced."""

    def _fill(self, words: I32) -> None:
        words[:] = 0
        takes = [one for one in range(conformance.END) if self.copy().accept_token(one)]
        masks.set_bits(words, takes, True)

    def _forced(self) -> list[int]:
        return []


@pytest.mark.parametrize(
    ("faulty", "caught"),
    [
        (Padded, "a_wider_head_allows_no_padding"),
        (Spilling, "rows_of_a_batch_are_told_apart"),
        (Tireless, "ends_are_exact[regex abc]"),
        (Spelling, "masks_are_exact[regex abc]"),
    ],
)
def test_one_check_is_enough_to_catch_it(faulty: type[GuidanceObject], caught: str) -> None:
    class Wrong(GuidanceBackend):
        def load(self, kind: GrammarKind, compiled: str) -> BaseGrammarObject:
            made = super().load(kind, compiled)
            assert isinstance(made, GuidanceObject)
            return faulty(made._matcher, made.vocab_size, made._own_ends)

    with pytest.raises(AssertionError):
        checks("grammar_backends", Wrong)[caught]()


@pytest.mark.parametrize("kind", [GrammarKind.JSON, GrammarKind.CHOICE])
def test_a_source_without_a_meaning_must_be_refused_by_a_typed_error(kind: GrammarKind) -> None:
    class Lenient(GuidanceBackend):
        def compile(self, kind: GrammarKind, text: str) -> str:
            return "start: /.*/"

    class Untyped(GuidanceBackend):
        def compile(self, kind: GrammarKind, text: str) -> str:
            raise RuntimeError("it broke")

    for wrong, words in ((Lenient, "is taken for one"), (Untyped, "raises RuntimeError: it broke")):
        with pytest.raises(AssertionError, match=words):
            checks("grammar_backends", wrong)[f"wrong_is_refused[{kind.value}]"]()


def test_what_is_no_backend_is_told_so() -> None:
    def factory(context: GrammarContext) -> object:
        return BACKENDS["outlines"] if context.vocab_size > conformance.END + 1 else object()

    with pytest.raises(RegistryError, match="does not conform to BaseGrammarBackend"):
        checks("grammar_backends", factory)["rows_of_a_batch_are_told_apart"]()
