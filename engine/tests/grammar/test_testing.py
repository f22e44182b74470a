"""The self-test that every backend goes through when an engine starts: what it catches, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from branchline.engine.errors import LoadError
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.grammar.guidance import GuidanceBackend, GuidanceObject
from branchline.engine.grammar.testing import build_backend, self_test
from branchline.engine.types import I32, GrammarKind
from branchline.registry import grammar_backends
from grammars import byte_backend


class Base(GuidanceObject):
    """A correct object of its own class."""


class Blank(Base):
    def _fill(self, words: I32) -> None:
        words[:] = 0


class Ended(Base):
    def _complete(self) -> bool:
        return True


class Refusing(Base):
    def _accept(self, token_id: int) -> bool:
        return False


class Same(Base):
    def _copy(self) -> Any:
        return type(self)(self._matcher, self.vocab_size, self._own_ends)

    def _fill(self, words: I32) -> None:
        self._words = None
        super()._fill(words)


class Stuck(Base):
    def _rollback(self, count: int) -> None:
        del count


class Failing(Base):
    def _fill(self, words: I32) -> None:
        raise RuntimeError("it broke")


def backend_with(kind: type[Base]) -> GuidanceBackend:
    class Made(GuidanceBackend):
        def compile(self, form: GrammarKind, text: str) -> str:
            return byte_backend().compile(form, text)

        def load(self, form: GrammarKind, compiled: str) -> BaseGrammarObject:
            made = super().load(form, compiled)
            assert isinstance(made, GuidanceObject)
            return kind(made._matcher, made.vocab_size, made._own_ends)

    return Made(byte_backend().context)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Base, ""),
        (Blank, "the first mask allows nothing"),
        (Ended, "the first mask allows the end"),
        (Refusing, "a token that the mask allows is refused"),
        (Same, "a copy's token changes the original"),
        (Stuck, "rollback does not bring the mask back"),
        (Failing, "RuntimeError: it broke"),
    ],
)
def test_each_breach_of_the_contract_is_told(kind: type[Base], words: str) -> None:
    found = self_test(backend_with(kind))
    assert words in found and bool(found) is bool(words)


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(grammar_backends._entries)
    yield
    grammar_backends._entries.clear()
    grammar_backends._entries.update(before)


def test_a_backend_that_fails_its_self_test_stops_the_start(registered: None) -> None:
    grammar_backends.register("blank", api_version=1)(lambda context: backend_with(Blank))
    grammar_backends.register("none at all", api_version=1)(lambda context: object())
    with pytest.raises(LoadError, match=r"'blank' fails its self-test: .*allows nothing"):
        build_backend("blank", byte_backend().context)
    with pytest.raises(LoadError, match="must derive from BaseGrammarBackend"):
        build_backend("none at all", byte_backend().context)


def test_a_backend_that_can_not_be_built_stops_the_start(registered: None) -> None:
    def broken(context: object) -> object:
        raise ValueError("no such tokenizer")

    grammar_backends.register("broken", api_version=1)(broken)
    with pytest.raises(LoadError, match="can't be built: ValueError: no such tokenizer"):
        build_backend("broken", byte_backend().context)


def test_a_backend_without_kinds_is_of_no_use() -> None:
    backend = backend_with(Base)
    backend.kinds = frozenset()  # type: ignore[misc]
    assert self_test(backend) == "it claims no kind of constraint"
    assert masks.width(backend.context.vocab_size) > 0
