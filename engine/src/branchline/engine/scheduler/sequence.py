"""State of accepted requests: a Group is one request, a Sequence one of its n continuations.

Plain state, keyed by the sequence's number; nothing here is shared by position in a batch. Pages are
handled by pages.py alone, text and ends by progress.py alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from branchline.engine.errors import EngineError
from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.scheduler.enforcing import Enforcing
from branchline.engine.types import Delta, LeaseReport, Request, RowPlan

if TYPE_CHECKING:
    from branchline.engine.scheduler.batch import Row

Sink = Callable[[int, list[Delta]], None]
"""Takes (step number, deltas) on the loop's thread; must not block. One sink is one gateway stream."""


class TextAutomaton(Protocol):
    """Token ids → text that is safe to send; finds stop strings. One per sequence."""

    def push(self, token_ids: list[int]) -> tuple[str, int, str | None]:
        """(text, tokens consumed, matched stop string)."""

    def finish(self) -> str:
        """Text held back so far."""


@dataclass(slots=True, eq=False)
class Group:
    """One accepted request. `live` counts its unfinished sequences; at zero it is forgotten."""

    request: Request
    sink: Sink
    arrival_s: float
    hashes: list[int]  # chained hashes of the prompt's whole pages
    sequences: list[Sequence] = field(default_factory=list)
    live: int = 0
    reported: bool = False  # whether the prompt report went out
    cached_tokens: int | None = None  # fixed at the first scheduling
    failed: bool = False
    lease: LeaseReport | None = None  # not yet told
    lease_node: int | None = None  # locked for the request's life
    places: int = 0  # of the worker's limits; guarded by the loop's condition
    given_up: bool = False  # answered from outside the loop, whose news are no longer sent
    withdraw: Callable[[], None] | None = None  # ends the wait for its constraint
    loosened: bool = False  # best effort: less than its constraint is enforced, and the text checked


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of a prompt, waiting or running.

    `tokens` is prompt + output and only grows; the KV of tokens[:computed] lies in `pages`. The first `full` pages were
    given to the tree: all of them are the tree's but `duplicates`, which it had from someone else.
    """

    number: int
    group: Group
    index: int
    tokens: list[int]
    ids: array[int]  # the first of `tokens` once more, as the cache reads them; see known()
    prompt_len: int
    max_len: int  # ends by length when so many tokens exist
    samples: bool  # False for max_tokens 0
    text: TextAutomaton
    plan: RowPlan  # reused for every sampled row
    ends: frozenset[int]
    banned: tuple[int, ...]  # what `ends` means to the sampler before min_tokens
    min_tokens: int
    priority: int = 0
    adapter: int = 0  # its number in the executor; 0: the base model
    grammar: BaseGrammarObject | None = None  # the constraint's state after `tokens`
    enforcing: Enforcing | None = None  # how that is enforced
    fault: EngineError | None = None  # why its row of this step may not be used
    row: Row | None = None  # of its decodes, reused; None before the first
    plain: bool = False  # whether a decode's result is a token and its text, and nothing else; see plain.py
    # KV
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    node: int | None = None  # locked handle
    full: int = 0
    duplicates: list[int] = field(default_factory=list)
    # input logprobs: the next prompt position to score; prompt_len if none is left
    scored: int = 0
    scores: list[float] = field(default_factory=list)  # of positions score_base.., for the store
    score_base: int = 0
    # queue
    admitted: int = 0  # rises with each admission; the latest is the first victim
    enqueued_pass: int = 0
    enqueued_s: float = 0.0
    matched: int = 0  # estimate of cached tokens while waiting
    matched_version: int = -1
    share_waits: int = 0
    retractions: int = 0  # preemptions included
    preemptions: int = 0  # retractions in favour of a higher priority
    finished: bool = False
    owed: str = ""  # text of a resumed output that its reader does not have yet
    draft_state: object | None = None  # the speculative algorithm's own
    drafted: int = 0  # guessed tokens that were checked
    accepted: int = 0
    text_s: float = 0.0  # spent making text
    # times, seconds on the loop's clock
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @property
    def namespace(self) -> bytes:
        """The request's cache namespace."""
        return self.group.request.namespace

    def known(self) -> array[int]:
        """All tokens as unsigned 32-bit numbers, which compiled code reads where they lie. Not to be changed."""
        if len(self.ids) < len(self.tokens):
            self.ids.extend(self.tokens[len(self.ids) :])
        return self.ids

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def work(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.tokens) - self.computed


def child_seed(seed: int, index: int) -> int:
    """Seed of the sequence `index` of a request: sequence 0 has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(
        (seed & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8
    )
    return int.from_bytes(digest.digest(), "little")
