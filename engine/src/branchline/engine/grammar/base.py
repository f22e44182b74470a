"""What a grammar backend is: constraints compiled once, and their state over the tokens of one sequence.

`BaseGrammarObject` owns what all backends must agree on: end ids, termination, the count for rollback. A backend
fills in the underscored methods, which never see an end id. Must not import torch, nor know requests or batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.types import I32, GrammarKind

T = TypeVar("T")


class BaseGrammarObject(ABC):
    """A constraint's state after the tokens accepted so far. One thread at a time; copies share nothing mutable.

    An end id is legal exactly where the text is complete; after one nothing is, and the object is terminated. A
    refused token changes nothing. Methods may raise GrammarUnsupported where a backend's limit is hit: the caller
    must then end the request, never go on without the constraint.
    """

    def __init__(self, vocab_size: int, ends: Iterable[int] = ()) -> None:
        self.vocab_size = vocab_size
        self._ends = frozenset(ends)
        self._accepted = 0
        self._terminated = False

    # ---- for backends ---------------------------------------------------------------------------

    @abstractmethod
    def _accept(self, token_id: int) -> bool:
        """Take one token that is no end id; False, and unchanged, if it is refused."""

    @abstractmethod
    def _rollback(self, count: int) -> None:
        """Undo the last `count` ≥ 1 tokens taken by `_accept`."""

    @abstractmethod
    def _fill(self, words: I32) -> None:
        """Overwrite one row, int32 [width of vocab_size]; end bits are set by the caller."""

    @abstractmethod
    def _complete(self) -> bool:
        """Whether the text may end here."""

    @abstractmethod
    def _copy(self) -> Self:
        """Another object in the same state; the caller copies what the base owns."""

    def _exhausted(self) -> bool:
        """Whether the text is complete and no token may follow. Backends that know it faster may say so."""
        words = masks.allocate(1, self.vocab_size)[0]
        self._fill(words)
        masks.set_bits(words, self._ends, False)
        return self._complete() and not words.any()

    def _forced(self) -> list[int]:
        """Canonical tokens of what must follow; empty where there is a choice, or where unknown."""
        return []

    # ---- for the step ---------------------------------------------------------------------------

    @property
    def accepted(self) -> int:
        """Tokens accepted and not rolled back, an end id included."""
        return self._accepted

    def start(self, ends: Iterable[int]) -> Self:
        """A copy whose end ids are `ends`: every id that ends its request."""
        other = self.copy()
        other._ends = frozenset(ends)
        return other

    def copy(self) -> Self:
        """An independent object in the same state."""
        other = self._copy()
        other.vocab_size, other._ends = self.vocab_size, self._ends
        other._accepted, other._terminated = self._accepted, self._terminated
        return other

    def accept_token(self, token_id: int) -> bool:
        """Take one token; False, and unchanged, if it is refused."""
        if self._terminated:
            return False
        if token_id in self._ends:
            if not self._complete():
                return False
            self._terminated = True
        elif not 0 <= token_id < self.vocab_size or not self._accept(token_id):
            return False
        self._accepted += 1
        return True

    def accept_tokens(self, token_ids: Sequence[int]) -> int:
        """Take tokens until one is refused; how many were taken."""
        for count, token in enumerate(token_ids):
            if not self.accept_token(token):
                return count
        return len(token_ids)

    def validate_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens would be taken; changes nothing."""
        taken = self.accept_tokens(token_ids)
        if taken:
            self.rollback(taken)
        return taken

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens. Raises ValueError for more than were accepted."""
        if not 0 <= count <= self._accepted:
            raise ValueError(f"can't roll back {count} tokens of {self._accepted} accepted ones")
        if count == 0:
            return
        inner = count - self._terminated
        if inner:
            self._rollback(inner)
        self._terminated = False
        self._accepted -= count

    def fill_vocab_mask(self, mask: I32, row: int) -> None:
        """Overwrite one row of int32 [rows, width] with what may come next; after the end, the end ids."""
        words = mask[row]
        if self._terminated:
            words[:] = 0
            masks.set_bits(words, self._ends, True)
            return
        self._fill(words)
        masks.set_bits(words, self._ends, self._complete())

    def is_complete(self) -> bool:
        """Whether an end id is legal now, or was taken."""
        return self._terminated or self._complete()

    def is_terminated(self) -> bool:
        """Whether an end id was taken."""
        return self._terminated

    def is_exhausted(self) -> bool:
        """Whether nothing may follow but an end."""
        return self._terminated or self._exhausted()

    def forced_tokens(self) -> list[int]:
        """Canonical tokens of what must follow, end ids left out; empty where there is a choice."""
        return [] if self._terminated else self._forced()

    # ---- masks ----------------------------------------------------------------------------------

    @staticmethod
    def allocate_vocab_mask(rows: int, vocab_size: int) -> I32:
        """int32 [rows, ceil(vocab_size / 32)], everything allowed."""
        return masks.allocate(rows, vocab_size)

    @staticmethod
    def reset_vocab_mask(mask: I32) -> None:
        """Allow everything again, in place."""
        mask.fill(masks.ALL)

    @staticmethod
    def move_vocab_mask(mask: I32, place: Callable[[I32], T]) -> T:
        """The mask where `place` puts host arrays, as a device's tensor for example."""
        return place(mask)

    @staticmethod
    def apply_vocab_mask(logits: npt.NDArray[np.float32], mask: I32) -> None:
        """Send forbidden logits to −inf, in place: float32 [rows, vocab_size] and int32 [rows, width]."""
        for line, words in zip(logits, mask, strict=True):
            masks.apply(line, words)


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """What a backend is built for: the tokenizer, the width of the model's head and the model's own end ids."""

    tokenizer_json: bytes
    vocab_size: int
    eos_ids: tuple[int, ...] = ()


class BaseGrammarBackend:
    """Compiles constraints. `compile` runs in a child process with limits, `load` in the engine, off its loop.

    Each dispatch method enforces its text exactly, or raises GrammarInvalid (wrong in itself) or GrammarUnsupported.
    """

    api_version = 1
    name = ""
    kinds: frozenset[GrammarKind] = frozenset()

    def __init__(self, context: GrammarContext) -> None:
        self.context = context

    def dispatch_json(self, text: str) -> BaseGrammarObject:
        """A JSON schema's values."""
        return self.dispatch_fallback(GrammarKind.JSON, text)

    def dispatch_regex(self, text: str) -> BaseGrammarObject:
        """Texts that the expression matches as a whole."""
        return self.dispatch_fallback(GrammarKind.REGEX, text)

    def dispatch_ebnf(self, text: str) -> BaseGrammarObject:
        """Texts of a grammar."""
        return self.dispatch_fallback(GrammarKind.EBNF, text)

    def dispatch_structural_tag(self, text: str) -> BaseGrammarObject:
        """Texts with tagged parts."""
        return self.dispatch_fallback(GrammarKind.STRUCTURAL_TAG, text)

    def dispatch_choice(self, text: str) -> BaseGrammarObject:
        """One of a JSON array's strings."""
        return self.dispatch_fallback(GrammarKind.CHOICE, text)

    def dispatch_fallback(self, kind: GrammarKind, text: str) -> BaseGrammarObject:
        """What is not implemented is refused, never ignored."""
        raise GrammarUnsupported(kind.value, "it has no such constraint; ask for another backend", backend=self.name)

    def dispatch(self, kind: GrammarKind, text: str) -> BaseGrammarObject:
        """The constraint of any kind."""
        return {
            GrammarKind.JSON: self.dispatch_json,
            GrammarKind.REGEX: self.dispatch_regex,
            GrammarKind.EBNF: self.dispatch_ebnf,
            GrammarKind.STRUCTURAL_TAG: self.dispatch_structural_tag,
            GrammarKind.CHOICE: self.dispatch_choice,
        }[kind](text)

    def compile(self, kind: GrammarKind, text: str) -> str:
        """What `load` needs, after proving that it works: first mask included. Backends without a form that can be
        shipped give the source back."""
        first = self.dispatch(kind, text)
        first.fill_vocab_mask(first.allocate_vocab_mask(1, self.context.vocab_size), 0)
        return text

    def load(self, kind: GrammarKind, compiled: str) -> BaseGrammarObject:
        """The constraint in its first state, from what `compile` gave."""
        return self.dispatch(kind, compiled)
