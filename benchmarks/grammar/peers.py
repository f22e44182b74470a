"""One way to ask every grammar backend the same: is this text a value of this schema, and what does a mask cost?

`ours` is the compiler of this repository; `llguidance`, `xgrammar` and `outlines` are asked through their own packages
alone, as their users ask them. Vocabularies: `bytes` for verdicts, a model's own for times. Knows nothing of suites.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from branchline.engine.errors import EngineError
from branchline.engine.grammar.refusal import GrammarInvalid
from branchline.engine.grammar.schema import SchemaOptions, compile_schema
from branchline.engine.grammar.schema.probe import byte_tokenizer
from llguidance import LLMatcher, LLTokenizer


class Refused(Exception):
    """The schema is not taken. `empty`: because no value fits it, which is a right answer."""

    def __init__(self, reason: str, empty: bool = False) -> None:
        super().__init__(reason)
        self.empty = empty


class Walk(ABC):
    """A schema's state over tokens."""

    @abstractmethod
    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether exactly these tokens are a whole text; the state stays the first one."""

    def masks(self, ids: Sequence[int]) -> list[float]:
        """CPU seconds of the mask before each of these tokens, and of the last one behind them; none if unmeasured."""
        return []

    def forced(self, ids: Sequence[int]) -> int | None:
        """How many of these tokens were told to be without a choice; None from a peer that is not asked."""
        return None


class Guided(Walk):
    """llguidance's matcher."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self._first = LLMatcher(tokenizer, grammar, log_level=0)
        if self._first.is_error():
            raise Refused(self._first.get_error()[:300])
        self._first.deep_copy().compute_bitmask()  # a schema without values shows here
        if self._first.is_error():
            raise Refused(self._first.get_error()[:300])

    def accepts(self, ids: Sequence[int]) -> bool:
        """See Walk."""
        matcher, data = self._first.deep_copy(), list(ids)
        return bool(
            matcher.validate_tokens(data) == len(data) and matcher.consume_tokens(data) and matcher.is_accepting()
        )

    def masks(self, ids: Sequence[int]) -> list[float]:
        """See Walk."""
        matcher, times = self._first.deep_copy(), []
        for token in (*ids, None):
            started = time.thread_time()
            matcher.compute_bitmask()
            times.append(time.thread_time() - started)
            if token is None or not matcher.try_consume_tokens([token]):
                break
        return times

    def forced(self, ids: Sequence[int]) -> int:
        """See Walk. A run is computed in one step together with the choice behind it."""
        matcher, place, told = self._first.deep_copy(), 0, 0
        while place < len(ids):
            run = matcher.compute_ff_tokens()
            same = next((n for n, (a, b) in enumerate(zip(run, ids[place:], strict=False)) if a != b), len(run))
            same = min(same, len(ids) - place)
            told += same
            step = list(ids[place : place + max(same, 1)])
            if matcher.try_consume_tokens(step) != len(step):
                break
            place += len(step)
        return told


class Peer(ABC):
    """A backend over bytes, and over a model's vocabulary for times."""

    name = ""

    @abstractmethod
    def compile(self, schema: Any, dialect: str | None = None) -> Walk:
        """The schema over bytes. Raises Refused."""


class Ours(Peer):
    """The compiler of this repository; `tokenizer` other than bytes for times."""

    name = "ours"

    def __init__(self, tokenizer: LLTokenizer | None = None) -> None:
        self._tokenizer = tokenizer or byte_tokenizer()

    def compile(self, schema: Any, dialect: str | None = None) -> Walk:
        """See Peer."""
        try:
            options = SchemaOptions(dialect=dialect) if dialect else SchemaOptions()
            return Guided(self._tokenizer, compile_schema(schema, options).lark)
        except EngineError as error:
            empty = isinstance(error, GrammarInvalid) and "no value fits" in error.message
            raise Refused(error.message, empty) from None


class Guidance(Peer):
    """llguidance's own reading of JSON schemas."""

    name = "llguidance"

    def __init__(self, tokenizer: LLTokenizer | None = None) -> None:
        self._tokenizer = tokenizer or byte_tokenizer()

    def compile(self, schema: Any, dialect: str | None = None) -> Walk:
        """See Peer. The dialect is told by `$schema` alone."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        except ValueError as error:
            raise Refused(str(error)) from None
        return Guided(self._tokenizer, grammar)


class _Xgrammar(Walk):
    def __init__(self, compiled: Any, end: int, width: int) -> None:
        import xgrammar

        self._made = lambda: xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=False)
        self._end, self._width = end, width

    def accepts(self, ids: Sequence[int]) -> bool:
        matcher = self._made()
        return all(matcher.accept_token(one) for one in ids) and bool(matcher.accept_token(self._end))

    def masks(self, ids: Sequence[int]) -> list[float]:
        import numpy as np

        matcher, times = self._made(), []
        words = np.zeros((1, (self._width + 31) // 32), dtype=np.int32)
        for token in (*ids, None):
            started = time.thread_time()
            matcher.fill_next_token_bitmask(words, 0)
            times.append(time.thread_time() - started)
            if token is None or not matcher.accept_token(token):
                break
        return times


class Xgrammar(Peer):
    """xgrammar's compiler, strict."""

    name = "xgrammar"

    def __init__(self, pieces: Sequence[bytes] | None = None) -> None:
        import xgrammar

        given = pieces or [bytes([byte]) for byte in range(256)]
        self._width = len(given) + 1
        info = xgrammar.TokenizerInfo(
            [*given, b"</s>"], xgrammar.VocabType.RAW, vocab_size=self._width, stop_token_ids=[len(given)]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Any, dialect: str | None = None) -> Walk:
        """See Peer."""
        try:
            return _Xgrammar(self._compiler.compile_json_schema(json.dumps(schema)), self._width - 1, self._width)
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error)[:300]) from None


class _Outlines(Walk):
    def __init__(self, index: Any) -> None:
        self._index = index

    def accepts(self, ids: Sequence[int]) -> bool:
        state = self._index.get_initial_state()
        for one in ids:
            state = self._index.get_next_state(state, one)
            if state is None:
                return False
        return bool(self._index.is_final_state(state))


class Outlines(Peer):
    """outlines-core: the schema as one expression, the expression as an automaton."""

    name = "outlines"

    def __init__(self) -> None:
        from outlines_core import Vocabulary

        self._vocabulary = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})

    def compile(self, schema: Any, dialect: str | None = None) -> Walk:
        """See Peer."""
        from outlines_core import Index
        from outlines_core.json_schema import build_regex_from_schema

        try:
            return _Outlines(Index(build_regex_from_schema(json.dumps(schema)), self._vocabulary))
        except (ValueError, TypeError, RuntimeError) as error:
            raise Refused(str(error)[:300]) from None


PEERS: dict[str, type[Peer]] = {one.name: one for one in (Ours, Guidance, Xgrammar, Outlines)}
