"""One suite for every grammar backend, ours and plugins': what must hold on any vocabulary, found by brute force.

A plugin's own tests import it: `for check in conformance.checks(backend): check()`, or parametrise over them. Each
check raises AssertionError in words. The backend is built over a small byte-level vocabulary (`SMALL`), where all
texts up to a length can be tried. Needs no pytest.
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

from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject, GrammarContext
from branchline.engine.types import GrammarKind

PIECES = ("a", "b", "c", "ab", "bc", "abc", "1", "12", '"', "{", "}", ":", '"a', '{"', '":', "aa", ",", "[", "]")
END = len(PIECES)
SMALL = GrammarContext(b"", END + 1, (END,))  # the tokenizer is for the caller to add: see small_context
DEPTH = 6


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


def _regex(text: str) -> Sample:
    """An expression over a, b and c with texts of at most 4 characters."""
    tried = ("".join(one) for length in range(6) for one in itertools.product("abc", repeat=length))
    return Sample(GrammarKind.REGEX, text, frozenset(one for one in tried if re.fullmatch(text, one)))


def _choice(*texts: str) -> Sample:
    return Sample(GrammarKind.CHOICE, json.dumps(texts), frozenset(texts))


def _values(schema: str, *values: str) -> Sample:
    return Sample(GrammarKind.JSON, schema, frozenset(values))


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
)


def checks(backend: BaseGrammarBackend) -> list[Callable[[], None]]:
    """All checks for the kinds that a backend claims. `name` of each tells check and constraint."""
    made: list[Callable[[], None]] = []
    for sample in SAMPLES:
        if sample.kind in backend.kinds:
            for one in (masks_are_exact, ends_are_exact, rollback_is_replay, copies_are_apart, forced_is_in_the_mask):
                made.append(partial(one, backend, sample))
    made += [partial(unsupported_is_refused, backend, kind) for kind in GrammarKind if kind not in backend.kinds]
    return made


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
    """A bit is set only where the token leads on to a legal text. Where text is forced, only its canonical token need
    be there; elsewhere every token that leads on is."""
    viable = sample.viable()
    for run, grammar in runs(backend, sample):
        assert spelled(run) in viable, f"{sample.text}: {spelled(run)!r} is taken and leads nowhere"
        found = allowed(grammar) - {END}
        right = {token for token in range(END) if spelled(run) + PIECES[token] in viable}
        assert found <= right, f"{sample.text}: after {spelled(run)!r} the mask allows {found - right}"
        forced = grammar.forced_tokens()
        if forced:
            assert found == set(forced[:1]), f"{sample.text}: {found} beside the canonical token after {spelled(run)!r}"
        else:
            assert found == right, f"{sample.text}: after {spelled(run)!r} the mask lacks {right - found}"
        for token in range(END + 1):
            taken = grammar.copy().accept_token(token)
            legal = token in found or (token == END and sample.legal(spelled(run)))
            assert taken or not legal, f"{sample.text}: {token} is in the mask and refused after {spelled(run)!r}"
            assert token != END or taken == legal, f"{sample.text}: the end after {spelled(run)!r}"


def ends_are_exact(backend: BaseGrammarBackend, sample: Sample) -> None:
    """An end is legal exactly where the text is; after it nothing is, and it can be rolled back."""
    for run, grammar in runs(backend, sample):
        legal = sample.legal(spelled(run))
        assert grammar.is_complete() is legal, f"{sample.text}: complete after {spelled(run)!r}"
        assert (END in allowed(grammar)) is legal, f"{sample.text}: the end's bit after {spelled(run)!r}"
        assert not grammar.is_terminated()
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
    from branchline.engine.grammar.refusal import GrammarUnsupported

    try:
        backend.dispatch(kind, "x")
    except GrammarUnsupported as error:
        assert backend.name in error.message and kind.value in error.message, error.message
        return
    raise AssertionError(f"{kind.value} is not claimed and not refused")


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
