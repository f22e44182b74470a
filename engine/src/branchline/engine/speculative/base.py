"""What a speculative algorithm is: the protocol, its build context and the values that cross the seam.

Knows nothing of scheduling or of pages of the target model. Called on the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from branchline.engine.config import SpeculativeOptions
from branchline.engine.types import RowPlan

if TYPE_CHECKING:
    from branchline.engine.types import Executor


@dataclass(frozen=True, slots=True)
class DraftContext:
    """All that an algorithm's constructor may know.

    `block_hashes(namespace, token_ids)` gives the chained hash of each whole page of `page_size` tokens.
    `draft_executor` builds the second model's executor with its own pool; it raises LoadError if it can't.
    `hidden_size` is the width of the target's hidden states.
    """

    options: SpeculativeOptions
    page_size: int
    num_pages: int
    vocab_size: int
    block_hashes: Callable[[bytes, Sequence[int]], list[int]]
    draft_executor: Callable[[], Executor] | None = None
    hidden_size: int = 0


class Drafted(Protocol):
    """A decoding sequence as algorithms see it. They keep their state in `draft_state` and change nothing else."""

    number: int
    tokens: list[int]  # prompt and output so far; grows in place
    prompt_len: int
    plan: RowPlan  # how its next token is sampled: seed, parameters
    draft_state: object | None

    @property
    def namespace(self) -> bytes:
        """Its cache namespace: what it may learn from others is bound to it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """At most `limit` tokens are wanted for a sequence."""

    sequence: Drafted
    limit: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens guessed to come next. `kind` groups guesses that tend to be right equally often.

    `behind` says that there is none yet because the algorithm is still reading: it is asked again in the next step.
    """

    tokens: list[int]
    kind: str = ""
    behind: bool = False


NOTHING = Proposal([])
BEHIND = Proposal([], behind=True)


class SpeculativeAlgorithm(Protocol):
    """Guesses the next tokens of sequences. Wrong guesses cost time, never correctness.

    `free` says that a proposal costs next to nothing, so that it may be made without being checked, to learn
    how often it is right. With `wants_hidden`, `accepted` gets the target's last hidden states (for EAGLE-style
    heads); only executors that offer `hidden` can serve such.
    """

    api_version: int
    free: bool
    wants_hidden: bool

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        """What is wrong with the engine's options for this algorithm, one sentence each; checked before loading."""

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        """One proposal an ask, in order; empty where there is none."""

    def accepted(self, sequence: Drafted, hidden: object) -> None:
        """With `wants_hidden` only: `hidden` [count, width] are the states that chose its last `count` tokens."""

    def end(self, sequence: Drafted, finished: bool) -> None:
        """The sequence ended, or was put back in the queue (`finished` False). Idempotent."""

    def close(self) -> None:
        """Release memory; idempotent."""
