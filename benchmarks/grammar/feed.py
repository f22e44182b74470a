"""Feeds JSON texts to a compiled schema and says what was accepted. The end is checked: a prefix is no acceptance."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from branchline.engine.grammar.schema import SchemaOptions, compile_schema
from branchline.engine.grammar.schema.probe import byte_tokenizer
from llguidance import LLMatcher

from benchmarks.grammar.peers import Guided, Walk

SEPARATORS = ((",", ":"), (", ", ": "))
MAX_KEYS = 4  # objects of more keys keep their order
MAX_ORDERS = 200


def texts(value: Any) -> Iterator[str]:
    """The value as JSON in some orders of its keys and with either separator."""
    for one in itertools.islice(orders(value), MAX_ORDERS):
        for separators in SEPARATORS:
            yield json.dumps(one, separators=separators, ensure_ascii=False)


def accepts(walk: Walk, value: Any) -> bool:
    """Whether a schema over bytes accepts the value in some order of keys and with some separator."""
    return any(walk.accepts(list(text.encode("utf-8", "surrogatepass"))) for text in texts(value))


class Checker:
    """One schema through our compiler. Raises what compile_schema raises."""

    def __init__(self, schema: Any, options: SchemaOptions) -> None:
        self.compiled = compile_schema(schema, options)
        self.matcher = LLMatcher(byte_tokenizer(), self.compiled.lark, log_level=0)
        if self.matcher.is_error():
            raise RuntimeError(self.matcher.get_error()[:400])
        self._walk = Guided(byte_tokenizer(), self.compiled.lark)

    def accepts_text(self, text: str) -> bool:
        """Whether exactly this text is accepted to its end."""
        return self._walk.accepts(list(text.encode("utf-8", "surrogatepass")))

    def accepts(self, value: Any) -> bool:
        """Whether the value is accepted in some order of keys and with some separator."""
        return accepts(self._walk, value)


def orders(value: Any) -> Iterator[Any]:
    """The value with its keys in every order, for small objects."""
    if isinstance(value, dict) and value:
        keys = list(itertools.permutations(value)) if len(value) <= MAX_KEYS else [tuple(value)]
        for names in keys:
            inner = itertools.product(*[list(itertools.islice(orders(value[name]), 24)) for name in names])
            for values in itertools.islice(inner, 48):
                yield dict(zip(names, values, strict=True))
    elif isinstance(value, list) and value:
        inner = itertools.product(*[list(itertools.islice(orders(one), 24)) for one in value])
        yield from (list(values) for values in itertools.islice(inner, 48))
    else:
        yield value
