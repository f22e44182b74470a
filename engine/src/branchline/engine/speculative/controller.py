"""Decides, each step, how many guessed tokens each decoding sequence has checked: the number that pays most.

Owns the rates and costs; the algorithm owns the guesses, the scheduler pages and rows. A guess is checked only
if the expected tokens a millisecond of the whole step rise by more than MARGIN.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from branchline.engine.config import SpeculativeOptions
from branchline.engine.speculative.base import NOTHING, Ask, Drafted, Proposal, SpeculativeAlgorithm
from branchline.engine.speculative.estimate import Rate, Rates, StepCosts

logger = logging.getLogger(__name__)

MARGIN = 1.05
LONGEST_REST = 4  # steps between guesses that cost nothing, while they are wrong
FIRST_PROBE, LONGEST_PROBE = 32, 1024  # steps between guesses that cost something, while they do not pay


@dataclass(slots=True)
class DraftCounts:
    """Sums since start: steps that checked something, guessed tokens checked, guessed tokens accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _State:
    """What is known about one sequence."""

    rates: Rates
    kind: str = ""  # of the proposal under way
    watched: list[int] | None = None  # a proposal that is only looked at
    watched_at: int = 0  # length of the sequence then
    rest: int = 0  # steps to go before the next guess
    pause: int = 1  # how long the next rest is
    owed: int = 0  # what was asked for while the algorithm was behind


class Drafter:
    """Chooses drafts for steps and learns from what came of them. One thread."""

    def __init__(
        self,
        algorithm: SpeculativeAlgorithm,
        options: SpeculativeOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.algorithm = algorithm
        self.options = options
        self.counts = DraftCounts()
        self.costs = StepCosts()
        self._clock = clock
        self._common: dict[str, Rate] = {}
        self._states: dict[int, _State] = {}
        self._broken = False
        self._propose_ms = 0.0  # a sequential draft step; 0 for free algorithms

    @property
    def wants_hidden(self) -> bool:
        """Whether `settle` needs the target's hidden states."""
        return self.algorithm.wants_hidden

    # ---- before a step ----------------------------------------------------------------------

    def plan(self, sequences: Iterable[tuple[Drafted, int]], decodes: int, room: int) -> dict[int, list[int]]:
        """Drafts by sequence number, none longer than the number beside its sequence, at most `room` in all.

        `decodes` is how many sequences the step decodes anyway. A fault of the algorithm turns it off, loudly.
        """
        if self._broken or room <= 0:
            return {}
        try:
            return self._plan(sequences, decodes, room)
        except Exception:
            self._fail()
            return {}

    def _plan(self, sequences: Iterable[tuple[Drafted, int]], decodes: int, room: int) -> dict[int, list[int]]:
        asks = [ask for sequence, limit in sequences if (ask := self._ask(sequence, limit, decodes)) is not None]
        if not asks:
            return {}
        begun = self._clock()
        proposals = self.algorithm.propose(asks)
        if not self.algorithm.free:
            self._learn_proposing(proposals, (self._clock() - begun) * 1e3)
        for ask, proposal in zip(asks, proposals, strict=True):
            if proposal.behind:
                self._states[ask.sequence.number].owed = ask.limit
        found = [(ask, proposal) for ask, proposal in zip(asks, proposals, strict=True) if proposal.tokens]
        lengths = self._lengths(found, decodes, room)
        drafts: dict[int, list[int]] = {}
        for (ask, proposal), length in zip(found, lengths, strict=True):
            state = self._states[ask.sequence.number]
            state.kind = proposal.kind
            if length:
                drafts[ask.sequence.number] = proposal.tokens[:length]
            elif self.algorithm.free:
                state.watched, state.watched_at = proposal.tokens, len(ask.sequence.tokens)
        return drafts

    def _ask(self, sequence: Drafted, limit: int, decodes: int) -> Ask | None:
        state = self._states.get(sequence.number)
        if state is None:
            state = self._states[sequence.number] = _State(Rates(self._common))
        self._look_back(state, sequence.tokens)
        limit = min(limit, self.options.max_draft_tokens)
        if state.owed:  # it may rest: this was to be its look at whether guesses pay again
            limit, state.owed = min(limit, state.owed), 0
            return Ask(sequence, limit) if limit > 0 else None
        if state.rest:
            state.rest -= 1
            return None
        if not self.algorithm.free and limit > 0:
            limit = self._worth(state, limit, decodes)
        return Ask(sequence, limit) if limit > 0 else None

    def _look_back(self, state: _State, tokens: list[int]) -> None:
        """Count a watched proposal against what really came."""
        watched = state.watched
        if watched is None:
            return
        came = tokens[state.watched_at : state.watched_at + len(watched)]
        if not came:
            return
        right = next((at for at, token in enumerate(came) if token != watched[at]), len(came))
        wrong = right < len(came)
        state.rates.add(state.kind, right, wrong)
        state.watched = None
        self._rest(state, wrong, LONGEST_REST)

    @staticmethod
    def _rest(state: _State, wrong: bool, longest: int) -> None:
        if not wrong:
            state.pause = 1
            return
        state.rest = state.pause - 1
        state.pause = min(state.pause * 2, longest)

    def _worth(self, state: _State, limit: int, decodes: int) -> int:
        """How many tokens of an algorithm that costs something are worth asking for; at times one, to learn."""
        rate = state.rates.of(state.kind)
        best, chosen = self.costs.at(decodes), 0
        best = MARGIN * 1.0 / best if best else 0.0
        expected = 1.0
        for count in range(1, limit + 1):
            expected += rate**count
            ms = self.costs.at(decodes + count) + self._propose_ms * count
            if not ms or expected / ms > best:
                best, chosen = expected / ms if ms else 0.0, count
        if chosen == 0:
            state.pause = max(state.pause, FIRST_PROBE)
            state.rest = state.pause
            state.pause = min(state.pause * 2, LONGEST_PROBE)
            return 1 if state.rest >= FIRST_PROBE * 2 else 0
        return chosen

    def _learn_proposing(self, proposals: list[Proposal], ms: float) -> None:
        rounds = max((len(proposal.tokens) for proposal in proposals), default=0)
        if rounds:
            each = ms / rounds
            self._propose_ms = each if not self._propose_ms else self._propose_ms + 0.2 * (each - self._propose_ms)

    def _lengths(self, found: list[tuple[Ask, Proposal]], decodes: int, room: int) -> list[int]:
        """Lengths that give the most expected tokens a millisecond; zeros if none beats decoding by MARGIN."""
        lengths = [0] * len(found)
        if not found:
            return lengths
        if not self.algorithm.free:  # asked for what pays already
            return [min(len(proposal.tokens), ask.limit, room) for ask, proposal in found]
        gains: list[tuple[float, int]] = []
        for place, (ask, proposal) in enumerate(found):
            rate = self._states[ask.sequence.number].rates.of(proposal.kind)
            gain = 1.0
            for _ in range(min(len(proposal.tokens), ask.limit)):
                gain *= rate
                if gain < 0.02:
                    break
                gains.append((gain, place))
        gains.sort(reverse=True)
        base = self.costs.at(decodes)
        if not base:
            return lengths  # nothing is known yet: decode once
        best, chosen, expected = MARGIN * decodes / base, 0, float(decodes)
        for count, (gain, _) in enumerate(gains[:room], 1):
            expected += gain
            worth = expected / self.costs.at(decodes + count)
            if worth > best:
                best, chosen = worth, count
        for _, place in gains[:chosen]:
            lengths[place] += 1
        return lengths

    # ---- after a step -----------------------------------------------------------------------

    def measured(self, tokens: int, ms: float) -> None:
        """A step that only decoded took so long with so many tokens, guessed ones included."""
        self.costs.observe(tokens, ms)

    def settle(self, sequence: Drafted, drafted: int, judged: int, accepted: int, hidden: object | None = None) -> None:
        """Of `drafted` guesses the first `judged` were compared and `accepted` of them right.

        `hidden` are the model's states of the tokens whose successors were chosen.
        """
        state = self._states.get(sequence.number)
        if drafted:
            self.counts.steps += 1
            self.counts.drafted += drafted
            self.counts.accepted += accepted
            if state is not None:
                state.rates.add(state.kind, accepted, accepted < judged)
        if self._broken or hidden is None:
            return
        try:
            self.algorithm.accepted(sequence, hidden)
        except Exception:
            self._fail()

    def end(self, sequence: Drafted, finished: bool) -> None:
        """The sequence left the batch."""
        if finished:
            self._states.pop(sequence.number, None)
        if self._broken:
            return
        try:
            self.algorithm.end(sequence, finished)
        except Exception:
            self._fail()

    def close(self) -> None:
        """Release what the algorithm holds."""
        self.algorithm.close()

    def _fail(self) -> None:
        logger.exception("the speculative algorithm failed; decoding goes on without it")
        self._broken = True


__all__ = ["NOTHING", "DraftCounts", "Drafter"]
