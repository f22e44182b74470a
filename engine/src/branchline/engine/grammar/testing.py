"""Builds a backend and tests it before anything relies on it: built-ins and plugins alike.

The few constraints here tell a backend that can't work with this tokenizer or breaks the contract; the whole suite
for authors of backends is `branchline.engine.grammar.conformance`.
"""

from __future__ import annotations

from collections.abc import Callable

from branchline.engine.errors import LoadError
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject, GrammarContext
from branchline.engine.types import GrammarKind
from branchline.registry import grammar_backends

SAMPLES = {
    GrammarKind.JSON: '{"type": "boolean"}',
    GrammarKind.REGEX: "[a-c]{2}",
    GrammarKind.EBNF: 'root ::= "a" | "b"',
    GrammarKind.STRUCTURAL_TAG: '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}',
    GrammarKind.CHOICE: '["a", "b"]',
}


def build_backend(name: str, context: GrammarContext) -> BaseGrammarBackend:
    """The backend by its registered name, tested. Raises LoadError saying what it got wrong."""
    factory: Callable[..., object] = grammar_backends.get(name)
    try:
        backend = factory(context)
    except Exception as error:
        raise LoadError(
            f"grammar backend {name!r} can't be built: {type(error).__name__}: {error}", field="grammar_backend"
        ) from error
    if not isinstance(backend, BaseGrammarBackend):
        raise LoadError(
            f"grammar backend {name!r} is a {type(backend).__name__}: it must derive from BaseGrammarBackend",
            field="grammar_backend",
        )
    fault = self_test(backend)
    if fault:
        raise LoadError(f"grammar backend {name!r} fails its self-test: {fault}", field="grammar_backend")
    return backend


def self_test(backend: BaseGrammarBackend) -> str:
    """What is wrong with a backend in a sentence; empty if nothing was found."""
    if not backend.kinds:
        return "it claims no kind of constraint"
    for kind in sorted(backend.kinds):
        try:
            fault = _try(backend.load(kind, backend.compile(kind, SAMPLES[kind])), backend.context)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            return f"{kind.value}: {fault}"
    return ""


def _try(first: BaseGrammarObject, context: GrammarContext) -> str:
    end = context.eos_ids[0] if context.eos_ids else 0
    grammar = first.start([end])
    mask = grammar.allocate_vocab_mask(1, context.vocab_size)
    grammar.fill_vocab_mask(mask, 0)
    allowed = masks.allowed_ids(mask[0], context.vocab_size)
    if not len(allowed):
        return "the first mask allows nothing"
    if end in allowed:
        return "the first mask allows the end"
    before = mask.copy()
    if grammar.accept_token(end):
        return "an end is taken where none is allowed"
    if not grammar.copy().accept_token(int(allowed[0])):
        return "a token that the mask allows is refused"
    grammar.fill_vocab_mask(mask, 0)
    if (mask != before).any():
        return "a copy's token changes the original"
    if not grammar.accept_token(int(allowed[0])):
        return "a token that the mask allows is refused"
    grammar.rollback(1)
    grammar.fill_vocab_mask(mask, 0)
    return "" if (mask == before).all() else "rollback does not bring the mask back"
