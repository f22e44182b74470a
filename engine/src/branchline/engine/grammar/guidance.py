"""The backend llguidance: every kind of constraint, by its Earley parser over lazily built lexers.

Sources become llguidance's own text in `source` and `tags`. An error of the matcher is sticky and would look like an
end: it is looked for after each call and raised.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from branchline.engine.grammar import mask as masks
from branchline.engine.grammar import source, tags
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject, GrammarContext
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import I32, GrammarKind

NAME = "llguidance"
PROBES = 3  # masks looked at before a grammar is taken


class GuidanceObject(BaseGrammarObject):
    """State of an LLMatcher. The latest mask is kept: it also tells whether anything may follow."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, own_ends: tuple[int, ...]) -> None:
        super().__init__(vocab_size, own_ends)
        self._matcher = matcher
        self._own_ends = own_ends  # llguidance's idea of end ids; ours are set by the base
        self._words: I32 | None = None  # the mask of this state, once computed

    def _accept(self, token_id: int) -> bool:
        if token_id in self._own_ends:
            return False
        taken: int = self._matcher.try_consume_tokens([token_id])
        if taken:
            self._words = None
        self._check()
        return taken == 1

    def _rollback(self, count: int) -> None:
        self._words = None
        if not self._matcher.rollback(count):
            self._check()
            raise RuntimeError("llguidance can't roll back")

    def _fill(self, words: I32) -> None:
        words[:] = self._mask()

    def _mask(self) -> I32:
        if self._words is None:
            words = np.zeros(masks.width(self.vocab_size), dtype=np.int32)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._check()
            masks.set_bits(words, self._own_ends, False)
            self._words = words
        return self._words

    def _complete(self) -> bool:
        return bool(self._matcher.is_accepting())

    def _exhausted(self) -> bool:
        if not self._matcher.is_accepting():
            return False
        return bool(self._matcher.is_stopped()) or not self._mask().any()

    def _forced(self) -> list[int]:
        forced: list[int] = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        for place, token in enumerate(forced):
            if token in self._own_ends:
                return forced[:place]
        return forced

    def _copy(self) -> Self:
        other = type(self)(self._matcher.deep_copy(), self.vocab_size, self._own_ends)
        other._words = self._words  # never written to once computed
        return other

    def _check(self) -> None:
        if self._matcher.is_error():
            raise refused(self._matcher.get_error())


class GuidanceBackend(BaseGrammarBackend):
    """See BaseGrammarBackend. Building it reads the tokenizer: about 0.4 s of CPU for 49,152 entries."""

    name = NAME
    kinds = frozenset(GrammarKind)

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        eos = list(context.eos_ids) or None
        self._tokenizer = LLTokenizer(context.tokenizer_json.decode(), n_vocab=context.vocab_size, eos_token=eos)
        self._own_ends = tuple(self._tokenizer.eos_tokens)

    def dispatch_json(self, text: str) -> BaseGrammarObject:
        """A JSON schema's values, canonically spelled."""
        return self.load(GrammarKind.JSON, source.of_json(text))

    def dispatch_regex(self, text: str) -> BaseGrammarObject:
        """Texts that the expression matches as a whole."""
        return self.load(GrammarKind.REGEX, source.of_regex(text))

    def dispatch_ebnf(self, text: str) -> BaseGrammarObject:
        """Texts of a GBNF or Lark grammar."""
        return self.load(GrammarKind.EBNF, source.of_ebnf(text))

    def dispatch_structural_tag(self, text: str) -> BaseGrammarObject:
        """Texts with tagged parts."""
        return self.load(GrammarKind.STRUCTURAL_TAG, tags.of_structural_tag(text))

    def dispatch_choice(self, text: str) -> BaseGrammarObject:
        """One of a JSON array's strings."""
        return self.load(GrammarKind.CHOICE, source.of_choice(text))

    def compile(self, kind: GrammarKind, text: str) -> str:
        """llguidance's text of the constraint, proved to have a first mask and to survive a few tokens."""
        compiled = SOURCES[kind](text)
        probe(self.load(kind, compiled))
        return compiled

    def load(self, kind: GrammarKind, compiled: str) -> BaseGrammarObject:
        """The constraint in its first state."""
        matcher = LLMatcher(self._tokenizer, compiled, log_level=0, limits=LLParserLimits())
        if matcher.is_error():
            raise refused(matcher.get_error())
        return GuidanceObject(matcher, self.context.vocab_size, self._own_ends)


SOURCES = {
    GrammarKind.JSON: source.of_json,
    GrammarKind.REGEX: source.of_regex,
    GrammarKind.EBNF: source.of_ebnf,
    GrammarKind.STRUCTURAL_TAG: tags.of_structural_tag,
    GrammarKind.CHOICE: source.of_choice,
}


def probe(grammar: BaseGrammarObject) -> None:
    """Walk a few tokens in. Raises GrammarInvalid if no text fits, GrammarUnsupported at a limit."""
    mask = grammar.allocate_vocab_mask(1, grammar.vocab_size)
    for _ in range(PROBES):
        grammar.fill_vocab_mask(mask, 0)
        allowed = masks.allowed_ids(mask[0], grammar.vocab_size)
        if not len(allowed):
            if grammar.is_complete():
                return
            raise GrammarInvalid("no text fits the constraint: correct it")
        grammar.accept_token(int(allowed[len(allowed) // 2]))
        if grammar.is_terminated():
            return


def refused(error: str) -> GrammarInvalid | GrammarUnsupported:
    """llguidance's error as one of ours: limits are ours to admit, the rest is the source's fault."""
    words = " ".join(error.partition("<state>")[0].split())[:300]
    limits = (
        "too complex",
        "too large",
        "too many",
        "limit",
        "fuel",
        "ParserTooComplex",
        "LexerTooComplex",
        "TooComplex",
    )
    if any(one in words for one in limits):
        return GrammarUnsupported("size", f"a limit is exceeded ({words})", backend=NAME)
    if words.startswith("NoExtension"):
        return GrammarInvalid("no text fits the constraint: correct it")
    return GrammarInvalid(f"the constraint can't be compiled: {words}")
