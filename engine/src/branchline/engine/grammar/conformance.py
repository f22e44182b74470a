"""One suite for every grammar backend, ours and plugins': what must hold on any vocabulary, found by brute force.

Plugins run it as pytest tests through `branchline.testing` (docs/extending/grammar-backends.md), or by hand: each of
`checks(backend)` raises AssertionError in words. The backend is built over `small_context()`, where all texts up to a
length can be tried. Needs no pytest; nothing that serves imports it.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.small import END, PIECES, small_context
from branchline.engine.types import I32, GrammarKind

DEPTH = 6
WIDE = 101  # a head wider than the vocabulary, and no multiple of a word's bits


@dataclass(frozen=True, slots=True)
class Sample:
    """A constraint and all of its texts."""

    kind: GrammarKind
    text: str
    texts: frozenset[str]

    def legal(self, text: str) -> bool:
        """Whether the constraint has this text."""
        return text in self.texts

    def viable(self) -> set[str]:
        """All prefixes of its texts."""
        return {text[:size] for text in self.texts for size in range(len(text) + 1)}

    def must(self, text: str) -> str:
        """What has to follow this beginning, whatever its end; empty where it may end."""
        rest = [one[len(text) :] for one in self.texts if one.startswith(text)]
        columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rest, strict=False))
        return "".join(column[0] for column in columns)


def _regex(text: str) -> Sample:
    """An expression over a, b and c with texts of at most 4 characters."""
    tried = ("".join(one) for length in range(6) for one in itertools.product("abc", repeat=length))
    return Sample(GrammarKind.REGEX, text, frozenset(one for one in tried if re.fullmatch(text, one)))


def _choice(*texts: str) -> Sample:
    return Sample(GrammarKind.CHOICE, json.dumps(texts), frozenset(texts))


def _values(schema: str, *values: str) -> Sample:
    return Sample(GrammarKind.JSON, schema, frozenset(values))


def _texts(kind: GrammarKind, text: str, *texts: str) -> Sample:
    return Sample(kind, text, frozenset(texts))


def _tag(shape: dict[str, object], *texts: str) -> Sample:
    return _texts(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": shape}), *texts)


SAMPLES = (
    _regex("abc"),
    _regex("a?b?c?"),
    _regex("(ab|a)(bc|c)"),
    _regex("[ab]{2,4}"),
    _regex("a(b|)c{0,2}"),
    _regex("(aa|a)b"),
    _choice("abc", "ab", "b"),
    _choice("", "a"),
    _values('{"enum": [1, 12, "a"]}', "1", "12", '"a"'),
    _values('{"const": {"a": 1}}', '{"a":1}', '{"a": 1}'),
    _values('{"type": "array", "items": {"const": 1}, "maxItems": 1}', "[]", "[1]"),
    _texts(GrammarKind.EBNF, 'root ::= "a" item | "1"\nitem ::= "b" "c"? | "b" "b" "c"', "ab", "abc", "abbc", "1"),
    # As deep as runs of DEPTH tokens can tell.
    _texts(GrammarKind.EBNF, 'root ::= "[" root? "]"', *("[" * deep + "]" * deep for deep in range(1, DEPTH + 2))),
    _tag({"type": "const_string", "value": "abc"}, "abc"),
    _tag({"type": "or", "elements": [{"type": "const_string", "value": one} for one in ("ab", "a1")]}, "ab", "a1"),
    _tag(
        {
            "type": "sequence",
            "elements": [{"type": "const_string", "value": "a"}, {"type": "json_schema", "json_schema": {"const": 1}}],
        },
        "a1",
    ),
)

WRONG = {
    GrammarKind.JSON: ("", "{", '{"type": 5}', '{"type": "nothing"}', '{"const": 1, "enum": []}', "nul"),
    GrammarKind.REGEX: ("(a", "a)", "[b-a]", "*a", "a{2,1}"),
    GrammarKind.EBNF: ("", "root ::= (", "root ::= other"),
    GrammarKind.STRUCTURAL_TAG: ("", "{", "[]", "{}", '{"type": "structural_tag", "format": {"type": "none such"}}'),
    GrammarKind.CHOICE: ("", "a", "[]", "[1]", '{"a": 1}'),
}
"""Sources without a meaning: each must be refused by a typed error."""


def checks(backend: BaseGrammarBackend) -> list[Callable[[], None]]:
    """All checks of a backend over `small_context()`: what it claims is enforced, what it doesn't claim is refused."""
    made: list[Callable[[], None]] = []
    for sample in SAMPLES:
        if sample.kind in backend.kinds:
            made += [partial(one, backend, sample) for one in EACH]
    for kind in GrammarKind:
        refused = wrong_is_refused if kind in backend.kinds else unsupported_is_refused
        made.append(partial(refused, backend, kind))
    return [*made, partial(rows_are_told_apart, backend)] if backend.kinds else made


def start(backend: BaseGrammarBackend, sample: Sample) -> BaseGrammarObject:
    """The constraint in its first state, as a request gets it."""
    return _compiled(backend, sample).start([END])


@functools.cache
def _compiled(backend: BaseGrammarBackend, sample: Sample) -> BaseGrammarObject:
    return backend.load(sample.kind, backend.compile(sample.kind, sample.text))


def allowed(grammar: BaseGrammarObject) -> set[int]:
    """The ids of its mask, which must be as wide as the head."""
    mask = grammar.allocate_vocab_mask(2, grammar.vocab_size)
    grammar.fill_vocab_mask(mask, 1)
    assert (mask[0] == masks.ALL).all(), "another row was written to"
    assert mask.shape[1] * 32 >= grammar.vocab_size, "the mask is narrower than the head"
    return set(masks.allowed_ids(mask[1], mask.shape[1] * 32).tolist())


def runs(backend: BaseGrammarBackend, sample: Sample) -> Iterator[tuple[tuple[int, ...], BaseGrammarObject]]:
    """Every run of at most DEPTH tokens that is taken, shortest first, with the state after it."""
    todo: deque[tuple[tuple[int, ...], BaseGrammarObject]] = deque([((), start(backend, sample))])
    while todo:
        run, grammar = todo.popleft()
        yield run, grammar.copy()
        if len(run) == DEPTH:
            continue
        for token in range(END):
            other = grammar.copy()
            if other.accept_token(token):
                todo.append(((*run, token), other))


def spelled(run: tuple[int, ...]) -> str:
    """The text of a run of tokens."""
    return "".join(PIECES[token] for token in run)


def masks_are_exact(backend: BaseGrammarBackend, sample: Sample) -> None:
    """A bit is set only where the token leads on to a legal text. Where every such token spells what is forced
    anyway, only one of them is canonical and has its bit; elsewhere each has."""
    viable = sample.viable()
    for run, grammar in runs(backend, sample):
        assert spelled(run) in viable, f"{sample.text}: {spelled(run)!r} is taken and leads nowhere"
        found = allowed(grammar) - {END}
        right = {token for token in range(END) if spelled(run) + PIECES[token] in viable}
        assert found <= right, f"{sample.text}: after {spelled(run)!r} the mask allows {found - right}"
        forced, must = grammar.forced_tokens(), sample.must(spelled(run))
        if must and all(must.startswith(PIECES[token]) for token in right):
            assert len(found) == 1, f"{sample.text}: {must!r} is forced after {spelled(run)!r}, the mask has {found}"
        else:
            assert found == right, f"{sample.text}: after {spelled(run)!r} the mask lacks {right - found}"
        assert not forced or found == {forced[0]}, f"{sample.text}: {found} beside {forced[0]} after {spelled(run)!r}"
        for token in range(END + 1):
            taken = grammar.copy().accept_token(token)
            legal = token in found or (token == END and sample.legal(spelled(run)))
            assert taken or not legal, f"{sample.text}: {token} is in the mask and refused after {spelled(run)!r}"
            assert token != END or taken == legal, f"{sample.text}: the end after {spelled(run)!r}"


def ends_are_exact(backend: BaseGrammarBackend, sample: Sample) -> None:
    """An end is legal exactly where the text is; after it nothing is, and it can be rolled back."""
    viable = sample.viable()
    for run, grammar in runs(backend, sample):
        legal = sample.legal(spelled(run))
        assert grammar.is_complete() is legal, f"{sample.text}: complete after {spelled(run)!r}"
        assert (END in allowed(grammar)) is legal, f"{sample.text}: the end's bit after {spelled(run)!r}"
        assert not grammar.is_terminated()
        last = legal and not any(spelled(run) + piece in viable for piece in PIECES)
        assert grammar.is_exhausted() is last, f"{sample.text}: whether anything follows {spelled(run)!r}"
        assert grammar.accept_token(END) is legal
        if not legal:
            continue
        assert grammar.is_terminated() and grammar.is_complete() and grammar.is_exhausted()
        assert not any(grammar.accept_token(token) for token in range(END + 1)), "something follows the end"
        assert allowed(grammar) == {END} and grammar.forced_tokens() == []
        grammar.rollback(1)
        assert not grammar.is_terminated() and END in allowed(grammar)


def rollback_is_replay(backend: BaseGrammarBackend, sample: Sample) -> None:
    """Undoing k tokens equals never having taken them, refused tokens in between or not."""
    for run in _legal_runs(backend, sample):
        for back in range(len(run) + 1):
            grammar = start(backend, sample)
            for token in run:
                assert grammar.accept_token(token)
                grammar.accept_token(-1)
                grammar.accept_token(END + 5)
            grammar.rollback(back)
            fresh = start(backend, sample)
            assert fresh.accept_tokens(run[: len(run) - back]) == len(run) - back
            _assert_same(grammar, fresh, f"{sample.text}: {back} back from {spelled(run)!r}")
            assert grammar.accept_tokens(run[len(run) - back :]) == back, "what was undone is not taken again"
    grammar = start(backend, sample)
    try:
        grammar.rollback(1)
    except ValueError:
        return
    raise AssertionError("more was rolled back than was accepted")


def copies_are_apart(backend: BaseGrammarBackend, sample: Sample) -> None:
    """A copy is in the same state, and what happens to one does not happen to the other."""
    for run in _legal_runs(backend, sample):
        grammar = start(backend, sample)
        grammar.accept_tokens(run[:-1])
        other, third = grammar.copy(), grammar.copy()
        assert other.accept_tokens(run[-1:]) == len(run[-1:])
        _assert_same(grammar, third, f"{sample.text}: a copy's token at {spelled(run)!r}")
        other.rollback(len(run))
        assert other.accepted == 0
        _assert_same(other, start(backend, sample), f"{sample.text}: a copy rolled back to its start")


def forced_is_in_the_mask(backend: BaseGrammarBackend, sample: Sample) -> None:
    """Each forced token is allowed where it stands, and legal texts go that way."""
    for run in _legal_runs(backend, sample):
        for size in range(len(run) + 1):
            grammar = start(backend, sample)
            grammar.accept_tokens(run[:size])
            forced = grammar.forced_tokens()
            text = spelled(tuple(run[:size])) + spelled(tuple(forced))
            assert not forced or spelled(run).startswith(text), f"{sample.text}: {text!r} is not forced"
            for token in forced:
                assert token in allowed(grammar), f"{sample.text}: forced token {token} is not in the mask"
                assert grammar.accept_token(token)


def unsupported_is_refused(backend: BaseGrammarBackend, kind: GrammarKind) -> None:
    """A kind that is not claimed is a typed refusal that names backend and kind."""
    try:
        backend.dispatch(kind, "x")
    except GrammarUnsupported as error:
        assert backend.name in error.message and kind.value in error.message, error.message
        return
    raise AssertionError(f"{kind.value} is not claimed and not refused")


def wrong_is_refused(backend: BaseGrammarBackend, kind: GrammarKind) -> None:
    """What means nothing is refused by one of the two typed errors before there is a constraint, in words."""
    for text in WRONG[kind]:
        try:
            backend.load(kind, backend.compile(kind, text))
        except (GrammarInvalid, GrammarUnsupported) as error:
            assert error.message, f"{text!r} is refused without a word"
        except Exception as error:
            raise AssertionError(f"{text!r} raises {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{text!r} is no {kind.value} and is taken for one")


def rows_are_told_apart(backend: BaseGrammarBackend) -> None:
    """Rows of one batch, of this backend and of another one, are filled in any order, moved and applied: each holds
    its own request's mask."""
    mine = [start(backend, sample) for sample in SAMPLES if sample.kind in backend.kinds]
    both: list[BaseGrammarObject] = []
    for number, one in enumerate(mine):
        one.accept_tokens(sorted(allowed(one) - {END})[: number % 2])
        both += [one, Listed(SAMPLES[number])]
    alone = [allowed(one) for one in both]
    for order in (range(len(both)), reversed(range(len(both)))):
        mask = BaseGrammarObject.allocate_vocab_mask(len(both), small_context().vocab_size)
        for row in order:
            both[row].fill_vocab_mask(mask, row)
        for row, one in enumerate(both):
            scores = np.zeros((len(both), small_context().vocab_size), dtype=np.float32)
            one.apply_vocab_mask(scores, one.move_vocab_mask(mask, np.copy))
            found = set(np.flatnonzero(scores[row] == 0).tolist())
            assert found == alone[row], f"row {row} allows {found}, alone {alone[row]}"
        both[0].reset_vocab_mask(mask)
        assert (mask == masks.ALL).all(), "a mask that was reset forbids something"


def padding_is_never_allowed(narrow: BaseGrammarBackend, wide: BaseGrammarBackend) -> None:
    """A head wider than the vocabulary gets the same masks; each of a request's ends counts, in the padding too."""
    ends = {END, END + 3}
    for kind in sorted(narrow.kinds):
        sample = next(one for one in SAMPLES if one.kind is kind)
        todo = [(start(narrow, sample), _compiled(wide, sample).start(ends))]
        for one, other in todo:
            right, found = allowed(one), allowed(other)
            assert found - ends == right - {END}, f"{sample.text}: a head of {WIDE} allows {found}, else {right}"
            assert found & ends == (ends if END in right else set()), f"{sample.text}: ends {found & ends}"
            for token in (END + 1, WIDE - 1):
                assert not other.copy().accept_token(token), f"{sample.text}: padding {token} is taken"
            for token in sorted(right - {END}):
                both = one.copy(), other.copy()
                assert all(each.accept_token(token) for each in both)
                if both[0].accepted <= DEPTH:
                    todo.append(both)


EACH = (masks_are_exact, ends_are_exact, rollback_is_replay, copies_are_apart, forced_is_in_the_mask)
"""What is checked of every sample."""


class Listed(BaseGrammarObject):
    """Texts that are written down: the other backend beside the one under test."""

    def __init__(self, sample: Sample, run: tuple[int, ...] = ()) -> None:
        super().__init__(small_context().vocab_size, (END,))
        self._sample, self._run = sample, run

    def _accept(self, token_id: int) -> bool:
        if spelled((*self._run, token_id)) not in self._sample.viable():
            return False
        self._run = (*self._run, token_id)
        return True

    def _rollback(self, count: int) -> None:
        self._run = self._run[:-count]

    def _fill(self, words: I32) -> None:
        words[:] = 0
        viable = self._sample.viable()
        masks.set_bits(words, [one for one in range(END) if spelled((*self._run, one)) in viable], True)

    def _complete(self) -> bool:
        return self._sample.legal(spelled(self._run))

    def _copy(self) -> Self:
        return type(self)(self._sample, self._run)


def _legal_runs(backend: BaseGrammarBackend, sample: Sample) -> list[tuple[int, ...]]:
    """Runs that spell a legal text and are taken, a few of each."""
    found = [run for run, _ in runs(backend, sample) if sample.legal(spelled(run))]
    assert found, f"{sample.text}: no text is taken"
    return found[:12]


def _assert_same(one: BaseGrammarObject, other: BaseGrammarObject, words: str) -> None:
    assert allowed(one) == allowed(other), f"{words}: masks differ"
    assert one.is_complete() == other.is_complete(), f"{words}: ends differ"
    assert one.is_terminated() == other.is_terminated(), f"{words}: termination differs"
    assert one.forced_tokens() == other.forced_tokens(), f"{words}: forced tokens differ"
    assert one.accepted == other.accepted, f"{words}: counts differ"
