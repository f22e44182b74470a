"""What every speculative algorithm must do, however good its guesses are."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from branchline.engine.config import SpeculativeOptions
from branchline.engine.speculative import Ask, DraftContext
from branchline.engine.speculative.base import SpeculativeAlgorithm
from branchline.engine.types import RowPlan, SamplingParams

Make = Callable[[DraftContext], SpeculativeAlgorithm]
VOCAB, SIZE = 50, 4


@dataclass
class Running:
    """A decoding sequence."""

    number: int
    tokens: list[int]
    prompt_len: int
    plan: RowPlan = field(default_factory=lambda: RowPlan(row=0, params=SamplingParams(), seed=1))
    draft_state: object | None = None
    namespace: bytes = b""


def _hashes(namespace: bytes, tokens: Sequence[int]) -> list[int]:
    """Chained hashes of whole pages."""
    chain, found = zlib.crc32(namespace), []
    for page in range(len(tokens) // SIZE):
        chain = zlib.crc32(repr(list(tokens[page * SIZE : page * SIZE + SIZE])).encode(), chain)
        found.append(chain)
    return found


def _made(make: Make) -> SpeculativeAlgorithm:
    return make(DraftContext(SpeculativeOptions("test", 6), SIZE, 64, VOCAB, _hashes))


def _running() -> list[Running]:
    repeated = [5, 6, 7, 8] * 5
    return [Running(1, list(repeated), 12), Running(2, [1, 2, 3], 3), Running(3, repeated[:-1], 19)]


def each_ask_gets_one_proposal_within_its_limit(make: Make) -> None:
    """Of known ids; and sequences are not touched."""
    algorithm = _made(make)
    sequences = _running()
    for _ in range(12):
        before = [list(one.tokens) for one in sequences]
        asked = [Ask(one, limit) for one, limit in zip(sequences, (1, 6, 3), strict=True)]
        proposals = algorithm.propose(asked)
        assert len(proposals) == len(asked)
        for ask, proposal in zip(asked, proposals, strict=True):
            assert len(proposal.tokens) <= ask.limit
            assert all(0 <= token < VOCAB for token in proposal.tokens), proposal
        assert [one.tokens for one in sequences] == before
        for one in sequences:
            one.tokens.append(one.tokens[-4] if len(one.tokens) > 4 else 9)
    algorithm.close()


def sequences_may_end_come_back_and_end_twice(make: Make) -> None:
    """Retraction puts a sequence back; an abort may find it gone already."""
    algorithm = _made(make)
    (one, two, _) = _running()
    algorithm.propose([Ask(one, 4), Ask(two, 4)])
    algorithm.end(one, False)
    algorithm.propose([Ask(one, 4)])
    for finished in (True, True, False):
        algorithm.end(one, finished)
    algorithm.end(Running(99, [1], 1), True)  # it was never asked about
    algorithm.propose([Ask(two, 4)])
    algorithm.close()
    algorithm.close()


CHECKS = (each_ask_gets_one_proposal_within_its_limit, sequences_may_end_come_back_and_end_twice)
